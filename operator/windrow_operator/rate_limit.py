"""Bound how often something is done: a bucket that fills with time, and a memory that forgets.

Time is an argument, in seconds of any clock that never goes back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Value = TypeVar("Value")


@dataclass(slots=True)
class TokenBucket:
    """Allows `burst` at once and `per_second` in the long run.

    Attributes:
        per_second: how fast it fills.
        burst: what it holds.
        level: what is in it.
        at_s: when that was so.
    """

    per_second: float
    burst: float
    level: float
    at_s: float

    @classmethod
    def full(cls, per_second: float, burst: float, now_s: float) -> TokenBucket:
        """Return a bucket that nothing was taken from yet."""
        return cls(per_second, burst, burst, now_s)

    def take(self, cost: float, now_s: float) -> float:
        """Take `cost`; return the seconds to wait until the bucket would have held it, or 0."""
        self.level = self.level_at(now_s) - cost
        self.at_s = now_s
        return max(0.0, -self.level / self.per_second)

    def level_at(self, now_s: float) -> float:
        """Return what is in it at `now_s`."""
        return min(self.burst, self.level + self.per_second * max(0.0, now_s - self.at_s))


class Forgetful(Generic[Value]):
    """Values by key, each for `seconds`, and no more than `most`: the oldest goes first."""

    def __init__(self, seconds: float, most: int) -> None:
        self._seconds, self._most = seconds, most
        self._held: OrderedDict[Hashable, tuple[float, Value]] = OrderedDict()

    def __len__(self) -> int:
        """Return how many are held."""
        return len(self._held)

    def get(self, key: Hashable, now_s: float) -> Value | None:
        """Return the value of a key; None: there is none any more."""
        held = self._held.get(key)
        if held is None or now_s - held[0] >= self._seconds:
            return None
        return held[1]

    def put(self, key: Hashable, value: Value, now_s: float) -> None:
        """Keep a value from now on."""
        self._held.pop(key, None)
        self._held[key] = (now_s, value)
        while len(self._held) > self._most:
            self._held.popitem(last=False)
