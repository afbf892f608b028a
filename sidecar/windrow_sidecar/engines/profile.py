"""Plan, fit and check a latency profile: decode alone and beside a load.

Knows no engine: an engine measures the points and hands the samples in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from windrow.errors import UserError
from windrow_sidecar.qos.co_run import CoRunFactors, CoRunSample, fit_co_run
from windrow_sidecar.qos.levels import Partitioning, PartitionLevel, spread_shares
from windrow_sidecar.qos.solo import (
    BATCH_FLOOR,
    SoloSample,
    SoloStepModel,
    fit_solo,
    solo_models,
)

_QUICK_BATCHES = (1, 4, 8, 16, 32)
_FULL_BATCHES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_QUICK_CONTEXTS = (256, 1024, 2048)
_FULL_CONTEXTS = (128, 256, 512, 1024, 2048, 4096)


# The first steps of a batch carry its admission, or find the caches cold.
WARM_UP_STEPS = 2


@dataclass(frozen=True, slots=True)
class Effort:
    """Time budget of a profile."""

    rounds: int  # over all points; the lower median counts, for a disturbance only ever adds
    steps: int  # of which the median is taken, per point and round
    batches: tuple[int, ...]
    contexts: tuple[int, ...]  # tokens per request
    # Past it a point gets a third of the steps, and no second round is begun or finished: a late
    # profile is worse than a rough one.
    soft_limit_s: float
    # Past it what is left of the first round is left out, once each share has a few points.
    hard_limit_s: float = math.inf
    co_run_limit_s: float = 0.0  # for steps beside a load; 0: none are measured


# `full` ends within a minute: all points have 40 s, steps beside a load 15.
EFFORTS = {
    "quick": Effort(2, 8, _QUICK_BATCHES, _QUICK_CONTEXTS, soft_limit_s=6.0, hard_limit_s=20.0),
    "full": Effort(
        3,
        24,
        _FULL_BATCHES,
        _FULL_CONTEXTS,
        soft_limit_s=30.0,
        hard_limit_s=40.0,
        co_run_limit_s=15.0,
    ),
}
_CO_RUN_BATCHES, _CO_RUN_CONTEXTS = (4, 16, 32), (512, 2048)
_TURNS = 3
# With fewer points of a share its three coefficients could not be separated.
LEAST_POINTS = 6
# A profile whose steps scatter by more than this around their median tells little about a device.
# A quiet host shows 1 to 5%, one with as many busy processes as cores 30% and more.
NOISE_LIMIT_PERCENT = 15.0
# How far the steps that check a stored profile may be from it, beyond its own noise: as much as
# the margin that a predictor starts with.
CHECK_LIMIT_PERCENT = 8.0


@dataclass(frozen=True, slots=True)
class Point:
    """One thing to measure: decode alone on `units`, `batch` requests of `context` tokens each."""

    units: int
    batch: int
    context: int


@dataclass(frozen=True, slots=True)
class CoRunPoint:
    """One thing to measure beside a load on `finetune_units`."""

    alone: Point
    finetune_units: int


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """The median step of a point, and how far its steps scatter.

    Attributes:
        scatter_percent: half of their interquartile range, of the median; None: of too few steps.
    """

    sample: SoloSample
    scatter_percent: float | None


@dataclass(frozen=True, slots=True)
class Measured:
    """Samples of decode alone, and how far steps of one point scatter."""

    samples: list[SoloSample]
    noise_percent: float


@dataclass(frozen=True, slots=True)
class Subject:
    """Identity of what a profile belongs to."""

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

    Without several contexts per batch the coefficients of batch and context cannot be separated.
    """
    # A GPU's decode has the same units in every split: measured once. Shares come in turn, and
    # every third batch first, so that what no time is left for is spread over all of them.
    shares = list(dict.fromkeys(split.decode_units for split in levels.splits))
    return [
        Point(units, batch, context)
        for first in range(_TURNS)
        for context in effort.contexts
        for batch in effort.batches[first::_TURNS]
        for units in shares
        if batch <= max_batch
        and batch * context <= max_tokens
        and context + effort.steps + WARM_UP_STEPS <= max_context
    ]


