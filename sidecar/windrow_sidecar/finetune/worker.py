"""The process that finetunes beside decode, or on a device of its own with --standalone."""

from __future__ import annotations

import os

# Before torch starts its threads: two teams that spin against each other ruin both (an idle thread
# has to leave the core to decode).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import ctypes
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from windrow.errors import UserError
from windrow.eventlog import EventLog
from windrow.rundir import ENV_LOG_DIR, ENV_POD_NAME, WORKER_LOG, RunDir

log = logging.getLogger(__name__)

NICENESS = 19
_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker; the exit status is a `runner.Ending`."""
    options = _options(argv)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(message)s"
    )
    if options.standalone:
        from windrow_sidecar.finetune.alone.dedicated import measure_alone
        from windrow_sidecar.finetune.alone.together import run_together

        measured = options.seconds is not None or options.steps is not None
        try:
            return (measure_alone if measured else run_together)(options)
        except UserError as error:
            print(error, file=sys.stderr)
            return 2
    return _run_beside_decode(options)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m windrow_sidecar.finetune.worker", description=__doc__
    )
    beside = parser.add_argument_group("beside decode")
    beside.add_argument("--run-dir", type=Path, help="run directory of the decode pod")
    beside.add_argument("--slot", type=int, default=0, help="which GPU of the pod (default 0)")
    beside.add_argument("--job-uid", help="UID of the FinetuneJob")
    beside.add_argument("--epoch", type=int, help="fencing token of the assignment")
    beside.add_argument(
        "--standby",
        action="store_true",
        help="load the libraries, then wait for a line on stdin that names the job",
    )
    beside.add_argument("--served-model", default="", help="standby: load its code ahead as well")
    own = parser.add_argument_group("on a device of its own")
    own.add_argument(
        "--standalone", action="store_true", help="no decode, no grants, a whole device"
    )
    own.add_argument(
        "--job",
        type=Path,
        action="append",
        help="FinetuneJob manifest, or a job.json; several share a base model and take turns",
    )
    own.add_argument(
        "--random-weights",
        type=int,
        metavar="SEED",
        help="with --seconds or --steps: make weights up on the device; the model needs no files",
    )
    own.add_argument("--seconds", type=float, help="measure for so long, then stop; no adapter")
    own.add_argument("--steps", type=int, help="measure so many steps, then stop; no adapter")
    own.add_argument("--device", default="cpu", help="cpu (default), cuda, or cuda:N")
    own.add_argument("--units", type=int, help="cores or SMs to use, the last ones (default: all)")
    own.add_argument("--json", type=Path, help="write what was measured there")
    own.add_argument("--log-dir", type=Path, help="event log goes there")
    options = parser.parse_args(argv)
    if options.standalone:
        needed = ["job"]
    else:
        needed = ["run_dir"] if options.standby else ["run_dir", "job_uid", "epoch"]
    if options.random_weights is not None and options.seconds is None and options.steps is None:
        parser.error("--random-weights is for measuring: --seconds or --steps with it")
    missing = [f"--{name.replace('_', '-')}" for name in needed if getattr(options, name) is None]
    if missing:
        parser.error(f"wanted: {', '.join(missing)}")
    return options


def _run_beside_decode(options: argparse.Namespace) -> int:
    _die_with_parent()
    os.nice(max(0, NICENESS - os.nice(0)))
    from windrow_sidecar.compute.host import HostPartition

    partition = HostPartition.from_affinity("finetune")
    # Loading is not granted by anyone: it takes the one core that decode needs least.
    os.sched_setaffinity(0, partition.cpus[-1:])
    partition.activate(1)
    if options.standby and not _take_order(options):
        return 0

    from windrow_sidecar.finetune.beside.report import AgentLink, worker_hello
    from windrow_sidecar.finetune.failures import failure
    from windrow_sidecar.finetune.ledger import Standing
    from windrow_sidecar.finetune.runner import Ending

    run_dir, standing = RunDir(options.run_dir), Standing()
    signal.signal(signal.SIGTERM, lambda *_: setattr(standing, "stop_asked", "SIGTERM"))
    events = _event_log(run_dir.job_dir(options.job_uid), options)
    hello = worker_hello(options.job_uid, options.epoch, os.getpid())
    with AgentLink(run_dir.agent_socket, hello, standing.report, events) as agent:
        standing.stall.watch(lambda found: _give_up(found, standing, agent))
        try:
            ending = _finetune(options, run_dir, partition, standing, agent, events)
        except Exception as error:
            # The edge of the process: whatever went wrong, the agent hears of it.
            event, ending = failure(error, standing.progress.checkpoint_path)
            log.exception("the job failed")
            agent.event(event)
        finally:
            standing.stall.close()
            events.flush()
    return int(Ending(ending))


def _give_up(found: Exception, standing: Any, agent: Any) -> None:  # noqa: ANN401
    """End the process from beside its stuck thread; decode takes its memory back."""
    from windrow_sidecar.finetune.failures import failure

    event, ending = failure(found, standing.progress.checkpoint_path)
    agent.event(event)
    agent.__exit__()
    os._exit(ending)


def _take_order(options: argparse.Namespace) -> bool:
    """Warm up, then become the worker of the job that stdin names; False: there will be none."""
    from windrow_sidecar.finetune.beside.standby import await_order, warm_up

    warm_up(options.served_model)
    order = await_order(sys.stdin)
    if order is None:
        return False
    options.job_uid, options.epoch = order.job_uid, order.epoch
    # From here on its words belong to the job, as if it had been started for it.
    job_log = RunDir(options.run_dir).job_dir(order.job_uid) / WORKER_LOG
    with job_log.open("ab") as out:
        os.dup2(out.fileno(), sys.stdout.fileno())
        os.dup2(out.fileno(), sys.stderr.fileno())
    return True


def _finetune(
    options: argparse.Namespace,
    run_dir: RunDir,
    partition: Any,  # noqa: ANN401
    standing: Any,  # noqa: ANN401
    agent: Any,  # noqa: ANN401
    events: EventLog,
) -> int:
    """Load the job into the slot and run it; decode gets everything back however it ends."""
    from windrow_sidecar.finetune.beside.harvested import open_slot
    from windrow_sidecar.finetune.checkpoints.checkpoint import JobFolder
    from windrow_sidecar.finetune.job import read_job
    from windrow_sidecar.finetune.ledger import Ledger
    from windrow_sidecar.finetune.runner import Runner

    job = replace(read_job(run_dir.job_dir(options.job_uid) / "job.json"), epoch=options.epoch)
    folder = JobFolder(job.destination, job.uid, job.epoch)
    folder.claim()
    slot = open_slot(job, run_dir, options.slot, partition, standing)
    try:
        ledger = Ledger(slot.session, folder, agent, events, standing)
        runner = Runner(slot.session.stream, slot.gate, slot.memory, ledger, agent, standing)
        return runner.run()
    finally:
        slot.close()


def _event_log(fallback: Path, options: argparse.Namespace) -> EventLog:
    folder = Path(os.environ.get(ENV_LOG_DIR) or fallback)
    source = os.environ.get(ENV_POD_NAME) or "worker"
    name = f"worker-{options.job_uid}-{options.epoch}-{os.getpid()}.events.jsonl"
    return EventLog(folder / name, source=source)


def _die_with_parent() -> None:
    """SIGTERM when the agent dies: a worker that nobody controls writes a checkpoint and ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
