"""Figures of a simulated GPU, counted while it runs, and added up over GPUs."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windrow_simulator.traffic import DecodeRequest

_BINS = 200  # of a histogram, for a factor of e: half a percent each
TIMELINE_S = 10.0


class Histogram:
    """Counts by logarithm: quantiles within half a percent, additive."""

    __slots__ = ("bins", "count", "total")

    def __init__(self) -> None:
        self.bins: Counter[int] = Counter()
        self.count, self.total = 0, 0.0

    def add(self, value: float) -> None:
        """Count a positive value; what is below a millionth counts as that."""
        self.bins[int(math.log(value if value > 1e-6 else 1e-6) * _BINS)] += 1
        self.count += 1
        self.total += value

    def merge(self, other: Histogram) -> None:
        """Add another one's counts."""
        self.bins.update(other.bins)
        self.count += other.count
        self.total += other.total

    def quantile(self, share: float) -> float:
        """Nearest rank; NaN of none."""
        if not self.count:
            return math.nan
        rank = max(1, math.ceil(share * self.count))
        for index in sorted(self.bins):
            rank -= self.bins[index]
            if rank <= 0:
                return math.exp((index + 0.5) / _BINS)
        return math.nan

    def share_above(self, value: float) -> float:
        """Share of what was counted that is above a value."""
        edge = math.log(value) * _BINS
        over = sum(n for index, n in self.bins.items() if index + 0.5 > edge)
        return over / self.count if self.count else 0.0

    @property
    def mean(self) -> float:
        """NaN of none."""
        return self.total / self.count if self.count else math.nan


def _empty_row() -> list[float]:
    """Tokens, steps, steps over the objective, microseconds of steps."""
    return [0.0] * 4


