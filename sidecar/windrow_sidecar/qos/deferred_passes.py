"""Decide which passes over a streamed model carry a finetune batch (FineInfer, Alg. 2).

A pass that only decodes takes t_i, an iteration that carries a batch and runs it back t_f. Each
request has a bound on what it may wait for finetuning, all its tokens together. An iteration is
taken where no request passes its bound by it: for every r, d_r + t_f - t_i < bound.
"""

from __future__ import annotations

from collections.abc import Iterable

# Weight of the newest time: a machine has slow minutes, and contexts grow.
_NEWEST = 0.3


class DeferredPasses:
    """The rule, with the times that it goes by. One thread.

    Departure from the paper: times are measured while serving, and an iteration whose time is not
    known yet counts as one that costs nothing. What it takes in the end is bounded all the same:
    the engine takes the device back when the first request's bound is reached (`left_us`).

    Args:
        bound_us: that a request may wait for finetuning in all.
    """

    def __init__(self, bound_us: int) -> None:
        self.bound_us = bound_us
        self.alone_us = 0.0  # t_i; 0: not known yet
        self.iteration_us = 0.0  # t_f

    @property
    def extra_us(self) -> float:
        """Time that an iteration costs every request that waits for it: t_f - t_i, not below 0."""
        return max(0.0, self.iteration_us - self.alone_us) if self.iteration_us else 0.0

    @property
    def ever_carries(self) -> bool:
        """True where a request that has not waited yet may wait for an iteration."""
        return self.extra_us < self.bound_us

    def carries(self, deferred_us: Iterable[float]) -> bool:
        """Return whether the next pass carries a batch; `deferred_us`: d_r of every request."""
        return all(waited + self.extra_us < self.bound_us for waited in deferred_us)

    def left_us(self, deferred_us: Iterable[float]) -> float:
        """Return how long an iteration may take until the first request's bound is reached."""
        return max(0.0, self.bound_us - max(deferred_us, default=0.0)) + self.alone_us

    def ran_alone(self, took_us: float) -> None:
        """Learn from a pass that only decoded."""
        self.alone_us = _learned(self.alone_us, took_us)

    def ran_iteration(self, took_us: float, *, whole: bool) -> float:
        """Learn from an iteration; `whole`: False: it was cut short, and takes longer than that.

        Returns:
            what to add to d_r of every request that waited for it.
        """
        if whole:
            self.iteration_us = _learned(self.iteration_us, took_us)
        else:
            self.iteration_us = max(self.iteration_us, took_us)
        return max(0.0, took_us - self.alone_us)


def _learned(known: float, newest: float) -> float:
    return newest if not known else (1 - _NEWEST) * known + _NEWEST * newest
