"""Scenario to simulate: device, levels, profile, memory and traffic, checked and joined."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import yaml

from windrow.crd import parse_profile_spec
from windrow.errors import UserError
from windrow_sidecar.engines.harvest.ablation import Protection
from windrow_sidecar.engines.profile import EFFORTS, Subject, document, host_splits, plan
from windrow_sidecar.qos.levels import (
    Partitioning,
    PartitionLevel,
    gpu_shares,
    overlapping_levels,
)
from windrow_sidecar.qos.policies import POLICIES
from windrow_sidecar.qos.predictor import PredictorForm
from windrow_sidecar.qos.solo import SoloSample
from windrow_sidecar.qos.terms import HarvestTerms, make_terms
from windrow_simulator.arena import ArenaGeometry
from windrow_simulator.calibration import MEASURED_GPU, RatesOf, check_worker_rate, measured
from windrow_simulator.decode import DecodeGpu, DecodeSettings
from windrow_simulator.figures import SlotFigures
from windrow_simulator.hardware import GpuFigures, ModelFigures, gpu_named, model_named
from windrow_simulator.traffic import JobArrival, Traffic, load_trace, read_jobs
from windrow_simulator.truth import (
    GPU_NOISE,
    Assumptions,
    MeasuredTruth,
    Noise,
    Residuals,
    RooflineTruth,
    Truth,
    Worker,
    gpu_noise,
)
from windrow_simulator.worker import PlainWorker, SimulatedWorker, WorkerMemory

ALONE = "alone"  # nothing is harvested: decode alone
NAIVE = "naive"  # a plain process beside decode: no policy, no partition, no guard
ALL = "all"
DEFAULT_GPU = "H200"
CELL_GPUS = 4  # decode GPUs that share a prefill pool
MICRO_BATCH_TOKENS = 2048
_MEMORY_FOR_WINDROW = 0.9  # of what the weights leave: workspaces and graphs have the rest


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """Settings of a simulation; `checked` says what is wrong with them.

    Attributes:
        gpus: decode GPUs of the cluster.
        sample: simulated step by step, at most; the others are like them.
        rate: requests a second for each decode GPU.
        batch: above 0: so many requests of `context` tokens at all times, instead of a trace.
        partition: green: decode and worker on SMs of their own; none: decode on every SM.
        deferral_ms: how long a policy may hold a request back; 0: as usual.
        aggregated: decode GPUs compute prompts themselves, before decode goes on.
        ttft_ms: objective of the time to first token, with `aggregated`; 0: none.
        predictor: what steps teach it (`windrow_sidecar.qos.predictor`).
        without: protections of decode that are off.
        contention: see `truth.Assumptions`.
        rates: measured: the worker's rate, and what decode feels of it, by what one H200 gave
            (`calibration`); published: by the roofline alone.
        worker_rate: tokens a second of the worker that was measured on this kind of GPU, alone on
            the device and on lent memory beside an idle decode; (): as on that H200.
        levels: shares of the worker in percent; (): as engines have them.
        train: the finetuned model; "": the served one, whose weights are shared.
        lengths: mean prompt and output tokens, instead of those of the trace; (): as it has them.
        surge: in the middle third of the time every second cell has so many times the requests.
        jobs: FinetuneJobs that come during the run; 0: one that does not end, on each GPU.
        job_tokens: of a job, least and most (see `traffic.job_arrivals`).
        job_list: a file with the jobs instead (see `traffic.read_jobs`).
        priorities: of the jobs, each value with its weight.
        preemption: a job gives its slot to one of higher priority.
        job_load_s: from a job's assignment until it trains.
        job_save_s: to write the checkpoint with which a job stops.
        jobs_per_slot: that take turns on a GPU.
        price: dollars for an hour of a GPU; 0: that of the device's figures.
        ranks: GPUs of each slot, over which decode's model and the worker's are cut. Above 1 `gpus`
            and `rate` are of slots.
    """

    gpus: int = 16
    sample: int = 8
    seconds: float = 600.0
    warm_up: float = 30.0
    gpu: str = ""  # H200 where no profile names a device
    model: str = "llama-3-8b"
    train: str = ""
    profile: str = ""
    trace: str = "conv"
    traces: str = ""
    rate: float = 4.0
    lengths: tuple[float, ...] = ()
    day: bool = False
    batch: int = 0
    context: int = 1024
    policy: str = "windrow"
    objectives_ms: tuple[float, ...] = (12.0,)
    percentile: float = 99.0
    scope: str = "perStep"
    deferral_ms: float = 0.0
    aggregated: bool = False
    ttft_ms: float = 0.0
    predictor: PredictorForm = "windrow"
    without: tuple[Protection, ...] = ()
    partition: str = "green"
    levels: tuple[int, ...] = ()
    contention: float = 0.35
    rates: RatesOf = "measured"
    worker_rate: tuple[float, ...] = ()
    max_sm_percent: int = 100
    max_memory_percent: int = 50
    memory_gb: float = 0.0
    max_batch: int = 64
    prefill: int = 0
    jobs: int = 0
    job_tokens: tuple[float, float] = (20e6, 20e6)
    job_list: str = ""
    priorities: tuple[tuple[int, float], ...] = ((0, 0.9), (1000, 0.1))
    preemption: bool = True
    job_load_s: float = 20.0
    job_save_s: float = 2.0
    jobs_per_slot: int = 1
    surge: float = 1.0
    price: float = 0.0
    ranks: int = 1
    seed: int = 7
    processes: int = 2

    @property
    def policies(self) -> list[str]:
        """Policies that run, alone first."""
        if self.policy == ALL:
            return [ALONE, *sorted(POLICIES, key=lambda name: name != "windrow")]
        return list(dict.fromkeys([ALONE, *self.policy.split(",")]))

    @property
    def simulated(self) -> int:
        """Decode GPUs that are simulated: whole cells."""
        return min(self.gpus, max(1, self.sample))


def checked(settings: SimulationSettings) -> SimulationSettings:
    """Return settings that can run.

    Raises:
        UserError: a number out of its range, an unknown policy, GPU or model.
    """
    for option, value, least, most in (
        ("--gpus", settings.gpus, 1, 1_000_000),
        ("--sample", settings.sample, 1, 1_000_000),
        ("--seconds", settings.seconds, 1, 31 * 86400),
        ("--warm-up", settings.warm_up, 0, 86400),
        ("--context", settings.context, 1, 10_000_000),
        ("--batch", settings.batch, 0, 4096),
        ("--max-batch", settings.max_batch, 1, 4096),
        ("--jobs", settings.jobs, 0, 1_000_000),
        ("--job-tokens", settings.job_tokens[0], 1, settings.job_tokens[-1]),
        ("--job-tokens", settings.job_tokens[-1], 1, 10**15),
        ("--load-seconds", settings.job_load_s, 0, 3600),
        # The operator ends a job that has not stopped within a minute.
        ("--save-seconds", settings.job_save_s, 0, 50),
        ("--surge", settings.surge, 1, 1000),
        ("--jobs-per-slot", settings.jobs_per_slot, 1, 64),
        ("--price", settings.price, 0, 1e6),
        ("ranks", settings.ranks, 1, 64),
        ("--memory-gb", settings.memory_gb, 0, 1e6),
        ("--processes", settings.processes, 1, 256),
        ("--prefill", settings.prefill, 0, 10**6),
        ("--deferral", settings.deferral_ms, 0, 60_000),
        ("--ttft", settings.ttft_ms, 0, 600_000),
        ("--contention", settings.contention, 0, 10),
        ("--rate", settings.rate, 1e-6, 1e6),
    ):
        if not least <= value <= most or not math.isfinite(value):
            raise UserError(
                f"{value:g} is not from {least:g} to {most:g}",
                field=option,
                remedy="Give a number in that range.",
            )
    if settings.lengths and (len(settings.lengths) != 2 or not min(settings.lengths) >= 1):
        raise UserError(
            f"{settings.lengths} are not two means of 1 and more",
            field="--lengths",
            remedy="Write mean prompt and output tokens, for example 60:65.",
        )
    if settings.aggregated and (settings.profile or settings.batch or settings.prefill):
        raise UserError(
            "has no effect on a profile, a batch that is kept, or prefill GPUs",
            field="--aggregated",
            remedy="Leave --profile, --batch and --prefill out.",
        )
    if settings.ttft_ms and not settings.aggregated:
        raise UserError(
            "has no effect where prompts are computed on other GPUs",
            field="--ttft",
            remedy="Add --aggregated.",
        )
    if settings.partition not in ("green", "none"):
        raise UserError(
            f"{settings.partition!r} is not a partition",
            field="--partition",
            remedy="Write green (SMs of its own for each side) or none (decode on every SM).",
        )
    if settings.predictor not in get_args(PredictorForm):
        raise UserError(
            f"{settings.predictor!r} is not a predictor",
            field="--predictor",
            remedy=f"Choose one of: {', '.join(get_args(PredictorForm))}.",
        )
    if unknown := set(settings.without) - set(get_args(Protection)):
        raise UserError(
            f"{', '.join(sorted(unknown))} is not a protection",
            field="--without",
            remedy=f"Choose of: {', '.join(get_args(Protection))}.",
        )
    if settings.rates not in get_args(RatesOf):
        raise UserError(
            f"{settings.rates!r} is not a source of rates",
            field="--rates",
            remedy=f"Choose one of: {', '.join(get_args(RatesOf))}.",
        )
    check_worker_rate(settings.worker_rate)
    if settings.worker_rate and settings.rates != "measured":
        raise UserError(
            "has no effect on published rates",
            field="--worker-rate",
            remedy="Leave --rates out.",
        )
    if not settings.objectives_ms:
        raise UserError("none is given", field="--objective", remedy="Write for example 12ms.")
    if sum(weight for _, weight in settings.priorities) <= 0 or any(
        weight < 0 for _, weight in settings.priorities
    ):
        raise UserError(
            "no priority has a weight above 0",
            field="--priorities",
            remedy="Write values with weights, for example 0:90,1000:10.",
        )
    if any(not 0 < percent < 100 for percent in settings.levels):
        raise UserError(
            f"{settings.levels} are not all between 0 and 100",
            field="--levels",
            remedy="Write percents, for example 10,20,30,40.",
        )
    for name in settings.policies:
        for objective_ms in settings.objectives_ms:
            terms_for(settings, name, objective_ms)
    if not settings.profile:
        gpu_named(settings.gpu or DEFAULT_GPU)
        model_named(settings.model)
        if settings.train:
            model_named(settings.train)
    return settings


def terms_for(
    settings: SimulationSettings, policy: str, objective_ms: float
) -> HarvestTerms | None:
    """Return the terms that a HarvestPolicy with these settings makes; None: nothing is harvested.

    Raises:
        UserError: as for the terms that come over the wire.
    """
    if policy in (ALONE, NAIVE):
        return None
    terms = make_terms(
        name="simulated",
        policy=policy,
        mode="harvest",
        objective_seconds=objective_ms / 1e3,
        percentile=settings.percentile,
        scope=settings.scope,
        max_compute_percent=settings.max_sm_percent,
        max_memory_percent=settings.max_memory_percent,
    )
    return terms and replace(
        terms,
        deferral_us=round(settings.deferral_ms * 1e3),
        first_token_us=round(settings.ttft_ms * 1e3),
    )


@dataclass(frozen=True, slots=True)
class ScenarioParts:
    """Parts that the GPUs of a simulation have in common."""

    settings: SimulationSettings
    levels: Partitioning
    profile: Mapping[str, Any]
    truth: Truth
    geometry: ArenaGeometry
    memory: WorkerMemory
    traffic: Traffic
    layers: int
    price: float
    device: str
    source: str
    jobs: tuple[JobArrival, ...] = ()  # of a list; else as many as the settings say
    prefill: RooflineTruth | None = None
    plain: RooflineTruth | None = None  # the same device beside a plain process
    noise: float = GPU_NOISE
    noise_beside: float | None = None
    residuals: Residuals | None = None  # None: those assumed of a GPU
    notes: tuple[str, ...] = field(default=())

    @property
    def has_jobs(self) -> bool:
        """True where jobs come, instead of one without an end on each GPU."""
        return bool(self.settings.jobs or self.jobs)

    @property
    def dedicated_per_second(self) -> float:
        """Tokens a second of the worker on a whole device."""
        return self.truth.dedicated_rate * 1e6

    def slot(self, seed: int, objective_ms: float, policy: str = "") -> DecodeGpu:
        """Return a fresh GPU whose steps are held against an objective."""
        naive = policy == NAIVE
        truth = self.plain if naive and self.plain else self.truth
        made = PlainWorker if naive else SimulatedWorker
        worker = made(
            truth,
            (*dict.fromkeys(s.finetune_units for s in self.levels.splits[1:]), self.levels.units),
            self.memory,
            layer_tokens=MICRO_BATCH_TOKENS,
            layers=self.layers,
            draw=random.Random(seed + 1),
            queue=truth.queue if isinstance(truth, RooflineTruth) else None,
        )
        worker.assign(1)
        if isinstance(worker, PlainWorker):
            worker.run_freely()
        noise = (
            Noise(self.residuals, seed, run=32)
            if self.residuals
            else gpu_noise(seed, self.noise, self.noise_beside)
        )
        figures = SlotFigures(objective_ms * 1e3)
        return DecodeGpu(
            self.levels,
            self.profile,
            truth,
            noise,
            worker,
            self.geometry,
            figures,
            DecodeSettings(
                max_batch=self.settings.max_batch,
                predictor=self.settings.predictor,
                without=frozenset(self.settings.without),
            ),
            prompts=truth
            if self.settings.aggregated and isinstance(truth, RooflineTruth)
            else None,
        )


def build(settings: SimulationSettings) -> ScenarioParts:
    """Return the parts of a simulation.

    Raises:
        UserError: settings, profile or trace are not sound.
    """
    settings = checked(settings)
    folder = Path(settings.traces) if settings.traces else None
    requests = [] if settings.batch else load_trace(settings.trace, folder)
    traffic = Traffic(requests, settings.rate, settings.day, settings.lengths)
    ground = (_measured if settings.profile else _published)(settings, traffic)
    jobs = read_jobs(Path(settings.job_list)) if settings.job_list else []
    return replace(ground, jobs=tuple(jobs))


def _published(settings: SimulationSettings, traffic: Traffic) -> ScenarioParts:
    gpu, ranks = gpu_named(settings.gpu or DEFAULT_GPU), settings.ranks
    served = model_named(settings.model).cut(ranks)
    trained = model_named(settings.train).cut(ranks) if settings.train else served
    disjoint = settings.partition == "green"
    assumed = replace(
        measured(settings.worker_rate) if settings.rates == "measured" else Assumptions(),
        contention=settings.contention,
    )
    truth = RooflineTruth(gpu, served, trained, assumed, disjoint=disjoint, ranks=ranks)
    levels = gpu_levels(gpu, disjoint=disjoint, percents=settings.levels)
    geometry = _geometry(settings, gpu, served)
    return ScenarioParts(
        settings=settings,
        levels=levels,
        profile=taken_of(truth, levels, f"gpu:{gpu.name}", served.name, settings, geometry),
        truth=truth,
        geometry=geometry,
        memory=_memory(settings, gpu, served, trained, geometry),
        traffic=traffic,
        layers=trained.layers,
        price=ranks * (settings.price or gpu.dollars_per_hour),
        device=gpu.name,
        source=gpu.source,
        prefill=truth,
        plain=RooflineTruth(
            *(gpu, served, trained, assumed), disjoint=False, plain=True, ranks=ranks
        ),
        noise=assumed.noise,
        noise_beside=assumed.noise_beside,
        notes=(_certainty(settings, gpu),),
    )


def _certainty(settings: SimulationSettings, gpu: GpuFigures) -> str:
    """Return a sentence on how far the rates are known."""
    if settings.rates == "published":
        return "The GPU's figures are published ones and assumptions: none was measured."
    if gpu.name != MEASURED_GPU:
        return (
            f"The worker's rate was measured on one {MEASURED_GPU} and is assumed of this GPU, "
            "whose own figures are published ones."
        )
    said = f"The worker's rate is that of two runs on one {MEASURED_GPU}"
    if settings.partition == "green":
        return f"{said}, with decode on every SM; what decode on SMs of its own feels is assumed."
    return f"{said}."


def gpu_levels(gpu: GpuFigures, *, disjoint: bool, percents: tuple[int, ...] = ()) -> Partitioning:
    """Return decode alone, and the shares that a worker has on such a GPU, or `percents` of it.

    They are whole groups of SMs; those that fill no group are decode's, as on a real one.
    """
    group = gpu.sm_group
    shares = [group * share for share in gpu_shares(gpu.sms // group)]
    if percents:
        shares = sorted({max(group, gpu.sms * p // 100 // group * group) for p in percents})
    if not disjoint:
        return overlapping_levels(gpu.sms, tuple(shares))
    splits = tuple(PartitionLevel(share, gpu.sms - share) for share in shares)
    return Partitioning(gpu.sms, (PartitionLevel(0, gpu.sms), *splits))


def taken_of(
    truth: Truth,
    levels: Partitioning,
    device: str,
    model: str,
    settings: SimulationSettings,
    geometry: ArenaGeometry,
) -> dict[str, Any]:
    """Take a latency profile of a simulated device, as an engine takes one of a real device."""
    effort = EFFORTS["full"]
    points = plan(
        levels,
        effort,
        max_batch=settings.max_batch,
        max_tokens=geometry.chunks * geometry.slots_per_chunk,
        max_context=8192,
    )
    noise = gpu_noise(settings.seed)
    samples = []
    for point in points:
        context = point.batch * point.context
        steps = sorted(
            truth.step_us(point.batch, context, point.units, 0) * noise.factor()
            for _ in range(effort.steps)
        )
        middle = steps[len(steps) // 2]
        samples.append(SoloSample(point.units, point.batch, context, middle))
    subject = Subject(device, "simulated", "simulator", "1", model)
    return document(subject, samples, taken_at=datetime(2025, 1, 1, tzinfo=UTC))


def _geometry(settings: SimulationSettings, gpu: GpuFigures, model: ModelFigures) -> ArenaGeometry:
    card = settings.memory_gb or gpu.memory_gb
    room = (card * 1e9 - model.weight_bytes) * _MEMORY_FOR_WINDROW
    chunks = int(room / model.chunk_bytes)
    if chunks < 8:
        raise UserError(
            f"{model.name} takes {model.weight_bytes / 1e9:.0f} of {card:.0f} GB and leaves no "
            "room for KV",
            field="--model",
            remedy="Choose a smaller model or a GPU with more memory.",
        )
    return ArenaGeometry(chunks, model.chunk_bytes, model.chunk_tokens, model.layers)


def _memory(
    settings: SimulationSettings,
    gpu: GpuFigures,
    served: ModelFigures,
    trained: ModelFigures,
    geometry: ArenaGeometry,
) -> WorkerMemory:
    """Return what the worker wants: activations, and frozen layers where decode's are others."""
    tokens = MICRO_BATCH_TOKENS
    boundaries = trained.boundary_bytes_per_token * tokens
    kept = trained.kept_bytes_per_token * tokens
    shared = trained.name == served.name and not settings.train
    frozen = 0 if shared else trained.layers * trained.layer_bytes

    def chunks(n_bytes: float) -> int:
        return math.ceil(n_bytes / geometry.chunk_bytes)

    two_layers = 0 if shared else 2 * trained.layer_bytes
    return WorkerMemory(
        needed=chunks(boundaries + two_layers),
        wanted=chunks(boundaries + kept + frozen),
        frozen=chunks(frozen),
        layers=trained.layers,
        swapped_us=frozen / (gpu.host_gb_s * 1e3),
        group_tokens=tokens * (1 if shared else 5),
    )


