"""The jobs of a worker beside decode: it takes them one by one, and each ends with its own word.

Each job has a stream to the agent, so that commands, progress and events are those of one job as
they always were. Any of these streams may say that a further job is to be taken (TAKE); it is made
ready while the others train (`loading`), and joins between two turns. A job that cannot be loaded,
fails, or is stopped ends alone; only a tasklet that never ends takes all of them along, since
nobody can take the thread away from it.
"""

from __future__ import annotations

import logging
import os
import queue
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from windrow.conditions import Reason
from windrow.errors import UserError
from windrow.eventlog import EventLog
from windrow.rundir import RunDir
from windrow_sidecar.finetune.beside.agentlink import AgentLink, worker_hello
from windrow_sidecar.finetune.beside.loading import NOT_BEGUN, Loading, Verdict, ended_unloaded
from windrow_sidecar.finetune.beside.seat import Seat
from windrow_sidecar.finetune.beside.slot import WorkerSlot
from windrow_sidecar.finetune.beside.standby import Order
from windrow_sidecar.finetune.checkpoints.checkpoint import Checkpoint, JobFolder
from windrow_sidecar.finetune.dataset.readers import Readers
from windrow_sidecar.finetune.failures import failure
from windrow_sidecar.finetune.job import read_job
from windrow_sidecar.finetune.ledger import Ledger, Standing
from windrow_sidecar.finetune.report import WorkerEvent
from windrow_sidecar.finetune.runner import Ending, Runner
from windrow_sidecar.finetune.sharing.carrier import Arrival, Carried, Carrier, worst
from windrow_sidecar.finetune.training.health import TAKING_FOLDER
from windrow_sidecar.turn import TurnNote

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Told:
    """What of a job is there before it is loaded, and for as long as it is not over.

    Attributes:
        order: names it.
        standing: what other threads read and set.
        agent: its stream.
        events: its event log.
    """

    order: Order
    standing: Standing
    agent: AgentLink
    events: EventLog


