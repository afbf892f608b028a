"""The ranks of one job: processes that are forked from the first one and end together.

The first rank is the worker itself: it reads, reports and writes as a job of one rank does. It
tells the others what to do through pipes; tensors go by torch.distributed. A rank that ends before
the job does ends it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, NoReturn

from windrow.errors import UserError, WindrowError
from windrow_sidecar.compute.communicator import Communicator
from windrow_sidecar.compute.host_device import out_of_memory
from windrow_sidecar.finetune.data.split import DataSplit
from windrow_sidecar.finetune.data.store import TokenFile
from windrow_sidecar.finetune.engine.sharded_stream import Act, ShardedStream
from windrow_sidecar.finetune.job.assembly import JobSpec, TrainingSession
from windrow_sidecar.finetune.model.loading import BaseModel
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
    """Tells the ranks to load their shards of a job's base model.

    Attributes:
        job: the job.
        folder: of the model, where the first rank has found it; None: as the job names it.
        of_hub: whether that is of a model of the Hub (see `HeldModel`).
    """

    job: JobSpec
    folder: Path | None = None
    of_hub: bool = False


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

    @property
    def processes(self) -> list[int]:
        """Process ids of all ranks, this one's first."""
        return [os.getpid(), *(process for process, _ in self._others)]

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

    def await_ranks(self) -> None:
        """Wait until every other rank has run the last tasklet.

        Raises:
            Exception: what a rank says of its end.
            RankLost: one has ended without a word.
        """
        for rank, (_, pipe) in enumerate(self._others, 1):
            try:
                said = pipe.recv()
            except (EOFError, OSError) as error:
                raise RankLost(f"rank {rank} has ended") from error
            if isinstance(said, Exception):
                raise said

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
                    if isinstance(word := pipe.recv(), Exception):
                        said.append(word)
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


def fork_rank(rank: int, follow: Callable[[int, Connection], None]) -> tuple[int, Connection]:
    """Fork a rank; returns its process and its pipe. This process has no second thread yet.

    `follow`: what it does, to its end.
    """
    ours, theirs = Pipe()
    parent = os.getpid()
    sys.stdout.flush()
    process = os.fork()
    if not process:
        ours.close()
        _be_rank(rank, theirs, parent, follow)
    theirs.close()
    return process, ours


def _be_rank(
    rank: int, pipe: Connection, parent: int, follow: Callable[[int, Connection], None]
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
        follow(rank, pipe)
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


def obey(
    pipe: Connection,
    tokens: IO[bytes],
    load: Callable[[LoadBase], tuple[BaseModel, Sharding]],
    open_job: Callable[[JobSpec, BaseModel, DataSplit, Sharding], TrainingSession],
    begin: Callable[[ShardedStream], None] = lambda stream: None,
) -> None:
    """Do on a rank what the first one tells, until it says that it is all, or has gone.

    Args:
        pipe: to the first rank.
        tokens: the file of the job's rows.
        load: this rank's shard of the base model of a job.
        open_job: puts a job together, at the time at which the first rank does.
        begin: called with its tasklets before the first.
    """
    told = _told(pipe)
    order = next(told, None)
    if not isinstance(order, LoadBase):
        return
    base, sharding = load(order)
    order = next(told, None)
    if not isinstance(order, OpenJob):
        return
    order.tokens.lies_in(tokens)
    session = open_job(order.job, base, order.rows, sharding)
    assert isinstance(session.stream, ShardedStream)
    begin(session.stream)
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


def import_ahead() -> None:
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