def _measured(settings: SimulationSettings, traffic: Traffic) -> ScenarioParts:
    profile = read_profile(Path(settings.profile))
    device = str(profile["device"])
    names = (device.lower(), device.lower().partition(":")[2])
    if settings.gpu and settings.gpu.lower() not in names:
        raise UserError(
            f"it is of {device}, not of {settings.gpu}",
            field="--profile",
            remedy="Leave --gpu out, or give a profile of that device.",
        )
    units = max(int(row["units"]) for row in profile["solo"])
    levels = levels_of(profile, units)
    worker = _worker_of(profile, units)
    geometry = ArenaGeometry(384, 1 << 21, 512, 8)
    return ScenarioParts(
        settings=settings,
        levels=levels,
        profile=profile,
        truth=MeasuredTruth(profile, units, worker),
        geometry=geometry,
        memory=WorkerMemory(),
        traffic=traffic,
        layers=8,
        price=settings.price,
        device=device,
        source=f"LatencyProfile {profile['key']}",
        residuals=Residuals((1.0,)),
    )


def levels_of(profile: Mapping[str, Any], units: int) -> Partitioning:
    """Return the splits that a profile was taken for."""
    shares = sorted({int(row["units"]) for row in profile["solo"]}, reverse=True)
    if str(profile.get("driver")) == "host" or len(shares) > 1:
        splits = tuple(PartitionLevel(units - n, n) for n in shares)
        return Partitioning(units, splits)
    return host_splits(units)