def plan_co_run(
    levels: Partitioning, effort: Effort, *, max_batch: int, max_tokens: int, max_context: int
) -> list[CoRunPoint]:
    """Return what to measure beside a load: every split, of few batches and contexts.

    One model serves all batches and contexts (Harli, Eq. 3), so few points are enough. Splits come
    in turn, so that what no time is left for is not all of one split.
    """
    if not effort.co_run_limit_s:
        return []
    return [
        CoRunPoint(Point(split.decode_units, batch, context), split.finetune_units)
        for context in _CO_RUN_CONTEXTS
        for batch in _CO_RUN_BATCHES
        for split in levels.splits[1:]
        if batch <= max_batch
        and batch * context <= max_tokens
        and context + effort.steps + WARM_UP_STEPS <= max_context
    ]


def check_subject(profile: Mapping[str, Any], subject: Subject) -> None:
    """Refuse a profile that belongs to something else.

    Raises:
        UserError: it is of another device, driver, engine, version, model or parallelism, by name.
    """
    for what, field, ours in (
        ("device", "device", subject.device),
        ("driver", "driver", subject.driver),
        ("engine", "engine", subject.engine),
        ("engine version", "engineVersion", subject.engine_version),
        ("model", "modelFingerprint", subject.model_fingerprint),
        ("tensor parallelism", "tensorParallel", subject.tensor_parallel),
    ):
        theirs = profile.get(field, 1 if field == "tensorParallel" else "")
        if theirs != ours:
            raise UserError(
                f"the latency profile is of another {what}: {theirs!r}, here it is {ours!r}",
                field=f"profile.{field}",
                remedy="Take a profile here: windrow profile.",
                reason="ProfileOfAnother",
            )


def check_reusable(
    profile: Mapping[str, Any], subject: Subject, splits: Partitioning
) -> Mapping[int, SoloStepModel]:
    """Refuse a profile of an earlier start or another pod that cannot be used here.

    Returns its models by decode's units. Whether steps bear it out is for the caller to measure.

    Raises:
        UserError: it belongs to something else, was never measured, is of a noisy machine, or lacks
            a share of decode's.
    """
    check_subject(profile, subject)
    if profile.get("roofline"):
        raise UserError("it is made of rates, not of measured steps")
    noise = float(profile.get("noisePercent", 0.0))
    if noise > NOISE_LIMIT_PERCENT:
        raise UserError(f"it is of a noisy machine: steps scatter by {noise:.0f}%")
    models = solo_models(profile)
    missing = {split.decode_units for split in splits.splits} - set(models)
    if missing:
        raise UserError(f"it lacks decode on {sorted(missing)} units")
    return models


def solo_samples(profile: Mapping[str, Any]) -> list[SoloSample]:
    """Return the steps alone that a profile was made of; none where it does not tell."""
    return [
        SoloSample(
            int(row["units"]), int(row["batch"]), int(row["contextTokens"]), float(row["stepUs"])
        )
        for row in profile.get("samples") or []
        if not row["finetuneUnits"]
    ]


def several_batches(samples: Sequence[SoloSample]) -> bool:
    """Return whether each share was seen with batches of several sizes.

    Below `BATCH_FLOOR` requests a step costs as much as with that many: these count as one size.
    From a single size nothing can be said of others.
    """
    return all(len(sizes) > 1 for sizes in _sizes(samples)) if samples else False


def sizes_on_every_share(samples: Sequence[SoloSample]) -> set[int]:
    """Return the sizes of batches that each share was seen with (`several_batches`)."""
    return set.intersection(*_sizes(samples)) if samples else set()


