"""Detect exploding gradients, and work that does not end."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from windrow.conditions import Reason
from windrow.errors import WindrowError


class Unhealthy(WindrowError):
    """Training has diverged or hangs; the last checkpoint stands."""

    def __init__(self, reason: Reason, detail: str) -> None:
        self.reason = reason
        super().__init__(detail)


@dataclass(frozen=True, slots=True)
class NormLimits:
    """Limits above which a gradient norm counts as an explosion.

    Clipping makes one outlier harmless; a run of them means that the adapter has left the region
    where its gradient says anything.
    """

    factor: float = 100.0  # times the median of the steps before
    in_a_row: int = 3
    window: int = 50  # steps that the median is of
    warm_up: int = 10  # steps that are needed for a median


class GradientWatch:
    """Compare each gradient norm with those of the steps before."""

    def __init__(self, limits: NormLimits | None = None) -> None:
        self._limits = limits or NormLimits()
        self._usual: deque[float] = deque(maxlen=self._limits.window)
        self._outliers = 0

    def see(self, step: int, norm: float) -> None:
        """Note the norm before clipping of step `step`.

        Raises:
            Unhealthy: it is the last of a run of outliers.
        """
        usual = statistics.median(self._usual) if len(self._usual) >= self._limits.warm_up else 0.0
        if not usual or norm <= self._limits.factor * usual:
            self._usual.append(norm)
            self._outliers = 0
            return
        self._outliers += 1
        if self._outliers >= self._limits.in_a_row:
            raise Unhealthy(
                Reason.GRADIENT_EXPLODED,
                f"the gradient's norm is {norm:.3g} at step {step}, usual were {usual:.3g}; "
                "a lower learning rate or a longer warm-up may help",
            )


# A model of 140 GB from a disk that gives 50 MB/s takes 47 minutes.
LOADING, LOADING_AFTER_S = "loading the model", 3600.0
TAKING_FOLDER, READING = "taking the job's folder", "reading the rows"
VERIFYING, ATTACHING = "reading the last checkpoint", "attaching to the model"
LAST_CHECKPOINT = "the last checkpoint"


class StallWatch:
    """Report work that does not end in time; waiting for decode does not count.

    Args:
        after_s: how long a tasklet, a row or a checkpoint may take.
        clock: monotonic seconds.
    """

    def __init__(
        self, after_s: float = 900.0, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._after_s, self._clock = after_s, clock
        self._begun: tuple[float, str, float] | None = None  # when, what, how long it may take
        self._closing = threading.Event()

    def begin(self, what: str = "a tasklet", after_s: float | None = None) -> None:
        """Something runs from now; `after_s`: how long it may."""
        self._begun = self._clock(), what, self._after_s if after_s is None else after_s

    def renew(self) -> None:
        """It is getting on: its time begins anew."""
        if (begun := self._begun) is not None:
            self._begun = self._clock(), *begun[1:]

    @contextmanager
    def during(self, what: str, after_s: float | None = None) -> Iterator[None]:
        """`begin`, and `end` however it ends."""
        self.begin(what, after_s)
        try:
            yield
        finally:
            self.end()

    def end(self) -> None:
        """It has ended."""
        self._begun = None

    def stalled(self) -> Unhealthy | None:
        """Return what to say of work that does not end."""
        if (begun := self._begun) is None:
            return None
        since, what, after_s = begun
        if self._clock() - since < after_s:
            return None
        return Unhealthy(Reason.NO_PROGRESS, f"{what} has not ended within {after_s:.0f} s")

    def watch(self, tell: Callable[[Unhealthy], None]) -> None:
        """Call `tell`, once, from a thread of its own; the stuck thread cannot."""

        def look() -> None:
            while not self._closing.wait(min(5.0, self._after_s)):
                if (found := self.stalled()) is not None:
                    tell(found)
                    return

        threading.Thread(target=look, name="stall-watch", daemon=True).start()

    def close(self) -> None:
        """Stop watching."""
        self._closing.set()
