"""Load, run and end the jobs of a colocated worker, each with a stream to the agent.

Each job has a stream to the agent, so that commands, progress and events are those of one job as
they always were. Any of these streams may bring a further job (ADD_JOB); it is made ready while the
others train (`loading`), and joins between two turns. A job that cannot be loaded,
fails, or is stopped ends alone; only a tasklet that never ends takes all of them along, since
nobody can take the thread away from it.
"""

from __future__ import annotations

import logging
import os
import queue
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

from windrow.conditions import Reason
from windrow.errors import UserError
from windrow.eventlog import EventLog
from windrow.protocol import Ending, WorkerEvent
from windrow.rundir import RunDir
from windrow_sidecar.compute.host_device import out_of_memory
from windrow_sidecar.finetune.colocated.agent_link import JobAgentLink, JobLink, worker_hello
from windrow_sidecar.finetune.colocated.job_context import JobContext
from windrow_sidecar.finetune.colocated.job_logs import JobLogs
from windrow_sidecar.finetune.colocated.loading import NOT_BEGUN, Loading, Verdict, ended_unloaded
from windrow_sidecar.finetune.colocated.slot import ReadRows, WorkerSlot
from windrow_sidecar.finetune.colocated.standby import JobOrder
from windrow_sidecar.finetune.data import network_guard
from windrow_sidecar.finetune.data.readers import Readers, RowsWanted, Unpaced
from windrow_sidecar.finetune.data.remote import Credentials
from windrow_sidecar.finetune.data.split import DataSplit
from windrow_sidecar.finetune.job.assembly import JobSpec, read_job
from windrow_sidecar.finetune.job.bucket import open_folder
from windrow_sidecar.finetune.job.failures import Crowded, failure
from windrow_sidecar.finetune.job.job_handle import JobHandle
from windrow_sidecar.finetune.job.joint_turns import JointTurns
from windrow_sidecar.finetune.job.ledger import JobState, Ledger
from windrow_sidecar.finetune.job.multiplexer import Arrival, JobMultiplexer, worst
from windrow_sidecar.finetune.job.runner import Runner
from windrow_sidecar.finetune.job.tracking import services_of
from windrow_sidecar.finetune.training.checkpoint import Checkpoint, JobFolder
from windrow_sidecar.finetune.training.health import READING, TAKING_FOLDER
from windrow_sidecar.turn import TurnNote

log = logging.getLogger(__name__)

# Of a job that hangs: a tasklet that is queued on a GPU takes milliseconds.
LEAVES_DEVICE_WITHIN_S = 2.0
# A client of MPS that exits with work under way may take decode's context along; the agent ends
# that work before it kills, after its grace (25 s).
KILLED_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True, eq=False)
class PendingJob:
    """A job from its assignment to its end: its order, state, agent stream and event log.

    Attributes:
        order: names it.
        job_state: what other threads read and set.
        agent: its stream.
        events: its event log.
    """

    order: JobOrder
    job_state: JobState
    agent: JobLink
    events: EventLog


@dataclass(frozen=True, slots=True)
class InProcess:
    """Facts of the process in which jobs run: a worker's, or one with a thread for them.

    Attributes:
        link: opens the stream of a job; takes what `JobAgentLink` takes.
        pid: of the process that the agent watches.
        give_up: called with an ending where a tasklet never ends; the process goes on.
    """

    link: Callable[..., JobLink]
    pid: int
    give_up: Callable[[int], None]


def worker_process() -> InProcess:
    """Return how jobs run in a worker's process, which ends with what is stuck in it."""
    return InProcess(JobAgentLink, os.getpid(), give_up=os._exit)


