"""Run one job over several ranks of this machine: processes that are forked and end together.

The first rank is the worker itself: it reads, reports and writes as a job of one rank does. It
tells the others what to do through pipes; tensors go by torch.distributed. A rank that ends before
the job does ends it, and the job goes on from its checkpoint with the next run.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, NoReturn

import torch

from windrow.errors import UserError, WindrowError
from windrow.protocol import Ending
from windrow_sidecar.compute.communicator import Communicator
from windrow_sidecar.compute.device import ComputeDevice
from windrow_sidecar.compute.finding import find_device
from windrow_sidecar.compute.host_device import out_of_memory
from windrow_sidecar.finetune.data.split import DataSplit
from windrow_sidecar.finetune.data.store import TokenFile
from windrow_sidecar.finetune.engine.sharded_stream import Act, ShardedStream
from windrow_sidecar.finetune.job.assembly import (
    JobSpec,
    TrainingSession,
    read_examples,
    read_job,
)
from windrow_sidecar.finetune.model.loading import BaseModel, find_model, load_base
from windrow_sidecar.finetune.model.precision import WeightForm
from windrow_sidecar.finetune.standalone.dedicated import open_alone
from windrow_sidecar.finetune.standalone.run import JobGroup
from windrow_sidecar.finetune.tensor_parallel.adapter import check_adapter
from windrow_sidecar.finetune.tensor_parallel.shard import read_shard
from windrow_sidecar.finetune.tensor_parallel.sharding import Sharding
from windrow_sidecar.finetune.training.health import Unhealthy

log = logging.getLogger(__name__)

# A collective that waits longer fails. A rank may read its shard that long.
LATE_AFTER_S = 3600.0
# A rank that has lost its neighbour says so, or is gone, within this.
_LAST_WORDS_S = 10.0
_PR_SET_PDEATHSIG = 1


class RankLost(WindrowError):
    """Error of a job of which a rank has ended or hangs."""


@dataclass(frozen=True, slots=True)
class LoadBase:
    """Tells the ranks to load their shards of a job's base model."""

    job: JobSpec


@dataclass(frozen=True, slots=True)
class OpenJob:
    """Tells the ranks to put the job together, over rows that the first one has read.

    Attributes:
        job: the job.
        rows: of it.
        tokens: what the rows are in, without its file, which every rank has open.
    """

    job: JobSpec
    rows: DataSplit
    tokens: TokenFile


@dataclass(frozen=True, slots=True)
class EndRank:
    """Tells the ranks to end."""


def run_over_ranks(options: argparse.Namespace) -> int:
    """Run the job that `--job` names over `--tp` ranks to its end; returns an `Ending`.

    Raises:
        UserError: the manifest cannot be read, or asks for what several ranks cannot do.
    """
    if len(options.job) > 1:
        raise UserError(
            f"{len(options.job)} jobs cannot share a model that is cut over ranks yet",
            field="--tp",
            remedy="Run them one by one, or on one rank.",
        )
    job = read_job(options.job[0], options.output)
    check_adapter(job.spec)
    if not options.device.startswith("cuda"):  # a process that has asked CUDA cannot be forked
        _import_ahead()
    meet = Path(tempfile.mkdtemp(prefix="windrow-ranks-"))
    # Every rank has it open by the same number; it has no name, so nothing of the rows stays.
    tokens = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the rows
    leader = Leader(
        [_fork(rank, options, meet / "meet", tokens) for rank in range(1, options.tp)], tokens
    )
    try:
        try:
            device, units = _place(options, 0)
            leader.communicator = _join(options, meet / "meet", 0, device)
        finally:
            shutil.rmtree(meet, ignore_errors=True)
        ranked = RankedJob(
            [job], units, options.log_dir, device, options.parent, fresh=options.fresh
        )
        return int(ranked.over(leader))
    finally:
        leader.end()


