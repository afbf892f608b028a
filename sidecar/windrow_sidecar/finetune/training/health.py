"""When a training has gone wrong: gradients that explode, work that does not come to an end."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from windrow.conditions import Reason
from windrow.errors import WindrowError


class Unhealthy(WindrowError):
    """Training on makes nothing better; the last checkpoint stands."""

    def __init__(self, reason: Reason, detail: str) -> None:
        self.reason = reason
        super().__init__(detail)


@dataclass(frozen=True, slots=True)
class NormLimits:
    """What counts as an explosion.

    Clipping makes one outlier harmless; a run of them means that the adapter has left the region
    where its gradient says anything.
    """

    factor: float = 100.0  # times the median of the steps before
    in_a_row: int = 3
    window: int = 50  # steps that the median is of
    warm_up: int = 10  # steps that are needed for a median


class GradientWatch:
    """Follows the norms of a job's gradients."""

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


class StallWatch:
    """Notices a tasklet that does not end; the waiting for decode is none.

    Args:
        after_s: how long a tasklet may take.
        clock: monotonic seconds.
    """

    def __init__(
        self, after_s: float = 900.0, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._after_s, self._clock = after_s, clock
        self._begun: float | None = None
        self._closing = threading.Event()

    def begin(self) -> None:
        """A tasklet runs from now."""
        self._begun = self._clock()

    def end(self) -> None:
        """It has ended."""
        self._begun = None

    def stalled(self) -> Unhealthy | None:
        """Return what to say of a tasklet that does not end."""
        begun = self._begun
        if begun is None or self._clock() - begun < self._after_s:
            return None
        return Unhealthy(
            Reason.NO_PROGRESS, f"a tasklet has not ended within {self._after_s:.0f} s"
        )

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
