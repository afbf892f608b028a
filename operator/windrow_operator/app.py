"""Assemble the operator, run it, and shut it down."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from aiohttp import web

from windrow.errors import UserError
from windrow_operator import connections, handlers, pki, prerequisites, webhook
from windrow_operator.attach import AttachServer
from windrow_operator.certificates import Certificates, TrustPublisher
from windrow_operator.cluster_state import ClusterState
from windrow_operator.events import Recorder
from windrow_operator.injection import SidecarTemplate
from windrow_operator.kube import ApiError, Conflict, Kube, ObjectNotFound
from windrow_operator.leading import Leading
from windrow_operator.lease import LeaderLease
from windrow_operator.memory import ProcessMemory
from windrow_operator.metrics import Metrics
from windrow_operator.reconcile import Event
from windrow_operator.resync import Resync
from windrow_operator.settings import Settings

log = logging.getLogger(__name__)

_STOP_SECONDS = 0.7
# Between two looks at a cluster that lacks something: doubled each time.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0
# Of the metrics' port, which anybody may ask: longer than between two scrapes of most.
_MOST_SILENT, _SILENT_FOR = 256, timedelta(minutes=2)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Ports:
    """Ports of the operator; kept in the state file, so that a restart finds them again."""

    attach: int
    webhook: int
    metrics: int


@dataclass(frozen=True)
class StateFile:
    """State that the starter of the process reads: pid, ports, whether it is ready."""

    path: Path | None

    def earlier_port(self, name: str) -> int:
        """Return the port of an earlier life, or 0."""
        if self.path is None or not self.path.exists():
            return 0
        try:
            return int(json.loads(self.path.read_text()).get(f"{name}Port", 0))
        except (ValueError, AttributeError):
            return 0  # half-written by a process that was killed

    def write(self, state: dict[str, Any]) -> None:
        """Write the file in one step; a reader never sees half of it. Known ports stay in it."""
        if self.path is None:
            return
        ports = {
            f"{name}Port": self.earlier_port(name) for name in ("attach", "webhook", "metrics")
        }
        state = ports | state
        scratch = self.path.with_suffix(".tmp")
        scratch.write_text(json.dumps(state, indent=2))
        scratch.replace(self.path)


def utc_now() -> datetime:
    """Return the time, aware."""
    return datetime.now(UTC)


@dataclass(frozen=True)
class _Served:
    """Parts that every replica serves, as a leader needs them."""

    ports: Ports
    attach: AttachServer
    lease: LeaderLease
    template: Callable[[], SidecarTemplate]
    client: Callable[[], dict[str, Any]]  # of the webhook's registration
    certificates: Certificates


class App:
    """The operator's parts: those that every replica runs, and those of the one that leads."""

    def __init__(self, settings: Settings, kube: Kube) -> None:
        self._settings, self._kube = settings, kube
        self._stop = asyncio.Event()
        self._state = StateFile(settings.state_file)
        self._facts: dict[str, Any] = {"pid": os.getpid(), "ready": False, "leads": False}
        self._leading: Leading | None = None
        self._memory = ProcessMemory()
        self.cluster = ClusterState(utc_now(), settings.offering)
        self.metrics = Metrics()
        kube.on_call = self.metrics.called
        self.recorder = Recorder(kube, utc_now)

    def stop(self) -> None:
        """Ask the operator to end."""
        self._stop.set()

    async def run(self) -> None:
        """Serve until `stop` or until a part fails, which then is raised."""
        self._memory.take_over()
        async with AsyncExitStack() as stack:
            self._take_signals()
            silent = connections.Connections(_MOST_SILENT, _SILENT_FOR)
            measured = self.metrics.application(connections.counts_between_calls(silent))
            metrics_port = await self._bind(
                "metrics",
                self._settings.metrics_port,
                lambda port: _serve_http(stack, measured, self._settings.host, port, None, silent),
            )
            self._write_state(metricsPort=metrics_port, ready=False)
            if not await self._patiently(self._check_and_load, self._waits):
                return
            # First, so that it ends last: kopf waits for every task that was made after its start.
            watching = await self._watch(stack)
            served = await self._listen(stack, metrics_port)
            ports, lease = served.ports, served.lease
            tasks = [
                watching,
                asyncio.create_task(lease.run(), name="lease"),
                asyncio.create_task(self._lead(served), name="leader"),
                asyncio.create_task(self._compare(served.attach), name="compare"),
                asyncio.create_task(served.certificates.keep(), name="certificates"),
                asyncio.create_task(self._stop.wait(), name="stop"),
            ]
            stack.push_async_callback(lease.release)
            stack.callback(self._write_state, ready=False, leads=False)
            stack.push_async_callback(_end, tasks[1:])
            self.metrics.works()
            self._write_state(
                attachPort=ports.attach,
                webhookPort=ports.webhook,
                metricsPort=ports.metrics,
                attachAddress=f"{self._settings.advertise_address}:{ports.attach}",
                ready=True,
            )
            log.info("ready: %s", ports)
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    async def _lead(self, served: _Served) -> None:
        """Act while this replica holds the Lease, term after term."""
        lease = served.lease
        while True:
            await lease.acquired.wait()
            over = asyncio.create_task(lease.lost.wait())
            term = asyncio.create_task(self._lead_term(served))
            try:
                await asyncio.wait([over, term], return_when=asyncio.FIRST_COMPLETED)
            finally:
                await _end([over, term])
                self._leading = None
                self.metrics.leads(0)
                self.cluster.begin_term(utc_now())
                self._write_state(leads=False)
            if term.done() and not term.cancelled() and (error := term.exception()):
                raise error

    async def _lead_term(self, served: _Served) -> None:
        lease = served.lease
        self.metrics.leads(lease.term)
        self.cluster.begin_term(utc_now())
        # The watches may lag behind what the leader before has written. Known before a sidecar
        # speaks, for a placement that is newer than what is known would look stale.
        if not await self._patiently(self._load, _nobody):
            return
        kube = self._kube.variant(may_write=lease.require)
        registration = webhook.WebhookRegistration(
            kube, served.client, lambda: served.certificates.trusted, self._settings.namespace
        )
        self._leading = Leading(
            self.cluster,
            kube,
            self.metrics,
            served.attach,
            registration,
            served.template,
            TrustPublisher(kube, served.certificates, utc_now),
            namespace=self._settings.namespace,
            timeouts=self._settings.timeouts,
            clock=utc_now,
            namespaces=self._settings.namespaces,
        )
        if not await self._patiently(self._leading.begin, _nobody):
            return
        self._memory.collect(len(served.attach.sessions))  # all that is listed lives for long
        self._write_state(leads=True, term=lease.term)
        await self._leading.run()

    async def _compare(self, attach: AttachServer) -> None:
        """Take up now and then what the watches have missed; put memory in order after it."""
        resync = Resync(self._kube, self.cluster, self._settings.namespaces)
        freed = False
        while True:
            await asyncio.sleep(self._settings.listed_every.total_seconds())
            # Also while the API server is away.
            freed |= self._memory.collect(len(attach.sessions))
            try:
                missed = await resync.compare()
            except ApiError as error:
                log.warning("cannot list the watched objects to compare them: %s", error)
                continue
            if freed:
                await asyncio.to_thread(self._memory.give_back)
                freed = False
            self.metrics.missed(missed)
            if missed:
                log.warning("the watches missed changes, a listing has corrected: %s", missed)
                self._wake()

    async def _patiently(
        self, act: Callable[[], Awaitable[None]], said: Callable[[str], None]
    ) -> bool:
        """Do `act` again until the cluster lets it; return False when asked to end before that.

        Args:
            act: raises ApiError or UserError for what the cluster lacks.
            said: called each time with what that is.
        """
        pause_s = _FIRST_PAUSE_S
        while not self._stop.is_set():
            try:
                await act()
            except (UserError, ApiError) as error:
                lacks = prerequisites.explain(error, self._kube.server)
            else:
                return True
            log.warning("not ready, trying again in %.1f s: %s", pause_s, lacks)
            said(lacks)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return False

    async def _note(self, about: dict[str, Any], event: Event) -> None:
        """Write an event that every replica would write: the one that leads does."""
        if self._leading is not None:
            await self.recorder.record(about, event)

    def _wake(self) -> None:
        if self._leading is not None:
            self._leading.on_news()

    async def _check_and_load(self) -> None:
        await prerequisites.check(self._kube, self._settings.namespace, self._settings.namespaces)
        await self._load()

    def _waits(self, lacks: str) -> None:
        """Say what the cluster lacks before this replica can serve."""
        self.metrics.waits(lacks)
        self._write_state(ready=False, lacks=lacks)

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)

    async def _load(self) -> None:
        """Know every object that is watched, as it is now."""
        await self._ensure_namespace()
        await Resync(self._kube, self.cluster, self._settings.namespaces).run()

    async def _ensure_namespace(self) -> None:
        """Make the operator's own namespace, unless it is there: in a pod it always is."""
        name = self._settings.namespace
        try:
            await self._kube.get(f"/api/v1/namespaces/{name}")
        except ObjectNotFound:
            body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
            with contextlib.suppress(Conflict):
                await self._kube.create("/api/v1/namespaces", body)

    async def _listen(self, stack: AsyncExitStack, metrics_port: int) -> _Served:
        settings = self._settings
        hosts = [settings.advertise_address, *_LOOPBACK]
        if settings.webhook_service:
            hosts.append(f"{settings.webhook_service}.{settings.namespace}.svc")
        certificates = Certificates(
            self._kube,
            settings.namespace,
            hosts,
            self.metrics,
            clock=utc_now,
            spread=settings.trust_spread,
        )
        await certificates.load()
        attach = AttachServer(self.cluster, self._kube, self.metrics, clock=utc_now)
        port = await self._bind(
            "attach",
            settings.attach_port,
            lambda port: attach.start(settings.host, port, certificates.of_grpc()),
        )
        stack.push_async_callback(attach.stop)
        lease = LeaderLease(
            self._kube,
            settings.namespace,
            settings.identity,
            f"{settings.replica_address or settings.advertise_address}:{port}",
            clock=utc_now,
        )
        attach.connect(lease)
        template = SidecarTemplate(
            operator_address=f"{settings.advertise_address}:{port}",
            operator_ca="",
            image=settings.sidecar_image,
            command=settings.sidecar_command,
            metrics_port=settings.sidecar_metrics_port,
            cpu=settings.sidecar_cpu,
            memory=settings.sidecar_memory,
        )

        def template_now() -> SidecarTemplate:
            return replace(template, operator_ca=certificates.trusted.decode())

        hook = webhook.Webhook(
            self.cluster,
            self._kube,
            template_now,
            self.metrics,
            self.recorder.record,
            settings.prepulled,
            keys=lambda: certificates.webhook_keys,
            client_names=settings.webhook_client_names,
        )
        if settings.webhook_client_ca is not None:
            pki.ask_for_client(certificates.context, settings.webhook_client_ca)
        webhook_port = await self._bind(
            "webhook",
            settings.webhook_port,
            lambda port: _serve_http(
                stack,
                hook.application(),
                settings.host,
                port,
                certificates.context,
                hook.connections,
            ),
        )

        def client() -> dict[str, Any]:
            return _webhook_client(settings, webhook_port, certificates.webhook_keys[0])

        ports = Ports(port, webhook_port, metrics_port)
        return _Served(ports, attach, lease, template_now, client, certificates)

    async def _bind(self, name: str, port: int, listen: Any) -> int:  # noqa: ANN401
        """Listen on `port`; for 0 on that of an earlier life if it is free, else on any."""
        earlier = self._state.earlier_port(name) if port == 0 else 0
        if earlier:
            try:
                return int(await listen(earlier))
            except OSError:
                log.info("%s port %d is still taken by an earlier process", name, earlier)
        return int(await listen(port))

    async def _watch(self, stack: AsyncExitStack) -> asyncio.Task[None]:
        seen = handlers.Watching(self.cluster, self.metrics, wake=self._wake, note=self._note)
        registry = handlers.registry_of(seen, self._kube.credentials)
        stop, ready = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(
            handlers.watch(registry, self._settings.namespaces, stop=stop, ready=ready)
        )
        stack.push_async_callback(_end, [task])
        stack.callback(stop.set)
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        # kopf takes the signals for itself and then waits for seconds; they are ours.
        self._take_signals()
        return task

    def _write_state(self, **facts: Any) -> None:  # noqa: ANN401 - JSON
        self._facts |= facts
        self._state.write(self._facts)


