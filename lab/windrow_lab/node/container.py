"""The life of one container: start, probe, end, start again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from windrow.errors import UserError
from windrow_lab.machine.processes import Child
from windrow_lab.node.backoff import Backoff, BackoffRule, restarts
from windrow_lab.node.probes import Execute, Probe, Prober, Streak
from windrow_lab.node.records import ContainerRecord, Running, Terminated, Waiting
from windrow_lab.node.status import is_sidecar

log = logging.getLogger(__name__)

Json = dict[str, Any]

# A missing config map may appear: tried again this often.
_CONFIG_RETRY_SECONDS = 2.0


@dataclass(frozen=True)
class ContainerSetup:
    """Needs of a container from its pod and node.

    Attributes:
        launch: starts its process; raises UserError when its configuration is wrong or missing.
        execute: runs a command of a probe.
        changed: called after each change of the record.
        event: (kind, reason, message) to the pod's events.
        prober: asks probes.
        backoff: delays between restarts.
        grace_seconds: between SIGTERM and SIGKILL when a probe ends the container.
    """

    launch: Callable[[], Awaitable[Child]]
    execute: Execute
    changed: Callable[[], None]
    event: Callable[[str, str, str], None]
    prober: Prober
    backoff: BackoffRule
    grace_seconds: float


class Container:
    """One container of a pod. `record` says how it is."""

    def __init__(
        self, spec: Json, policy: str, record: ContainerRecord, around: ContainerSetup
    ) -> None:
        self.name: str = spec["name"]
        self.is_sidecar = is_sidecar(spec)
        self.record = record
        # Set once it runs and its startup probe, if any, has passed.
        self.started = asyncio.Event()
        self._spec, self._policy, self._around = spec, policy, around
        self._stopping = asyncio.Event()
        self._child: Child | None = None

    async def run(self) -> None:
        """Run until it has ended for good, of its own accord or by `stop`."""
        backoff = Backoff(self._around.backoff)
        while not self._stopping.is_set():
            if isinstance(ended := self.record.state, Terminated):
                if not restarts(self._policy, ended.exit_code):
                    return
                delay, backoff = backoff.after_run(ended.finished_at - ended.started_at)
                await self._wait_to_restart(ended, delay.total_seconds())
            if (child := await self._launch()) is not None:
                await self._attend(child)

    async def stop(self, grace_seconds: float) -> None:
        """End it: SIGTERM, and SIGKILL after the grace; it does not start again."""
        self._stopping.set()
        if self._child is not None:
            await self._end(self._child, grace_seconds)

    def kill(self) -> None:
        """End it at once, if it runs."""
        if self._child is not None:
            self._child.signal(signal.SIGKILL)

    @property
    def is_running(self) -> bool:
        """True where its process exists."""
        return self._child is not None

    async def _wait_to_restart(self, ended: Terminated, delay_seconds: float) -> None:
        if delay_seconds:
            message = f"back-off {delay_seconds:g}s restarting {self.name}"
            self._set(state=Waiting("CrashLoopBackOff", message), last=ended)
            self._around.event(
                "Warning", "BackOff", f"{message}: it ended with {ended.exit_code} ({ended.reason})"
            )
            await self._pause(delay_seconds)
        if not self._stopping.is_set():
            self._set(last=ended, restarts=self.record.restarts + 1)

    async def _launch(self) -> Child | None:
        while not self._stopping.is_set():
            try:
                return await self._around.launch()
            except (UserError, OSError) as error:
                reason = (
                    "CreateContainerConfigError"
                    if isinstance(error, UserError)
                    else "RunContainerError"
                )
                if not isinstance(self.record.state, Waiting) or (
                    self.record.state.message != str(error)
                ):
                    self._around.event("Warning", "Failed", f"{self.name}: {error}")
                self._set(state=Waiting(reason, str(error)))
                await self._pause(_CONFIG_RETRY_SECONDS)
        return None

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), timeout=seconds)

    async def _attend(self, child: Child) -> None:
        self._child = child
        running = Running(datetime.now(UTC), child.pid)
        has_startup = Probe.of(self._spec.get("startupProbe")) is not None
        has_readiness = Probe.of(self._spec.get("readinessProbe")) is not None
        self._set(state=running, started=not has_startup, ready=not (has_startup or has_readiness))
        if not has_startup:
            self.started.set()
        probing = asyncio.create_task(self._probe(child), name=f"probes of {self.name}")
        try:
            if self._stopping.is_set():  # asked to stop while it was starting
                child.signal(signal.SIGTERM)
            self._around.event("Normal", "Started", f"Started {self.name} as {child.pid}")
            status = await asyncio.wrap_future(child.exited)
        finally:
            self._child = None
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)
        self.started.clear()
        ended = Terminated.of_status(status, running, datetime.now(UTC))
        self._set(state=ended, started=False, ready=False)

    async def _end(self, child: Child, grace_seconds: float) -> None:
        child.signal(signal.SIGTERM)
        exited = asyncio.wrap_future(child.exited)
        await asyncio.wait({exited}, timeout=grace_seconds)
        if not exited.done():
            child.signal(signal.SIGKILL)
            await exited

    async def _probe(self, child: Child) -> None:
        if startup := Probe.of(self._spec.get("startupProbe")):
            if not await self._passes_startup(startup, child):
                return
            self._set(started=True, ready=self._spec.get("readinessProbe") is None)
            self.started.set()
        async with asyncio.TaskGroup() as probes:
            if liveness := Probe.of(self._spec.get("livenessProbe")):
                probes.create_task(self._watch_liveness(liveness, child))
            if readiness := Probe.of(self._spec.get("readinessProbe")):
                probes.create_task(self._watch_readiness(readiness))

    async def _passes_startup(self, probe: Probe, child: Child) -> bool:
        async for verdict in self._verdicts("Startup", probe):
            if verdict:
                return True
            await self._kill_for(child, probe, "its startup probe failed")
            return False
        return False

    async def _watch_liveness(self, probe: Probe, child: Child) -> None:
        async for alive in self._verdicts("Liveness", probe):
            if not alive:
                await self._kill_for(child, probe, "its liveness probe failed")
                return

    async def _watch_readiness(self, probe: Probe) -> None:
        async for ready in self._verdicts("Readiness", probe):
            if ready != self.record.ready:
                self._set(ready=ready)

    async def _verdicts(self, kind: str, probe: Probe) -> AsyncIterator[bool]:
        ports = {
            port["name"]: port["containerPort"]
            for port in self._spec.get("ports") or []
            if "name" in port
        }
        await asyncio.sleep(probe.initial_delay)
        streak = Streak(probe)
        while True:
            try:
                answer = await self._around.prober.ask(probe, ports, self._around.execute)
            except UserError as error:
                self._around.event("Warning", "Unhealthy", f"{self.name}: {error}")
                return
            streak = streak.after(answer.ok)
            if not answer.ok and not self._stopping.is_set():
                message = f"{kind} probe of {self.name} failed: {answer.message}"
                self._around.event("Warning", "Unhealthy", message)
            if streak.verdict is not None:
                yield streak.verdict
            await asyncio.sleep(probe.period)

    async def _kill_for(self, child: Child, probe: Probe, why: str) -> None:
        self._around.event("Normal", "Killing", f"{self.name} will be restarted: {why}")
        grace = probe.grace_seconds
        await self._end(child, self._around.grace_seconds if grace is None else grace)

    def _set(self, **changes: Any) -> None:  # noqa: ANN401
        self.record = replace(self.record, **changes)
        self._around.changed()
