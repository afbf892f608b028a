"""Follow one placement of a job: its events, its commands, and the one report of its end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from windrow.conditions import Reason
from windrow.proto import agent_pb2, attach_pb2
from windrow_sidecar.agent.channel import OutgoingQueue
from windrow_sidecar.agent.outbox import EventOutbox
from windrow_sidecar.agent.progress import ProgressMeter
from windrow_sidecar.agent.settings import AgentSettings
from windrow_sidecar.agent.worker_process import Exit

_log = logging.getLogger(__name__)

Event = attach_pb2.JobEvent
Ask = attach_pb2.JobCommand
_TERMINAL = (Event.STOPPED, Event.SUCCEEDED, Event.FAILED, Event.REJECTED)
# The end of a process can be seen before what it last said has been read.
_LAST_WORDS_S = 2.0

WorkerChannel = OutgoingQueue[agent_pb2.WorkerCommand]


class RunningWorker(Protocol):
    """The process that runs the job, and others with it (see `supervisor.WorkerSupervisor`)."""

    def is_shared_by(self, run: JobRun) -> bool:
        """Return whether the run shares its worker with other jobs."""

    def kill_for(self, run: JobRun) -> None:
        """End it at once, for the sake of `run`."""

    def ended(self, run: JobRun) -> None:
        """The end of `run` has been reported."""


class JobRun:
    """One placement of a job; reports each of its events, and exactly one end.

    Args:
        settings: of the agent.
        assign: the placement.
        outbox: takes the events.
        worker: that runs it.
        joined: whether it came to a worker that was there.
        on_tokens: called with the tokens  done since its last call.
        why_paused: says why decode lets the worker wait; empty: it does not.
    """

    def __init__(
        self,
        settings: AgentSettings,
        assign: attach_pb2.Assign,
        outbox: EventOutbox,
        worker: RunningWorker,
        *,
        joined: bool = False,
        on_tokens: Callable[[int], None] = lambda n: None,
        why_paused: Callable[[], str] = lambda: "",
    ) -> None:
        self._settings, self._outbox, self._worker = settings, outbox, worker
        self._joined, self._on_tokens, self._why_paused = joined, on_tokens, why_paused
        self.assign = assign
        self.meter = ProgressMeter()
        self.ended: int | None = None  # kind of the event that reported the end
        self.asked_to_end = False
        self._has_ended = asyncio.Event()
        self._killer: asyncio.Task[None] | None = None
        self._channel: WorkerChannel | None = None
        self._waiting: list[agent_pb2.WorkerCommand] = []  # until the worker calls
        self._called = False
        self._hung_up = asyncio.Event()
        self._hung_up.set()
        self._cause: tuple[Reason, str] | None = None  # why we end it, when nobody asked
        self._silent_s = 0.0  # for which its worker said nothing, so that we have ended it

    def is_of(self, job_uid: str, epoch: int) -> bool:
        """Return whether this run is that placement."""
        return (self.assign.job_uid, self.assign.epoch) == (job_uid, epoch)

    async def wait(self) -> None:
        """Wait until its end has been reported."""
        await self._has_ended.wait()

    # What the worker says

    def attached(self, channel: WorkerChannel) -> None:
        """The worker has called; hand it what was asked meanwhile."""
        self._channel, self._called = channel, True
        self._hung_up.clear()
        of_job = self.assign
        credentials = agent_pb2.WorkerCommand(
            action="CREDENTIALS",
            dataset_secret=of_job.dataset_secret,
            output_secret=of_job.output_secret,
            tracking_secret=of_job.tracking_secret,
            model_secret=of_job.model_secret,
        )
        if len(credentials.ListFields()) > 1:
            channel.send(credentials)
        for command in self._waiting:
            channel.send(command)
        self._waiting.clear()

    def hung_up(self) -> None:
        """The worker's stream has ended."""
        self._channel = None
        self._hung_up.set()

    def fell_silent(self, silent_s: float) -> None:
        """Report a worker that lives and says nothing: it hangs as a whole, or was stopped."""
        if self.ended is None:
            _log.warning(
                "job %s: the worker has reported nothing for %.0f s", self.assign.job_uid, silent_s
            )
            self._silent_s = silent_s
            self._worker.kill_for(self)

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
        if kind == Event.PAUSED and (why := self._why_paused()):
            detail = f"{detail} ({why})"  # only decode knows
        event = self._event(kind, reason, detail)
        event.user_error = said.user_error
        event.field, event.remedy = said.field, said.remedy
        event.adapter_path = said.adapter_path
        event.adapter_digest = said.adapter_digest
        if said.HasField("base_eval_loss"):
            event.base_eval_loss = said.base_eval_loss
        if said.HasField("tuned_eval_loss"):
            event.tuned_eval_loss = said.tuned_eval_loss
        await self._tell(event)

    # Its input

    async def obey(self, action: int, reason: str) -> None:
        """Carry out a command of the operator; one that comes after the end has no meaning."""
        if self.ended is not None:
            return
        ends = action in (Ask.STOP, Ask.ABORT)
        self.asked_to_end = self.asked_to_end or ends
        if action == Ask.ABORT and not self._worker.is_shared_by(self):
            self._worker.kill_for(self)
        elif action == Ask.STOP and reason == Reason.DELETED and self._joined and not self._called:
            # Checkpoints go with the worker, which takes further jobs between two turns.
            self.send(agent_pb2.WorkerCommand(action="STOP", reason=reason))
            self._killer = self._killer or asyncio.create_task(self._let_go_after_grace())
        elif ends and self._joined and not self._called:
            # The worker may be busy with another job; should it still call for this one, it ends.
            self.send(agent_pb2.WorkerCommand(action="ABORT", reason=reason))
            await self._end(Event.STOPPED, *(self._cause or (Reason.STOPPED, "it had not begun")))
        else:
            self.send(agent_pb2.WorkerCommand(action=Ask.Action.Name(action), reason=reason))
            if ends:
                self._killer = self._killer or asyncio.create_task(self._kill_after_grace())

    def send(self, command: agent_pb2.WorkerCommand) -> None:
        """Hand the worker a command, as soon as it has called."""
        if self._channel:
            self._channel.send(command)
        else:
            self._waiting.append(command)

    async def give_up(self, reason: Reason, detail: str) -> None:
        """End it with a checkpoint, unasked: no failure of the job's, it can go on elsewhere."""
        self._cause = (reason, detail)
        await self.obey(Ask.STOP, detail)

    async def abort(self) -> None:
        """End it now; returns when that has been reported."""
        await self.obey(Ask.ABORT, "")
        await self.wait()

    async def _kill_after_grace(self) -> None:
        await asyncio.sleep(self._settings.grace_s)
        _log.warning(
            "job %s has not ended within %.0f s", self.assign.job_uid, self._settings.grace_s
        )
        self._worker.kill_for(self)

    async def _let_go_after_grace(self) -> None:
        """Wait for a worker that is to remove checkpoints; other jobs are not killed for that."""
        await asyncio.sleep(self._settings.grace_s)
        if self._called:
            await self._kill_after_grace()
            return
        detail = (
            f"its worker, busy with another job, did not take it within {self._settings.grace_s:g} "
            "s: checkpoints that it has stay"
        )
        await self._end(Event.STOPPED, Reason.STOPPED, detail)

    # How it ends

    async def cannot_start(self, error: Exception) -> None:
        """No worker could be made to run it."""
        await self._end(Event.FAILED, Reason.WORKER_ERROR, f"cannot start a worker: {error}")

    async def worker_ended(self, end: Exit, *, through: JobRun | None) -> None:
        """The process is gone; report that as the end where the worker has said none.

        `through`: the run for whose sake we have killed it, or in whose turn it has died: a failed
        attempt of that run alone. None: nobody knows, and it is one of each.
        """
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._hung_up.wait()
        except TimeoutError:
            _log.warning("the worker of job %s has ended, its stream has not", self.assign.job_uid)
        if self.ended is not None:
            return
        if self.asked_to_end:
            reason, detail = self._cause or (Reason.STOPPED, end.describe())
            await self._end(Event.STOPPED, reason, detail)
        elif through is not None and through is not self:
            same = through.assign.job_namespace == self.assign.job_namespace
            which = f"job {through.assign.job_name}" if same else "a job of another namespace"
            detail = f"its worker has ended with {which}"
            await self._end(Event.STOPPED, Reason.SLOT_LOST, detail)
        elif self._silent_s:
            detail = f"the worker said nothing for {self._silent_s:.0f} s; {end.describe()}"
            await self._end(Event.FAILED, Reason.NO_PROGRESS, detail)
        elif self._joined and not self._called:
            detail = "the worker ended before it took the job"
            await self._end(Event.STOPPED, Reason.SLOT_LOST, detail)
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
        if event.kind in _TERMINAL:
            if self._killer:
                self._killer.cancel()
            self._has_ended.set()
            self._worker.ended(self)

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