def _sizes(samples: Iterable[SoloSample]) -> list[set[int]]:
    sizes: dict[int, set[int]] = {}
    for sample in samples:
        sizes.setdefault(sample.units, set()).add(max(sample.batch, BATCH_FLOOR))
    return list(sizes.values())


def with_co_run(
    profile: Mapping[str, Any],
    beside: Sequence[CoRunSample],
    units: int,
    *,
    taken_at: datetime | None = None,
) -> dict[str, Any]:
    """Return the profile with a co-run part of steps that were measured beside a worker.

    Args:
        profile: a LatencyProfileSpec as a mapping, measured alone.
        beside: the steps; none: the profile is returned as it is.
        units: of the device.
        taken_at: replaces the profile's time: a store keeps the newest of a kind.
    """
    if not beside:
        return dict(profile)
    factors, error = fit_co_run(beside, solo_models(profile), units)
    alone = [row for row in profile.get("samples") or [] if not row["finetuneUnits"]]
    time = {} if taken_at is None else {"takenAt": _timestamp(taken_at)}
    return {
        **profile,
        **time,
        "coRun": _co_run_part(factors, len(beside), error),
        "samples": [*alone, *_rows_beside(beside)],
    }


def document(
    subject: Subject,
    samples: Sequence[SoloSample],
    *,
    taken_at: datetime,
    co_run: Sequence[CoRunSample] = (),
    noise_percent: float = 0.0,
    units: int = 0,
) -> dict[str, Any]:
    """Fit each level; returns a LatencyProfileSpec as a mapping. Raises UserError for no sample.

    `units`: of the device, where `co_run` is given.
    """
    fits = fit_solo(samples)
    beside: dict[str, Any] = {}
    if co_run:
        solo = {level: fit.model for level, fit in fits.items()}
        factors, error = fit_co_run(co_run, solo, units)
        beside["coRun"] = _co_run_part(factors, len(co_run), error)
    return {
        **_of(subject, taken_at),
        "solo": [
            {**_solo_row(units, fit.model), "medianAbsErrorPercent": fit.median_abs_error_percent}
            for units, fit in fits.items()
        ],
        **beside,
        "noisePercent": noise_percent,
        "samples": [*_rows(samples), *_rows_beside(co_run)],
    }


def prior_document(
    subject: Subject, models: Mapping[int, SoloStepModel], *, taken_at: datetime
) -> dict[str, Any]:
    """Return a LatencyProfileSpec, as a mapping, of a device that was never profiled."""
    solo = [_solo_row(units, model) for units, model in sorted(models.items())]
    return {**_of(subject, taken_at), "solo": solo, "roofline": True}


def _co_run_part(factors: CoRunFactors, samples: int, error_percent: float) -> dict[str, Any]:
    return {
        "b1": factors.b1,
        "k1": factors.k1,
        "samples": samples,
        "medianAbsErrorPercent": error_percent,
    }


def _timestamp(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def _of(subject: Subject, taken_at: datetime) -> dict[str, Any]:
    return {
        "key": subject.key,
        "device": subject.device,
        "driver": subject.driver,
        "engine": subject.engine,
        "engineVersion": subject.engine_version,
        "modelFingerprint": subject.model_fingerprint,
        "tensorParallel": subject.tensor_parallel,
        "takenAt": _timestamp(taken_at),
    }


def _solo_row(units: int, model: SoloStepModel) -> dict[str, Any]:
    return {
        "units": units,
        "c0Us": model.c0_us,
        "b0Us": model.b0_us,
        "k0NsPerToken": model.k0_us * 1000,
    }


def _rows_beside(samples: Iterable[CoRunSample]) -> Iterable[dict[str, Any]]:
    for sample in samples:
        (row,) = _rows([sample.step])
        yield row | {
            "finetuneUnits": sample.finetune_units,
            "finetuneTokensPerSecond": sample.tokens_per_second,
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
