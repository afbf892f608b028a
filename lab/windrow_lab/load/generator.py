"""Requests as they came to two services, seeded: `azure-conv-2023-like`, `azure-code-2023-like`.

They imitate the Azure traces of November 2023 (CC-BY-4.0, Patel et al., Splitwise, ISCA 2024) by
their figures. Of the conversation trace (19,366 requests in 3,502 s):

- arrivals: Poisson within 10 s windows, whose rate is log-normal and remembers the window before.
  Counts of 10 s have a variance of 3.86 times their mean, and neighbours correlate by 0.69;
- lengths: context tokens by their quantiles, generated tokens by their quantiles within each tenth
  of the contexts (the two are far from independent: prompts of 1,020 to 1,190 tokens get 400, the
  shortest and the longest get 75 to 150).

Of the code trace (8,819 requests in 3,436 s):

- arrivals: bursts and silence. Cut where nothing comes for 3 s, it has 72 bursts of 12.8 s in the
  mean, 9.6 requests a second within them, and 35.4 s between them (median 17.6 s). The rate
  within a burst changes so much that counts of 1 s and of 10 s have a variance of 13 and 72 times
  their means;
- lengths: context and generated tokens by their quantiles, the one independent of the other (the
  medians of generated tokens are 12 to 14 in every tenth of the contexts).
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterator
from itertools import takewhile
from typing import Literal

from windrow_lab.load.trace import TraceRequest

Like = Literal["conv", "code"]
NAMES: dict[Like, str] = {"conv": "azure-conv-2023-like", "code": "azure-code-2023-like"}
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
CODE_PER_SECOND = 2.567
BURST_S, SILENCE_MEDIAN_S, SILENCE_MEAN_S, SHORTEST_SILENCE_S = 12.8, 17.6, 35.4, 3.0
MOOD_S, MOOD_VARIATION = 4.0, 0.75  # of the rate within a burst
BURST_PER_SECOND = CODE_PER_SECOND * (BURST_S + SILENCE_MEAN_S) / BURST_S
CODE_CONTEXT = (
    (0, 3),
    (0.005, 12),
    (0.01, 17),
    (0.02, 35),
    (0.05, 75),
    (0.1, 147),
    (0.15, 232),
    (0.2, 385),
    (0.25, 578),
    (0.3, 770),
    (0.35, 938),
    (0.4, 1075),
    (0.45, 1261),
    (0.5, 1469),
    (0.55, 1690),
    (0.6, 1909),
    (0.65, 2164),
    (0.7, 2433),
    (0.75, 2745),
    (0.8, 3193),
    (0.85, 3923),
    (0.9, 5194),
    (0.95, 7315),
    (0.97, 7435),
    (1, 7437),
)
CODE_GENERATED = (
    (0, 6),
    (0.05, 6),
    (0.1, 7),
    (0.2, 8),
    (0.3, 9),
    (0.4, 11),
    (0.5, 13),
    (0.6, 16),
    (0.7, 20),
    (0.8, 29),
    (0.9, 55),
    (0.95, 90),
    (0.97, 128),
    (0.99, 252),
    (0.995, 361),
    (0.999, 831),
    (1, 1899),
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


def generate(
    *, per_second: float, seconds: float, seed: int, like: Like = "conv"
) -> list[TraceRequest]:
    """Return the requests of `seconds`, at a mean rate of `per_second`.

    Of `conv` the burstiness is the trace's own at the trace's rate; a scaled rate scales the rate
    of each window, as playing a trace faster would. `code` is played faster or slower as a whole.
    """
    draw = random.Random(seed)
    if like == "code":
        pace = per_second / CODE_PER_SECOND
        bursts = takewhile(lambda at_s: at_s < seconds, (at / pace for at in _bursts(draw)))
        return [TraceRequest(at_s, *_code_lengths(draw)) for at_s in bursts]
    arrivals = takewhile(lambda at_s: at_s < seconds, _arrivals(per_second, draw))
    return [TraceRequest(at_s, *_lengths(draw)) for at_s in arrivals]


def _bursts(draw: random.Random) -> Iterator[float]:
    """Yield arrivals at the code trace's own rate: bursts whose rate changes, then silence."""
    mean_s, median_s = (s - SHORTEST_SILENCE_S for s in (SILENCE_MEAN_S, SILENCE_MEDIAN_S))
    sigma = math.sqrt(2 * math.log(mean_s / median_s))  # log-normal above the shortest one
    begin_s = 0.0
    spread = math.sqrt(math.log1p(MOOD_VARIATION**2))
    while True:
        end_s = begin_s + draw.expovariate(1 / BURST_S)
        while begin_s < end_s:
            mood_ends_s = min(begin_s + MOOD_S, end_s)
            rate = BURST_PER_SECOND * math.exp(spread * draw.gauss(0, 1) - spread * spread / 2)
            at_s = begin_s + draw.expovariate(rate)
            while at_s < mood_ends_s:
                yield at_s
                at_s += draw.expovariate(rate)
            begin_s = mood_ends_s
        begin_s += SHORTEST_SILENCE_S + median_s * math.exp(sigma * draw.gauss(0, 1))


def _code_lengths(draw: random.Random) -> tuple[int, int]:
    drawn = [
        _quantile(at, values, draw.random())
        for at, values in ((_CODE_AT, _CODE_VALUES), (_CODE_OUT_AT, _CODE_OUT))
    ]
    return round(drawn[0]), round(drawn[1])


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


_CODE_AT = tuple(float(u) for u, _ in CODE_CONTEXT)
_CODE_VALUES = tuple(v for _, v in CODE_CONTEXT)
_CODE_OUT_AT = tuple(float(u) for u, _ in CODE_GENERATED)
_CODE_OUT = tuple(v for _, v in CODE_GENERATED)
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
