"""Accept, run and command the jobs of one slot."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from windrow.conditions import Reason
from windrow.proto import attach_pb2
from windrow_sidecar.agent.job_run import JobRun
from windrow_sidecar.agent.outbox import EventOutbox
from windrow_sidecar.agent.settings import AgentSettings
from windrow_sidecar.agent.worker_process import EndGpuWork, Standby
from windrow_sidecar.agent.worker_supervisor import WorkerSupervisor
from windrow_sidecar.engine_facts import EngineFacts

Refusal = tuple[Reason, str]


class SlotJobs:
    """Takes assignments and commands, one after the other. Belongs to the agent's event loop.

    Args:
        settings: of the agent.
        index: of the slot.
        outbox: takes events of jobs.
        standby: the worker that waits ahead of a first job.
        refuses_all: says why the slot takes no job at all now.
        max_jobs: how many may run at a time.
        worker_changed: called when a worker has been started or reaped.
        why_paused: says why decode lets the worker wait; empty: it does not.
        end_gpu_work: of a worker's process, before it is killed.
        engine: says what is known of decode's engine.

    Attributes:
        runs: those that go on, and the last that have ended, oldest first.
        harvested_tokens: of all jobs that ran here, by their namespaces.
        worker_starts: of processes.
        worker_exits: of processes, by how their last job ended.
    """

    def __init__(
        self,
        settings: AgentSettings,
        index: int,
        outbox: EventOutbox,
        standby: Standby,
        *,
        refuses_all: Callable[[], Refusal | None],
        max_jobs: Callable[[], int],
        worker_changed: Callable[[], None],
        why_paused: Callable[[], str],
        end_gpu_work: EndGpuWork | None = None,
        engine: Callable[[], EngineFacts] = EngineFacts,
    ) -> None:
        self._settings, self._index, self._outbox = settings, index, outbox
        self._why_paused = why_paused
        self._standby, self._refuses_all = standby, refuses_all
        self._max_jobs, self._worker_changed = max_jobs, worker_changed
        self._end_gpu_work, self._engine = end_gpu_work, engine
        self.runs: list[JobRun] = []
        self.worker_starts = 0
        self.harvested_tokens: Counter[str] = Counter()
        self.worker_exits: Counter[str] = Counter()
        self._supervisor: WorkerSupervisor | None = None
        self._coming: set[tuple[str, int]] = set()  # assignments that wait for their turn
        self._inbox = asyncio.Lock()

    @property
    def has_no_worker(self) -> bool:
        """True where no process runs here and none is about to start."""
        return self._supervisor is None or self._supervisor.is_over

    @property
    def worker_pid(self) -> int:
        """Process id of the worker; 0: none has started."""
        return self._supervisor.pid if self._supervisor else 0

    @property
    def worker_epoch(self) -> int:
        """Epoch by which decode knows the process; 0: none runs."""
        return self._supervisor.epoch if self._supervisor and self._supervisor.has_worker else 0

    @property
    def going(self) -> list[JobRun]:
        """The runs whose end has not been reported, the first one first."""
        return [run for run in self.runs if run.ended is None]

    def find(self, job_uid: str, epoch: int) -> JobRun | None:
        """Return that placement; None: it is not here, or it ended long ago."""
        return next((run for run in self.runs if run.is_of(job_uid, epoch)), None)

    async def assign(self, assign: attach_pb2.Assign) -> None:
        """Have a worker run a job, or say why not. The same assignment twice is one."""
        placement = (assign.job_uid, assign.epoch)
        self._coming.add(placement)
        try:
            async with self._inbox:
                if self.find(*placement) is None:
                    await self._place(assign)
        finally:
            self._coming.discard(placement)

    def is_for(self, job_uid: str, epoch: int) -> bool:
        """Return whether that placement is here, or about to be."""
        return (job_uid, epoch) in self._coming or self.find(job_uid, epoch) is not None

    async def _place(self, assign: attach_pb2.Assign) -> None:
        self._outbox.placed_again(assign.job_uid, assign.epoch)
        if refusal := self._refusal(assign):
            await self._reject(assign, *refusal)
            return
        for run in self.going:
            if run.assign.job_uid == assign.job_uid:
                await run.abort()  # an older epoch is fenced off
        if self._supervisor and not self._supervisor.takes_more:
            await self._supervisor.wait()  # its last run has ended, or was asked to: so does it
            self._supervisor = None
            if refusal := self._refuses_all():  # by now
                await self._reject(assign, *refusal)
                return
        self._forget_ended()
        if self._supervisor is None:
            self._supervisor = WorkerSupervisor(
                self._settings,
                self._index,
                on_exit=self._worker_exited,
                end_gpu_work=self._end_gpu_work,
                engine=self._engine,
            )
            run = self._make_run(assign, self._supervisor)
            await self._supervisor.start(run, self._standby)
            self.worker_starts += 1
            self._worker_changed()
        else:
            await self._supervisor.take(self._make_run(assign, self._supervisor, joined=True))

    def _make_run(
        self, assign: attach_pb2.Assign, supervisor: WorkerSupervisor, *, joined: bool = False
    ) -> JobRun:
        def count_tokens(n: int) -> None:
            self.harvested_tokens[assign.job_namespace] += n

        run = JobRun(
            self._settings,
            assign,
            self._outbox,
            supervisor,
            joined=joined,
            on_tokens=count_tokens,
            why_paused=self._why_paused,
        )
        self.runs.append(run)
        return run

    def _refusal(self, assign: attach_pb2.Assign) -> Refusal | None:
        if refusal := self._refuses_all():
            return refusal
        same = [r.assign.epoch for r in self.runs if r.assign.job_uid == assign.job_uid]
        if same and max(same) > assign.epoch:
            return Reason.STALE_EPOCH, f"epoch {max(same)} has been here already"
        others = [r.assign for r in self.going if r.assign.job_uid != assign.job_uid]
        if len(others) >= self._max_jobs():
            # Of other namespaces no name is said.
            own = [o.job_name for o in others if o.job_namespace == assign.job_namespace]
            jobs = "jobs" if own[1:] else "job"
            said = f"{jobs} {' and '.join(own)}" if own else "a job of another namespace"
            return Reason.BUSY, f"slot {self._index} runs {said}"
        worker = self._supervisor.runs if self._supervisor and self._supervisor.takes_more else []
        served = [assign, *(run.assign for run in worker)]
        if len({each.job_namespace for each in served}) > 1 and not all(map(_may_share, served)):
            return (
                Reason.BUSY,
                f"the worker of slot {self._index} serves another namespace, and the policy lets "
                "no two share one (access.shareWorkers)",
            )
        return None

    def _forget_ended(self) -> None:
        """Drop the runs of whose end the operator knows.

        It places no more than `max_jobs` at a time, so of those that have ended all but the last
        `max_jobs - 1` had to be known to it before it placed another.
        """
        here = self._supervisor.runs if self._supervisor else []
        ended = [run for run in self.runs if run.ended is not None and run not in here]
        for run in ended[: max(0, len(ended) - (self._max_jobs() - 1))]:
            self.runs.remove(run)
            self._outbox.forget(run.assign.job_uid, run.assign.epoch)

    async def _reject(self, assign: attach_pb2.Assign, reason: Reason, detail: str) -> None:
        await self._outbox.add(
            attach_pb2.JobEvent(
                kind=attach_pb2.JobEvent.REJECTED,
                job_uid=assign.job_uid,
                epoch=assign.epoch,
                reason=str(reason),
                detail=detail,
            )
        )

    def _worker_exited(self, outcome: str) -> None:
        self.worker_exits[outcome] += 1
        asyncio.get_running_loop().call_soon(self._worker_changed)

    async def give_up(self, reason: Reason, detail: str) -> None:
        """Have every job write a checkpoint and end, unasked (see `JobRun.give_up`)."""
        for run in self.going:
            await run.give_up(reason, detail)

    async def wait(self) -> None:
        """Wait until the worker has ended."""
        if self._supervisor:
            await self._supervisor.wait()

    async def command(self, command: attach_pb2.JobCommand) -> None:
        """Pass a command on; one for a run that is not here is answered as done."""
        async with self._inbox:
            run = self.find(command.job_uid, command.epoch)
            if run is not None:
                await run.obey(command.action, command.reason)
            elif command.action in (attach_pb2.JobCommand.STOP, attach_pb2.JobCommand.ABORT):
                await self._outbox.add(
                    attach_pb2.JobEvent(
                        kind=attach_pb2.JobEvent.STOPPED,
                        job_uid=command.job_uid,
                        epoch=command.epoch,
                        reason=str(Reason.STOPPED),
                        detail="no such worker runs here",
                    )
                )

    def running(self) -> list[attach_pb2.RunningJob]:
        """The runs whose end has not been reported, the first one first."""
        return [self._message_of(run) for run in self.going]

    def unsettled(self) -> list[attach_pb2.RunningJob]:
        """Return the jobs of a hello, ended runs included: the operator may not know yet.

        It would count a run that the hello leaves out as lost; the event of its end comes next.
        """
        return [self._message_of(run) for run in self.runs]

    def _message_of(self, run: JobRun) -> attach_pb2.RunningJob:
        return attach_pb2.RunningJob(
            slot=self._index,
            job_uid=run.assign.job_uid,
            epoch=run.assign.epoch,
            progress=run.meter.message(),
        )


def _may_share(assign: attach_pb2.Assign) -> bool:
    """Return whether the job's worker may serve another namespace as well."""
    return not assign.HasField("access") or assign.access.shares_worker