class WorkerJobs:
    """Runs jobs in one slot until none is left.

    Args:
        run_dir: of the decode pod.
        first: the job that the worker was started for.
        open_slot: attaches to decode, under the first job's epoch.
        event_log: makes the event log of a job.
        readers: have the rows of further jobs read; closed at the end.
        turn: says whose turn it is, to whoever finds the process dead.
        standing: makes that of a job.
    """

    def __init__(
        self,
        run_dir: RunDir,
        first: Order,
        open_slot: Callable[[], WorkerSlot],
        event_log: Callable[[Order], EventLog],
        readers: Readers,
        turn: TurnNote,
        standing: Callable[[], Standing] = Standing,
    ) -> None:
        self._readers, self._turn, self._standing = readers, turn, standing
        self._run_dir, self._open_slot, self._event_log = run_dir, open_slot, event_log
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._orders.put(first)
        self._slot: WorkerSlot | None = None
        self._open: list[Told] = []  # jobs that are not over
        self._loading: dict[Told, Loading] = {}  # of these, those that are not ready
        self._endings: list[Ending] = []
        self._stop_asked = ""
        self._until_told = ExitStack()

    def run(self) -> Ending:
        """Run them to their ends; returns the worst of these (see `worst`)."""
        with self._until_told:
            try:
                Carrier(arrivals=self._arrival).run()
            except Exception as error:
                # The edge of the process: whatever went wrong, the agent hears of it.
                log.exception("the worker failed")
                for told in tuple(self._open):
                    self._failed(told, error)
            finally:
                if self._slot is not None:
                    self._slot.close()
                self._readers.close()
        return worst(self._endings)

    def ask_to_stop(self, why: str) -> None:
        """Have every job write a checkpoint and end; no further one is taken. For a signal."""
        self._stop_asked = why
        for told in tuple(self._open):
            told.standing.stop_asked = why

    def _arrival(self) -> Arrival | None:
        """Return what makes a job join now; with nobody to train, waits for one that loads."""
        while not (self._stop_asked and (self._open or self._endings)):
            if (order := self._next_order()) is not None:
                if self._slot is None or not self._slot.has_base:
                    return lambda: self._take_first(order)
                self._begin_loading(order, self._slot)
            if (told := self._one_loaded()) is not None:
                return lambda: self._join(told, self._loading.pop(told))
            if len(self._open) > len(self._loading) or not self._loading:
                return None
            if self._slot is not None and not self._slot.idle():
                gone = WorkerEvent("STOPPED", Reason.SLOT_LOST, "the decode process has ended")
                self._give_up_loading((gone, Ending.DECODE_GONE))
        stopped = WorkerEvent("STOPPED", Reason.STOPPED, f"{self._stop_asked}; {NOT_BEGUN}")
        self._give_up_loading((stopped, Ending.STOPPED))
        return None

    def _next_order(self) -> Order | None:
        try:
            return self._orders.get_nowait()
        except queue.Empty:
            return None

    def _begin_loading(self, order: Order, slot: WorkerSlot) -> None:
        told = self._meet(order)
        self._loading[told] = Loading(
            self._file_of(order),
            order,
            told.standing,
            self._readers,
            slot.rows_for,
            slot.pace(),
        )

    def _one_loaded(self) -> Told | None:
        """Return a job that is ready, or cannot be; tell the ends of those that were given up."""
        for told, loading in tuple(self._loading.items()):
            if told.agent.end_asked is not None:
                loading.give_up(ended_unloaded(told.agent.end_asked))
            if loading.verdict is not None:
                del self._loading[told]
                event, ending = loading.verdict
                told.agent.event(event)
                self._over(told, ending)
            elif loading.is_over:
                return told
        return None

    def _give_up_loading(self, verdict: Verdict) -> None:
        for loading in self._loading.values():
            loading.give_up(verdict)
        while (told := self._one_loaded()) is not None:  # was ready just now: it has learnt nothing
            del self._loading[told]
            told.agent.event(verdict[0])
            self._over(told, verdict[1])

    def _take_first(self, order: Order) -> Carried | None:
        """Load the model and a job; None: that failed, as its stream has told."""
        told = self._meet(order)

        def load() -> Carried:
            job = replace(read_job(self._file_of(order)), epoch=order.epoch)
            folder = JobFolder(job.destination, job.uid, job.epoch)
            with told.standing.stall.during(TAKING_FOLDER):
                folder.claim()
            if self._slot is None:
                self._slot = self._open_slot()
            seat = self._slot.take(job, told.standing)
            return self._carried(told, self._slot, seat, folder)

        return self._try_to(load, told)

    def _join(self, told: Told, loading: Loading) -> Carried | None:
        """Attach a job that was made ready; None: that failed, as its stream has told."""

        def attach() -> Carried:
            assert self._slot is not None
            ready = loading.result()
            seat = self._slot.join(ready.job, ready.rows, told.standing)
            newest = ready.checkpoint
            return self._carried(told, self._slot, seat, ready.folder, lambda: newest)

        return self._try_to(attach, told)

    def _try_to(self, begin: Callable[[], Carried], told: Told) -> Carried | None:
        self._turn_of(told)()
        try:
            return begin()
        except Exception as error:
            # The edge of a job: the others run without it.
            log.exception("job %s cannot begin", told.order.job_uid)
            self._failed(told, crowded(error) if len(self._open) > 1 else error)
            return None

    def _meet(self, order: Order) -> Told:
        """Open the job's stream, before anything that takes time."""
        events, standing = self._event_log(order), self._standing()
        standing.stop_asked = self._stop_asked
        agent = AgentLink(
            self._run_dir.agent_socket,
            worker_hello(order, os.getpid()),
            standing.report,
            events,
            take=self._orders.put,
            orphaned=self.ask_to_stop,
        )
        told = Told(order, standing, self._until_told.enter_context(agent), events)
        standing.stall.watch(lambda found: self._stuck(told, found))
        self._open.append(told)
        return told

    def _file_of(self, order: Order) -> Path:
        return self._run_dir.job_dir(order.job_uid) / "job.json"

    def _carried(
        self,
        told: Told,
        slot: WorkerSlot,
        seat: Seat,
        folder: JobFolder,
        newest: Callable[[], Checkpoint | None] | None = None,
    ) -> Carried:
        stream, standing = seat.session.stream, told.standing
        ledger = Ledger(
            seat.session, folder, told.agent, told.events, standing, newest, forgets=True
        )
        estimates, weights = slot.estimates, stream.weights
        return Carried(
            seat.session.job.name,
            stream,
            seat.memory,
            Runner(
                *(stream, slot.gate, seat.memory, ledger, told.agent, standing),
                expected_s=lambda tasklet: estimates.expected_s(tasklet, weights),
            ),
            failed=lambda error: self._tell_failure(told, error),
            ended=lambda ending: self._left(slot, seat, told, ending),
            acts=self._turn_of(told),
        )

    def _turn_of(self, told: Told) -> Callable[[], None]:
        return self._turn.of(told.order.job_uid, told.order.epoch)

    def _tell_failure(self, told: Told, error: Exception) -> Ending:
        event, ending = failure(error, told.standing.last_checkpoint)
        told.agent.event(event)
        return ending

    def _failed(self, told: Told, error: Exception) -> None:
        self._over(told, self._tell_failure(told, error))

    def _left(self, slot: WorkerSlot, seat: Seat, told: Told, ending: Ending) -> None:
        slot.leave(seat)
        self._over(told, ending)

    def _over(self, told: Told, ending: Ending) -> None:
        """Let go of a job; its stream ends by itself once its last word was taken."""
        self._open.remove(told)
        self._endings.append(ending)
        told.standing.stall.close()
        told.events.flush()
        told.agent.finish()

    def _stuck(self, told: Told, found: Exception) -> None:
        """End a job that does not get ready, else the process, from beside its stuck thread.

        Decode takes the memory of a process that has ended.
        """
        event, ending = failure(found, told.standing.last_checkpoint)
        if (loading := self._loading.get(told)) is not None:
            if not loading.give_up((event, ending)):  # it has got ready just now
                told.standing.stall.watch(lambda found: self._stuck(told, found))
            return
        told.agent.event(event)
        why = "another job of this worker has stopped it for good"
        for other in tuple(self._open):
            if other is not told:
                other.agent.event(WorkerEvent("STOPPED", Reason.SLOT_LOST, why))
            other.agent.finish()
        for other in tuple(self._open):
            other.agent.__exit__()
        os._exit(ending)


def crowded(error: Exception) -> Exception:
    """What a job finds too small beside others may be large enough elsewhere: worth a retry."""
    if isinstance(error, UserError) and error.reason == Reason.OUT_OF_MEMORY:
        return MemoryError(f"beside other jobs of this worker: {error}")
    return error
