"""One placement of a job: its worker, from the start to the one report of how it ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from windrow.conditions import Reason
from windrow.proto import agent_pb2, attach_pb2
from windrow_sidecar.agent.channel import Channel
from windrow_sidecar.agent.orphans import forget_worker, note_worker
from windrow_sidecar.agent.outbox import Outbox
from windrow_sidecar.agent.progress import ProgressMeter
from windrow_sidecar.agent.settings import AgentSettings
from windrow_sidecar.agent.worker_process import Exit, Standby, WorkerProcess

_log = logging.getLogger(__name__)

Event = attach_pb2.JobEvent
Ask = attach_pb2.JobCommand
_TERMINAL = (Event.STOPPED, Event.SUCCEEDED, Event.FAILED)
# The end of a process can be seen before what it last said has been read.
_LAST_WORDS_S = 2.0

WorkerChannel = Channel[agent_pb2.WorkerCommand]


class JobRun:
    """Reports every event of its worker, and exactly one end."""

    def __init__(
        self,
        settings: AgentSettings,
        assign: attach_pb2.Assign,
        outbox: Outbox,
        *,
        standby: Standby | None = None,
        on_tokens: Callable[[int], None] = lambda n: None,
        on_exit: Callable[[str], None] = lambda outcome: None,
    ) -> None:
        self._settings, self._outbox, self._standby = settings, outbox, standby
        self._on_tokens, self._on_exit = on_tokens, on_exit
        self.assign = assign
        self.meter = ProgressMeter()
        self.ended: int | None = None  # kind of the event that reported the end
        self._process: WorkerProcess | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._killer: asyncio.Task[None] | None = None
        self._channel: WorkerChannel | None = None
        self._waiting: list[agent_pb2.WorkerCommand] = []  # for a worker that has not called yet
        self._hung_up = asyncio.Event()
        self._hung_up.set()
        self._asked_to_end = False
        self._cause: tuple[Reason, str] | None = None  # why we end it, when nobody asked

    def is_of(self, job_uid: str, epoch: int) -> bool:
        """Whether this is that placement."""
        return (self.assign.job_uid, self.assign.epoch) == (job_uid, epoch)

    @property
    def pid(self) -> int:
        """Of the worker; 0 before it has started."""
        return self._process.pid if self._process else 0

    @property
    def is_over(self) -> bool:
        """The worker has ended and has been reaped."""
        return self._supervisor is not None and self._supervisor.done()

    async def start(self) -> None:
        """Start the worker; a start that fails is reported as the run's end."""
        try:
            self._process = await WorkerProcess.start(self._settings, self.assign, self._standby)
        except (OSError, ValueError) as error:
            await self._end(Event.FAILED, Reason.WORKER_ERROR, f"cannot start a worker: {error}")
            self._supervisor = asyncio.create_task(asyncio.sleep(0))
            return
        _log.info("job %s epoch %d: worker %d", self.assign.job_uid, self.assign.epoch, self.pid)
        note_worker(self._settings.run_dir.root, self.assign.slot, self.pid)
        self._supervisor = asyncio.create_task(self._supervise(self._process))

    async def wait(self) -> None:
        """Until the worker has ended and that has been reported."""
        if self._supervisor:
            await asyncio.shield(self._supervisor)

    # What the worker says

    def attached(self, channel: WorkerChannel) -> None:
        """The worker has called; hand it what was asked meanwhile."""
        self._channel = channel
        self._hung_up.clear()
        for command in self._waiting:
            channel.send(command)
        self._waiting.clear()

    def hung_up(self) -> None:
        """The worker's stream has ended."""
        self._channel = None
        self._hung_up.set()

    async def heard(self, report: agent_pb2.WorkerReport) -> None:
        """Take progress or an event from the worker."""
        kind = report.WhichOneof("message")
        if kind == "progress":
            self._on_tokens(self.meter.add(time.monotonic(), report.progress))
        elif kind == "event":
            await self._retell(report.event)

    async def _retell(self, said: agent_pb2.WorkerEvent) -> None:
        if said.kind not in Event.Kind.keys():  # noqa: SIM118 - an enum wrapper, no mapping
            _log.warning("the worker reported an unknown event %r", said.kind)
            return
        kind = Event.Kind.Value(said.kind)
        reason, detail = said.reason, said.detail
        if kind == Event.STOPPED and self._cause:
            reason, detail = self._cause
        event = self._event(kind, reason, detail)
        event.user_error = said.user_error
        event.adapter_path = said.adapter_path
        event.base_eval_loss = said.base_eval_loss
        event.tuned_eval_loss = said.tuned_eval_loss
        await self._tell(event)
        if kind in _TERMINAL:
            self._end_soon()

    # What it is told

    def obey(self, action: int, reason: str) -> None:
        """Carry out a command of the operator."""
        if action == Ask.ABORT:
            self._asked_to_end = True
            self._kill()
            return
        command = agent_pb2.WorkerCommand(action=Ask.Action.Name(action), reason=reason)
        if self._channel:
            self._channel.send(command)
        else:
            self._waiting.append(command)
        if action == Ask.STOP:
            self._asked_to_end = True
            self._end_soon()

    def give_up(self, reason: Reason, detail: str) -> None:
        """End it with a checkpoint, unasked: no failure of the job's, it can go on elsewhere."""
        self._cause = (reason, detail)
        self.obey(Ask.STOP, detail)

    async def abort(self) -> None:
        """End it now; returns when it is gone."""
        self.obey(Ask.ABORT, "")
        await self.wait()

    def _end_soon(self) -> None:
        """It should end by itself; what has not after the grace is killed."""
        self._killer = self._killer or asyncio.create_task(self._kill_after_grace())

    def _kill(self) -> None:
        if self._process:
            self._process.kill()

    async def _kill_after_grace(self) -> None:
        await asyncio.sleep(self._settings.grace_s)
        _log.warning("job %s: no end within %.0f s", self.assign.job_uid, self._settings.grace_s)
        self._kill()

    # How it ends

    async def _supervise(self, process: WorkerProcess) -> None:
        end = await process.wait()
        forget_worker(self._settings.run_dir.root, self.assign.slot)
        if self._killer:
            self._killer.cancel()
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._hung_up.wait()
        except TimeoutError:
            _log.warning("the stream of worker %d outlives it", process.pid)
        if self.ended is None:
            await self._report_end(end)
        outcome = Event.Kind.Name(self.ended or Event.FAILED).lower()
        _log.info("job %s: %s, %s", self.assign.job_uid, outcome, end.describe())
        self._on_exit(outcome)

    async def _report_end(self, end: Exit) -> None:
        """The worker ended without a word of its own."""
        if self._asked_to_end:
            reason, detail = self._cause or (Reason.STOPPED, end.describe())
            await self._end(Event.STOPPED, reason, detail)
        else:
            await self._end(Event.FAILED, Reason.WORKER_DIED, end.describe())

    async def _end(self, kind: int, reason: Reason, detail: str) -> None:
        await self._tell(self._event(kind, reason, detail))

    async def _tell(self, event: attach_pb2.JobEvent) -> None:
        if event.kind in _TERMINAL:
            if self.ended is not None:
                return
            self.ended = event.kind
        await self._outbox.add(event)

    def _event(self, kind: int, reason: str, detail: str) -> attach_pb2.JobEvent:
        return Event(
            kind=kind,  # type: ignore[arg-type]
            job_uid=self.assign.job_uid,
            epoch=self.assign.epoch,
            reason=str(reason),
            detail=detail,
            progress=self.meter.message(),
            at_unix_seconds=time.time(),
        )
