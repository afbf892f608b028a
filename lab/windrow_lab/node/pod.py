"""The life of one pod on the node: volumes, containers of each kind, deletion."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx

from windrow.errors import UserError
from windrow_lab.machine.processes import Child, Keeper
from windrow_lab.node.api import Api, Json, NodeApiError
from windrow_lab.node.backoff import BackoffRule
from windrow_lab.node.container import Container, ContainerSetup
from windrow_lab.node.events import NodeEventRecorder
from windrow_lab.node.launch import Launcher, LaunchSettings, pod_logs
from windrow_lab.node.probes import Prober
from windrow_lab.node.records import ContainerRecord, Terminated, resumed
from windrow_lab.node.report import RETRY_SECONDS, PodStatusReporter
from windrow_lab.node.status import is_sidecar, pod_status
from windrow_lab.node.volumes import Volumes

log = logging.getLogger(__name__)

# A sidecar has this long to end even when the containers used up the pod's grace.
_SIDECAR_GRACE_SECONDS = 2.0


@dataclass(frozen=True)
class NodeServices:
    """Services that the pods of a node share.

    Attributes:
        pods_dir: one directory per pod with its volumes.
        logs_dir: one directory per pod with a file per container.
    """

    api: Api
    keeper: Keeper
    recorder: NodeEventRecorder
    prober: Prober
    pods_dir: Path
    logs_dir: Path
    launch: LaunchSettings
    backoff: BackoffRule


class PodRunner:
    """One pod that is bound to this node. `run` it in a task; tell it of changes by `update`."""

    def __init__(self, seen: Json, services: NodeServices) -> None:
        self.uid: str = seen["metadata"]["uid"]
        self._seen, self._services = seen, services
        # Short, since the paths of Unix sockets below it are limited to 107 bytes.
        self._dir = services.pods_dir / self.uid[:13]
        self._logs = pod_logs(services.logs_dir, seen)
        self._volumes = Volumes(services.api, seen, self._dir)
        self._launcher = Launcher(
            services.api, services.keeper, services.launch, self._volumes, self._logs
        )
        self._reporter = PodStatusReporter(services.api, seen, self._make_status)
        self._inits = [self._container(spec) for spec in seen["spec"].get("initContainers") or []]
        self._mains = [self._container(spec) for spec in seen["spec"]["containers"]]
        self._ephemerals: dict[str, Container] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stop_asked = asyncio.Event()
        self._stop_by = float("inf")
        self._finalise = False
        self._has_begun = False  # the containers run, and none of them was asked to stop

    def update(self, seen: Json) -> None:
        """Take note of the object's newest form; a deletion begins to end the containers."""
        self._seen = seen
        metadata = seen["metadata"]
        if "deletionTimestamp" in metadata:
            self._finalise = True
            self.ask_to_stop(metadata.get("deletionGracePeriodSeconds", 30))
        self._begin_ephemerals()

    def ask_to_stop(self, grace_seconds: float) -> None:
        """End the containers within the grace; a shorter grace replaces a longer one."""
        deadline = time.monotonic() + grace_seconds
        if deadline < self._stop_by:
            self._stop_by = deadline
            asyncio.get_running_loop().call_later(grace_seconds, self._kill_mains)
        self._stop_asked.set()

    async def run(self) -> None:
        """Run the pod until it was asked to stop and has ended; its volumes are removed then."""
        reporting = asyncio.create_task(self._reporter.run(), name=f"status of {self.uid}")
        living = asyncio.create_task(self._live(), name=f"pod {self.uid}")
        try:
            await self._stop_asked.wait()
            # What starts the next container must stop before the containers do.
            await _cancel(living)
            await self._stop()
        finally:
            await _cancel(living, reporting, *self._tasks.values())
        if self._finalise:
            await self._reporter.finish_deletion()
        self._services.recorder.forget(self.uid)
        shutil.rmtree(self._dir, ignore_errors=True)

    # Running ---------------------------------------------------------------------------------

    async def _live(self) -> None:
        if self._seen.get("status", {}).get("phase") in ("Succeeded", "Failed"):
            return
        self._reporter.changed()
        await self._prepare()
        renewing = asyncio.create_task(self._renew_tokens(), name=f"tokens of {self.uid}")
        try:
            if await self._initialise():
                mains = [self._begin(container) for container in self._mains]
                self._has_begun = True
                self._begin_ephemerals()
                await _await_end(mains)
            self._has_begun = False
            await self._stop_all(list(self._ephemerals.values()), self._grace_seconds)
            await self._stop_sidecars(time.monotonic() + self._grace_seconds)
        finally:
            await _cancel(renewing)

    async def _prepare(self) -> None:
        images = sorted({main.get("image", "") for main in self._seen["spec"]["containers"]})
        self._event(
            "Normal",
            "ImageIgnored",
            f"A process node runs the commands of this machine, no image: {', '.join(images)}",
        )
        said = ""
        while True:
            try:
                self._dir.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._logs.mkdir(parents=True, exist_ok=True)
                await self._volumes.prepare()
                await self._reporter.annotate_logs(self._seen, self._logs)
            except (UserError, NodeApiError, httpx.TransportError, OSError) as error:
                if str(error) != said:
                    said = str(error)
                    self._event("Warning", "FailedMount", said)
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return

    async def _initialise(self) -> bool:
        """Run the init containers in order; False when one has failed for good."""
        for container in self._inits:
            task = self._begin(container)
            if container.is_sidecar:
                await container.started.wait()
                continue
            await _await_end([task])
            state = container.record.state
            if not isinstance(state, Terminated) or state.exit_code != 0:
                return False
        return True

    def _begin_ephemerals(self) -> None:
        """Run the ephemeral containers that were added since; they never start a second time."""
        if not self._has_begun or self._stop_asked.is_set():
            return
        for spec in self._seen["spec"].get("ephemeralContainers") or []:
            if spec["name"] not in self._ephemerals:
                container = self._ephemerals[spec["name"]] = self._container(spec)
                self._begin(container)

    def _begin(self, container: Container) -> asyncio.Task[None]:
        task = asyncio.create_task(container.run(), name=f"{container.name} of {self.uid}")
        self._tasks[container.name] = task
        return task

    async def _renew_tokens(self) -> None:
        delay: float | None = 0.0
        while delay is not None:
            await asyncio.sleep(delay)
            try:
                delay = await self._volumes.renew_tokens()
            except (NodeApiError, httpx.TransportError) as error:
                # The old token is good for the last fifth of its life.
                log.warning("tokens of %s were not renewed: %s", self.uid, error)
                delay = 10.0

    # Ending ----------------------------------------------------------------------------------

    @property
    def _grace_seconds(self) -> float:
        seconds: float = self._seen["spec"].get("terminationGracePeriodSeconds", 30)
        return seconds

    async def _stop(self) -> None:
        inits = [init for init in self._inits if not init.is_sidecar]
        first = [*self._mains, *self._ephemerals.values(), *inits]
        if any(container.is_running for container in first):
            self._event("Normal", "Killing", "Stopping the containers")
        left = max(0.0, self._stop_by - time.monotonic())
        await self._stop_all(first, left)
        await self._stop_sidecars(self._stop_by)

    async def _stop_all(self, containers: Sequence[Container], grace_seconds: float) -> None:
        await asyncio.gather(*(container.stop(grace_seconds) for container in containers))
        await _await_end([self._tasks[c.name] for c in containers if c.name in self._tasks])

    async def _stop_sidecars(self, deadline: float) -> None:
        """End the native sidecars, the last one first, once the containers have ended."""
        for container in reversed([init for init in self._inits if init.is_sidecar]):
            await self._stop_all(
                [container], max(_SIDECAR_GRACE_SECONDS, deadline - time.monotonic())
            )

    def _kill_mains(self) -> None:
        for container in [*self._mains, *self._ephemerals.values()]:
            container.kill()

    # Containers ------------------------------------------------------------------------------

    def _container(self, spec: Json) -> Container:
        async def launch() -> Child:
            return await self._launcher.start(self._seen, spec)

        async def execute(words: Sequence[str], timeout_seconds: float) -> int | None:
            return await self._launcher.execute(self._seen, spec, words, timeout_seconds)

        around = ContainerSetup(
            launch=launch,
            execute=execute,
            changed=self._reporter.changed,
            event=self._event,
            prober=self._services.prober,
            backoff=self._services.backoff,
            grace_seconds=self._grace_seconds,
        )
        return Container(spec, self._policy_of(spec), self._known(spec["name"]), around)

    def _policy_of(self, spec: Json) -> str:
        policy: str = self._seen["spec"].get("restartPolicy", "Always")
        if spec in self._seen["spec"]["containers"]:
            return policy
        if spec in (self._seen["spec"].get("ephemeralContainers") or []):
            return "Never"
        if is_sidecar(spec):
            return "Always"
        return "Never" if policy == "Never" else "OnFailure"

    def _known(self, name: str) -> ContainerRecord:
        status = self._seen.get("status", {})
        kinds = ("initContainerStatuses", "containerStatuses", "ephemeralContainerStatuses")
        known = {entry["name"]: entry for kind in kinds for entry in status.get(kind) or []}
        return resumed(known.get(name), datetime.now(UTC))

    def _make_status(self) -> Json:
        containers = [*self._inits, *self._mains, *self._ephemerals.values()]
        records = {container.name: container.record for container in containers}
        return pod_status(self._seen, records, datetime.now(UTC))

    def _event(self, kind: str, reason: str, message: str) -> None:
        self._services.recorder.record(self._seen, kind, reason, message)


async def _await_end(tasks: Sequence[asyncio.Task[None]]) -> None:
    # Neither `await` nor `gather`: they would cancel the tasks along with the waiting one.
    if tasks:
        await asyncio.wait(tasks)


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            log.error("a task of a pod failed", exc_info=outcome)
