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
import select
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, NoReturn

import psutil
import torch

from windrow.errors import InvariantBroken, WindrowError
from windrow_sidecar.compute.communicator import Communicator
from windrow_sidecar.engines.builtin.scheduler import EngineRequest, Scheduler, finish_reason
from windrow_sidecar.engines.builtin.web.messages import Cancel, Submit
from windrow_sidecar.engines.rank_chunks import RankChunks
from windrow_sidecar.engines.rank_pages import RankMeter
from windrow_sidecar.qos.rank_group import GroupDecision

_log = logging.getLogger(__name__)

# A rank that has lost another one is gone within this.
_REAPED_WITHIN_S = 2.0
_PR_SET_PDEATHSIG = 1


class RankEnded(WindrowError):
    """Error of an engine of which a rank has ended, or does not answer."""


class Pass(NamedTuple):
    """Message of rank 0 to the others before each pass.

    What decode's policy has decided travels in it, so every rank applies it in the same pass.

    Attributes:
        tokens: that it chose in the pass before, one for each request of that batch.
        heard: requests that came and went since then, in their order.
        admits: whether waiting requests may start.
        units: of the device that decode computes on.
        moves: chunks that are lent, asked back and handed back; None: none is.
    """

    tokens: list[int]
    heard: list[Submit | Cancel]
    admits: bool
    units: int
    moves: GroupDecision | None = None


class Said(NamedTuple):
    """Word of another rank: that it is ready, or what it did of what was decided.

    Attributes:
        refused: why it could not move to its units; "": it could.
        failed: why it could not lend a chunk, or KV found one that is not free; "": it could.
        applied: number of the last decision on chunks.
    """

    refused: str = ""
    failed: str = ""
    applied: int = 0


@dataclass(slots=True)
class RankLeader:
    """Rank 0's hold on the others.

    Attributes:
        others: process and pipe of each, from rank 1 on.
        refused: why a rank could not apply what was decided; "": each could.
        heard_of: called with a rank and what it says of chunks.
        meter: of rank 0's own passes.
    """

    others: list[tuple[int, Connection]]
    refused: str = ""
    heard_of: Callable[[int, Said], None] = lambda rank, said: None
    meter: RankMeter = field(default_factory=RankMeter)
    _heard: list[Submit | Cancel] = field(default_factory=list)
    _tokens: list[int] = field(default_factory=list)
    _status: dict[int, int] = field(default_factory=dict)
    _said: select.poll | None = None  # made with the first pass: ranks say "ready" before it

    def hear(self, message: Submit | Cancel) -> None:
        """Note a request that came or went."""
        self._heard.append(message)

    def chose(self, tokens: list[int]) -> None:
        """Note the tokens of the pass that has ended."""
        self._tokens = tokens

    def tell(self, *, admits: bool, units: int, moves: GroupDecision | None = None) -> None:
        """Have the other ranks schedule and compute the pass that begins.

        `units`: of the device, for decode. `moves`: chunks that are lent and come back.

        Raises:
            RankEnded: one has ended.
        """
        order = Pass(self._tokens, self._heard, admits, units, moves)
        for rank, (_, pipe) in enumerate(self.others, 1):
            try:
                pipe.send(order)
            except BlockingIOError as error:  # it has read nothing for the watchdog's time
                raise RankEnded(self.why_ended() or f"rank {rank} does not answer") from error
            except OSError as error:
                raise RankEnded(self.why_ended() or f"rank {rank} has ended") from error
        self._tokens, self._heard = [], []
        self.listen()

    def listen(self) -> None:
        """Take what the ranks said since the last time; no rank is waited for.

        Raises:
            RankEnded: one has ended.
        """
        if self._said is None:
            self._said = select.poll()
            for _, pipe in self.others:
                self._said.register(pipe.fileno(), select.POLLIN)
        for descriptor, _ in self._said.poll(0):
            for rank, (_, pipe) in enumerate(self.others, 1):
                if pipe.fileno() == descriptor:
                    try:
                        said = pipe.recv()
                    except (EOFError, OSError) as error:
                        raise RankEnded(self.why_ended() or f"rank {rank} has ended") from error
                    if why := said.refused or said.failed:
                        self.refused = self.refused or f"rank {rank}: {why}"
                    self.heard_of(rank, said)

    def wait_until_ready(self) -> None:
        """Wait until every rank has read its weights, however long that takes.

        Raises:
            RankEnded: one has ended.
        """
        for rank, (_, pipe) in enumerate(self.others, 1):
            try:
                pipe.recv()
            except (EOFError, OSError) as error:
                raise RankEnded(self.why_ended() or f"rank {rank} has ended") from error

    def why_ended(self) -> str:
        """Say which rank has ended or is stopped, and how; "": all live, or are about to end.

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
            elif _is_stopped(process):
                found.append(f"rank {rank} is stopped by a signal")
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


# Joins the group as that rank.
Join = Callable[[int], Communicator]


def fork_ranks(
    ranks: int, follow: Callable[[Connection, Communicator], None], *, late_after_s: float
) -> tuple[RankLeader, Communicator]:
    """Fork the ranks from 1 on; returns rank 0's hold on them, and its collectives.

    To be called before this process has a second thread.

    Args:
        ranks: of the engine.
        follow: what the others do, to their end: they send something once they have read their
            weights, then they do what rank 0 sends.
        late_after_s: a rank that takes longer over its part of a pass ends the engine.
    """

    def join(rank: int) -> Communicator:
        device = torch.device("cpu")
        return Communicator.joined(meet, rank, ranks, device=device, late_after_s=late_after_s)

    with tempfile.TemporaryDirectory(prefix="windrow-engine-") as folder:
        meet = Path(folder) / "meet"
        others = [_fork(rank, join, follow, late_after_s) for rank in range(1, ranks)]
        leader = RankLeader(others)
        try:
            return leader, join(0)
        except BaseException:
            leader.end()
            raise


def _fork(
    rank: int,
    join: Join,
    follow: Callable[[Connection, Communicator], None],
    late_after_s: float,
) -> tuple[int, Connection]:
    ours, theirs = Pipe()
    _bound_sends(ours, late_after_s)
    parent = os.getpid()
    sys.stdout.flush()
    process = os.fork()
    if not process:
        ours.close()
        _be_rank(rank, join, theirs, parent, follow)
    theirs.close()
    return process, ours


def _bound_sends(pipe: Connection, seconds: float) -> None:
    """Let what is sent fail after so long, where a rank that is stopped reads nothing."""
    whole = int(seconds)
    bound = struct.pack("@ll", whole, int((seconds - whole) * 1e6))
    with socket.socket(fileno=os.dup(pipe.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)


def _is_stopped(process: int) -> bool:
    """Return whether a signal has stopped a process."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(process).status() == psutil.STATUS_STOPPED
    return False


