"""Measure what a worker costs decode's steps from the steps that policies grant it anyway.

Nothing is benchmarked outside a grant: an engine that people use is not held up for it. The steps
are those throughout which the worker had one share of the device and its own tasklets ran, so that
the co-run part of a latency profile is of the job's real work, on cores and on a GPU alike.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from statistics import median

from windrow_sidecar.engines.profile import several_batches
from windrow_sidecar.qos.co_run import CoRunSample
from windrow_sidecar.qos.levels import Partitioning
from windrow_sidecar.qos.solo import SoloSample

# Of a share, a batch and a length of context, as many steps make a median; older ones are
# forgotten.
_KEPT, _ENOUGH = 64, 16
_CONTEXT_BUCKET = 512
# By how much what is known has to grow until it is reported again.
_GROWTH = 1.25
# Kinds of steps that are remembered at once: a load that never repeats would fill the memory.
_MOST_KINDS = 512


class StepsBeside:
    """Collects decode's steps beside a worker. One thread, but for reading `samples`.

    Attributes:
        samples: medians of the kinds of steps that had been seen often enough at the last news;
            replaced as a whole.
    """

    def __init__(self, levels: Partitioning) -> None:
        self._splits = levels.splits
        self._seen: dict[tuple[int, int, int], deque[tuple[int, float]]] = defaultdict(
            lambda: deque(maxlen=_KEPT)
        )
        self._reported = 0
        self.samples: tuple[CoRunSample, ...] = ()

    def add(self, steps: Iterable[tuple[int, int, int, float]]) -> None:
        """Take steps: the index of the split, batch, context tokens of it, and microseconds."""
        for split, batch, context_tokens, latency_us in steps:
            kind = (split, batch, context_tokens // _CONTEXT_BUCKET)
            if kind in self._seen or len(self._seen) < _MOST_KINDS:
                self._seen[kind].append((context_tokens, latency_us))

    def news(self, tokens_per_second: Callable[[int], float]) -> bool:
        """Return whether `samples` have grown enough to report, and bring them up to date.

        Steps of a single batch size say too little of others: alone they are never news.

        Args:
            tokens_per_second: what the worker computes on so many units; 0: not known.
        """
        full = [kind for kind, steps in self._seen.items() if len(steps) >= _ENOUGH]
        if len(full) <= self._reported * _GROWTH:
            return False
        samples = tuple(self._sample(kind, tokens_per_second) for kind in full)
        if not several_batches([sample.step for sample in samples]):
            return False
        self._reported, self.samples = len(full), samples
        return True

    def _sample(
        self, kind: tuple[int, int, int], tokens_per_second: Callable[[int], float]
    ) -> CoRunSample:
        split, steps = self._splits[kind[0]], self._seen[kind]
        step = SoloSample(
            units=split.decode_units,
            batch=kind[1],
            context_tokens=round(median(context for context, _ in steps)),
            step_us=max(1.0, median(latency for _, latency in steps)),
        )
        return CoRunSample(step, split.finetune_units, tokens_per_second(split.finetune_units))
