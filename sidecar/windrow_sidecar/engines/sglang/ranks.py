"""Keep the ranks of an SGLang engine on one decision: rank 0 decides, all apply it together.

SGLang broadcasts the requests of each iteration from rank 0 over the ranks' gloo group, and every
rank computes the same schedule from them (`SchedulerRequestReceiver._broadcast_reqs_across_ranks`,
SGLang 0.5.22 and 0.5.23). What rank 0 has decided is one more entry of that broadcast, where it
differs from what it said last; each rank takes it out again before its scheduler sees it. So no
rank sends a message of its own, and all apply a decision in the same iteration.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, NamedTuple

from windrow.errors import InvariantBroken, UserError
from windrow.rundir import RunDir
from windrow_sidecar.compute.partition import Partition, Side, UnknownLevel
from windrow_sidecar.engines.rank_chunks import RankChunks
from windrow_sidecar.engines.rank_pages import RankMeter
from windrow_sidecar.engines.sglang.rank_lending import ChunkMoves, LendingRank

_PARALLEL = "sglang.srt.runtime_context.get_parallel"


class RankOrder(NamedTuple):
    """Order of rank 0 that every rank follows from this iteration on, in SGLang's broadcast.

    Attributes:
        units: of the device that decode computes on.
        holds: whether a decode instance admits no request.
        off: why nothing is harvested any more; "": it is.
        moves: chunks that move once, with this order; None: none does.
    """

    units: int
    holds: bool = False
    off: str = ""
    moves: ChunkMoves | None = None


_NOTHING = RankOrder(0)  # before a rank has been opened


class RankReport(NamedTuple):
    """Report of a rank to all, once its scheduler has been made.

    Attributes:
        slot: of the pod, which rank 0 has claimed.
        cores: that the rank may use.
        off: why this rank cannot be harvested; "": it can.
    """

    slot: int
    cores: tuple[int, ...]
    off: str


@dataclass(slots=True)
class SchedulerRanks:
    """The ranks of an engine as one of them sees them. The scheduler's thread.

    Attributes:
        rank: this one.
        ranks: how many there are.
        run_dir: as rank 0 sees it, once all have met.
        order: in force on every rank.
        move: puts this rank on so many units; raises InvariantBroken where it cannot.
        chunks: of this rank's arena, once its KV has one.
        lending: what this rank does of what is decided on chunks; None: none is lent.
        meter: of this rank's passes; counts nothing until it is open.
    """

    rank: int
    ranks: int
    run_dir: RunDir
    order: RankOrder = _NOTHING
    move: Callable[[int], None] = lambda units: None
    chunks: RankChunks | None = None
    lending: LendingRank | None = None
    meter: RankMeter = field(default_factory=RankMeter)
    _asked: RankOrder = _NOTHING

    def open(self, partition: Partition) -> None:
        """Decode has all units of the device; `partition` moves this rank to fewer."""
        self.order = self._asked = RankOrder(partition.total_units)
        self.move = partition.activate

    def ask_units(self, units: int) -> None:
        """Have every rank on so many units from the next iteration on (rank 0)."""
        self._asked = self._asked._replace(units=units)

    def end(self, reason: str) -> None:
        """Have every rank end harvesting; admission is held back no longer (rank 0)."""
        if not self._asked.off:
            self._asked = self._asked._replace(off=reason)

    def news(self, *, holds: bool, moves: ChunkMoves | None = None) -> RankOrder | None:
        """Return what the ranks have not heard yet; None: nothing (rank 0).

        `holds`: whether admission is held back now. `moves`: chunks that move with it.
        """
        wanted = self._asked._replace(holds=holds and not self._asked.off, moves=moves)
        return None if wanted == self.order else wanted

    def take(self, order: RankOrder) -> None:
        """Apply what rank 0 has decided.

        Raises InvariantBroken where this rank cannot move, ValueError where a decision is missing.
        """
        # Before the move: what is admitted has to be the same on all ranks, whatever fails.
        to_other_units = order.units not in (0, self.order.units)
        self.order = order._replace(moves=None)
        if self.lending is not None and order.moves is not None:
            self.lending.apply(order.moves)
        if to_other_units:
            self.move(order.units)

    def tell(self, now_ns: int) -> None:
        """Let rank 0 know how far this one is. Raises InvariantBroken where it could not go on."""
        if self.lending is not None:
            self.lending.tell(now_ns)

    def failure(self) -> str:
        """Return why a rank could not apply an order, with its number; "": each could (rank 0)."""
        for rank in range(1, self.ranks):
            path = self.run_dir.of_rank(rank).refusal()
            if path.exists():
                return f"rank {rank}: {_reason(path.read_text(encoding='utf-8'))}"
        return ""

    def tell_failure(self, reason: str) -> None:
        """Leave for rank 0 why this rank cannot go on; "": it can. Raises OSError."""
        write_refusal(self.run_dir.of_rank(self.rank), reason)


class AskedPartition:
    """Decode's share of the device on all ranks: asked for here, in force with the next order."""

    side: Side = "decode"

    def __init__(self, partition: Partition, ranks: SchedulerRanks) -> None:
        self._partition, self._ranks = partition, ranks

    @property
    def total_units(self) -> int:
        """Units of the device."""
        return self._partition.total_units

    def levels(self) -> tuple[int, ...]:
        """Return the levels of each rank."""
        return self._partition.levels()

    def activate(self, level: int) -> None:
        """Ask for so many units on every rank. Raises UnknownLevel."""
        if level not in self.levels():
            raise UnknownLevel(self.side, level, self.levels(), "cores")
        self._ranks.ask_units(level)

    def release(self) -> None:
        """Ask for every unit again."""
        self._ranks.ask_units(self.total_units)


