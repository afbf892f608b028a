"""Cache measured steps by kind of step, in front of the linear predictor.

Source: LLMStation's record cache, a dictionary from batch and tasklet to measured latencies, with a
linear predictor for what it misses. Departure: a record holds measured over predicted instead of
microseconds, so that it is right for the whole of its bucket (batches up to the next power of two,
4,096 context tokens) and a miss is simply a correction of 1.
"""

from __future__ import annotations

# Records forget with this weight; fewer than so many steps are no record yet.
_WEIGHT, _ENOUGH = 0.05, 16
# A correction beyond this is a model that does not fit, which the margin is for.
_MOST = 1.25
_CAPACITY = 1024
CONTEXT_BITS = 12


class RecordCache:
    """Corrections by batch, context and phase of the worker's tasklet, one for each split."""

    def __init__(self, splits: int) -> None:
        self._splits = splits
        self._ratios: dict[tuple[int, int, int], list[float]] = {}
        self._seen: dict[tuple[int, int, int], list[int]] = {}
        self._known: dict[tuple[int, int, int], list[float]] = {}
        # The last correction that changed: batch bits, context, phase, split, ratio.
        self.newest: tuple[int, int, int, int, float] | None = None

    def corrections(self, batch: int, context_tokens: int, phase: int) -> list[float] | None:
        """Return the factors for each split's prediction; None: a miss."""
        return self._known.get(((batch - 1).bit_length(), context_tokens >> CONTEXT_BITS, phase))

    def add(self, split: int, batch: int, context_tokens: int, phase: int, *, ratio: float) -> None:
        """Keep how long a step took, over what the linear model says."""
        key = ((batch - 1).bit_length(), context_tokens >> CONTEXT_BITS, phase)
        ratios = self._ratios.get(key)
        if ratios is None:
            if len(self._ratios) >= _CAPACITY:
                return
            ratios = self._ratios[key] = [1.0] * self._splits
            self._seen[key] = [0] * self._splits
        seen = self._seen[key]
        seen[split] += 1
        # One disturbed step says nothing about its kind.
        ratio = max(1 / _MOST, min(_MOST, ratio))
        ratios[split] += max(_WEIGHT, 1 / seen[split]) * (ratio - ratios[split])
        if seen[split] >= _ENOUGH:
            known = self._known.setdefault(key, [1.0] * self._splits)
            known[split] = ratios[split]
            self.newest = (*key, split, ratios[split])

    def all_known(self) -> list[tuple[int, int, int, int, float]]:
        """Every correction, as `newest` has them."""
        return [
            (*key, split, ratio)
            for key, ratios in self._known.items()
            for split, ratio in enumerate(ratios)
        ]