class WorkerJobs:
    """Runs jobs in one slot until none is left.

    Args:
        run_dir: of the decode pod.
        first: the job that the worker was started for.
        open_slot: attaches to decode, under the first job's epoch.
        event_log: makes the event log of a job.
        readers: have the rows of further jobs read; closed at the end.
        turn: records whose turn it is, for the reader who finds the process dead.
        job_state: makes that of a job.
        logs: keep what is said of each job apart. Default: by no handler of the process.
        within: what runs them. Default: a worker's process.
    """

    def __init__(
        self,
        run_dir: RunDir,
        first: JobOrder,
        open_slot: Callable[[], WorkerSlot],
        event_log: Callable[[JobOrder], EventLog],
        readers: Readers,
        turn: TurnNote,
        job_state: Callable[[], JobState] = JobState,
        logs: JobLogs | None = None,
        within: InProcess | None = None,
    ) -> None:
        self._within = within or worker_process()
        self._logs = JobLogs(run_dir) if logs is None else logs
        self._readers, self._turn, self._job_state = readers, turn, job_state
        self._run_dir, self._open_slot, self._event_log = run_dir, open_slot, event_log
        self._orders: queue.SimpleQueue[JobOrder] = queue.SimpleQueue()
        self._orders.put(first)
        self._slot: WorkerSlot | None = None
        self._open: list[PendingJob] = []  # jobs that are not over
        self._loading: dict[PendingJob, Loading] = {}  # of these, those that are not ready
        self._endings: list[Ending] = []
        self._stop_asked = ""
        self._until_told = ExitStack()

    def run(self) -> Ending:
        """Run them to their ends; returns the worst of these (see `worst`)."""
        with self._until_told:
            try:
                JobMultiplexer(arrivals=self._arrival, joint=self._join_rows).run()
            except Exception as error:
                # The edge of the process: whatever went wrong, the agent hears of it.
                self._logs.about("")
                log.exception("the worker failed")
                for pending in tuple(self._open):
                    self._failed(pending, error)
            finally:
                if self._slot is not None:
                    self._slot.close()
                self._readers.close()
        return worst(self._endings)

    def ask_to_stop(self, why: str) -> None:
        """Have every job write a checkpoint and end; no further one is taken. For a signal."""
        self._stop_asked = why
        for pending in tuple(self._open):
            pending.job_state.stop_asked = why

    def _arrival(self) -> Arrival | None:
        """Return what makes a job join now; with nobody to train, waits for one that loads."""
        while not (self._stop_asked and (self._open or self._endings)):
            if (order := self._next_order()) is not None:
                if self._slot is None or not self._slot.has_base:
                    return lambda: self._take_first(order)
                self._begin_loading(order, self._slot)
            if (pending := self._one_loaded()) is not None:
                return lambda: self._join(pending, self._loading.pop(pending))
            if len(self._open) > len(self._loading) or not self._loading:
                return None
            if self._slot is not None and not self._slot.idle():
                gone = WorkerEvent("STOPPED", Reason.SLOT_LOST, "the decode process has ended")
                self._give_up_loading((gone, Ending.DECODE_GONE))
        stopped = WorkerEvent("STOPPED", Reason.STOPPED, f"{self._stop_asked}; {NOT_BEGUN}")
        self._give_up_loading((stopped, Ending.STOPPED))
        return None

    def _join_rows(self) -> JointTurns:
        assert self._slot is not None
        return self._slot.join_rows()

    def _next_order(self) -> JobOrder | None:
        try:
            return self._orders.get_nowait()
        except queue.Empty:
            return None

    def _begin_loading(self, order: JobOrder, slot: WorkerSlot) -> None:
        pending = self._meet(order)

        def job() -> JobSpec:
            self._logs.about(order.job_uid)  # of the thread that loads it
            return self._read(pending)

        def rows_for(job: JobSpec) -> RowsWanted:
            return replace(slot.rows_for(job), log=self._logs.path_of(order.job_uid))

        self._loading[pending] = Loading(
            job,
            order,
            pending.job_state,
            self._readers,
            rows_for,
            slot.pace(),
        )

    def _one_loaded(self) -> PendingJob | None:
        """Return a job that is ready, or cannot be; tell the ends of those that were given up."""
        for pending, loading in tuple(self._loading.items()):
            if pending.agent.end_asked == "FORGET":
                loading.forget()
            elif pending.agent.end_asked is not None:
                loading.give_up(ended_unloaded(pending.agent.end_asked))
            if loading.verdict is not None:
                del self._loading[pending]
                event, ending = loading.verdict
                pending.agent.event(event)
                self._over(pending, ending)
            elif loading.is_over:
                return pending
        return None

    def _give_up_loading(self, verdict: Verdict) -> None:
        for loading in self._loading.values():
            loading.give_up(verdict)
        while (
            pending := self._one_loaded()
        ) is not None:  # was ready just now: it has learnt nothing
            del self._loading[pending]
            pending.agent.event(verdict[0])
            self._over(pending, verdict[1])

    def _take_first(self, order: JobOrder) -> JobHandle | None:
        """Load the model and a job; None: that failed, as its stream has reported."""
        pending = self._meet(order)

        def load() -> JobHandle:
            job = self._read(pending)
            folder = open_folder(job)
            with pending.job_state.stall.during(TAKING_FOLDER):
                folder.claim()
                job = job.of_folder(folder)
            if self._slot is None:
                self._slot = self._open_slot()
            read = self._read_apart(pending)
            context = self._slot.take(job, pending.job_state, read, tell=pending.agent.event)
            return self._job_handle(pending, self._slot, context, folder)

        return self._try_to(load, pending)

    def _read_apart(self, pending: PendingJob) -> ReadRows:
        """Return what has the first job's rows read by a process of their own."""
        stall, log_file = pending.job_state.stall, self._logs.path_of(pending.order.job_uid)

        def read(wanted: RowsWanted) -> DataSplit:
            with stall.during(READING):
                rows = self._readers.begin(replace(wanted, log=log_file))
                return rows.wait(stall.renew, Unpaced())

        return read

    def _join(self, pending: PendingJob, loading: Loading) -> JobHandle | None:
        """Attach a job that was made ready; None: that failed, as its stream has reported."""

        def attach() -> JobHandle:
            assert self._slot is not None
            ready = loading.result()
            context = self._slot.join(ready.job, ready.rows, pending.job_state)
            newest = ready.checkpoint
            return self._job_handle(pending, self._slot, context, ready.folder, lambda: newest)

        return self._try_to(attach, pending)

    def _try_to(self, begin: Callable[[], JobHandle], pending: PendingJob) -> JobHandle | None:
        self._turn_of(pending)()
        try:
            return begin()
        except Exception as error:
            # The edge of a job: the others run without it.
            log.exception("job %s cannot begin", pending.order.job_uid)
            self._failed(pending, crowded(error) if len(self._open) > 1 else error)
            return None

    def _meet(self, order: JobOrder) -> PendingJob:
        """Open the job's stream, before anything that takes time."""
        if self._open or self._endings:
            self._logs.separate()
        events, job_state = self._event_log(order), self._job_state()
        job_state.stop_asked = self._stop_asked
        agent = self._within.link(
            self._run_dir.agent_socket,
            worker_hello(order, self._within.pid),
            job_state.report,
            events,
            take=self._orders.put,
            orphaned=self.ask_to_stop,
        )
        pending = PendingJob(order, job_state, self._until_told.enter_context(agent), events)
        job_state.stall.watch(lambda found: self._stuck(pending, found))
        self._open.append(pending)
        return pending

    def _read(self, pending: PendingJob) -> JobSpec:
        """Read a job, with the credentials that its stream brings where it names a Secret.

        Raises:
            UserError: the spec cannot be honoured.
            Transient: the agent does not answer.
        """
        order = pending.order
        job = read_job(self._run_dir.job_dir(order.job_uid) / "job.json")
        if job.access.network is not None:
            network_guard.install().admit(pending, job.access.network)
        job = replace(job, epoch=order.epoch)
        figures = job.spec.tracking.secret_ref if job.spec.tracking else None
        spec = job.spec
        secrets = (spec.dataset.secret_ref, spec.output.secret_ref, figures, spec.model.secret_ref)
        if any(secrets):
            named = [secret.name if secret else "" for secret in secrets]
            held = pending.agent.credentials()
            rows, output, tracking, model = map(Credentials, named, held)
            job = replace(
                job,
                dataset_credentials=rows,
                output_credentials=output,
                tracking_credentials=tracking,
                model_credentials=model,
            )
        services_of(job)  # what cannot be reported is refused before anything is loaded
        return job

    def _job_handle(
        self,
        pending: PendingJob,
        slot: WorkerSlot,
        context: JobContext,
        folder: JobFolder,
        newest: Callable[[], Checkpoint | None] | None = None,
    ) -> JobHandle:
        stream, job_state = context.session.stream, pending.job_state
        ledger = Ledger(
            context.session, folder, pending.agent, pending.events, job_state, newest, forgets=True
        )
        estimates, weights = slot.estimates, stream.parts.weights
        return JobHandle(
            context.session.job.name,
            stream,
            context.memory,
            Runner(
                *(stream, slot.gate, context.memory, ledger, pending.agent, job_state),
                expected_s=lambda tasklet: estimates.expected_s(tasklet, weights),
            ),
            failed=lambda error: self._fell(pending, ledger, folder, error),
            ended=lambda ending: self._left(slot, context, pending, ending),
            acts=self._turn_of(pending),
            joined=job_state.join,
            apart=context.apart,
            activation_budget=context.activation_budget,
            program=stream.parts.stack.program,
        )

    def _turn_of(self, pending: PendingJob) -> Callable[[], None]:
        job_uid, about = pending.order.job_uid, self._logs.about
        note = self._turn.of(job_uid, pending.order.epoch)

        def begin() -> None:
            note()
            about(job_uid)

        return begin

    def _fell(
        self, pending: PendingJob, ledger: Ledger, folder: JobFolder, error: Exception
    ) -> Ending:
        ledger.failed()
        folder.keep_figures()
        return self._tell_failure(pending, error)

    def _tell_failure(self, pending: PendingJob, error: Exception) -> Ending:
        if self._slot is not None:
            error = self._slot.explain(error)
        event, ending = failure(error, pending.job_state.last_checkpoint)
        pending.agent.event(event)
        return ending

    def _failed(self, pending: PendingJob, error: Exception) -> None:
        self._over(pending, self._tell_failure(pending, error))

    def _left(
        self, slot: WorkerSlot, context: JobContext, pending: PendingJob, ending: Ending
    ) -> None:
        slot.leave(context)
        self._over(pending, ending)

    def _over(self, pending: PendingJob, ending: Ending) -> None:
        """Release a job; its stream ends once its last message was taken."""
        self._open.remove(pending)
        network_guard.forget(pending)
        self._endings.append(ending)
        pending.job_state.stall.close()
        pending.events.flush()
        pending.agent.finish()

    def _stuck(self, pending: PendingJob, found: Exception) -> None:
        """End a job that does not get ready, else the process, from beside its stuck thread.

        Decode takes the memory of a process that has ended.
        """
        self._logs.about(pending.order.job_uid)
        if self._slot is not None:
            found = self._slot.explain(found)
        event, ending = failure(found, pending.job_state.last_checkpoint)
        if (loading := self._loading.get(pending)) is not None:
            if not loading.give_up((event, ending)):  # it has got ready just now
                pending.job_state.stall.watch(lambda found: self._stuck(pending, found))
            return
        pending.agent.event(event)
        why = "another job of this worker has stopped it for good"
        for other in tuple(self._open):
            if other is not pending:
                other.agent.event(WorkerEvent("STOPPED", Reason.SLOT_LOST, why))
            other.agent.finish()
        for other in tuple(self._open):
            other.agent.__exit__()
        if self._slot is not None and not self._slot.idle_within(LEAVES_DEVICE_WITHIN_S):
            log.error("work on the device does not end: the sidecar ends it, then this process")
            time.sleep(KILLED_WITHIN_S)
        self._within.give_up(ending)


def crowded(error: Exception) -> Exception:
    """Make out-of-memory beside other jobs no failure of this one: there is no room here now."""
    if out_of_memory(error) or (
        isinstance(error, UserError) and error.reason == Reason.OUT_OF_MEMORY
    ):
        return Crowded(f"there is no room for it beside other jobs of this worker: {error}")
    return error
