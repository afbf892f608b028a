"""The levels at which a device's units can be split between decode and the worker."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from windrow.errors import UserError
from windrow_sidecar.qos.view import LEVELS_MAX

# Each share of a GPU is a set of graphs on decode's side, a cache of activations on the worker's.
GPU_SHARES = LEVELS_MAX - 1


@dataclass(frozen=True, slots=True)
class PartitionLevel:
    """One way to share a device while decode works."""

    finetune_units: int
    decode_units: int


@dataclass(frozen=True, slots=True)
class Partitioning:
    """The splits of one device, from "decode alone" to "most for the worker".

    Attributes:
        units: cores or SMs of the device.
        splits: by growing `finetune_units`, then by growing `decode_units`; the first is decode
            alone on all units.
    """

    units: int
    splits: tuple[PartitionLevel, ...]

    def __post_init__(self) -> None:
        """Refuse what a device cannot do.

        Raises:
            UserError: the first split is not decode alone, or the units do not fit.
        """
        if not self.splits or self.splits[0] != PartitionLevel(0, self.units):
            raise UserError(
                f"the first split is {self.splits[:1]}, not decode alone on {self.units} units",
                field="levels.splits",
                remedy="Start with Split(0, units).",
            )
        pairs = self.pairs
        shares = [share for share, _ in pairs]
        if pairs[1:] != sorted(set(pairs[1:])) or 0 in shares[1:] or shares[-1] > self.units:
            raise UserError(
                f"the worker's units {shares} do not grow up to at most {self.units}",
                field="levels.splits",
                remedy="Give every level once, smallest first.",
            )
        if any(not 0 < s.decode_units <= self.units for s in self.splits):
            raise UserError(
                "a split leaves decode without a unit, or gives it more than there are",
                field="levels.splits",
                remedy="Give decode between 1 and all units in each split.",
            )

    def index_of(self, finetune_units: int, decode_units: int = 0) -> int:
        """The split of exactly so many units; 0 (alone) where there is none.

        `decode_units` tells splits apart that give the worker as much; 0: the first of them.
        """
        for index, split in enumerate(self.splits):
            if split.finetune_units == finetune_units and decode_units in (0, split.decode_units):
                return index
        return 0

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Units of the worker and of decode in each split."""
        return [(s.finetune_units, s.decode_units) for s in self.splits]

    @property
    def offered(self) -> list[int]:
        """Units of the worker's estimates, in the order of `Offer.estimates_us`."""
        return [*dict.fromkeys(s.finetune_units for s in self.splits[1:]), self.units]

    def offered_index(self, finetune_units: int) -> int:
        """Place of the worker's estimate for so many units among `Offer.estimates_us`.

        The worker shows its shares by growing units, and the whole device last.
        """
        shares = self.offered
        index = bisect_left(shares, finetune_units)
        return min(index, len(shares) - 1, LEVELS_MAX - 1)

    def allowed(self, max_compute_percent: int) -> int:
        """Return how many splits, from the first on, a limit in percent of the units allows."""
        bound = self.units * max_compute_percent // 100
        return sum(1 for s in self.splits if s.finetune_units <= bound)

    def idle_share(self, max_compute_percent: int) -> int:
        """Units that the worker may have while decode idles, under the same limit.

        A device that is shared in time has no split but decode alone, and no part of it can be
        given: all of it, or nothing where the limit asks for less.
        """
        bound = self.units * max_compute_percent // 100
        smallest = self.splits[1].finetune_units if len(self.splits) > 1 else self.units
        return bound if bound >= smallest else 0


def spread_shares(units: int) -> tuple[int, ...]:
    """Shares of a CPU set for the worker: each number of cores, at most as many as the page holds.

    On large sets they are spread evenly, from none to all cores but one.
    """
    n = min(units, LEVELS_MAX)
    if n == 1:
        return (0,)
    return tuple(sorted({round(i * (units - 1) / (n - 1)) for i in range(n)}))


def gpu_shares(groups: int) -> tuple[int, ...]:
    """Shares of a GPU for the worker, in groups of SMs, ascending: `GPU_SHARES` at most.

    Decode reads about as fast with half of the SMs as with all of them, so that up to half the
    worker's SMs hardly cost decode anything, and beyond each group costs the more the fewer are
    left. So all shares but one leave decode between one group and half of them, in even steps with
    the wider ones where a group matters least. The first is an eighth: what an objective near
    decode's own step still bears.
    """
    half = groups // 2
    n = min(GPU_SHARES - 1, half)
    decode = {1 + i * (half - 1) // max(1, n - 1) for i in range(n)}
    return tuple(sorted({max(1, groups // 8), *(groups - left for left in decode)}))


def offered_levels(levels: Sequence[int]) -> tuple[int, ...]:
    """Return the levels for which an offer holds an estimate: the whole device is the last."""
    if len(levels) <= LEVELS_MAX:
        return tuple(levels)
    return (*spread_shares(levels[-1])[1:], levels[-1])


def pair_levels(units: int, parts: int = 10) -> Partitioning:
    """Harli's pairs: i of `parts` for decode, j for the worker, i + j <= parts; 45 of ten.

    Units that are no multiple of `parts` are rounded down.

    Raises:
        UserError: there are fewer units than parts.
    """
    if units < parts:
        raise UserError(
            f"{units} units cannot be cut into {parts} parts",
            field="levels.splits",
            remedy=f"Use {units} parts at most.",
        )
    pairs = [
        PartitionLevel(units * worker // parts, units * decode // parts)
        for worker in range(1, parts)
        for decode in range(1, parts - worker + 1)
    ]
    return Partitioning(units, (PartitionLevel(0, units), *pairs))


def host_levels(units: int) -> Partitioning:
    """Every split of a CPU set: decode takes what the worker leaves."""
    return Partitioning(units, tuple(PartitionLevel(i, units - i) for i in range(units)))


def whole_levels(units: int) -> Partitioning:
    """A device that decode and worker use in turn: no split but decode alone."""
    return Partitioning(units, (PartitionLevel(0, units),))


def overlapping_levels(units: int, finetune_levels: tuple[int, ...]) -> Partitioning:
    """Splits of a GPU whose decode is not confined: the worker is capped, decode is not."""
    shares = (0, *(level for level in finetune_levels if level > 0))
    return Partitioning(units, tuple(PartitionLevel(share, units) for share in shares))