def _worker_of(profile: Mapping[str, Any], units: int) -> Worker:
    """Return the worker's rates from co-run samples.

    Raises:
        UserError: there are none.
    """
    beside: dict[int, list[float]] = {}
    for row in profile.get("samples") or ():
        if row.get("finetuneUnits") and row.get("finetuneTokensPerSecond"):
            beside.setdefault(int(row["finetuneUnits"]), []).append(
                float(row["finetuneTokensPerSecond"])
            )
    if not beside:
        raise UserError(
            "it has no co-run samples, so it does not say how fast a worker is",
            field="--profile",
            remedy="Take a profile with co-run samples, or replay a run: --run FOLDER.",
        )
    rates = {n: sum(values) / len(values) for n, values in beside.items()}
    most = max(rates)
    return Worker(rates[most] * units / most, rates)


def read_profile(path: Path) -> dict[str, Any]:
    """Read a LatencyProfile: the object as the API server gives it, or its spec alone.

    Raises:
        UserError: no such file, or no profile.
    """
    try:
        document_read = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UserError(
            f"cannot be read: {error}",
            field=str(path),
            remedy="Give --profile a LatencyProfile as YAML or JSON.",
        ) from error
    spec = document_read.get("spec", document_read) if isinstance(document_read, dict) else None
    if not isinstance(spec, dict) or not spec.get("solo"):
        raise UserError(
            "is not a LatencyProfile with a solo model",
            field=str(path),
            remedy="kubectl get lp NAME -o yaml gives one.",
        )
    parse_profile_spec(spec)
    return json.loads(json.dumps(spec, default=str))  # type: ignore[no-any-return]
