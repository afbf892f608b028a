"""The process that finetunes beside decode, or on a device of its own with --standalone."""

from __future__ import annotations

import os

from windrow import openmp

# Before torch is loaded.
os.environ.update({**openmp.WORKER, **os.environ})

import argparse
import ctypes
import importlib.util
import json
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from windrow.crd import slot_name
from windrow.errors import Transient, UserError
from windrow.eventlog import EventLog
from windrow.protocol import Ending, error_line
from windrow.redaction import RedactingFormatter
from windrow.rundir import ENV_COPY_RATE, ENV_LOG_DIR, ENV_POD_NAME, WORKER_LOG, RunDir
from windrow_sidecar.finetune.colocated.job_logs import LOG_FORMAT
from windrow_sidecar.finetune.colocated.standby import NICENESS, JobOrder
from windrow_sidecar.finetune.data.outside import agree_on_authorities
from windrow_sidecar.heap import uncollected
from windrow_sidecar.process_exit import run_to_exit

_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker; the exit status is a `protocol.Ending`, of several jobs the worst."""
    options = _options(argv)
    to_log = logging.StreamHandler(sys.stderr)
    to_log.setFormatter(RedactingFormatter(LOG_FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=[to_log])
    agree_on_authorities()
    if options.standalone:
        _flush_denormals()
        from windrow_sidecar.finetune.standalone.dedicated import measure_alone
        from windrow_sidecar.finetune.standalone.run import run_together

        if options.parent:
            _die_with_parent()
            if os.getppid() != options.parent:  # it has ended before the line above
                return 1
        measured = options.seconds is not None or options.steps is not None
        try:
            if options.tp > 1:
                from windrow_sidecar.finetune.standalone.ranks import run_over_ranks

                return run_over_ranks(options)
            return (measure_alone if measured else run_together)(options)
        except (UserError, Transient) as error:
            # The parent reads one stream; the other is also where libraries say things
            # as they end.
            print(json.dumps(error_line(error)))
            print(error, file=sys.stderr)
            return Ending.USER_ERROR if isinstance(error, UserError) else Ending.FAILED
    return _run_beside_decode(options)


def load_ahead() -> None:
    """Import what any worker beside decode needs, in a process that is forked for each (see agent).

    bitsandbytes asks CUDA for its devices as it is imported, and a process that has done so cannot
    be forked; peft imports it where it is installed.
    """
    from windrow_sidecar.finetune.colocated.standby import warm_up

    without = ("peft",) if importlib.util.find_spec("bitsandbytes") else ()
    warm_up("", without=without)


def _flush_denormals() -> None:
    """Take numbers below 1e-38 for zero, as decode's engine does; threads to come do so as well.

    Attention that has made up its mind has such gradients. An Intel core takes a hundred times as
    long for one: on a Xeon the backward of a layer took 28 ms instead of 12, most of it in one
    product in which it cannot be held up.
    """
    import torch

    torch.set_flush_denormal(True)


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
    own.add_argument(
        "--tp",
        type=int,
        default=1,
        metavar="RANKS",
        help="cut the model over so many ranks: processes that share the cores, or a GPU each",
    )
    own.add_argument("--json", type=Path, help="write what was measured there")
    own.add_argument(
        "--parent",
        type=int,
        default=0,
        metavar="PID",
        help="who starts it: when that process ends, it writes a checkpoint and ends as well",
    )
    own.add_argument("--output", metavar="PLACE", help="instead of the job's output.destination")
    own.add_argument(
        "--fresh", action="store_true", help="forget what earlier runs left in a bucket"
    )
    own.add_argument("--log-dir", type=Path, help="event log goes there")
    options = parser.parse_args(argv)
    if options.standalone:
        needed = ["job"]
    else:
        needed = ["run_dir"] if options.standby else ["run_dir", "job_uid", "epoch"]
    if options.random_weights is not None and options.seconds is None and options.steps is None:
        parser.error("--random-weights is for measuring: --seconds or --steps with it")
    if any(n is not None and not n > 0 for n in (options.seconds, options.steps)):
        parser.error("--seconds and --steps are above zero")
    if options.tp < 1 or (
        options.tp > 1 and any(n is not None for n in (options.seconds, options.steps))
    ):
        parser.error("--tp is 1 or more, and --seconds and --steps measure one rank")
    missing = [f"--{name.replace('_', '-')}" for name in needed if getattr(options, name) is None]
    if missing:
        parser.error(f"wanted: {', '.join(missing)}")
    return options


def _run_beside_decode(options: argparse.Namespace) -> int:
    _die_with_parent()
    in_engine = RunDir(options.run_dir, options.slot).in_engine_socket()
    if in_engine.exists():  # one that waits needs no libraries either
        if options.standby and not _take_order(options, loads=False):
            return 0
        return _relay(in_engine, options)
    os.nice(max(0, NICENESS - os.nice(0)))
    from windrow_sidecar.compute.host import HostPartition, load_openmp

    partition = HostPartition.from_affinity("finetune")
    if options.tp > 1:
        from windrow_sidecar.finetune.colocated.ranks import threads_of_rank

        share = threads_of_rank(options.tp)
        partition = HostPartition.from_affinity("finetune", set_threads=share)
    load_openmp()
    # Loading is not granted by anyone: it takes the one core that decode needs least.
    os.sched_setaffinity(0, partition.cpus[-1:])
    partition.activate(1)
    _flush_denormals()
    if options.standby and not _take_order(options):
        return 0
    if in_engine.exists():
        return _relay(in_engine, options)

    with uncollected():
        from windrow_sidecar.finetune.colocated.job_logs import JobLogs
        from windrow_sidecar.finetune.colocated.jobs import WorkerJobs
        from windrow_sidecar.finetune.data.readers import Readers
        from windrow_sidecar.turn import TurnNote

        run_dir = RunDir(options.run_dir, options.slot)
        from windrow_sidecar.finetune.colocated.ranks import RankGroup

        group: RankGroup | None = None
        if options.tp > 1:  # forked: before anything starts a thread, as the readers are
            group = RankGroup(run_dir, options.tp, partition.cpus, options.epoch)
        readers = Readers()
        from windrow_sidecar.finetune.colocated.slot import open_slot

    if group is not None:
        group.join()
    logs = JobLogs(run_dir)
    logs.setFormatter(RedactingFormatter(LOG_FORMAT))
    logging.getLogger().handlers[:] = [logs]
    jobs = WorkerJobs(
        run_dir,
        JobOrder(options.job_uid, options.epoch),
        lambda: open_slot(options.epoch, run_dir, partition, _copy_rate(), group=group),
        lambda order: _event_log(run_dir, order),
        readers,
        TurnNote(run_dir.turn_note()),
        logs=logs,
    )
    signal.signal(signal.SIGTERM, lambda *_: jobs.ask_to_stop("SIGTERM"))
    try:
        return int(jobs.run())
    finally:
        if group is not None:
            group.end()


def _relay(socket: Path, options: argparse.Namespace) -> int:
    """Relay the job to the engine, which runs it in its own process."""
    from windrow_sidecar.finetune.colocated.standby import JobOrder
    from windrow_sidecar.finetune.in_engine.orders import relay_job

    def on_stop(stop: Callable[[], None]) -> None:
        signal.signal(signal.SIGTERM, lambda *_: stop())

    return relay_job(socket, JobOrder(options.job_uid, options.epoch), on_stop)


def _take_order(options: argparse.Namespace, *, loads: bool = True) -> bool:
    """Warm up, then become the worker of the job that stdin names; False: there will be none."""
    from windrow_sidecar.finetune.colocated.standby import await_order, warm_up

    if loads:
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


def _copy_rate() -> float | None:
    """Return what the agent lets frozen layers move a second; None: as much as they can."""
    rate = os.environ.get(ENV_COPY_RATE)
    return float(rate) if rate else None


def _event_log(run_dir: RunDir, order: JobOrder) -> EventLog:
    folder = Path(os.environ.get(ENV_LOG_DIR) or run_dir.job_dir(order.job_uid))
    pod = os.environ.get(ENV_POD_NAME)
    source = slot_name(pod, run_dir.slot) if pod else "worker"
    name = f"worker-{order.job_uid}-{order.epoch}-{os.getpid()}.events.jsonl"
    return EventLog(folder / name, source=source)


def _die_with_parent() -> None:
    """SIGTERM when the parent dies: a worker that nobody controls writes a checkpoint and ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    run_to_exit(main)
