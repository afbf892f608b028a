"""Requests as they came to a conversation service: `azure-conv-2023-like`, seeded.

Imitates the Azure conversation trace of November 2023 (19,366 requests in 3,502 s; CC-BY-4.0,
Patel et al., Splitwise, ISCA 2024) by its figures:

- arrivals: Poisson within 10 s windows, whose rate is log-normal and remembers the window before.
  Counts of 10 s have a variance of 3.86 times their mean, and neighbours correlate by 0.69;
- lengths: context tokens by their quantiles, generated tokens by their quantiles within each tenth
  of the contexts (the two are far from independent: prompts of 1,020 to 1,190 tokens get 400, the
  shortest and the longest get 75 to 150).
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterator
from itertools import takewhile

from windrow.local.trace import TraceRequest

NAME = "azure-conv-2023-like"
TRACE_PER_SECOND = 5.53
WINDOW_S = 10.0
DISPERSION = 3.857  # variance / mean of the counts in 10 s
MEMORY = 0.93  # of the rate from window to window; counts then correlate by 0.69

CONTEXT = (
    (0, 2),
    (0.005, 16),
    (0.01, 29),
    (0.02, 91),
    (0.05, 181),
    (0.1, 207),
    (0.15, 372),
    (0.2, 387),
    (0.25, 396),
    (0.3, 403),
    (0.35, 414),
    (0.4, 703),
    (0.45, 984),
    (0.5, 1020),
    (0.55, 1045),
    (0.6, 1071),
    (0.65, 1097),
    (0.7, 1130),
    (0.75, 1189),
    (0.8, 1315),
    (0.85, 1876),
    (0.9, 2734),
    (0.95, 4083),
    (0.96, 4086),
    (0.97, 4090),
    (0.98, 4098),
    (0.985, 4110),
    (0.99, 4142),
    (0.995, 4831),
    (0.999, 6179),
    (1, 14050),
)
GENERATED_AT = (0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1)
GENERATED = (  # a row for each tenth of the contexts, shortest first
    (11, 12, 16, 66, 101, 122, 144, 161, 169, 182, 204, 217, 217, 294, 1000),
    (7, 14, 18, 18, 53, 62, 69, 76, 82, 92, 110, 162, 183, 217, 436),
    (24, 53, 72, 80, 86, 89, 92, 96, 100, 106, 114, 131, 143, 170, 200),
    (25, 51, 75, 81, 87, 91, 95, 99, 103, 109, 121, 140, 153, 200, 739),
    (10, 35, 57, 81, 104, 373, 389, 395, 401, 411, 422, 448, 513, 609, 921),
    (33, 64, 370, 379, 391, 396, 399, 406, 414, 420, 431, 477, 538, 667, 1000),
    (28, 51, 363, 377, 388, 395, 398, 407, 414, 426, 438, 500, 569, 661, 1000),
    (26, 42, 60, 92, 157, 207, 384, 396, 401, 412, 424, 453, 523, 643, 992),
    (15, 31, 44, 50, 63, 75, 85, 95, 108, 126, 149, 191, 233, 421, 918),
    (17, 26, 30, 35, 41, 46, 51, 58, 68, 79, 100, 132, 154, 255, 757),
)


def generate(*, per_second: float, seconds: float, seed: int) -> list[TraceRequest]:
    """Return the requests of `seconds`, at a mean rate of `per_second`.

    The burstiness is the trace's own at the trace's rate; a scaled rate scales the rate of each
    window, as playing a trace faster would.
    """
    draw = random.Random(seed)
    arrivals = takewhile(lambda at_s: at_s < seconds, _arrivals(per_second, draw))
    return [TraceRequest(at_s, *_lengths(draw)) for at_s in arrivals]


def _arrivals(per_second: float, draw: random.Random) -> Iterator[float]:
    excess = (DISPERSION - 1) / (TRACE_PER_SECOND * WINDOW_S)  # squared variation of the rate
    sigma = math.sqrt(math.log1p(excess))
    mood, begin_s = draw.gauss(0, 1), 0.0
    while True:
        rate = per_second * math.exp(sigma * mood - sigma * sigma / 2)
        at_s = begin_s + draw.expovariate(rate)
        while at_s < begin_s + WINDOW_S:
            yield at_s
            at_s += draw.expovariate(rate)
        begin_s += WINDOW_S
        mood = MEMORY * mood + math.sqrt(1 - MEMORY * MEMORY) * draw.gauss(0, 1)


def _lengths(draw: random.Random) -> tuple[int, int]:
    rank = draw.random()
    tenth = GENERATED[int(rank * len(GENERATED))]
    context = _quantile(_CONTEXT_AT, _CONTEXT_VALUES, rank)
    return round(context), round(_quantile(GENERATED_AT, tenth, draw.random()))


def _quantile(at: tuple[float, ...], values: tuple[int, ...], u: float) -> float:
    i = min(bisect_right(at, u) - 1, len(at) - 2)
    within = (u - at[i]) / (at[i + 1] - at[i])
    return values[i] + within * (values[i + 1] - values[i])


_CONTEXT_AT = tuple(float(u) for u, _ in CONTEXT)
_CONTEXT_VALUES = tuple(v for _, v in CONTEXT)


def dispersion(requests: list[TraceRequest]) -> float:
    """Return variance / mean of the counts in whole 10 s windows: 1 for plain Poisson."""
    edges = int(requests[-1].at_s // WINDOW_S)
    counts = [0] * edges
    for r in requests:
        if (window := int(r.at_s // WINDOW_S)) < edges:
            counts[window] += 1
    mean = sum(counts) / edges
    return sum((n - mean) ** 2 for n in counts) / edges / mean
