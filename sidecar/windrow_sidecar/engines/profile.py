"""Plan and fit the latency profile of decode alone.

Knows no engine: an engine measures the points and hands the samples in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from windrow_sidecar.qos.levels import Partitioning, PartitionLevel, spread_shares
from windrow_sidecar.qos.solo import SoloSample, fit_solo

_QUICK_BATCHES = (1, 4, 8, 16, 32)
_FULL_BATCHES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_QUICK_CONTEXTS = (256, 1024, 2048)
_FULL_CONTEXTS = (128, 256, 512, 1024, 2048, 4096)


# The first steps of a batch carry its admission, or find the caches cold.
WARM_UP_STEPS = 2


@dataclass(frozen=True, slots=True)
class Effort:
    """How much time goes into a profile."""

    rounds: int  # over all points; the lower median counts, for a disturbance only ever adds
    steps: int  # of which the median is taken, per point and round
    batches: tuple[int, ...]
    contexts: tuple[int, ...]  # tokens per request
    # Past it a point gets a third of the steps, and no second round is begun or finished: a late
    # profile is worse than a rough one.
    soft_limit_s: float


EFFORTS = {
    "quick": Effort(2, 8, _QUICK_BATCHES, _QUICK_CONTEXTS, soft_limit_s=6.0),
    "full": Effort(3, 24, _FULL_BATCHES, _FULL_CONTEXTS, soft_limit_s=120.0),
}


@dataclass(frozen=True, slots=True)
class Point:
    """One thing to measure: decode alone on `units`, `batch` requests of `context` tokens each."""

    units: int
    batch: int
    context: int


@dataclass(frozen=True, slots=True)
class Subject:
    """What a profile belongs to."""

    device: str
    driver: str
    engine: str
    engine_version: str
    model_fingerprint: str
    tensor_parallel: int = 1

    @property
    def key(self) -> str:
        """Names the profile; pods of one kind share it."""
        engine = f"{self.engine}-{self.engine_version}"
        return f"{self.device}/{engine}/{self.model_fingerprint[:16]}/tp{self.tensor_parallel}"


def host_splits(units: int) -> Partitioning:
    """Splits of a CPU set: each number of cores for the worker, at most as many as the page holds.

    On large sets they are spread evenly, from decode alone to one core for decode.
    """
    shares = spread_shares(units)
    return Partitioning(units, tuple(PartitionLevel(share, units - share) for share in shares))


def plan(
    levels: Partitioning, effort: Effort, *, max_batch: int, max_tokens: int, max_context: int
) -> list[Point]:
    """Return what to measure: every split by every batch and context that fits.

    Args:
        levels: the splits.
        effort: which batches and contexts.
        max_batch: requests at once.
        max_tokens: context tokens of a batch.
        max_context: of one request, the tokens that it generates meanwhile included.

    Without several contexts per batch the coefficients of batch and context cannot be told apart.
    """
    return [
        Point(units, batch, context)
        # A GPU's decode has the same units in every split: measured once.
        for units in dict.fromkeys(split.decode_units for split in levels.splits)
        for context in effort.contexts
        for batch in effort.batches
        if batch <= max_batch
        and batch * context <= max_tokens
        and context + effort.steps + WARM_UP_STEPS <= max_context
    ]


def document(
    subject: Subject, samples: Sequence[SoloSample], *, taken_at: datetime
) -> dict[str, Any]:
    """Fit each level; returns a LatencyProfileSpec as a mapping. Raises UserError for no sample."""
    return {
        "key": subject.key,
        "device": subject.device,
        "driver": subject.driver,
        "engine": subject.engine,
        "engineVersion": subject.engine_version,
        "modelFingerprint": subject.model_fingerprint,
        "tensorParallel": subject.tensor_parallel,
        "solo": [
            {
                "units": units,
                "c0Us": fit.model.c0_us,
                "b0Us": fit.model.b0_us,
                "k0NsPerToken": fit.model.k0_us * 1000,
                "medianAbsErrorPercent": fit.median_abs_error_percent,
            }
            for units, fit in fit_solo(samples).items()
        ],
        "samples": list(_rows(samples)),
        "takenAt": taken_at.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def _rows(samples: Iterable[SoloSample]) -> Iterable[dict[str, Any]]:
    for sample in samples:
        yield {
            "units": sample.units,
            "finetuneUnits": 0,
            "batch": sample.batch,
            "contextTokens": sample.context_tokens,
            "stepUs": sample.step_us,
        }
