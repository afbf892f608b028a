"""Learn decode's latency profile, or check one that is reused, by the steps that it takes anyway.

A server that people use is not held up to be measured. While no worker runs beside it, decode takes
some of its steps on each of the shares that it would have beside one; medians of those steps make
the profile. A profile of an earlier start or another pod is compared with the first steps.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from windrow.errors import UserError
from windrow_sidecar.engines.profile import CHECK_LIMIT_PERCENT, several_batches
from windrow_sidecar.qos.levels import Partitioning
from windrow_sidecar.qos.solo import SoloSample, solo_models

# Steps in a row on one share: the first find the caches of other cores.
_BLOCK, _DROPPED = 12, 2
# Of a batch and a length of context, as many steps make a median; older ones are forgotten.
_KEPT, _ENOUGH = 48, 8
# Steps on each share before there is a profile at all.
_STEPS_NEEDED = 40
_CONTEXT_BUCKET = 512
# Steps by which a reused profile is judged.
_CHECKED = 24
# Of a step in the mean of the tokens that steps yield.
_TOKENS_WEIGHT = 1 / 32
# Once there is a profile, one block in so many goes to a share that has not seen such a batch yet.
_ONE_BLOCK_IN = 4


class SoloLearner:
    """Collects steps of decode alone and says when they tell something new. One thread.

    Attributes:
        units: the share that decode should take while it is alone; 0: all units.
    """

    def __init__(self, levels: Partitioning) -> None:
        self._shares = sorted({split.decode_units for split in levels.splits}, reverse=True)
        self._all = levels.units
        self._seen: dict[tuple[int, int, int], deque[tuple[int, int]]] = defaultdict(
            lambda: deque(maxlen=_KEPT)
        )
        self._steps = dict.fromkeys(self._shares, 0)
        self._in_block, self._blocks, self._known = 0, 0, 0
        self._several_batches = False
        self.units = 0

    @property
    def complete(self) -> bool:
        """True where every share has been seen often enough."""
        return all(n >= _STEPS_NEEDED for n in self._steps.values())

    def add(self, units: int, batch: int, context_tokens: int, latency_us: int) -> None:
        """One step of decode alone on `units`, of at least one request."""
        self._in_block += 1
        if self._in_block > _DROPPED and units == (self.units or self._all):
            self._steps[units] = self._steps.get(units, 0) + 1
            bucket = (units, batch, context_tokens // _CONTEXT_BUCKET)
            self._seen[bucket].append((context_tokens, latency_us))
        if self._in_block >= _BLOCK:
            self._in_block, self._blocks = 0, self._blocks + 1
            self.units = self._next_share(batch, context_tokens // _CONTEXT_BUCKET)

    def _next_share(self, batch: int, context_bucket: int) -> int:
        """Return the share for the next steps, after some with that batch and context."""
        if not self.complete:
            return min(self._shares, key=lambda share: self._steps[share])
        if self._blocks % _ONE_BLOCK_IN:
            return 0
        seen = {share: len(self._seen[share, batch, context_bucket]) for share in self._shares}
        behind = min(self._shares, key=lambda share: seen[share])
        return behind if seen[behind] < _ENOUGH else 0

    def news(self) -> Sequence[SoloSample] | None:
        """Samples for a new profile, when the steps since the last one cover new points.

        The first with several batches on each share count as new in any case: those before were
        good enough for this load, and for no other pod (`profile.several_batches`).
        """
        if not self.complete or self._in_block:
            return None
        full = [key for key, steps in self._seen.items() if len(steps) >= _ENOUGH]
        if len(full) <= self._known:
            return None
        if {units for units, _, _ in full} != set(self._shares):
            return None
        samples = [self._sample(key) for key in full]
        spans = several_batches(samples)
        if len(full) <= self._known * 1.25 and spans == self._several_batches:
            return None
        self._known, self._several_batches = len(full), spans
        return samples

    def _sample(self, key: tuple[int, int, int]) -> SoloSample:
        steps = self._seen[key]
        return SoloSample(
            units=key[0],
            batch=key[1],
            context_tokens=round(median(context for context, _ in steps)),
            step_us=max(1.0, median(latency for _, latency in steps)),
        )


class ReusedProfile:
    """Compares decode's steps alone on all units with what a profile of another start says of them.

    Args:
        profile: the profile, with a model for all units.
        units: of the device.
    """

    def __init__(self, profile: Mapping[str, Any], units: int) -> None:
        self.profile, self._model = profile, solo_models(profile)[units]
        self._noise = float(profile.get("noisePercent", 0.0))
        self._left, self._off = _DROPPED, list[float]()

    def add(self, batch: int, context_tokens: int, latency_us: int) -> bool:
        """Take one step of at least one request; returns True once there are enough of them."""
        if self._left:
            self._left -= 1
        else:
            expected_us = self._model.predict_us(batch, context_tokens)
            self._off.append(100 * abs(latency_us / max(1.0, expected_us) - 1))
        return len(self._off) >= _CHECKED

    def check(self) -> None:
        """Judge the steps so far. Raises UserError where they take other times than it says."""
        off, limit = median(self._off), CHECK_LIMIT_PERCENT + self._noise
        if off > limit:
            raise UserError(f"steps take {off:.0f}% other than it says; {limit:.0f}% would do")


class FullShareEstimate:
    """Estimates what smaller shares would take from steps on all units, which cost decode nothing.

    On a part of the units a step is taken to last longer in proportion, which is the most that it
    can: where memory is what it waits for it lasts less. So what a worker would get by it is a
    lower bound, good enough to observe by and never to harvest by.
    """

    def __init__(self, levels: Partitioning) -> None:
        self._shares = sorted({split.decode_units for split in levels.splits}, reverse=True)
        self._all = levels.units
        self._seen: dict[tuple[int, int], deque[tuple[int, int]]] = defaultdict(
            lambda: deque(maxlen=_KEPT)
        )
        self._steps, self._known = 0, 0

    def add(self, batch: int, context_tokens: int, latency_us: int) -> None:
        """One step of decode alone on all units, of at least one request."""
        self._steps += 1
        self._seen[batch, context_tokens // _CONTEXT_BUCKET].append((context_tokens, latency_us))

    def news(self) -> Sequence[SoloSample] | None:
        """Samples of every share, when the steps since the last ones cover other loads."""
        full = [key for key, steps in self._seen.items() if len(steps) >= _ENOUGH]
        if self._steps < _STEPS_NEEDED or len(full) <= self._known * 1.25:
            return None
        self._known = len(full)
        return [self._sample(share, key) for share in self._shares for key in full]

    def _sample(self, units: int, key: tuple[int, int]) -> SoloSample:
        steps = self._seen[key]
        return SoloSample(
            units=units,
            batch=key[0],
            context_tokens=round(median(context for context, _ in steps)),
            step_us=max(1.0, median(latency for _, latency in steps) * self._all / units),
        )


class StepTokens:
    """Counts the tokens that a step of a decode that speculates gives a request, on average.

    Attributes:
        mean: over the last steps, each of which counts alike; 1 before there is one.
    """

    def __init__(self) -> None:
        self.mean = 1.0
        self._steps = 0
        self._lengths: dict[str, int] = {}  # tokens of each request so far, by its ID

    def delivered(self, requests: Iterable[Any]) -> None:
        """Take note of a batch whose tokens have been delivered.

        A request's first tokens here are a prefill's, and those of one that had ended before are
        thrown away: neither counts.
        """
        tokens = n = 0
        for request in requests:
            length, before = len(request.output_ids), self._lengths.get(request.rid)
            if before is not None and length > before:
                tokens, n = tokens + length - before, n + 1
            if request.finished():
                self._lengths.pop(request.rid, None)
            else:
                self._lengths[request.rid] = length
        if n:
            self._steps += 1
            weight = max(_TOKENS_WEIGHT, 1 / self._steps)
            self.mean += weight * (tokens / n - self.mean)
