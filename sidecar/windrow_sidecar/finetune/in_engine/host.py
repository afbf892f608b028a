"""Run finetune jobs in a thread of an engine's process.

The thread runs what a worker's process runs (`WorkerJobs`): the same tasklets, gate, lent memory,
checkpoints and reports. It differs in where it waits: it returns the turn to decode's thread.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from windrow.crd import slot_name
from windrow.eventlog import EventLog
from windrow.protocol import Ending
from windrow.redaction import RedactingFormatter
from windrow.rundir import ENV_LOG_DIR, ENV_POD_NAME, RunDir
from windrow_sidecar.compute.whole_device import WholeDevice
from windrow_sidecar.engines.opening import RunningHarvest
from windrow_sidecar.engines.turns import Turns
from windrow_sidecar.finetune.colocated.agent_link import JobAgentLink
from windrow_sidecar.finetune.colocated.job_logs import LOG_FORMAT, JobLogs
from windrow_sidecar.finetune.colocated.jobs import InProcess, WorkerJobs
from windrow_sidecar.finetune.colocated.slot import EngineWeights, WorkerSlot, open_slot
from windrow_sidecar.finetune.colocated.standby import NICENESS, JobOrder, warm_up
from windrow_sidecar.finetune.data.readers import Readers
from windrow_sidecar.finetune.engine.orders import layer_major, token_major
from windrow_sidecar.finetune.in_engine.gate import InEngineGate
from windrow_sidecar.finetune.in_engine.joined_products import RiderSeat
from windrow_sidecar.finetune.in_engine.local_link import LocalLink
from windrow_sidecar.finetune.in_engine.orders import OrderSocket
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.qos.terms import HarvestTerms
from windrow_sidecar.turn import TurnNote

log = logging.getLogger(__name__)

# A pod has 30 s for its end. A checkpoint of an adapter takes far less; the next start goes on from
# the one before where a disk is slower.
_ENDS_WITHIN_S = 15.0


class KeptReaders(Readers):
    """Readers that outlive the jobs of one order: they cannot be forked a second time.

    They are not paced by grants, so they have the priority that a worker's process has.
    """

    def __init__(self) -> None:
        super().__init__()
        os.setpriority(os.PRIO_PROCESS, self.pid, NICENESS)

    def close(self) -> None:
        """Do nothing; `end` ends them."""

    def end(self) -> None:
        """End the process that makes them."""
        super().close()


def prepare_for_agent(run_dir: RunDir, model: str) -> EngineHost:
    """Load libraries for an agent's jobs; to be called before the process has a second thread.

    Args:
        run_dir: of the pod.
        model: the served checkpoint, whose family's code is imported.

    Raises:
        RuntimeError: the process has a second thread.
        ImportError: a library that jobs need is not installed.
    """
    warm_up(model)
    return EngineHost(run_dir, KeptReaders())


class EngineHost:
    """Finetuning in an engine's process; the engine's thread starts and ends it.

    An engine calls `claimed`, `shares` where it has any, `start`, and `close` at its end.

    Args:
        run_dir: of the slot.
        readers: have rows read.
        terms: the policy; None: the agent sends one.
        orders: jobs of the command line by name, run one after the other; None: the agent sends
            jobs.
        own_folder: is removed at the end; None: the run directory is the pod's.
    """

    def __init__(
        self,
        run_dir: RunDir,
        readers: KeptReaders,
        terms: HarvestTerms | None = None,
        orders: Mapping[str, JobOrder] | None = None,
        own_folder: Path | None = None,
    ) -> None:
        self.turns, self.run_dir = Turns(), run_dir
        self._readers = readers
        self._local, self._own_folder = orders, own_folder
        self._joins: Callable[[DecoderStack, RiderSeat], str] | None = None
        self._weights: EngineWeights | None = None
        self._terms = terms
        self._logs = _ThreadLogs(run_dir)
        self._jobs: WorkerJobs | None = None
        self._socket: OrderSocket | None = None
        self._closing = ""
        self._thread = threading.Thread(target=self._run, name="finetune", daemon=True)
        self._hook: RunningHarvest | None = None

    def shares(
        self, own: EngineWeights | None, joins: Callable[[DecoderStack, RiderSeat], str] | None
    ) -> None:
        """Note what jobs have in common with decode beside the device, before `start`.

        Args:
            own: weights that they compute with; None: those that decode exports.
            joins: see `InEngineGate`.
        """
        self._weights, self._joins = own, joins

    def claimed(self, run_dir: RunDir) -> None:
        """Note which slot the engine is; from here on the agent finds where to send jobs."""
        self.run_dir, self._logs = run_dir, _ThreadLogs(run_dir)
        if self._local is None:
            self._socket = OrderSocket(run_dir.in_engine_socket())

    def start(self, harvest: RunningHarvest) -> None:
        """Begin to run jobs; the arena is served, and steps ask the hook."""
        self._hook = harvest
        self.turns.policy = lambda: harvest.inner.policy
        if self._terms is not None:
            harvest.inner.set_terms(self._terms)
        _separate_logs(self._logs)
        self._thread.start()

    def close(self) -> None:
        """Have jobs write a checkpoint and end; returns within some seconds."""
        self._closing = "the engine ends"
        if self._socket is not None:
            self._socket.close()
        if (jobs := self._jobs) is not None:
            jobs.ask_to_stop(self._closing)
        if self._thread.is_alive():
            self._thread.join(_ENDS_WITHIN_S)
        self.turns.end()
        log.info(
            "%d turns before a step, %d with the step's products shared, %d not back in time",
            *(self.turns.lent, self.turns.rode, self.turns.overdue),
        )
        if self._thread.is_alive():
            log.error("the job has not ended in time; it goes on from its checkpoint before")
            return
        self._readers.end()

    def remove_own_files(self) -> None:
        """Remove the run directory, where it is this process's own; nothing may use it any more."""
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)

    def _run(self) -> None:
        """Run what is ordered, one worker's life after the other. Nothing here ends decode."""
        torch.set_flush_denormal(True)  # of this thread, as decode's has it
        try:
            if self._local is not None:
                for name, order in self._local.items():
                    link = partial(LocalLink, name=name)
                    within = InProcess(link, os.getpid(), give_up=self._abandon)
                    self._run_jobs(order, within)
                return
            assert self._socket is not None
            while (placed := self._socket.accept()) is not None:
                within = InProcess(JobAgentLink, placed.pid, give_up=self._abandon)
                ending = Ending.FAILED
                try:
                    ending = self._run_jobs(placed.job, within, placed.await_stop)
                finally:
                    placed.ended(ending)
        except Exception:
            # The edge of a thread: decode goes on, and harvests nothing any more.
            log.exception("finetuning in the engine has ended")
        finally:
            self.turns.give_back()
            self.turns.end()

    def _run_jobs(
        self, order: JobOrder, within: InProcess, stop: Callable[[], str] | None = None
    ) -> Ending:
        if self._closing:
            return Ending.STOPPED
        self._logs.about(order.job_uid)
        self._jobs = jobs = WorkerJobs(
            self.run_dir,
            order,
            lambda: self._open_slot(order.epoch),
            lambda of: _event_log(self.run_dir, of),
            self._readers,
            TurnNote(self.run_dir.turn_note()),
            logs=self._logs,
            within=within,
        )
        if stop is not None:

            def await_stop() -> None:
                if why := stop():
                    jobs.ask_to_stop(why)

            threading.Thread(target=await_stop, name="finetune-stop", daemon=True).start()
        elif self._hook is not None:
            self._hook.inner.worker_lives(order.epoch)
        try:
            return jobs.run()
        finally:
            self._jobs = None
            self.turns.give_back()
            if stop is None and self._hook is not None:
                self._hook.inner.worker_lives(0)
            self._logs.about("")

    def _open_slot(self, epoch: int) -> WorkerSlot:
        cores = WholeDevice.cores("finetune", set_threads=torch.set_num_threads)
        own = self._weights
        gate = partial(InEngineGate, self.turns, RiderSeat(), self._joins, streamed=own is not None)
        # Streamed layers are visited once by all micro-batches of a pass.
        order = token_major if own is None else layer_major
        return open_slot(epoch, self.run_dir, cores, gate=gate, order=order, own=own)

    def _abandon(self, ending: int) -> None:
        """A tasklet never ends, and nobody can end a thread: decode goes on beside it."""
        log.error("a tasklet does not end: nothing is harvested until the engine starts again")
        del ending
        self.turns.end()


