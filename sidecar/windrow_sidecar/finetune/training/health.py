"""Detect exploding gradients, and work that does not end."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from windrow.conditions import Reason
from windrow.errors import WindrowError


class Unhealthy(WindrowError):
    """Training has diverged or hangs; the last checkpoint remains."""

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


@dataclass(slots=True)  # frozen, it takes three times as long to make, before each tasklet
class _Begun:
    """Running work, never changed: its begin, the time before that did not count, and its limit.

    All times are seconds.
    """

    at_s: float
    lost_s: float
    what: str
    after_s: float


def waited_for_cores() -> dict[str, float]:
    """Return for how long each thread of this process was ready and had no core, seconds.

    Empty where the kernel does not count that. See Documentation/scheduler/sched-stats.rst.
    """
    found = {}
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError, ValueError, IndexError):  # it has just ended
            found[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    return found


# A tasklet may take so many times as long as it is expected to, and so long in any case: a machine
# that swaps, or whose clock was lowered, is slow and not stuck.
TASKLET_FACTOR, TASKLET_LEAST_S = 20.0, 60.0
_LOOK_EVERY_S = 5.0


class StallWatch:
    """Report work that does not end in time.

    Waiting for decode does not count, nor does the time in which the process was stopped or its
    threads waited for a core.

    Args:
        after_s: how long a tasklet, a row or a checkpoint may take.
        clock: monotonic seconds.
        waited: returns for how long each thread of the process has waited for a core so far,
            seconds by its number.
    """

    def __init__(
        self,
        after_s: float = 900.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        waited: Callable[[], Mapping[str, float]] = lambda: waited_for_cores(),
    ) -> None:
        self._after_s, self._clock, self._waited = after_s, clock, waited
        self._begun: _Begun | None = None
        self._lost_s = 0.0  # that did not count, until now; only the watching thread changes it
        self._looked: tuple[float, Mapping[str, float]] | None = None
        self._closing = threading.Event()
        self._tell: Callable[[Unhealthy], None] = lambda found: None

    def begin(self, what: str = "a tasklet", after_s: float | None = None) -> None:
        """Note that work begins now; `after_s`: how long it may take."""
        after_s = self._after_s if after_s is None else after_s
        self._begun = _Begun(self._clock(), self._lost_s, what, after_s)

    def begin_tasklet(self, expected_s: float | None) -> None:
        """A tasklet runs from now that is expected to take so long; None: nobody knows."""
        after_s = self._after_s
        if expected_s is not None:
            after_s = min(after_s, max(TASKLET_LEAST_S, TASKLET_FACTOR * expected_s))
        self.begin(after_s=after_s)

    def renew(self) -> None:
        """Restart its time: it makes progress."""
        if (begun := self._begun) is not None:
            self._begun = replace(begun, at_s=self._clock(), lost_s=self._lost_s)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Exclude the time in which running work waits for decode; its time restarts afterwards."""
        begun, self._begun = self._begun, None
        yield
        if begun is not None:
            self.begin(begun.what, begun.after_s)

    @contextmanager
    def during(self, what: str, after_s: float | None = None) -> Iterator[None]:
        """`begin`, and `end` however it ends."""
        self.begin(what, after_s)
        try:
            yield
        finally:
            self.end()

    def end(self) -> None:
        """Note that it has ended."""
        self._begun = None

    def stalled(self) -> Unhealthy | None:
        """Return what to say of work that does not end."""
        if (begun := self._begun) is None:
            return None
        if self._clock() - begun.at_s - (self._lost_s - begun.lost_s) < begun.after_s:
            return None
        detail = f"{begun.what} has not ended within {begun.after_s:.0f} s"
        return Unhealthy(Reason.NO_PROGRESS, detail)

    def look(self, every_s: float = _LOOK_EVERY_S) -> None:
        """Leave out what does not count since the last look; to be called every so often."""
        now_s, waited = self._clock(), self._waited()
        if self._looked is not None:
            before_s, before = self._looked
            passed_s = now_s - before_s
            # A process that was stopped does not look: it comes too late by as much.
            stopped_s = passed_s - every_s if passed_s > 2 * every_s else 0.0
            starved_s = max(
                (waited[n] - before[n] for n in waited.keys() & before.keys()), default=0
            )
            self._lost_s += min(passed_s, max(stopped_s, starved_s))
        self._looked = now_s, waited

    def watch(self, tell: Callable[[Unhealthy], None]) -> None:
        """Call `tell`, once, from a thread of its own; the stuck thread cannot."""
        every_s = min(_LOOK_EVERY_S, self._after_s)
        self._tell = tell

        def look() -> None:
            while not self._closing.wait(every_s):
                self.look(every_s)
                if (found := self.stalled()) is not None:
                    tell(found)
                    return

        threading.Thread(target=look, name="stall-watch", daemon=True).start()

    def found(self, what: Unhealthy) -> None:
        """Tell of work that does not end, as another watch has found it."""
        self._tell(what)

    def close(self) -> None:
        """Stop watching."""
        self._closing.set()
