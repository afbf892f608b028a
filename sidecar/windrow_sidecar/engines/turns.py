"""Hand the device to and fro between decode's thread and a finetune thread of the same process.

In-engine mode has no second process that the kernel could run beside decode. The finetune thread
computes only while it has the turn; decode's thread lends it and takes it back. So the two never
want the interpreter's lock at the same time while a step runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

from windrow_sidecar.engines.hook import LONGEST_GAP_NS
from windrow_sidecar.qos.hybrid_tokens import JoinedCost

# A finetune thread that does not wait for a turn now is busy with something other than
# a tasklet (a checkpoint, loading). Decode does not wait for it: a hand-over takes some 50 us.
_TAKEN_WITHIN_S = 0.001
# Between two points of a tasklet lie some milliseconds. Whatever takes longer (a machine that
# swaps, a kernel that hangs) must not hold decode up: it goes on beside it.
_GIVEN_BACK_WITHIN_S = 1.0
# A finetune thread of this process gives chunks back in its turn; moving one takes less than this.
SETTLES_NS = 1_000_000


def turn_end_ns(gap_until_ns: int, now_ns: int, *, owed: bool) -> int:
    """Return until when the finetune thread has a turn before a step; `now_ns`: it has none.

    Args:
        gap_until_ns: of the step's grant.
        now_ns: now, CLOCK_MONOTONIC as all here.
        owed: chunks are asked back: they come in a short turn in which nothing is computed.
    """
    until_ns = min(gap_until_ns, now_ns + LONGEST_GAP_NS)
    if until_ns > now_ns:
        return until_ns
    return now_ns + SETTLES_NS if owed else now_ns


class _State(Enum):
    """State of the turn."""

    DECODE = 0  # decode computes
    OFFERED = 1  # the finetune thread may take it
    TAKEN = 2  # the finetune thread computes
    RECALLED = 3  # it computes, and is to give the turn back at its next point


# Decode that has been silent for a second counts as gone.
_BEATS_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class IterationTurn:
    """Result of a turn of an iteration.

    Attributes:
        taken: whether the finetune thread had it.
        whole: whether that thread was through with it before it was recalled.
        back: False: it has not given the turn back in time, and computes still.
    """

    taken: bool
    whole: bool
    back: bool


class RidingStep(Protocol):
    """A decode step whose products finetune rows may join."""

    @property
    def done(self) -> float:
        """Share of the step that is computed, 0 to 1."""


Step = TypeVar("Step", bound=RidingStep)


@dataclass(frozen=True, slots=True)
class Ride(Generic[Step]):
    """A decode step that rides along with a turn.

    Attributes:
        step: whose products finetune rows may join.
        alone_ns: how long the step is predicted to take alone.
    """

    step: Step
    alone_ns: int

    @property
    def done_ns(self) -> int:
        """Time that decode needs no more, since a part of the step is done: the turn has it."""
        return round(self.alone_ns * self.step.done)


class Turns:
    """The turn of one engine's process. Decode's thread and one finetune thread share it.

    Attributes:
        lent: how many turns the finetune thread was offered before a step.
        rode: in how many of them a decode step shared a product with finetune rows.
        overdue: how often one was not given back in time.
        wants_ride: whether what the finetune thread runs next has products that a step could share.
        ride: of the turn that is lent now; None: nothing rides.
        by_iteration: whether a turn ends with the finetune iteration: the next forward waits for
            the next decode step.
        window_tokens: of a forward that it shares products with, at most; 0: no bound.
        hybrid: predicts iterations with shared products; None: nothing rides.
        policy: returns the name of the policy in force.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._state = _State.DECODE
        self._ended = False
        self.lent = self.rode = self.overdue = 0
        self.wants_ride = self.by_iteration = False
        self.ride: Ride[Any] | None = None
        self.window_tokens = 0
        self.hybrid: JoinedCost | None = None
        self.policy: Callable[[], str] = str

    # Decode's thread.

    def lend(self, until_ns: int, clock: Callable[[], int], ride: Ride[Any] | None = None) -> bool:
        """Let the finetune thread compute until then at most, and wait for it.

        Returns at once where that thread does not wait for a turn.

        Args:
            until_ns: end of the turn, by `clock`.
            clock: nanoseconds of CLOCK_MONOTONIC.
            ride: a decode step that rides along.

        Returns:
            False: the finetune thread has not come to a point in time, and computes still.
        """
        if not self.offer(ride):
            return self._state is _State.DECODE
        with self._changed:
            self._changed.wait_for(self._is_not(_State.OFFERED), _TAKEN_WITHIN_S)
            left_s = (until_ns - clock()) / 1e9
            if self._state is _State.TAKEN and left_s > 0:
                self._changed.wait_for(self._is_not(_State.TAKEN), left_s)
        return self.recall()

    def lend_iteration(
        self,
        until_ns: int,
        clock: Callable[[], int],
        ride: Ride[Any] | None,
        *,
        beat: Callable[[], object],
    ) -> IterationTurn:
        """Let the finetune thread run on to the end of its iteration, until then at most.

        A ride ends it as well: its turn is over once the step has its products behind it.

        Args:
            until_ns: end of the turn, by `clock`.
            clock: nanoseconds of CLOCK_MONOTONIC.
            ride: a decode step that rides along.
            beat: called before the turn and a few times a second: shows that decode lives.
        """
        beat()
        if not self.offer(ride):
            return IterationTurn(taken=False, whole=False, back=self._state is _State.DECODE)
        with self._changed:
            taken = self._changed.wait_for(self._is_not(_State.OFFERED), _TAKEN_WITHIN_S)
            while taken and self._state is _State.TAKEN and (left_ns := until_ns - clock()) > 0:
                left_s = min(left_ns / 1e9, _BEATS_EVERY_S)
                if not self._changed.wait_for(self._is_not(_State.TAKEN), left_s):
                    beat()
            whole = taken and self._state is _State.DECODE
        return IterationTurn(taken=taken, whole=whole, back=self.recall())

    def offer(self, ride: Ride[Any] | None = None) -> bool:
        """Let the finetune thread compute from now on; `recall` ends that.

        Returns:
            False: there is none any more, or it still has an earlier turn.
        """
        with self._changed:
            if self._ended or self._state is not _State.DECODE:
                return False
            self._state, self.ride = _State.OFFERED, ride
            self._changed.notify_all()
            return True

    def recall(self) -> bool:
        """Take the turn back; waits until the finetune thread is at its next point.

        Returns:
            False: it has not come there within a second. Decode goes on beside it.
        """
        with self._changed:
            if self._state is _State.OFFERED:
                self._state = _State.DECODE
            if self._state is _State.TAKEN:
                self._state = _State.RECALLED
                self._changed.wait_for(self._is_not(_State.RECALLED), _GIVEN_BACK_WITHIN_S)
                self.overdue += self._state is _State.RECALLED
            return self._state is _State.DECODE

    def end(self) -> None:
        """Lend no turn any more. Any thread may say so."""
        with self._changed:
            self._ended = True

    # The finetune thread.

    @property
    def held(self) -> bool:
        """True where the finetune thread may compute; False once the turn is recalled."""
        return self._state is _State.TAKEN

    def give_back(self) -> None:
        """Return the turn, if it was taken."""
        with self._changed:
            if self._state in (_State.TAKEN, _State.RECALLED):
                self._state = _State.DECODE
                self._changed.notify_all()

    def rest(self, timeout_s: float) -> bool:
        """Return the turn and wait for the next one.

        Returns:
            False: none has come within the timeout.
        """
        until_s = time.monotonic() + timeout_s
        with self._changed:
            if self._state in (_State.TAKEN, _State.RECALLED):
                self._state = _State.DECODE
                self._changed.notify_all()
            while self._state is not _State.OFFERED:
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(left_s)
            self._state = _State.TAKEN
            self._changed.notify_all()
            return True

    def _is_not(self, state: _State) -> Callable[[], bool]:
        return lambda: self._state is not state