def _event_log(run_dir: RunDir, order: JobOrder) -> EventLog:
    folder = Path(os.environ.get(ENV_LOG_DIR) or run_dir.job_dir(order.job_uid))
    pod = os.environ.get(ENV_POD_NAME)
    source = slot_name(pod, run_dir.slot) if pod else "worker"
    return EventLog(
        folder / f"worker-{order.job_uid}-{order.epoch}-{os.getpid()}.events.jsonl", source=source
    )


class _ThreadLogs(JobLogs):
    """Writes what threads say of a job into its log; standard output stays the engine's."""

    def separate(self) -> None:
        """Do nothing: they always are."""

    def speaks_of_a_job(self) -> bool:
        return bool(getattr(self._thread, "job_uid", ""))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, if it is of a job."""
        job_uid = getattr(self._thread, "job_uid", "")
        if not job_uid:
            return
        try:
            with self.path_of(job_uid).open("a", encoding="utf-8") as out:
                out.write(self.format(record) + "\n")
        except Exception:  # noqa: BLE001 - as every handler does: a log ends no job
            self.handleError(record)


def _separate_logs(logs: _ThreadLogs) -> None:
    """Keep a job's words out of the engine's log, but for what this package says to it.

    They may hold what only the job's owner may read.
    """
    root = logging.getLogger()
    logs.setFormatter(RedactingFormatter(LOG_FORMAT))
    of_host = (__name__, LocalLink.__module__, InEngineGate.__module__)
    for handler in root.handlers:
        handler.addFilter(lambda record: not logs.speaks_of_a_job() or record.name in of_host)
    root.addHandler(logs)