@dataclass(slots=True)
class SlotFigures:
    """Figures of one GPU. Times in microseconds unless named otherwise.

    Attributes:
        objective_us: that steps are held against.
        epoch_ns: when the measurement begins; the time before is warm-up and is not counted.
    """

    objective_us: float
    epoch_ns: int = 0
    steps: int = 0
    over: int = 0
    harvested_steps: int = 0
    busy_us: float = 0.0
    idle_us: float = 0.0
    starved_us: float = 0.0
    batch_us: float = 0.0
    finetune_tokens: float = 0.0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    requests: int = 0
    retractions: int = 0
    waited_for_kv: int = 0
    tpot: Histogram = field(default_factory=Histogram)
    request_tpot: Histogram = field(default_factory=Histogram)
    ttft: Histogram = field(default_factory=Histogram)
    timeline: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(_empty_row))
    now_us: float = 0.0  # counted so far

    def step(self, latency_us: float, batch: int, harvested: bool) -> None:
        """A step has ended."""
        self.steps += 1
        self.harvested_steps += harvested
        over = latency_us > self.objective_us > 0
        self.over += over
        self.busy_us += latency_us
        self.batch_us += batch * latency_us
        self.generated_tokens += batch
        self.tpot.add(latency_us)
        self.now_us += latency_us
        row = self.timeline[int(self.now_us / (TIMELINE_S * 1e6))]
        row[1] += 1
        row[2] += over
        row[3] += latency_us

    def prompt(self, us: float) -> None:
        """A pass has computed prompts for so long; no request got a token of decode's."""
        self.busy_us += us
        self.now_us += us

    def idle(self, ns: int) -> None:
        """Decode had no request for so long."""
        self.idle_us += ns / 1e3
        self.now_us += ns / 1e3

    def starved(self, ns: int) -> None:
        """No request fitted for so long, since memory was lent."""
        self.starved_us += ns / 1e3
        self.now_us += ns / 1e3

    def finetuned(self, tokens: float) -> None:
        """The worker has made so many tokens."""
        self.finetune_tokens += tokens
        if tokens:
            self.timeline[int(self.now_us / (TIMELINE_S * 1e6))][0] += tokens

    def retracted(self) -> None:
        """A request went back since there was no chunk for its next token."""
        self.retractions += 1

    def finished(self, request: DecodeRequest, end_ns: int) -> None:
        """A request has all of its tokens."""
        self.requests += 1
        self.prompt_tokens += request.prompt_tokens
        if request.output_tokens > 1:
            took_us = (end_ns - request.first_ns) / 1e3
            self.request_tpot.add(took_us / (request.output_tokens - 1))
        self.ttft.add((request.first_ns - request.arrived_ns) / 1e3)
        self.waited_for_kv += request.waited_for_kv

    def begin(self) -> None:
        """Forget what was counted so far: the warm-up is over."""
        fresh = SlotFigures(self.objective_us)
        for name in self.__slots__:
            setattr(self, name, getattr(fresh, name))

    def add(self, other: SlotFigures) -> None:
        """Count another GPU's figures as well."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("tpot", "request_tpot", "ttft"):
            getattr(self, name).merge(getattr(other, name))

    @property
    def seconds(self) -> float:
        """Counted so far."""
        return (self.busy_us + self.idle_us + self.starved_us) / 1e6


_SUMS = (
    *("steps", "over", "harvested_steps", "busy_us", "idle_us", "starved_us", "batch_us"),
    *("finetune_tokens", "prompt_tokens", "generated_tokens", "requests", "retractions"),
    "waited_for_kv",
)


@dataclass(frozen=True, slots=True)
class PriorityFigures:
    """Outcome of the jobs of one priority.

    Attributes:
        priority: its value; `all`: of all jobs.
        wait_s: mean time without a slot so far, of those that wait still as well.
        longest_wait_s: of one job.
        turnaround_s: mean time from submission to the end, of those that ended.
        preemptions: how often one gave its slot to a job of higher priority.
        moves: how often one left a slot where decode left it little.
        lost_s: time of slots that went into stopping and loading again.
        lost_tokens: what the jobs would have made meanwhile, each at its own pace so far.
        tokens: made.
    """

    priority: str
    submitted: int
    ended: int
    running: int
    waiting: int
    wait_s: float
    longest_wait_s: float
    turnaround_s: float
    preemptions: int
    moves: int
    lost_s: float
    lost_tokens: float
    tokens: float


@dataclass(frozen=True, slots=True)
class JobFigures:
    """Outcome of the jobs: by priority, the highest first, and of all."""

    by_priority: tuple[PriorityFigures, ...]
    all: PriorityFigures


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """Figures of a cluster under one policy and objective, from the GPUs that were simulated.

    Attributes:
        policy: its name; `alone`: nothing is harvested.
        gpus: decode GPUs that this represents.
        simulated: of these, simulated step by step.
        eta: tokens a second, as a share of those on a whole GPU.
        eta_error: half of the 95% interval of eta, from the spread over the GPUs.
        jobs: what became of the jobs; None: each GPU has one that does not end.
        gpu_hours: of a whole GPU that would make the same tokens, on all GPUs.
        dollars: what these hours cost at the price.
        over: share of the steps above the objective.
        over_error: half of its 95% interval.
    """

    policy: str
    objective_ms: float
    gpus: int
    simulated: int
    seconds: float
    eta: float
    eta_error: float
    tokens: float
    tokens_per_second: float
    gpu_hours: float
    dollars: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    request_tpot_p99_ms: float
    requests_within: float
    over: float
    over_error: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    mean_batch: float
    busy: float
    steps: int
    requests: int
    generated_tokens: int
    waited_for_kv: int
    retractions: int
    guard_trips: int
    breaks: int
    timeline: list[list[float]]
    jobs: JobFigures | None = None


def add_up(
    policy: str,
    slots: list[SlotFigures],
    *,
    objective_ms: float,
    gpus: int,
    dedicated_per_second: float,
    price: float,
    trips: int = 0,
    breaks: int = 0,
    jobs: JobFigures | None = None,
) -> PolicyFigures:
    """Return the figures of a cluster of `gpus` of which `slots` were simulated."""
    tpot, request_tpot, ttft = Histogram(), Histogram(), Histogram()
    timeline: defaultdict[int, list[float]] = defaultdict(_empty_row)
    for slot in slots:
        tpot.merge(slot.tpot)
        request_tpot.merge(slot.request_tpot)
        ttft.merge(slot.ttft)
        for at, row in slot.timeline.items():
            timeline[at] = [a + b for a, b in zip(timeline[at], row, strict=True)]
    n, seconds = len(slots), sum(s.seconds for s in slots)
    steps, busy_us = sum(s.steps for s in slots), sum(s.busy_us for s in slots)
    tokens = sum(s.finetune_tokens for s in slots)
    etas = [s.finetune_tokens / s.seconds / dedicated_per_second for s in slots if s.seconds]
    # Counted against another objective (decode alone runs once for all): by the histogram.
    same = all(s.objective_us == objective_ms * 1e3 for s in slots)
    overs = [
        s.over / s.steps if same else s.tpot.share_above(objective_ms * 1e3)
        for s in slots
        if s.steps
    ]
    eta = tokens / seconds / dedicated_per_second if seconds else 0.0
    hours = eta * gpus * (seconds / n) / 3600
    last = max(timeline, default=-1)
    return PolicyFigures(
        policy=policy,
        objective_ms=objective_ms,
        gpus=gpus,
        simulated=n,
        seconds=seconds / n,
        eta=eta,
        eta_error=interval(etas, gpus),
        tokens=tokens * gpus / n,
        tokens_per_second=tokens / seconds * gpus if seconds else 0.0,
        gpu_hours=hours,
        dollars=hours * price,
        tpot_p50_ms=tpot.quantile(0.5) / 1e3,
        tpot_p99_ms=tpot.quantile(0.99) / 1e3,
        request_tpot_p99_ms=request_tpot.quantile(0.99) / 1e3,
        requests_within=1 - request_tpot.share_above(objective_ms * 1e3),
        over=sum(s.over for s in slots) / steps
        if steps and same
        else tpot.share_above(objective_ms * 1e3),
        over_error=interval(overs, gpus),
        ttft_p50_ms=ttft.quantile(0.5) / 1e3,
        ttft_p99_ms=ttft.quantile(0.99) / 1e3,
        mean_batch=sum(s.batch_us for s in slots) / busy_us if busy_us else 0.0,
        busy=busy_us / 1e6 / seconds if seconds else 0.0,
        steps=steps,
        requests=sum(s.requests for s in slots),
        generated_tokens=sum(s.generated_tokens for s in slots),
        waited_for_kv=sum(s.waited_for_kv for s in slots),
        retractions=sum(s.retractions for s in slots),
        guard_trips=trips,
        breaks=breaks,
        timeline=[timeline[at] for at in range(last + 1)],
        jobs=jobs,
    )


# Student's t for a two-sided 95% interval, by degrees of freedom.
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


def interval(values: list[float], population: int) -> float:
    """Return half of the 95% interval of a mean, of a sample without replacement; NaN of one."""
    n = len(values)
    if n >= population:
        return 0.0
    if n < 2:
        return math.nan
    mean = sum(values) / n
    variance = sum((v - mean) ** 2 for v in values) / (n - 1)
    t = _T95[n - 2] if n - 2 < len(_T95) else 2.0
    return t * math.sqrt(variance / n * (1 - n / population))


def plain(figures: PolicyFigures) -> dict[str, Any]:
    """Return figures as JSON takes them: NaN is null."""
    values = {name: getattr(figures, name) for name in PolicyFigures.__slots__}
    values["jobs"] = asdict(figures.jobs) if figures.jobs else None
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }
