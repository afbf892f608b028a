"""Pause the worker when measured steps break the objective, whatever a policy says.

Two consecutive steps over the objective while the worker ran pause it for 50 ms and widen the
margin. So do requests that wait: an objective of each token allows slow steps, slow steps fill the
batch, and others find no place in it. A breaker gives up for a while when steps beside the worker
break the objective much more often than steps of decode alone, or when a CPU limit kept decode from
running beside it. The way back: after 10 s (twice as long each time, 160 s at most) it lets the
worker run again on trial, judged by a fresh window; a clean window of 1,600 steps puts the 10 s
back. Impossible input (a stale view, a stopped clock, a latency of NaN) pauses too. Time is an
argument.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from windrow_sidecar.qos.view import Grant, Offer, View

SECOND_NS = 1_000_000_000
# Beyond these a worker's figures cannot be meant: no model has as many layers, no tasklet as many
# tokens, no device as many bytes. Products of figures below them fit 64 bits.
OFFERED_LAYERS, OFFERED_TOKENS, OFFERED_BYTES = 1 << 20, 1 << 31, 1 << 50


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """Defaults as the design gives them; times in nanoseconds."""

    pause_ns: int = 50_000_000
    # Longer than a request waits that comes between two steps, short to who awaits a first token.
    queue_us: int = 50_000
    widen: float = 0.05  # added to the margin at each trip
    widen_max: float = 0.4
    widen_queued: float = 4.0  # for requests that wait: steps of a fifth of the objective
    widen_half_life_ns: int = 10 * SECOND_NS
    # The breaker: a percentile of 99 allows 1% of steps over the objective; five times that, beyond
    # what decode shows alone, over a window long enough that two bad steps do not make it.
    excess_factor: float = 5.0
    window_steps: int = 400
    min_steps: int = 200
    first_break_ns: int = 10 * SECOND_NS
    longest_break_ns: int = 160 * SECOND_NS
    # A view describes the step that starts now; a second is longer than any step of an objective.
    stale_ns: int = SECOND_NS
    # Two decisions may fall into one tick of a coarse clock, and three do not.
    standing_clock: int = 3
    # Ten minutes; no decode step takes as long.
    longest_step_us: float = 6e8


class _Rate:
    """Share of the last steps that were over the objective, exponentially forgotten."""

    __slots__ = ("_decay", "seen", "share")

    def __init__(self, window_steps: int) -> None:
        self._decay = 1.0 / window_steps
        self.seen, self.share = 0, 0.0

    def add(self, over: bool) -> None:
        self.seen += 1
        # A plain mean until the window is full: the first step must not weigh as much as 400.
        self.share += (over - self.share) * max(self._decay, 1.0 / self.seen)

    def clear(self) -> None:
        self.seen, self.share = 0, 0.0


class Guard:
    """Watches latencies; says whether the worker may run now and how much margin to add."""

    def __init__(self, settings: GuardSettings | None = None) -> None:
        self._settings = settings or GuardSettings()
        self._beside = _Rate(self._settings.window_steps)
        self._alone = _Rate(self._settings.window_steps)
        self._over_in_a_row = 0
        self._beside_step = (0, 0.0)  # objective and latency of the last one, us
        self._extra, self._extra_at_ns = 0.0, 0
        self._paused_until_ns, self._for_queue = 0, False
        self._open_until_ns = 0
        self._break_ns = self._settings.first_break_ns
        self._allowed_share = 0.01
        self._last_now_ns, self._standing = 0, 0
        self.reason = ""  # why harvesting has given up; empty while it has not
        self.trips = 0

    @property
    def settings(self) -> GuardSettings:
        """Settings as passed at construction."""
        return self._settings

    def set_percentile(self, percentile: float) -> None:
        """Set the percentile of the objective: 99 allows one step in a hundred to be over it."""
        self._allowed_share = max(0.0, 1.0 - percentile / 100.0)

    def extra_margin(self, now_ns: int) -> float:
        """Return what trips added to the predictor's margin; fades by half every ten seconds."""
        if self._extra == 0.0:
            return 0.0
        age = (now_ns - self._extra_at_ns) / self._settings.widen_half_life_ns
        return self._extra * 2.0**-age if age < 10 else 0.0

    def doubt(self, view: View, offer: Offer, predicted_us: Sequence[float], now_ns: int) -> str:
        """Return why these figures allow no decision, in a few words; "" where they do."""
        settings = self._settings
        self._standing = 0 if now_ns > self._last_now_ns else self._standing + 1
        backwards = now_ns < self._last_now_ns
        self._last_now_ns = now_ns
        if backwards or self._standing >= settings.standing_clock:
            return "the clock stands still"
        if view.start_ns and not -settings.stale_ns < now_ns - view.start_ns < settings.stale_ns:
            return "the view is stale"
        if not (
            view.batch >= 0
            and view.context_tokens >= 0
            and 0 < view.objective_us < settings.longest_step_us
            and math.isfinite(view.slack_us)
        ):
            return "the view holds impossible figures"
        for step_us in predicted_us:
            if not 0 < step_us < settings.longest_step_us:
                return "the prediction is impossible"
        if not (
            0 <= offer.layer_begin < OFFERED_LAYERS
            and 0 <= offer.layer_end < OFFERED_LAYERS
            and 0 <= offer.tokens < OFFERED_TOKENS
            and offer.memory_delta_bytes < OFFERED_BYTES
            and all(0 <= us < settings.longest_step_us for us in offer.estimates_us)
        ):
            return "the offer holds impossible figures"
        return ""

    def allows(self, wish: Grant, most_units: int, most_gap_ns: int, most_hold_ns: int) -> bool:
        """Return whether a wish keeps the hard limits: units, and how long decode may wait.

        `most_gap_ns`, `most_hold_ns`: the latest moments of CLOCK_MONOTONIC.
        """
        return (
            0 < wish.finetune_units <= most_units
            and wish.gap_until_ns <= most_gap_ns
            and wish.hold_admission_until_ns <= most_hold_ns
        )

    def distrust(self, now_ns: int) -> None:
        """Take note of a step whose latency cannot be: the worker pauses, nothing is learned."""
        self._pause(now_ns)

    def queued(self, now_ns: int, waited_us: int) -> None:
        """Take note that requests have waited for a place in decode for so long without a break."""
        if waited_us < self._settings.queue_us:
            return
        if now_ns >= self._paused_until_ns:
            # Steps a tenth shorter than those that could not keep up.
            objective_us, step_us = self._beside_step
            shorter = objective_us / (0.9 * step_us) - 1 if step_us else 0.0
            self._widen(now_ns, at_least=min(self._settings.widen_queued, shorter))
        self._pause(now_ns, for_queue=True)

    def pauses(self, now_ns: int) -> bool:
        """Return whether late steps or waiting requests hold the worker at this moment."""
        return now_ns < self._paused_until_ns

    def may_run(self, now_ns: int) -> bool:
        """Return whether the worker may run at this moment, whatever a policy says."""
        if self.pauses(now_ns):
            return False
        if self.reason and now_ns >= self._open_until_ns:
            self.begin_trial()
        return not self.reason

    @property
    def why_paused(self) -> str:
        """Reason where `may_run` is False: breaker, waiting requests, late steps."""
        if self.reason:
            return "breaker"
        return "queue" if self._for_queue else "guard"

    def throttled(self, now_ns: int, seconds: float) -> None:
        """Give up for a while: a CPU limit has kept decode from running beside the worker.

        Limits are counted in periods of 100 ms, so decode stops for longer than any margin covers,
        and what the worker takes of the pod's limit decode lacks.
        """
        if self.reason:
            return
        self.reason = (
            f"its CPU limit kept decode from running for {seconds * 1000:.0f} ms beside the "
            "worker: raise resources.limits.cpu of decode's container, or harvest fewer cores"
        )
        self._open(now_ns)

    def begin_trial(self) -> None:
        """Half-open: the worker runs again on trial, judged by a fresh window of its own."""
        self.reason = ""
        self._beside.clear()

    @property
    def state(self) -> tuple[float, int, int, int, bool, bool]:
        """State that a decision needs.

        Margin added and when, paused until, open until, open, paused for requests that wait.
        """
        return (
            self._extra,
            self._extra_at_ns,
            self._paused_until_ns,
            self._open_until_ns,
            bool(self.reason),
            self._for_queue,
        )

    def observe(
        self, now_ns: int, *, latency_us: float, objective_us: int, harvested: bool
    ) -> None:
        """Take note of a finished step; `harvested`: the worker was granted units during it."""
        over = latency_us > objective_us > 0
        if harvested:
            self._beside_step = (objective_us, latency_us)
        (self._beside if harvested else self._alone).add(over)
        self._over_in_a_row = self._over_in_a_row + 1 if over and harvested else 0
        if self._over_in_a_row >= 2:
            self._trip(now_ns)
        if over and harvested:
            self._judge(now_ns)
        elif harvested and self._beside.seen == 4 * self._settings.window_steps:
            self._break_ns = self._settings.first_break_ns  # long enough without a break

    def _trip(self, now_ns: int) -> None:
        self._widen(now_ns)
        self._pause(now_ns)
        self._over_in_a_row = 0
        self.trips += 1

    def _pause(self, now_ns: int, *, for_queue: bool = False) -> None:
        self._paused_until_ns = now_ns + self._settings.pause_ns
        self._for_queue = for_queue

    def _widen(self, now_ns: int, at_least: float = 0.0) -> None:
        settings, before = self._settings, self.extra_margin(now_ns)
        wider = min(settings.widen_max, before + settings.widen)
        self._extra = max(before, wider, at_least)
        self._extra_at_ns = now_ns

    def _judge(self, now_ns: int) -> None:
        settings, beside = self._settings, self._beside
        bound = self._alone.share + settings.excess_factor * self._allowed_share
        if self.reason or beside.seen < settings.min_steps or beside.share <= bound:
            return
        self.reason = (
            f"{beside.share:.1%} of {min(beside.seen, settings.window_steps)} steps beside the "
            f"worker broke the objective, {self._alone.share:.1%} of those without"
        )
        self._open(now_ns)

    def _open(self, now_ns: int) -> None:
        """Open the breaker, each time for twice as long."""
        self._open_until_ns = now_ns + self._break_ns
        self._break_ns = min(2 * self._break_ns, self._settings.longest_break_ns)