def _be_rank(
    rank: int,
    join: Join,
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
        follow(pipe, join(rank))
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
        activate: moves this rank to so many units of the device, decode's.
        chunks: of this rank's arena.
        meter: of this rank's passes.
        prefill_tokens: of a prompt in one pass.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        fill: Callable[[EngineRequest], None],
        prefill: Callable[[EngineRequest, list[int]], None],
        decode: Callable[[list[EngineRequest]], object],
        activate: Callable[[int], None],
        chunks: RankChunks,
        meter: RankMeter,
        *,
        prefill_tokens: int,
    ) -> None:
        self._chunks, self._meter, self._said = chunks, meter, Said()
        self._scheduler, self._fill = scheduler, fill
        self._prefill, self._decode, self._activate = prefill, decode, activate
        self._prefill_tokens = prefill_tokens
        self._batch: list[EngineRequest] = []  # of the pass before

    @torch.inference_mode()
    def follow(self, pipe: Connection) -> None:
        """Say that this rank is ready; then do what rank 0 tells, until it has gone."""
        pipe.send(self._said)
        while True:
            try:
                order = pipe.recv()
            except (EOFError, OSError):
                return
            refused = ""
            try:
                self._activate(order.units)
            except InvariantBroken as error:  # it computes where it is; rank 0 ends harvesting
                refused = str(error)
            self._meter.begin()
            self.run(order, lambda: self._say(pipe, refused))  # noqa: B023 - called in `run`
            self._meter.end()

    def _say(self, pipe: Connection, refused: str) -> None:
        """Tell rank 0 what has changed of what this rank could do."""
        lending = self._chunks.lending
        said = Said(refused, lending.failed, lending.number)
        if said != self._said:
            self._said = said
            pipe.send(said)

    def run(self, order: Pass, scheduled: Callable[[], None] = lambda: None) -> None:
        """Schedule and compute one pass, in the order of `DecodeLoop.step`.

        `scheduled`: called when chunks have moved, before anything is computed.
        """
        scheduler = self._scheduler
        for request, token in zip(self._batch, order.tokens, strict=True):
            request.tokens.append(token)
            if finish_reason(request, token):
                scheduler.remove(request)
        for message in order.heard:
            if isinstance(message, Submit):
                scheduler.submit(message)
            elif (found := scheduler.find(message.id)) is not None:
                scheduler.remove(found)
        for request in scheduler.admit() if order.admits else []:
            self._fill(request)
        prefill = scheduler.next_prefill(self._prefill_tokens)
        scheduler.make_room()
        if order.moves is not None:
            self._chunks.apply(order.moves)
        scheduled()
        self._batch = list(scheduler.running)
        if prefill is not None and prefill[0] in scheduler.prefilling:
            self._prefill(*prefill)
        if self._batch:
            self._decode(self._batch)
