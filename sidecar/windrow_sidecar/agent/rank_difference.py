"""Say in one line how the ranks of an engine differ, from their figures of two reports."""

from __future__ import annotations

from collections.abc import Sequence

from windrow.proto.agent_pb2 import RankStats

# A rank that computes half as long again as another has other work, or a slower part of the device;
# less is what schedulers and caches make of equal work.
_UNEVEN = 1.5
# Of less computing in a report's time a ratio says nothing.
_LEAST_SECONDS = 0.05


def rank_difference(before: Sequence[RankStats], now: Sequence[RankStats]) -> str:
    """Return how ranks differ; "": they do not, there is one, or it is too early to say.

    Args:
        before: figures of each rank in the report before, in their order.
        now: those of the newest report.
    """
    if len(now) < 2 or len(before) != len(now):
        return ""
    found = []
    computed = [b.computed_seconds - a.computed_seconds for a, b in zip(before, now, strict=True)]
    slowest, least = computed.index(max(computed)), computed.index(min(computed))
    if min(computed) > 0 and computed[slowest] >= max(_LEAST_SECONDS, _UNEVEN * computed[least]):
        ratio = computed[slowest] / computed[least]
        found.append(f"rank {slowest} computes {ratio:.1f} times as long as rank {least}")
    # One report alone may fall between the answers of two ranks.
    lent = [min(a.chunks_lent, b.chunks_lent) for a, b in zip(before, now, strict=True)]
    most = lent.index(max(lent))
    fewest = [max(a.chunks_lent, b.chunks_lent) for a, b in zip(before, now, strict=True)]
    other = fewest.index(min(fewest))
    if (more := lent[most] - fewest[other]) > 0:
        found.append(f"the worker of rank {most} has {more} more chunks than that of rank {other}")
    return "; ".join(found)
