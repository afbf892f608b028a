"""Keep the ranks of one engine in step: rank 0 schedules and tells, the others do the same.

What rank 0 tells before each pass is what SGLang broadcasts before its own: the requests that came
and went since the pass before. Beside them are the tokens that rank 0 has chosen. Each rank has a
scheduler and page tables of its own and computes the same from them. A rank that ends ends the
engine, as it ends SGLang's.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

from windrow.errors import WindrowError
from windrow_sidecar.compute.communicator import Communicator
from windrow_sidecar.engines.builtin.scheduler import EngineRequest, Scheduler, finish_reason
from windrow_sidecar.engines.builtin.web.messages import Cancel, Submit

_log = logging.getLogger(__name__)

# A collective that waits longer fails. A rank may read its weights that long; a rank that a signal
# has stopped holds decode up until it goes on, as a rank of SGLang's does.
LATE_AFTER_S = 3600.0
# A rank that has lost another one is gone within this.
_REAPED_WITHIN_S = 2.0
_PR_SET_PDEATHSIG = 1


class RankEnded(WindrowError):
    """Error of an engine of which a rank has ended."""


class Pass(NamedTuple):
    """Message of rank 0 to the others before each pass.

    Attributes:
        tokens: that it chose in the pass before, one for each request of that batch.
        heard: requests that came and went since then, in their order.
        admits: whether waiting requests may start.
    """

    tokens: list[int]
    heard: list[Submit | Cancel]
    admits: bool


@dataclass(slots=True)
class RankLeader:
    """Rank 0's hold on the others.

    Attributes:
        others: process and pipe of each, from rank 1 on.
    """

    others: list[tuple[int, Connection]]
    _heard: list[Submit | Cancel] = field(default_factory=list)
    _tokens: list[int] = field(default_factory=list)
    _status: dict[int, int] = field(default_factory=dict)

    def hear(self, message: Submit | Cancel) -> None:
        """Note a request that came or went."""
        self._heard.append(message)

    def chose(self, tokens: list[int]) -> None:
        """Note the tokens of the pass that has ended."""
        self._tokens = tokens

    def tell(self, *, admits: bool) -> None:
        """Have the other ranks schedule and compute the pass that begins.

        Raises:
            RankEnded: one has ended.
        """
        told = Pass(self._tokens, self._heard, admits)
        for rank, (_, pipe) in enumerate(self.others, 1):
            try:
                pipe.send(told)
            except OSError as error:
                raise RankEnded(self.why_ended() or f"rank {rank} has ended") from error
        self._tokens, self._heard = [], []

    def why_ended(self) -> str:
        """Say which rank has ended, and how; "": all live, or are on their way to their end.

        One that a signal has ended makes the others fail, so it is named first.
        """
        found: list[str] = []
        for rank, (process, _) in enumerate(self.others, 1):
            deadline_s = time.monotonic() + _REAPED_WITHIN_S
            while process not in self._status and time.monotonic() < deadline_s:
                reaped, status = os.waitpid(process, os.WNOHANG)
                if reaped:
                    self._status[process] = os.waitstatus_to_exitcode(status)
                else:
                    time.sleep(0.01)
            code = self._status.get(process, 0)
            if code < 0:
                found.insert(0, f"rank {rank} was ended by {signal.Signals(-code).name}")
            elif process in self._status:
                found.append(f"rank {rank} exited with {code}")
        return found[0] if found else ""

    def end(self) -> None:
        """End the other ranks, and reap them."""
        for process, pipe in self.others:
            pipe.close()
            if process in self._status:
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)  # it holds nothing that is not in rank 0 as well
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process, 0)
        self.others = []


def fork_ranks(
    ranks: int, follow: Callable[[Connection, Communicator], None]
) -> tuple[RankLeader, Communicator]:
    """Fork the ranks from 1 on; returns rank 0's hold on them, and its collectives.

    To be called before this process has a second thread.

    Args:
        ranks: of the engine.
        follow: what the others do, to their end; see `told`.
    """
    with tempfile.TemporaryDirectory(prefix="windrow-engine-") as folder:
        meet = Path(folder) / "meet"
        leader = RankLeader([_fork(rank, ranks, meet, follow) for rank in range(1, ranks)])
        try:
            return leader, _join(meet, 0, ranks)
        except BaseException:
            leader.end()
            raise


def _join(meet: Path, rank: int, ranks: int) -> Communicator:
    device = torch.device("cpu")
    return Communicator.joined(meet, rank, ranks, device=device, late_after_s=LATE_AFTER_S)


def _fork(
    rank: int, ranks: int, meet: Path, follow: Callable[[Connection, Communicator], None]
) -> tuple[int, Connection]:
    ours, theirs = Pipe()
    parent = os.getpid()
    sys.stdout.flush()
    process = os.fork()
    if not process:
        ours.close()
        _be_rank(rank, ranks, meet, theirs, parent, follow)
    theirs.close()
    return process, ours


def _be_rank(
    rank: int,
    ranks: int,
    meet: Path,
    pipe: Connection,
    parent: int,
    follow: Callable[[Connection, Communicator], None],
) -> NoReturn:
    code = 1
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        for asked in (signal.SIGTERM, signal.SIGINT):  # rank 0 hears of it, and ends the others
            signal.signal(asked, signal.SIG_IGN)
        follow(pipe, _join(meet, rank, ranks))
        code = 0
    except Exception:  # noqa: BLE001 - the edge of the process, whatever it was
        _log.exception("rank %d ends", rank)
    finally:
        logging.shutdown()
        os._exit(code)


class RankFollower:
    """A rank other than 0: it schedules as rank 0 does, and computes its part of each pass.

    Args:
        scheduler: of this rank.
        fill: writes the KV of a prompt whose KV arrives.
        prefill: computes a part of a prompt.
        decode: computes a step of a batch.
        prefill_tokens: of a prompt in one pass.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        fill: Callable[[EngineRequest], None],
        prefill: Callable[[EngineRequest, list[int]], None],
        decode: Callable[[list[EngineRequest]], object],
        *,
        prefill_tokens: int,
    ) -> None:
        self._scheduler, self._fill = scheduler, fill
        self._prefill, self._decode = prefill, decode
        self._prefill_tokens = prefill_tokens
        self._batch: list[EngineRequest] = []  # of the pass before

    @torch.inference_mode()
    def follow(self, pipe: Connection) -> None:
        """Do what rank 0 tells, until it has gone."""
        while True:
            try:
                told = pipe.recv()
            except (EOFError, OSError):
                return
            self.run(told)

    def run(self, told: Pass) -> None:
        """Schedule and compute one pass, in the order of `DecodeLoop.step`."""
        scheduler = self._scheduler
        for request, token in zip(self._batch, told.tokens, strict=True):
            request.tokens.append(token)
            if finish_reason(request, token):
                scheduler.remove(request)
        for message in told.heard:
            if isinstance(message, Submit):
                scheduler.submit(message)
            elif (found := scheduler.find(message.id)) is not None:
                scheduler.remove(found)
        for request in scheduler.admit() if told.admits else []:
            self._fill(request)
        prefill = scheduler.next_prefill(self._prefill_tokens)
        scheduler.make_room()
        self._batch = list(scheduler.running)
        if prefill is not None and prefill[0] in scheduler.prefilling:
            self._prefill(*prefill)
        if self._batch:
            self._decode(self._batch)