class Leader:
    """The first rank's hold on the others.

    Args:
        others: process and pipe of each, from rank 1 on.
        tokens: the file of the job's rows, which all ranks have open.

    Attributes:
        communicator: of all ranks.
        tokens: see there.
    """

    def __init__(self, others: list[tuple[int, Connection]], tokens: IO[bytes]) -> None:
        self._others, self.tokens = others, tokens
        self.communicator: Communicator | None = None
        self._status: dict[int, int] = {}

    def tell(self, act: Act | LoadBase | OpenJob | EndRank) -> None:
        """Tell all other ranks what to do next.

        Raises:
            RankLost: one has ended.
        """
        for rank, (_, pipe) in enumerate(self._others, 1):
            try:
                pipe.send(act)
            except OSError as error:
                raise RankLost(f"rank {rank} has ended") from error

    def explain(self, error: Exception) -> Exception:
        """Return what a rank says of its end, where that is why `error` came; else `error`."""
        if isinstance(error, Unhealthy):  # of work that does not end: a rank may hold it up
            stopped = self._stopped()
            detail = f"{error}: rank {stopped[0]} is stopped" if stopped else str(error)
            return Unhealthy(error.reason, detail)
        known = isinstance(error, WindrowError) and not isinstance(error, RankLost)
        if known or out_of_memory(error):
            return error
        deadline = time.monotonic() + _LAST_WORDS_S
        while True:
            if (found := self._first_cause()) is not None:
                return found
            if not _is_of_ranks(error) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        stopped = self._stopped()
        return RankLost(f"rank {stopped[0]} is stopped") if stopped else error

    def _first_cause(self) -> Exception | None:
        """Return what has ended a rank; None: all live.

        One that was killed makes the others fail, so it comes before what they say; a mistake in
        the job comes before all.
        """
        said, ended = [], []
        for rank, (process, pipe) in enumerate(self._others, 1):
            with contextlib.suppress(EOFError, OSError):
                while pipe.poll():
                    said.append(pipe.recv())
            if (why := self._ended(process)) is not None:
                ended.append((self._status[process] >= 0, RankLost(f"rank {rank} {why}")))
        mistakes = [error for error in said if isinstance(error, UserError)]
        killed = [error for exited, error in ended if not exited]
        exited = [error for exited, error in ended if exited]
        return next(iter([*mistakes, *killed, *said, *exited]), None)

    def _stopped(self) -> list[int]:
        """Return the ranks that a signal has stopped."""
        return [n for n, (process, _) in enumerate(self._others, 1) if _is_stopped(process)]

    def end(self) -> None:
        """End the other ranks, and wait for them."""
        with contextlib.suppress(RankLost):
            self.tell(EndRank())
        if self.communicator is not None and self.communicator.device.type == "cpu":
            # One that waits for this rank in a collective sees that it has gone.
            self.communicator.close()
        for process, pipe in self._others:
            pipe.close()
            if process not in self._status:
                deadline = time.monotonic() + _LAST_WORDS_S
                while self._ended(process) is None:
                    if time.monotonic() > deadline:
                        os.kill(process, signal.SIGKILL)
                    time.sleep(0.01)

    def _ended(self, process: int) -> str | None:
        """Say how a rank's process has ended; None: it has not."""
        if process not in self._status:
            found, status = os.waitpid(process, os.WNOHANG)
            if not found:
                return None
            self._status[process] = os.waitstatus_to_exitcode(status)
        code = self._status[process]
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


class RankedJob(JobGroup):
    """One job, reported as any other (see `JobGroup`), whose model is cut over ranks."""

    _leader: Leader
    _sharding: Sharding

    def over(self, leader: Leader) -> Ending:
        """Run it to its end with the ranks of `leader`."""
        self._leader = leader
        return self.run()

    def _base(self) -> BaseModel:
        job = self._jobs[0]
        self._leader.tell(LoadBase(job))
        assert self._leader.communicator is not None
        base, self._sharding = load_sharded(job, self._device, self._leader.communicator)
        return base

    def _open(self, job: JobSpec, base: BaseModel, alive: Callable[[], None]) -> TrainingSession:
        tokens = TokenFile(self._leader.tokens)
        rows = read_examples(job, base, alive, tokens)
        tokens.flush()
        self._leader.tell(OpenJob(job, rows, tokens))
        session = open_alone(
            job, self._device, base, self._estimates, rows=rows, sharding=self._sharding
        )
        assert isinstance(session.stream, ShardedStream)
        session.stream.tell = self._leader.tell
        return session

    def _failed(self, n: int, reporter: Any, error: Exception, *rest: Any) -> Ending:  # noqa: ANN401
        return super()._failed(n, reporter, self._leader.explain(error), *rest)


