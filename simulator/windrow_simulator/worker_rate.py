"""The rate of a worker that its host and its device bound together, for the simulator."""

from __future__ import annotations

import math

# Between 1 (their times add up) and infinity (the lesser alone counts), as an H200's runs had it.
_SHARPNESS = 1.5


def joint_rate(one: float, other: float) -> float:
    """Return the rate of work that two things bound, each to a rate; infinite: it does not.

    Both bounds cost something where they are near each other, and the lesser alone counts where
    they are far apart.
    """
    least, most = sorted((one, other))
    if math.isinf(most) or least <= 0:
        return max(0.0, least)
    return float(least * (1 + (least / most) ** _SHARPNESS) ** (-1 / _SHARPNESS))


def other_bound(joint: float, one: float) -> float:
    """Return the second bound of a rate that two things bound, by the rate and the first bound.

    Infinite where the first one explains the rate.
    """
    if joint >= one:
        return math.inf
    return float(joint * (1 - (joint / one) ** _SHARPNESS) ** (-1 / _SHARPNESS))