def carried(
    ranks: SchedulerRanks,
    broadcast: Callable[..., Any],
    receiver: Any,  # noqa: ANN401 - SGLang's
    requests: list[Any] | None,
    local: list[Any] | None,
    *,
    holds: bool,
    moves: Callable[[], ChunkMoves | None],
) -> tuple[RankOrder | None, Any]:
    """Broadcast SGLang's requests, and with them on rank 0 what the ranks have not heard yet.

    Args:
        ranks: as this one sees them.
        broadcast: SGLang's own; what it raises is SGLang's.
        receiver: SGLang's, which it is a method of.
        requests: that came to this rank; None on all but rank 0.
        local: aborts that rank 0 has decided on.
        holds: whether rank 0 holds admission back now.
        moves: returns the chunks that rank 0 has decided to move with this broadcast.

    Returns:
        the order that came with them, for this rank to take, and the requests.
    """
    if ranks.rank == 0 and requests is not None:
        order = ranks.news(holds=holds, moves=moves())
        requests = requests if order is None else [order, *requests]
    found = broadcast(receiver, requests, local)
    if found and isinstance(found[0], RankOrder):
        return found[0], found[1:]
    return None, found


def own_rank() -> int:
    """Return the number of this scheduler's rank, before SGLang has made its groups."""
    return int(resolve_name(_PARALLEL)().tp_rank)


def exchange(scheduler: Any, report: RankReport) -> list[RankReport]:  # noqa: ANN401
    """Tell every rank this one's report; returns all of them, in the order of ranks.

    The only collectives of the plugin, while the server starts: each rank has to call it.
    """
    import torch

    found: list[Any] = [None] * scheduler.tp_group.world_size
    torch.distributed.all_gather_object(found, tuple(report), group=scheduler.tp_cpu_group)
    return [RankReport(*each) for each in found]


def check_reports(reports: Sequence[RankReport]) -> None:
    """Refuse ranks of which one cannot be harvested, or that do not share the device's cores.

    Raises UserError, the same on every rank.
    """
    for rank, report in enumerate(reports):
        if report.off:
            raise UserError(
                f"rank {rank}: {report.off}",
                remedy="Decode serves alone until every rank can be harvested.",
            )
    if len({report.cores for report in reports}) > 1:
        raise UserError(
            "the ranks of decode are bound to different cores, and a worker's ranks share one set",
            field="SGLANG_CPU_OMP_THREADS_BIND",
            remedy="Give each rank the same cores, as in 0-7|0-7.",
        )


def own_cores() -> tuple[int, ...]:
    """Return the cores that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))


def raise_failure(ranks: SchedulerRanks) -> None:
    """Raise InvariantBroken where a rank could not apply an order (rank 0)."""
    if why := ranks.failure():
        raise InvariantBroken(why)


def write_refusal(run_dir: RunDir, reason: str) -> None:
    """Leave in the run directory why nothing is harvested; "": nothing is left. Raises OSError."""
    path = run_dir.refusal()
    if not reason:
        path.unlink(missing_ok=True)
        return
    scratch = path.with_suffix(f".{os.getpid()}")
    scratch.write_text(json.dumps({"reason": reason}), encoding="utf-8")
    scratch.replace(path)


def _reason(text: str) -> str:
    try:
        return str(json.loads(text)["reason"])
    except (ValueError, KeyError, TypeError):
        return text