def load_sharded(
    job: JobSpec, device: ComputeDevice, ranks: Communicator
) -> tuple[BaseModel, Sharding]:
    """Load this rank's shard of the base model that a job names.

    Raises:
        UserError: it cannot be had, or cannot be cut so.
    """
    whole: list[Any] = []

    def build(directory: Path, config: Any, form: WeightForm) -> torch.nn.Module:  # noqa: ANN401
        whole.append(config)
        return read_shard(directory, config, form, ranks)

    directory = find_model(job.spec.model.name, job.spec.model.revision)
    base = load_base(directory, form=WeightForm.of(job.spec), device=device, build=build)
    # Rows are read for the whole model: its vocabulary, its positions.
    return replace(base, config=whole[0]), Sharding(ranks, whole[0])


def _fork(
    rank: int, options: argparse.Namespace, meet: Path, tokens: IO[bytes]
) -> tuple[int, Connection]:
    ours, theirs = Pipe()
    parent = os.getpid()
    sys.stdout.flush()
    process = os.fork()
    if not process:
        ours.close()
        _follow(rank, options, meet, theirs, parent, tokens)
    theirs.close()
    return process, ours


def _follow(
    rank: int,
    options: argparse.Namespace,
    meet: Path,
    pipe: Connection,
    parent: int,
    tokens: IO[bytes],
) -> NoReturn:
    """Be rank `rank`, to the end of this process."""
    code = 1
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        # Who stops the job tells the first rank, which tells the others.
        for asked in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(asked, signal.SIG_IGN)
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the first rank's reader waits for it
        device, _ = _place(options, rank)
        ranks = _join(options, meet, rank, device)
        _obey(_told(pipe), device, ranks, tokens)
        code = 0
    except Exception as error:
        log.exception("rank %d ends", rank)
        if isinstance(error, UserError):
            _say(pipe, error)
        elif out_of_memory(error) or not _is_of_ranks(
            error
        ):  # else another rank, or the first one, has ended before
            _say(pipe, RankLost(f"rank {rank}: {type(error).__name__}: {error}"))
    finally:
        logging.shutdown()
        os._exit(code)


def _say(pipe: Connection, error: Exception) -> None:
    """Tell the first rank of an error; it may have gone."""
    with contextlib.suppress(OSError):
        pipe.send(error)


def _obey(
    told: Iterator[Any], device: ComputeDevice, ranks: Communicator, tokens: IO[bytes]
) -> None:
    order = next(told, None)
    if not isinstance(order, LoadBase):
        return
    base, sharding = load_sharded(order.job, device, ranks)
    order = next(told, None)
    if not isinstance(order, OpenJob):
        return
    order.tokens.lies_in(tokens)
    session = open_alone(order.job, device, base, rows=order.rows, sharding=sharding)
    assert isinstance(session.stream, ShardedStream)
    session.stream.follow(told)


def _told(pipe: Connection) -> Iterator[Any]:
    """Yield what the first rank tells, until it says that it is all, or has gone."""
    while True:
        try:
            order = pipe.recv()
        except (EOFError, OSError):
            return
        if isinstance(order, EndRank):
            return
        yield order


def _place(options: argparse.Namespace, rank: int) -> tuple[ComputeDevice, int]:
    """Find a rank's device and take its share of it; returns it and its units."""
    name = options.device
    if not name.startswith("cuda"):
        device = find_device(name)
        cores = sorted(os.sched_getaffinity(0))
        cores = cores[-options.units :] if options.units else cores
        share = max(1, len(cores) // options.tp)
        own = {cores[(rank * share + n) % len(cores)] for n in range(share)}
        os.sched_setaffinity(0, own)
        torch.set_num_threads(share)
        return device, share
    first = int(name.partition(":")[2] or 0)
    device = find_device(f"cuda:{first + rank}")
    torch.cuda.set_device(device.torch)
    return device, device.total_units()


def _join(
    options: argparse.Namespace, meet: Path, rank: int, device: ComputeDevice
) -> Communicator:
    return Communicator.joined(
        meet, rank, options.tp, device=device.torch, late_after_s=LATE_AFTER_S
    )


def _import_ahead() -> None:
    """Import what every rank needs once, before they are forked."""
    import peft
    import transformers

    del peft, transformers


def _is_of_ranks(error: Exception) -> bool:
    """Return whether an error may come of another rank: torch's collectives raise RuntimeError."""
    return isinstance(error, RuntimeError | RankLost)


def _is_stopped(process: int) -> bool:
    """Return whether a signal has stopped a process."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == "T"
