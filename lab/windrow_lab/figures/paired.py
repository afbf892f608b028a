"""Statistics of a comparison's rounds: medians with exact intervals, a winner only where one is.

Every arm plays in every round, so two arms are compared by their differences within the rounds:
what changes from one minute to the next on a shared machine is in both of them.

The interval of a median is between two of the ordered values and holds for whatever distribution
they come from: the median is below the lowest of n values with a chance of 2^-n. The widest one,
from the lowest to the highest, is right in 93.75% of the cases with five rounds and in 96.9% with
six. A bootstrap of so few values resamples little but their extremes and looks narrower than it
is, and Student's t wants normal noise, which a shared machine has not. So six rounds are the
fewest that name a winner: the one that was ahead in all of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

CONFIDENCE = 0.95
FEWEST_ROUNDS = 5
DECIDING_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Interval:
    """Median with its interval, and the confidence of that."""

    median: float
    low: float
    high: float
    confidence: float

    @property
    def is_decided(self) -> bool:
        """True where the interval is one of 95%: only such a one names a winner."""
        return self.confidence >= CONFIDENCE

    @property
    def is_above_zero(self) -> bool:
        """True where the median is above zero, decided."""
        return self.is_decided and self.low > 0


def interval_of(values: Iterable[float]) -> Interval:
    """Return the median of independent values, and the narrowest exact interval of 95% for it.

    With fewer than six values the widest there is, with the confidence that it has. Raises
    ValueError for none.
    """
    ordered = sorted(values)
    n = len(ordered)
    if not n:
        raise ValueError("no value")
    # The chance that the median is outside of the k-th lowest to the k-th highest value.
    outside, k = 2 * 0.5**n, 1
    while True:
        wider = outside + 2 * comb(n, k) * 0.5**n
        if wider > 1 - CONFIDENCE or 2 * (k + 1) > n:
            break
        outside, k = wider, k + 1
    return Interval(median(ordered), ordered[k - 1], ordered[n - k], 1 - outside if n > 1 else 0.0)


def differences(these: Sequence[float], those: Sequence[float]) -> list[float]:
    """Return this minus that, round by round."""
    return [this - that for this, that in zip(these, those, strict=True)]


def ahead_of_all(
    values: Mapping[str, Sequence[float]], names: Sequence[str], others: Sequence[str] = ()
) -> str | None:
    """Return which of the names has higher values than all of them and the others, decided.

    None: nobody.
    """
    for name in names:
        rivals = [rival for rival in (*names, *others) if rival != name]
        if rivals and all(
            interval_of(differences(values[name], values[rival])).is_above_zero for rival in rivals
        ):
            return name
    return None


def order_of(
    names: Sequence[str], *, first: Sequence[str], last: Sequence[str], seed: int, round_: int
) -> list[str]:
    """Return the order in which a round plays the arms.

    The order is new for each round, from the seed, but for those that open and close every round.
    """
    between = [name for name in names if name not in first and name not in last]
    random.Random(f"{seed}/{round_}").shuffle(between)
    return [*first, *between, *last]
