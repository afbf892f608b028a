"""Whose turn it is among jobs that share a base model: decisions over plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# A turn lasts so many times as long as the switch that began it took: switching costs 5% at most.
TURN_PER_SWITCH = 20.0


@dataclass(frozen=True, slots=True)
class Standing:
    """One job among others.

    Attributes:
        tokens: that it has had so far in this worker, evaluations included.
        weight: of its share; 1 is usual.
        may_run: nothing holds it back but the device.
    """

    tokens: int
    weight: float = 1.0
    may_run: bool = True


def next_turn(jobs: Sequence[Standing]) -> int | None:
    """Return the index of the job that is furthest behind its share; None: none may run.

    Tokens differ by at most one turn over the weight, whatever the steps' sizes.
    """
    waiting = [i for i, job in enumerate(jobs) if job.may_run]
    return min(waiting, key=lambda i: (jobs[i].tokens / jobs[i].weight, i), default=None)


def turn_is_over(turn_s: float, switch_s: float) -> bool:
    """Whether a turn has lasted long enough to be worth the switch that began it."""
    return turn_s >= TURN_PER_SWITCH * switch_s


def fair_start(weight: float, others: Sequence[Standing]) -> int:
    """Return the tokens that count as had already of a job that joins `others`.

    As many as the one has that is furthest behind: else all would wait until it has caught up.
    """
    return int(weight * min((job.tokens / job.weight for job in others), default=0.0))
