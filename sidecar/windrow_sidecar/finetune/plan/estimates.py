"""How long a tasklet will take: what it took before, by phase and compute level."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from windrow_sidecar.finetune.tasklets import Tasklet
from windrow_sidecar.qos.view import Phase

# Weight of the newest measurement: settles within about ten tasklets, which is two layers' worth.
FRESH = 0.2
# Sizes that differ by less than a tenth say nothing about what a tasklet costs beside its tokens.
_SPREAD = 0.1
# Floating-point operations: for each weight and token (forward, back, and forward once more), and
# those that a slow core does, before anything was measured.
_FLOPS_A_WEIGHT, _FLOPS_A_SECOND = 8, 20e9
# Measurements before a level may be preferred to another: the first ones find cold threads.
SETTLED = 10
# More units have to be worth their wake-ups: parallel regions of a small layer may only get slower.
WORTHWHILE = 0.97
# What is known of a level is out of date unless so many of the phase's last tasklets ran on it. One
# try is not enough: a team that has slept takes half as long again for its first tasklets, and one
# bad moment would keep it asleep for good.
TRIED, LAST = 5, 50


@dataclass(slots=True)
class _Level:
    """Of one phase on so many units: microseconds of a layer as a line over its tokens.

    Fitted with forgetting.

    Attributes:
        fixed, slope: us of a tasklet without tokens, us a token; both 0: never measured.
    """

    measured: int = 0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    fixed: float = 0.0
    slope: float = 0.0

    def learn(self, tokens: float, us: float) -> None:
        weight = FRESH if self.measured else 1.0
        self.measured += 1
        self.x += weight * (tokens - self.x)
        self.y += weight * (us - self.y)
        self.xx += weight * (tokens * tokens - self.xx)
        self.xy += weight * (tokens * us - self.xy)
        # Asked for several times before the next measurement.
        self.fixed, self.slope = self._fit()

    def _fit(self) -> tuple[float, float]:
        """Without sizes that differ, and where the fit makes no sense, time is in proportion."""
        variance = self.xx - self.x * self.x
        if variance > (_SPREAD * self.x) ** 2:
            slope = (self.xy - self.x * self.y) / variance
            fixed = self.y - slope * self.x
            if slope > 0 and fixed > 0:
                return fixed, slope
        return 0.0, self.y / self.x


class Estimates:
    """What tasklets have taken in this slot."""

    def __init__(self) -> None:
        self._levels: defaultdict[tuple[Phase, int], _Level] = defaultdict(_Level)
        self._last: defaultdict[Phase, deque[int]] = defaultdict(lambda: deque(maxlen=LAST))

    def learn(self, tasklet: Tasklet, units: int, elapsed_us: float) -> None:
        """Take one measurement into account."""
        self._last[tasklet.phase].append(units)
        self._levels[tasklet.phase, units].learn(_size(tasklet), elapsed_us / tasklet.parts)

    def estimate_us(self, tasklet: Tasklet, units: int) -> int:
        """Microseconds on so many units; 0: never measured there."""
        return round(self._us(tasklet, units))

    def expected_s(self, tasklet: Tasklet, weights: int) -> float:
        """Seconds on the slowest level where its phase was measured; before, by its products.

        `weights`: of a layer, or of the head.
        """
        levels = {units for phase, units in self._levels if phase is tasklet.phase}
        if known_us := max((self._us(tasklet, units) for units in levels), default=0.0):
            return known_us / 1e6
        return tasklet.parts * tasklet.tokens * weights * _FLOPS_A_WEIGHT / _FLOPS_A_SECOND

    def useful_units(self, tasklet: Tasklet, granted: int) -> int:
        """Return how many of the granted units make `tasklet` fastest.

        All of them until they have been tried, and again now and then; fewer where more have proved
        slower, or hardly any faster.
        """
        if granted <= 1 or self._last[tasklet.phase].count(granted) < TRIED:
            return granted
        best = granted
        tried = {units for phase, units in self._levels if phase is tasklet.phase}
        for units in sorted((units for units in tried if units < granted), reverse=True):
            levels = (self._levels[tasklet.phase, n] for n in (units, best))
            if min(level.measured for level in levels) < SETTLED:
                continue
            if self._us(tasklet, best) > WORTHWHILE * self._us(tasklet, units):
                best = units
        return best

    def by_level(self, tasklet: Tasklet, levels: Sequence[int]) -> tuple[int, ...]:
        """`estimate_us` for each of those numbers of units, as an offer holds them."""
        return tuple(self.estimate_us(tasklet, units) for units in levels)

    def tokens_within(self, phase: Phase, bound_us: float) -> int:
        """Padded tokens with which one layer stays within `bound_us` on any level in use.

        At least 1 where anything is known; 0: nothing is.
        """
        return min(
            (max(1, int((bound_us - fixed) / slope)) for fixed, slope in self._in_use(phase)),
            default=0,
        )

    def layer_us(self, phase: Phase, tokens: int) -> float:
        """Microseconds of one layer for so many padded tokens, on the fastest level in use.

        0: nothing is known.
        """
        return min((fixed + slope * tokens for fixed, slope in self._in_use(phase)), default=0.0)

    def _in_use(self, phase: Phase) -> list[tuple[float, float]]:
        """Coefficients of the phase on the levels of the last tasklets, where it was measured."""
        units = {units for last in self._last.values() for units in last}
        levels = [self._levels.get((phase, n)) for n in units]
        return [(level.fixed, level.slope) for level in levels if level and level.measured]

    def _us(self, tasklet: Tasklet, units: int) -> float:
        level = self._levels.get((tasklet.phase, units))
        return tasklet.parts * (level.fixed + level.slope * _size(tasklet)) if level else 0.0


def _size(tasklet: Tasklet) -> int:
    return tasklet.tokens if tasklet.micro else 1
