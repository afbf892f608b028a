"""Join the MPS daemon that decode's start has brought up, watch it, and end clients of it.

The daemon is decode's: its start brings it up before any process uses the GPU, and leaves a note in
the run directory. When decode calls, the agent checks what joining needs, tries it with a process,
and looks whether the daemon knows that process for a client, since a worker's work has to be ended
before the worker is killed. Where anything is missing, workers run only while decode runs no step.
A daemon that ends takes decode's context along: the next one comes with the next decode.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Final

from windrow.conditions import Reason
from windrow.errors import Transient
from windrow.rundir import RunDir
from windrow_sidecar.compute import mps_trial
from windrow_sidecar.compute.mps import MpsDaemon
from windrow_sidecar.compute.mps_joining import (
    DaemonNote,
    JoiningContainer,
    find_joining_lack,
    pid_namespace,
)
from windrow_sidecar.compute.sharing import (
    ASKED_IN_TIME,
    GpuCapabilities,
    Lack,
    Sharing,
    choose_sharing,
)
from windrow_sidecar.compute.survey import Survey

_log = logging.getLogger(__name__)

WATCH_EVERY_S = 1.0
# A trial beside a busy decode starts slowly; one that the server queues never does.
TRIAL_WITHIN_S = 20.0
NOT_THE_NODES_CLIENT: Final = Lack(
    Reason.MPS_NOT_CONNECTED,
    "the sidecar did not become a client of the node's daemon (another user, or no hostIPC?)",
)
_NOT_CALLED: Final = Lack(Reason.NO_WORKER_YET, "decode has not called yet")
_NO_NOTE: Final = Lack(
    Reason.NO_MPS_DAEMON, "decode's start left no note of a daemon in the run directory"
)
_ENDED: Final = Lack(Reason.MPS_ENDED, "the MPS daemon has ended; see mps/log")
_UNKNOWN: Final = Lack(
    Reason.CLIENT_UNKNOWN, "the daemon does not name a process of the sidecar among its clients"
)

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
        daemon: of the run directory; None: none is joined.
        of_node: this process's environment names a daemon of the node's; no other one is joined.
        in_time: the policy says that the GPU is to be shared in time.
        probe: what the GPU offers to a process with such an environment.
        changed: called when the sharing is another than before.
        every_s: between two looks at the daemon.
        trial_within_s: how long a process may take to become a client.
    """

    def __init__(
        self,
        run_dir: RunDir,
        daemon: MpsDaemon | None,
        *,
        probe: Probe = probe_gpu,
        of_node: bool = False,
        in_time: bool = False,
        changed: Callable[[], None] = lambda: None,
        every_s: float = WATCH_EVERY_S,
        trial_within_s: float = TRIAL_WITHIN_S,
    ) -> None:
        self._run_dir, self._daemon, self._probe = run_dir, daemon, probe
        self._changed, self._every_s, self._of_node = changed, every_s, of_node
        self._in_time, self._trial_within_s = in_time, trial_within_s
        self._watch: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._joined: DaemonNote | None = None
        self._joining = asyncio.Lock()  # the engines of a pod call together
        self.sharing: Sharing | None = None  # None: without a GPU
        self.found = Survey()  # what this process's container sees

    async def start(self) -> None:
        """Look at the GPU; whatever is missing is a reason. Nothing is joined before decode calls.

        The daemon of an earlier life of this agent is known again by its note, for what is left of
        that life's workers.
        """
        self.found = found = await self._probe({})
        if not found.gpu:
            _log.info("no GPU to share: %s", found.why)
            return
        lack: Lack | None = _NOT_CALLED
        if self._in_time:
            lack = ASKED_IN_TIME
        elif self._of_node:
            # It is the node's: neither started nor watched here, and its clients' GPU work is ended
            # by nobody but its owner.
            lack = None if found.is_mps_client else NOT_THE_NODES_CLIENT
        else:
            self._joined = DaemonNote.read(self._run_dir)
        self._settle(lack)

    async def join(self) -> None:
        """Decode has called as a client of the pod's daemon: become one as well, where that can be.

        Costs a process that starts and ends; nothing where that daemon is joined already.
        """
        if self.sharing is None or self._of_node or self._in_time or self._daemon is None:
            return
        async with self._joining:
            note = DaemonNote.read(self._run_dir)
            if note is not None and note == self._joined and self.sharing.mode == "spatial":
                return
            await self._end_watch()
            lack = await self._join(self._daemon, note)
            self._joined = note
            self._settle(lack)
            if lack is None:
                self._watch = asyncio.create_task(self._watch_over(self._daemon))

    @property
    def worker_environment(self) -> dict[str, str]:
        """The variables that make a worker a client; none where it is to be none."""
        if self._joined is None or self.sharing is None or self.sharing.mode != "spatial":
            return {}
        return dict(self._joined.environment)

    async def close(self) -> None:
        """Leave. A daemon whose decode is gone, and that nobody uses, is asked to quit."""
        self._closing.set()
        await self._end_watch()
        note, daemon = DaemonNote.read(self._run_dir), self._daemon
        if note is None or daemon is None or not note.starter_is_gone:
            return
        if await asyncio.to_thread(daemon.take_over) and not await self._clients(daemon):
            await asyncio.to_thread(daemon.stop)

    async def end_client(self, pid: int) -> None:
        """End the GPU work of a worker that is about to be killed; only of a client.

        What a client of MPS leaves running when it is killed may take decode's context along.
        """
        if self._daemon is None or self._joined is None:
            return
        try:
            shares = self._joined.pid_namespace == pid_namespace()
            ended = await asyncio.to_thread(
                self._daemon.terminate_client, pid, shares_namespace=shares
            )
        except Transient as error:
            _log.warning("cannot end the GPU work of worker %d before it is killed: %s", pid, error)
            return
        if ended:
            _log.info("the GPU work of worker %d was ended before it is killed", pid)

    async def _join(self, daemon: MpsDaemon, note: DaemonNote | None) -> Lack | None:
        """Return what keeps this container from sharing in space; None: nothing does."""
        if note is None:
            return _NO_NOTE
        here = JoiningContainer.here(note, has_control=daemon.has_control)
        if lack := find_joining_lack(note, here):
            return lack
        if not await asyncio.to_thread(daemon.take_over):
            return _ENDED
        return await self._try(daemon, note)

    async def _try(self, daemon: MpsDaemon, note: DaemonNote) -> Lack | None:
        """Have a process become a client, and look whether the daemon knows it for one."""
        trial = await asyncio.create_subprocess_exec(
            *mps_trial.COMMAND,
            mps_trial.STAY,
            env={**os.environ, **note.environment},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert trial.stdout is not None
        try:
            line = await asyncio.wait_for(trial.stdout.readline(), self._trial_within_s)
            if not line:
                _, err = await trial.communicate()
                return mps_trial.read_answer("", err.decode(errors="replace"))
            if lack := mps_trial.read_answer(line.decode(), ""):
                return lack
            shares = note.pid_namespace == pid_namespace()
            known = await asyncio.to_thread(daemon.find_client, trial.pid, shares_namespace=shares)
        except TimeoutError:
            mps_trial.end_group(trial.pid)
            return mps_trial.hanging(self._trial_within_s)
        except Transient as error:
            return Lack(Reason.MPS_ENDED, str(error))
        finally:
            assert trial.stdin is not None
            trial.stdin.close()
            with suppress(TimeoutError):
                await asyncio.wait_for(trial.wait(), 1.0)
            if trial.returncode is None:
                mps_trial.end_group(trial.pid)
        return None if known else _UNKNOWN

    @staticmethod
    async def _clients(daemon: MpsDaemon) -> list[int]:
        """Process ids; none where it does not answer."""
        try:
            of_each_server = await asyncio.to_thread(daemon.clients)
        except Transient:
            return []
        return [pid for pids in of_each_server.values() for pid in pids]

    async def _watch_over(self, daemon: MpsDaemon) -> None:
        # Asked twice: on a machine without free cores its program may answer too late once.
        while await asyncio.to_thread(lambda: daemon.alive() or daemon.take_over()):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), self._every_s)
                return
        self._settle(_ENDED)
        self._changed()

    async def _end_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    def _settle(self, lack: Lack | None) -> None:
        capabilities = GpuCapabilities(
            self.found.green_missing,
            lack.text if lack else "",
            mps_code=lack.code if lack else Reason.MPS_CLIENTS,
        )
        sharing, before = choose_sharing(capabilities), self.sharing
        if sharing == before:
            return
        self.sharing = sharing
        lost = before is not None and before.mode == "spatial"
        say = _log.warning if lost else _log.info
        say("the GPU is shared in %s mode: %s", sharing.mode, sharing.reason)
