"""Choose how decode and workers share the pod's GPU, start MPS, and watch it.

Where the GPU has shares of SMs, a private MPS daemon is started before anybody uses it, and a
process is tried as its client. What makes a process its client stands in a file of the run
directory, for the engine and for our workers; an engine that finds itself no client says so. A
daemon that ends is not started again: decode would not become a client of the new one, so from then
on workers run only while decode runs no step.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from windrow.errors import Transient, UserError
from windrow.rundir import RunDir
from windrow_sidecar.compute.mps import MpsDaemon
from windrow_sidecar.compute.sharing import GpuCapabilities, Sharing, choose_sharing
from windrow_sidecar.compute.survey import Survey

_log = logging.getLogger(__name__)

WATCH_EVERY_S = 1.0
NOT_THE_NODES_CLIENT = (
    "the sidecar did not become a client of the node's daemon (another user, or no hostIPC?)"
)
SWITCHED_OFF = "it is switched off (--mps off)"

Probe = Callable[[Mapping[str, str]], Awaitable[Survey]]


async def probe_gpu(environment: Mapping[str, str]) -> Survey:
    """Ask in a process of its own, which leaves no context on the GPU.

    `environment`: what that process has besides this one's.
    """
    asked = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "windrow_sidecar.compute.survey"),
        env={**os.environ, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asked.communicate()
    if asked.returncode:
        last = err.decode(errors="replace").strip().splitlines()[-1:]
        return Survey(why=f"looking at it failed: {''.join(last)}")
    return Survey(**json.loads(out))


class GpuSharing:
    """The sharing of one pod's GPU. All of it belongs to the agent's event loop.

    Args:
        run_dir: of the pod.
        daemon: to start; None: MPS is switched off.
        of_node: this process's environment names a daemon of the node's; none is started.
        probe: what the GPU offers to a process with such an environment.
        changed: called when the sharing is another than before.
        every_s: between two looks at the daemon.
    """

    def __init__(
        self,
        run_dir: RunDir,
        daemon: MpsDaemon | None,
        *,
        probe: Probe = probe_gpu,
        of_node: bool = False,
        changed: Callable[[], None] = lambda: None,
        every_s: float = WATCH_EVERY_S,
    ) -> None:
        self._run_dir, self._daemon, self._probe = run_dir, daemon, probe
        self._changed, self._every_s, self._of_node = changed, every_s, of_node
        self._watch: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self.sharing: Sharing | None = None  # None: there is no GPU
        self.found = Survey()  # what this process's container sees

    async def start(self) -> None:
        """Decide, and start the daemon where it is wanted; whatever is missing is a reason."""
        self._forget_environment()
        self.found = found = await self._probe({})
        if not found.gpu:
            _log.info("no GPU to share: %s", found.why)
            return
        mps_missing = SWITCHED_OFF if self._daemon is None else ""
        if self._of_node:
            # It is the node's: neither started here nor watched, and its clients' GPU work is
            # ended by nobody but its owner.
            mps_missing = "" if found.is_mps_client else NOT_THE_NODES_CLIENT
        elif self._daemon is not None and not found.green_missing:
            mps_missing = await self._start(self._daemon)
        self._settle(choose_sharing(GpuCapabilities(found.green_missing, mps_missing)))

    async def close(self) -> None:
        """Stop the daemon, unless decode is its client: that would take the GPU from it."""
        self._closing.set()
        if self._watch is not None:
            await self._watch
        if self._daemon is not None and self._daemon.alive():
            await self._stop_unless_used(self._daemon)

    async def end_client(self, pid: int) -> None:
        """End the GPU work of a worker that is about to be killed; nothing where it is no client.

        What a client of MPS leaves running when it is killed may take decode's context along.
        """
        if self._daemon is None:
            return
        try:
            if await asyncio.to_thread(self._daemon.terminate_client, pid):
                _log.info("the GPU work of worker %d was ended before it is killed", pid)
        except Transient as error:
            _log.warning("cannot end the GPU work of worker %d before it is killed: %s", pid, error)

    async def _start(self, daemon: MpsDaemon) -> str:
        """Return why there is no daemon now; "": there is."""
        try:
            await asyncio.to_thread(daemon.start)
        except (UserError, Transient) as error:
            return str(error)
        # Clients of a daemon that was taken over prove that there can be some; one more context
        # beside a decode that fills the GPU might find no room.
        if not await self._clients(daemon):
            tried = await self._probe(daemon.environment)
            if not tried.is_mps_client:
                await self._stop_unless_used(daemon)
                why = tried.why or "the driver ran it without MPS; see mps/log"
                return f"a process that was to be a client of the daemon was none: {why}"
        file = self._run_dir.mps_environment
        draft = file.with_suffix(".tmp")
        draft.write_text(json.dumps(daemon.environment), encoding="utf-8")
        os.replace(draft, file)
        self._watch = asyncio.create_task(self._watch_over(daemon))
        return ""

    @staticmethod
    async def _clients(daemon: MpsDaemon) -> list[int]:
        """Process ids; none where it does not answer."""
        try:
            of_each_server = await asyncio.to_thread(daemon.clients)
        except Transient:
            return []
        return [pid for pids in of_each_server.values() for pid in pids]

    async def _stop_unless_used(self, daemon: MpsDaemon) -> None:
        if clients := await self._clients(daemon):
            _log.warning("the MPS daemon keeps running for its clients %s", clients)
            return
        self._forget_environment()
        await asyncio.to_thread(daemon.stop)

    async def _watch_over(self, daemon: MpsDaemon) -> None:
        while daemon.alive():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), self._every_s)
                return
        self._forget_environment()
        self._settle(choose_sharing(GpuCapabilities("", "the MPS daemon has ended; see mps/log")))
        self._changed()

    def _settle(self, sharing: Sharing) -> None:
        lost = self.sharing is not None and self.sharing.mode != sharing.mode
        self.sharing = sharing
        say = _log.warning if lost else _log.info
        say("the GPU is shared in %s mode: %s", sharing.mode, sharing.reason)

    def _forget_environment(self) -> None:
        self._run_dir.mps_environment.unlink(missing_ok=True)
