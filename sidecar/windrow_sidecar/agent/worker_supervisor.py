"""Supervise one worker process and the jobs that share it.

Each job ends with its own message and leaves the others running. The process should end on its own
after the last one. A job that has to be killed, or that kills the worker, ends the others too: they
lose their slot and resume elsewhere from their checkpoints.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from windrow.proto import agent_pb2, attach_pb2
from windrow_sidecar.agent.job_run import JobRun
from windrow_sidecar.agent.orphans import forget_worker, note_worker
from windrow_sidecar.agent.settings import AgentSettings
from windrow_sidecar.agent.worker_process import (
    EndGpuWork,
    Standby,
    WorkerProcess,
    write_job,
)
from windrow_sidecar.engine_facts import EngineFacts
from windrow_sidecar.turn import forget_turn, read_turn

_log = logging.getLogger(__name__)


class WorkerSupervisor:
    """One worker process and its job runs. Used from the agent's event loop only.

    Args:
        settings: of the agent.
        slot: its index.
        on_exit: called once the process has been reaped, with how its last run ended.
        end_gpu_work: of the process, before it is killed.
        engine: says what is known of decode's engine.
    """

    def __init__(
        self,
        settings: AgentSettings,
        slot: int,
        *,
        on_exit: Callable[[str], None],
        end_gpu_work: EndGpuWork | None = None,
        engine: Callable[[], EngineFacts] = EngineFacts,
    ) -> None:
        self._settings, self._slot, self._on_exit = settings, slot, on_exit
        self._end_gpu_work, self._engine = end_gpu_work, engine
        self._killing: asyncio.Task[None] | None = None
        self._turn_note = settings.run_dir.of_slot(slot).turn_note()
        self.runs: list[JobRun] = []
        self._process: WorkerProcess | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._killer: asyncio.Task[None] | None = None
        self._killed_for: JobRun | None = None
        self._last_end = ""

    @property
    def pid(self) -> int:
        """Process id of the worker; 0 before it has started and after it has been reaped."""
        return self._process.pid if self._process and not self.is_over else 0

    @property
    def has_worker(self) -> bool:
        """True where a worker runs, or is about to."""
        return self._process is not None and not self.is_over

    @property
    def epoch(self) -> int:
        """Epoch by which decode knows the worker: that of the job that it was started for."""
        return self.runs[0].assign.epoch

    @property
    def is_over(self) -> bool:
        """The worker has ended and has been reaped."""
        return self._supervisor is not None and self._supervisor.done()

    @property
    def takes_more(self) -> bool:
        """True while a run goes on that can hand the worker another job."""
        return self._killed_for is None and self._control_stream() is not None

    async def start(self, run: JobRun, standby: Standby) -> None:
        """Start the worker for a run; a start that fails is reported as the run's end."""
        self.runs.append(run)
        assign = run.assign
        forget_turn(self._turn_note)
        try:
            self._process = await WorkerProcess.start(
                self._settings, assign, standby, self._engine()
            )
        except (OSError, ValueError) as error:
            await run.cannot_start(error)
            self._supervisor = asyncio.create_task(asyncio.sleep(0))
            return
        self._supervisor = asyncio.create_task(self._supervise(self._process))

    async def take(self, run: JobRun) -> None:
        """Have the worker run this one too, in turns; see `takes_more`."""
        control = self._control_stream()
        assert control is not None
        self.runs.append(run)
        assign = run.assign
        try:
            write_job(self._settings, assign, self._engine())
        except (OSError, ValueError) as error:
            await run.cannot_start(error)
            return
        _log.info("job %s epoch %d: joins worker %d", assign.job_uid, assign.epoch, self.pid)
        if self._process:
            self._process.joined(assign)
        control.send(
            agent_pb2.WorkerCommand(action="ADD_JOB", job_uid=assign.job_uid, epoch=assign.epoch)
        )

    async def wait(self) -> None:
        """Wait until the worker has been reaped and the ends of its runs have been reported."""
        if self._supervisor:
            await asyncio.shield(self._supervisor)

    # What its runs ask for (see `jobrun.RunningWorker`)

    def is_shared_by(self, run: JobRun) -> bool:
        """Return whether another run goes on."""
        return any(other.ended is None for other in self.runs if other is not run)

    def kill_for(self, run: JobRun) -> None:
        """End the worker at once."""
        self._killed_for = self._killed_for or run
        self._kill()

    def ended(self, run: JobRun) -> None:
        """Note a run's end; after the last one the worker should end on its own, or is killed."""
        self._last_end = attach_pb2.JobEvent.Kind.Name(run.ended or 0).lower()
        if self._process and self.is_shared_by(run):
            self._process.left(run.assign)
        elif self._process:
            self._killer = self._killer or asyncio.create_task(self._kill_after_grace())

    def _control_stream(self) -> JobRun | None:
        """A run over whose stream the worker hears of others."""
        going = (run for run in self.runs if run.ended is None and not run.asked_to_end)
        return next(going, None)

    def _whose_turn(self) -> JobRun | None:
        """The run that the worker was at when it ended; None: it has not said."""
        turn = read_turn(self._turn_note)
        return next((run for run in self.runs if turn and run.is_of(*turn)), None)

    def _kill(self) -> None:
        if self._process and self._end_gpu_work is None:
            self._process.kill()
        elif self._process and self._end_gpu_work and self._killing is None:
            self._killing = asyncio.create_task(
                self._kill_on_gpu(self._process, self._end_gpu_work)
            )

    @staticmethod
    async def _kill_on_gpu(process: WorkerProcess, end_gpu_work: EndGpuWork) -> None:
        """Kill it with nothing left running on the GPU (see `compute.mps`)."""
        try:
            if process.pid:
                await end_gpu_work(process.pid)
        finally:
            process.kill()

    async def _kill_after_grace(self) -> None:
        await asyncio.sleep(self._settings.grace_s)
        _log.warning("worker %d has not ended within %.0f s", self.pid, self._settings.grace_s)
        self._kill()

    async def _supervise(self, process: WorkerProcess) -> None:
        waiting = asyncio.create_task(process.wait())  # its log is followed from its first line on
        await process.started()
        if process.pid:
            assign = self.runs[0].assign
            _log.info("job %s epoch %d: worker %d", assign.job_uid, assign.epoch, process.pid)
            note_worker(self._settings.run_dir.root, self._slot, process.pid)
        end = await waiting
        forget_worker(self._settings.run_dir.root, self._slot)
        if self._killer:
            self._killer.cancel()
        costs = self._killed_for or self._whose_turn()
        forget_turn(self._turn_note)
        await asyncio.gather(
            *(
                run.worker_ended(process.exit_of(run.assign, end.code), through=costs)
                for run in self.runs
            )
        )
        if self._killer:
            self._killer.cancel()
        _log.info("worker %d: %s, %s", process.pid, self._last_end, end.describe())
        self._on_exit(self._last_end)