def _nobody(_: str) -> None:
    """Tell nobody: the log has it."""


def _webhook_client(settings: Settings, port: int, key: str) -> dict[str, Any]:
    """Return how the API server reaches the webhook: it resolves no names of the cluster itself."""
    path = f"{webhook.PATH}/{key}"
    if settings.webhook_service:
        service = {"name": settings.webhook_service, "namespace": settings.namespace}
        return {"service": {**service, "path": path, "port": 443}}
    return {"url": f"https://{settings.advertise_address}:{port}{path}"}


async def _serve_http(
    stack: AsyncExitStack,
    application: web.Application,
    host: str,
    port: int,
    tls: Any,  # noqa: ANN401
    counted: connections.Connections | None = None,
) -> int:
    """Serve until the stack ends; return the port. `counted`: bounds idle connections."""
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    try:
        if counted is None:
            await web.TCPSite(runner, host, port, ssl_context=tls).start()
            address = runner.addresses[0]
        else:
            assert runner.server is not None  # it was set up
            server = await connections.listen(runner.server, counted, host, port, tls)
            stack.callback(server.close)
            address = server.sockets[0].getsockname()
    except OSError:
        await runner.cleanup()
        raise
    stack.push_async_callback(runner.cleanup)
    return int(address[1])


async def _end(tasks: list[asyncio.Task[Any]]) -> None:
    """End tasks; one that is already stopping has a moment for it."""
    await asyncio.wait(tasks, timeout=0 if len(tasks) > 1 else _STOP_SECONDS)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=_STOP_SECONDS)


async def serve(settings: Settings) -> None:
    """Run the operator until SIGTERM or SIGINT."""
    kube = await Kube.connect(settings.kubeconfig, in_pod=settings.in_pod)
    try:
        await App(settings, kube).run()
    finally:
        await kube.close()
