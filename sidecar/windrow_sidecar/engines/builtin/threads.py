"""Find by trying how many threads make a decode step fastest.

A step of a small model waits for memory. On two cores of one socket the second thread won 0 to 15%
of a quiet step, and lost twice the step whenever another process had its core at a barrier: under
load, steps of 9 ms with one thread took 20 to 30 ms with two.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# Threads must win this much, or they cost more in bad moments than they bring in good ones. Well
# above what they won at best, so that one machine does not choose differently at every start.
WORTH_IT = 0.3


class Threads:
    """Sets torch's threads for a number of cores, but never more than are useful."""

    def __init__(self, most: int = 0) -> None:
        """`most`: 0: no bound known yet."""
        self.most = most

    def __call__(self, cores: int) -> None:
        """Compute with so many threads from now on, or with the most that are useful."""
        torch.set_num_threads(min(cores, self.most) if self.most else cores)


def candidates(cores: int) -> list[int]:
    """1, 2, 4, ... and all cores."""
    powers = [1 << i for i in range(cores.bit_length()) if 1 << i < cores]
    return [*powers, cores]


def most_useful(cores: int, step_us: Callable[[int], float]) -> int:
    """The number of threads beyond which no candidate is worth its threads.

    `step_us` measures a step with that many threads.
    """
    best, best_us = 1, step_us(1)
    for threads in candidates(cores)[1:]:
        took_us = step_us(threads)
        if took_us < best_us * (1 - WORTH_IT):
            best, best_us = threads, took_us
    return best
