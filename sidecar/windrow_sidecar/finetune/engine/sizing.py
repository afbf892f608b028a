"""Choose how large a tasklet is, from measured times of layers and a bound on its own time."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from windrow_sidecar.engines.streaming.schedule import micro_batches_to_hide
from windrow_sidecar.engines.streaming.streamed_layers import StreamedLayers
from windrow_sidecar.finetune.offload.frozen_layers import FrozenLayers
from windrow_sidecar.finetune.tasklets import MicroBatch, Tasklet
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
# A tasklet counts for no more than so many times what was expected of it. Whatever else runs on a
# machine makes one in twenty take twice as long, and one in a hundred five times; taken at its
# word, one such tasklet on two cores kept a worker on one of them for a second and more, a tenth of
# its time in the mean.
MOST_SURPRISE = 1.5
# What is known of a level is out of date unless so many of the phase's last tasklets ran on it. One
# try is not enough: a team that has slept takes half as long again for its first tasklets, and one
# bad moment would keep it asleep for good.
TRIED, LAST = 5, 50
# Of the stretches between two points where a layer can be stopped, how many are to be shorter than
# what is kept, and how fast that follows: a longer one raises it by 4% at most, so that being
# preempted once says little.
_SHORTER, _FOLLOW = 0.95, 0.04


@dataclass(slots=True)
class _Level:
    """Time of one layer in one phase on a number of units: a line over its tokens, microseconds.

    Fitted with forgetting.

    Attributes:
        fixed, slope: us of a tasklet without tokens, us a token; both 0: never measured.
        stretch: us a token that the longest time in a tasklet without a point to stop takes; 95 of
            100 take less.
        stretches: that were measured.
    """

    measured: int = 0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    fixed: float = 0.0
    slope: float = 0.0
    stretch: float = 0.0
    stretches: int = 0

    def learn(self, tokens: float, us: float) -> None:
        weight = FRESH if self.measured else 1.0
        if self.measured >= SETTLED:
            us = min(us, MOST_SURPRISE * (self.fixed + self.slope * tokens))
        self.measured += 1
        self.x += weight * (tokens - self.x)
        self.y += weight * (us - self.y)
        self.xx += weight * (tokens * tokens - self.xx)
        self.xy += weight * (tokens * us - self.xy)
        # Asked for several times before the next measurement.
        self.fixed, self.slope = self._fit()

    def learn_stretch(self, us_a_token: float) -> None:
        """Step towards the quantile by what keeps it there (stochastic approximation)."""
        self.stretches += 1
        if self.stretches == 1:
            self.stretch = us_a_token
        elif us_a_token > self.stretch:
            self.stretch *= 1 + _FOLLOW * _SHORTER
        else:
            self.stretch *= 1 - _FOLLOW * (1 - _SHORTER)

    def _fit(self) -> tuple[float, float]:
        """Fit time to size; where sizes do not differ or the fit is senseless, in proportion."""
        variance = self.xx - self.x * self.x
        if variance > (_SPREAD * self.x) ** 2:
            slope = (self.xy - self.x * self.y) / variance
            fixed = self.y - slope * self.x
            if slope > 0 and fixed > 0:
                return fixed, slope
        return 0.0, self.y / self.x


@dataclass(slots=True)
class _Queued:
    """Work time of one layer on a device that queues, as means with forgetting.

    Its kernels take `wait_us` at least and `overlap_us` more at most: while the host queues them,
    the device is at work or waits for the host, and nobody sees which. So a tasklet of twice the
    tokens is counted with twice their sum, of which the same part runs while it is queued.

    Attributes:
        measured: how often.
        tokens: of a tasklet.
        overlap_us: of its time on the device, while it was queued.
        wait_us: after that: what decode waits for where it asks for the device then.
    """

    measured: int = 0
    tokens: float = 0.0
    overlap_us: float = 0.0
    wait_us: float = 0.0

    def learn(self, tokens: float, overlap_us: float, wait_us: float) -> None:
        weight = FRESH if self.measured else 1.0
        if self.measured >= SETTLED:
            wait_us = min(wait_us, MOST_SURPRISE * self.us(tokens) + overlap_us)
        self.measured += 1
        self.tokens += weight * (tokens - self.tokens)
        self.overlap_us += weight * (overlap_us - self.overlap_us)
        self.wait_us += weight * (wait_us - self.wait_us)

    def us(self, tokens: float) -> float:
        """Return what decode would wait for with so many tokens, at most."""
        scale = tokens / self.tokens
        return scale * self.wait_us + max(0.0, scale - 1) * self.overlap_us

    def kernels_us(self, tokens: float) -> float:
        """Return how long kernels take at most."""
        return tokens / self.tokens * (self.overlap_us + self.wait_us)

    def tokens_within(self, bound_us: float) -> float:
        """Return with how many tokens `us` is that."""
        if bound_us < self.wait_us:
            return self.tokens * bound_us / self.wait_us
        both_us = self.overlap_us + self.wait_us
        return self.tokens * (self.overlap_us + bound_us) / both_us if both_us else self.tokens


class Estimates:
    """Measured times of tasklets in this slot, by phase and compute units."""

    def __init__(self) -> None:
        # By phase first: gate and offer ask for all levels of one phase, before each tasklet.
        self._levels: defaultdict[Phase, defaultdict[int, _Level]] = defaultdict(
            lambda: defaultdict(_Level)
        )
        self._queued: defaultdict[tuple[Phase, int], _Queued] = defaultdict(_Queued)
        self._last: defaultdict[Phase, deque[int]] = defaultdict(lambda: deque(maxlen=LAST))

    def learn(
        self, tasklet: Tasklet, units: int, elapsed_us: float, *, overlap_us: float = 0.0
    ) -> None:
        """Take one measurement into account; `overlap_us`: of it, while it was still queued."""
        key, size, parts = (tasklet.phase, units), _size(tasklet), tasklet.parts
        self._last[tasklet.phase].append(units)
        self._levels[tasklet.phase][units].learn(size, elapsed_us / parts)
        wait_us = max(0.0, elapsed_us - overlap_us)
        self._queued[key].learn(size, overlap_us / parts, wait_us / parts)

    def learn_stretch(self, tasklet: Tasklet, units: int, longest_us: float) -> None:
        """Note the longest time in a tasklet during which it could not be stopped."""
        if tasklet.micro is not None:
            self._levels[tasklet.phase][units].learn_stretch(longest_us / tasklet.tokens)

    def estimate_us(self, tasklet: Tasklet, units: int) -> int:
        """Microseconds on so many units; 0: never measured there."""
        return round(self._us(tasklet, units))

    def wait_us(self, tasklet: Tasklet, units: int) -> int:
        """Microseconds that decode waits for it at most, once a device has it in its queue.

        1 at least where it was measured on so many units; 0: it never was.
        """
        queued = self._queued.get((tasklet.phase, units))
        return max(1, round(tasklet.parts * queued.us(_size(tasklet)))) if queued else 0

    def kernels_us(self, tasklet: Tasklet, units: int) -> int:
        """Microseconds that its kernels take at most; 0: it was never measured on so many units."""
        queued = self._queued.get((tasklet.phase, units))
        return round(tasklet.parts * queued.kernels_us(_size(tasklet))) if queued else 0

    def expected_s(self, tasklet: Tasklet, weights: int) -> float:
        """Seconds on the slowest level where its phase was measured; before, by its products.

        `weights`: of a layer, or of the head.
        """
        levels = self._levels[tasklet.phase]
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
        levels = self._levels[tasklet.phase]
        for units in sorted((units for units in levels if units < granted), reverse=True):
            if min(levels[units].measured, levels[best].measured) < SETTLED:
                continue
            if self._us(tasklet, best) > WORTHWHILE * self._us(tasklet, units):
                best = units
        return best

    def by_level(self, tasklet: Tasklet, levels: Sequence[int]) -> tuple[int, ...]:
        """`estimate_us` for each of those numbers of units, as an offer holds them."""
        known = self._levels[tasklet.phase]
        return tuple([self.estimate_us(tasklet, n) if n in known else 0 for n in levels])

    def tokens_within(self, phase: Phase, bound_us: float) -> int:
        """Padded tokens with which one layer stays within `bound_us` on any level in use.

        At least 1 where anything is known; 0: nothing is.
        """
        return min(
            (
                max(1, int((bound_us - level.fixed) / level.slope))
                for level in self._in_use(phase)
                if level.measured
            ),
            default=0,
        )

    def tokens_queued_within(self, phase: Phase, bound_us: float) -> int:
        """Padded tokens of one layer for which decode waits `bound_us` at most, on any level.

        Of a device that queues; at least 1 where anything is known; 0: nothing is.
        """
        in_use = {units for last in self._last.values() for units in last}
        known = [queued for n in in_use if (queued := self._queued.get((phase, n))) is not None]
        return min((max(1, int(queued.tokens_within(bound_us))) for queued in known), default=0)

    def tokens_to_stop_within(self, phase: Phase, bound_us: float) -> int:
        """Padded tokens with which a layer of any level in use can be stopped within `bound_us`.

        0: too little is known.
        """
        known = [level.stretch for level in self._in_use(phase) if level.stretches >= SETTLED]
        return min((max(1, int(bound_us / stretch)) for stretch in known), default=0)

    def layer_us(self, phase: Phase, tokens: int) -> float:
        """Microseconds of one layer for so many padded tokens, on the fastest level in use.

        0: nothing is known.
        """
        levels = [level for level in self._in_use(phase) if level.measured]
        return min((level.fixed + level.slope * tokens for level in levels), default=0.0)

    def _in_use(self, phase: Phase) -> list[_Level]:
        """Return what is known of the phase on the numbers of units of the last tasklets."""
        units = {units for last in self._last.values() for units in last}
        return [level for n in units if (level := self._levels[phase].get(n)) is not None]

    def _us(self, tasklet: Tasklet, units: int) -> float:
        level = self._levels[tasklet.phase].get(units)
        return tasklet.parts * (level.fixed + level.slope * _size(tasklet)) if level else 0.0


def _size(tasklet: Tasklet) -> int:
    return tasklet.tokens if tasklet.micro else 1


# Of the bound on what is in flight: estimates are means, and the slowest of a hundred tasklets
# takes about a third more.
TARGET = 0.7
# Of the bound, for the longest stretch of a layer: what is kept of it is a high quantile already.
IN_TIME = 0.85
# Padded tokens of a tasklet before anything has been measured: short on any device.
FIRST_TOKENS = 32
# Fewer mostly pay for the call: a layer of a small model takes 1 ms for no tokens at all. Beside
# decode on two cores, windows of 24 to 34 tokens kept within 5.5 ms and made 1,200 tokens a second,
# one row of 200 at a time 2,373 (0.64 of the device alone), three rows 2,688 to 2,933 (0.68 to
# 0.77), four rows 2,983 (0.74). So the bound gives way to this, and a layer that is longer is held
# up between its modules (`suspension`), whose longest stretch is to stay within the bound.
LEAST_TOKENS = 896
# For that no tasklet gets smaller than this.
LEAST_TO_STOP = 448
# On a device that queues, a layer cannot be held up once it is queued, so the bound gives way to
# this alone. Products of fewer tokens read weights for as long as they multiply (H100: 295).
LEAST_QUEUED_TOKENS = 256


class TaskletSizing(Protocol):
    """Size of one tasklet in layers and tokens."""

    def cut(self, phase: Phase, micro: MicroBatch) -> int:
        """Return of how many tokens of each row a tasklet takes, at least one (see `orders`)."""

    def fits(self, tasklet: Tasklet) -> bool:
        """Return whether a tasklet that spans several layers is not too large."""


@dataclass(frozen=True, slots=True)  # two are equal: a lookahead goes on with either
class WholeRows:
    """Tasklets of all tokens and a fixed number of layers, for a device that nobody waits for.

    Attributes:
        layers: of a tasklet, at most; the losses of micro-batches are never joined.
    """

    layers: int = 1

    def cut(self, phase: Phase, micro: MicroBatch) -> int:
        """Return the whole width."""
        del phase
        return micro.width

    def fits(self, tasklet: Tasklet) -> bool:
        """Return whether it has no more layers than that."""
        return tasklet.parts <= self.layers


@dataclass(frozen=True, slots=True)
class Windows:
    """Tasklets of one layer and a fixed number of tokens of each row."""

    tokens: int

    def cut(self, phase: Phase, micro: MicroBatch) -> int:
        """Return it."""
        del phase, micro
        return self.tokens

    def fits(self, tasklet: Tasklet) -> bool:
        """No: a tasklet is a layer."""
        del tasklet
        return False


@dataclass(frozen=True, slots=True)
class Paced:
    """Tasklets as large as a time bound allows: a token window of a layer, or several layers.

    Attributes:
        estimates: of this slot.
        bound_us: on what is in flight.
        units: that are granted now.
        windows: whether rows may be cut.
        most_tokens: of a window, as the policy asks; 0: it does not.
        queues: whether a tasklet that has begun runs to its end, as on a device that queues them:
            the bound is on its work alone then, however long the host takes to queue it.
    """

    estimates: Estimates
    bound_us: int
    units: int
    windows: bool = True
    most_tokens: int = 0
    queues: bool = False

    def tokens(self, phase: Phase) -> int:
        """Padded tokens of one layer, over all rows; a window runs forward and back."""
        worst = Phase.LOSS if phase is Phase.LOSS else Phase.BACKWARD
        known = self._within(worst, TARGET * self.bound_us)
        if not known and worst is Phase.BACKWARD:
            # A backward takes about twice as long: the gradient of the input, and of the adapter.
            known = self._within(Phase.FORWARD, TARGET / 2 * self.bound_us)
        known = max(self._least(worst), known) if known else FIRST_TOKENS
        return min(known, self.most_tokens) if self.most_tokens else known

    def _within(self, phase: Phase, bound_us: float) -> int:
        if self.queues:
            return self.estimates.tokens_queued_within(phase, bound_us)
        return self.estimates.tokens_within(phase, bound_us)

    def _least(self, phase: Phase) -> int:
        """Tokens that a tasklet has in any case: fewer where it could not be stopped in time."""
        if self.queues:
            return LEAST_QUEUED_TOKENS
        in_time = self.estimates.tokens_to_stop_within(phase, IN_TIME * self.bound_us)
        return max(LEAST_TO_STOP, min(LEAST_TOKENS, in_time)) if in_time else LEAST_TOKENS

    def cut(self, phase: Phase, micro: MicroBatch) -> int:
        """Return the share of each row; even windows, since a short last one costs a whole call."""
        if not self.windows and phase is not Phase.LOSS:
            return micro.width
        most = max(1, self.tokens(phase) // micro.lines)
        return -(-micro.width // -(-micro.width // most))

    def fits(self, tasklet: Tasklet) -> bool:
        """Return whether it is known to take no longer than a tasklet should."""
        units = self.estimates.useful_units(tasklet, self.units)
        return 0 < self.estimates.estimate_us(tasklet, units) <= TARGET * self.bound_us


def micro_batches_a_visit(
    frozen: FrozenLayers | StreamedLayers | None, estimates: Estimates, tokens: int, most: int
) -> int:
    """Return how many micro-batches compute for as long as the next layer's transfer takes.

    One until a transfer and a forward have been, and where every layer stays in memory.

    Args:
        frozen: the layers; None: they do not take turns.
        estimates: of this device.
        tokens: padded ones of a micro-batch.
        most: that a step can have.
    """
    if frozen is None or frozen.all_fit:
        return 1
    compute_us = estimates.layer_us(Phase.FORWARD, tokens)
    if not compute_us or not frozen.bytes_per_s:
        return 1
    return min(most, micro_batches_to_hide(frozen.slot_bytes, frozen.bytes_per_s, compute_us / 1e6))


def most_that_fit(wanted: int, tokens: int, capacity_tokens: Callable[[int], int]) -> int:
    """Return how many of the wanted micro-batches fit at their full size.

    Args:
        wanted: one at least.
        tokens: of each, where there is room.
        capacity_tokens: of each, by how many there are.
    """
    tokens = min(tokens, capacity_tokens(1))
    return next((n for n in range(wanted, 1, -1) if capacity_tokens(n) >= tokens), 1)
