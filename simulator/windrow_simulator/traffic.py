"""Arrivals: requests to decode GPUs, by trace or generator and prefill; FinetuneJobs."""

from __future__ import annotations

import csv
import heapq
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from windrow.errors import UserError
from windrow_lab.load import generator
from windrow_lab.load.trace import TraceRequest, check_trace, read_trace
from windrow_simulator.truth import RooflineTruth

# Where `--trace conv` and so on look: published files, under the names that they are published by.
PUBLISHED = {
    "conv": "AzureLLMInferenceTrace_conv.csv",
    "code": "AzureLLMInferenceTrace_code.csv",
    "burstgpt": "BurstGPT_1.csv",
}
LONGEST_S = 7 * 24 * 3600.0
# Of mean traffic by the hour, from midnight on: low at night, high in the afternoon, mean 1.
DAY = (
    *(0.55, 0.45, 0.40, 0.36, 0.36, 0.42, 0.55, 0.75, 1.00, 1.20, 1.35, 1.42),
    *(1.42, 1.45, 1.48, 1.48, 1.45, 1.38, 1.28, 1.20, 1.12, 1.02, 0.88, 0.70),
)


def load_trace(name: str, folder: Path | None) -> list[TraceRequest]:
    """Return the requests of a trace, from 0 s on; empty: `conv` has to be generated.

    Args:
        name: conv, code or burstgpt, or a path.
        folder: of the published files.

    Raises:
        UserError: no such file, or one that is not sound (see `check_trace`).
    """
    if name in PUBLISHED:
        path = (folder or Path()) / PUBLISHED[name]
        if folder is not None and name == "burstgpt" and not path.exists():
            path = next(iter(sorted(folder.glob("BurstGPT_1*.csv"))), path)
        if name == "conv" and folder is None:
            return []
        if folder is None or not path.exists():
            raise UserError(
                f"{path} is not there",
                field="--trace",
                remedy="Name its folder with --traces (Azure/AzurePublicDataset, data/; "
                "HPMLL/BurstGPT), or use --trace conv without --traces, which needs no file.",
            )
    else:
        path = Path(name)
        if not path.exists():
            raise UserError(
                f"there is no file {name}",
                field="--trace",
                remedy=f"Give a CSV file, or one of: {', '.join(PUBLISHED)}.",
            )
    requests = read_trace(path)
    check_trace(requests, str(path))
    return requests


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """A request on its decode GPU. Times in nanoseconds."""

    arrived_ns: int  # at the cluster
    ready_ns: int  # with its KV, at decode
    prompt_tokens: int
    output_tokens: int
    number: int = 0
    joined_ns: int = 0
    first_ns: int = 0
    done: int = 0  # tokens that it has
    end_step: int = 0
    held_tokens: int = 0  # of KV when it joined
    joined_step: int = 0
    waited_for_kv: bool = False


@dataclass(frozen=True, slots=True)
class Traffic:
    """Arrivals at the cluster.

    Attributes:
        requests: of a trace; empty: generated like the Azure conversation trace.
        per_second: mean rate of one decode GPU.
        day: the mean follows the hours of a day, stretched over the run.
        lengths: mean prompt and output tokens, each exponentially distributed, and arrivals by
            Poisson, instead of the trace's; (): as the trace has them.
    """

    requests: Sequence[TraceRequest]
    per_second: float
    day: bool = False
    lengths: tuple[float, ...] = ()

    def arrivals(
        self, gpus: int, seconds: float, seed: int, surge: float = 1.0
    ) -> Iterator[TraceRequest]:
        """Return what arrives at a cell of so many GPUs, in order.

        Each cell plays the trace from a place of its own on, so that bursts of two cells do not
        coincide; a trace that is over begins again. In the middle third of the time `surge` times
        as much comes.
        """
        rate = self.per_second * gpus
        if self.lengths:
            even = self._drawn(rate, seed)
        elif self.requests:
            even = self._played(rate, seed)
        else:
            even_s = seconds * (1 + (surge - 1) / 3)
            made = generator.generate(per_second=rate, seconds=even_s * 1.02 + 1, seed=seed)
            even = iter(made)
        for request in even:
            at_s = day_time(request.at_s, seconds) if self.day else request.at_s
            at_s = surge_time(at_s, seconds, surge)
            if at_s >= seconds:
                return
            yield TraceRequest(at_s, request.prompt_tokens, request.output_tokens)

    def _drawn(self, rate: float, seed: int) -> Iterator[TraceRequest]:
        draw, at_s = random.Random(seed), 0.0
        prompt, output = self.lengths
        while True:
            at_s += draw.expovariate(rate)
            lengths = (max(1, round(draw.expovariate(1 / mean))) for mean in (prompt, output))
            yield TraceRequest(at_s, *lengths)

    def _played(self, rate: float, seed: int) -> Iterator[TraceRequest]:
        requests = self.requests
        n = len(requests)
        span_s = (requests[-1].at_s - requests[0].at_s) * n / (n - 1)
        stretch = n / span_s / rate
        first = random.Random(seed).randrange(n)
        origin, turn = requests[first].at_s, 0
        while True:
            for i in range(first if turn == 0 else 0, n):
                r = requests[i]
                at_s = (r.at_s - origin + turn * span_s) * stretch
                yield TraceRequest(at_s, r.prompt_tokens, r.output_tokens)
            turn += 1


def surge_time(at_s: float, seconds: float, surge: float) -> float:
    """Return when what would come at `at_s` comes if the middle third has `surge` times as much."""
    third_s = seconds / 3
    surged_s = (at_s - third_s) / surge
    if at_s <= third_s:
        return at_s
    return third_s + surged_s if surged_s <= third_s else at_s - (surge - 1) * third_s


def day_time(at_s: float, seconds: float) -> float:
    """Return when what would come at `at_s` under an even rate comes in a day of `seconds`."""
    mean = sum(DAY) / len(DAY)
    hour_s = seconds / len(DAY)
    wanted, passed = at_s / hour_s, 0.0
    hour = 0
    while True:
        share = DAY[hour % len(DAY)] / mean
        if passed + share > wanted:
            return (hour + (wanted - passed) / share) * hour_s
        passed += share
        hour += 1


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that is on its way to a decode GPU. Times in seconds."""

    at_s: float
    ready_s: float
    prompt_tokens: int
    output_tokens: int
    gpu: int  # of the cell


class PrefillPool:
    """GPUs that compute prompts, first come, first served, and send their KV on.

    Args:
        truth: how long that takes; None: KV arrives at once.
        gpus: of the pool.
    """

    def __init__(self, truth: RooflineTruth | None, gpus: int) -> None:
        self._truth = truth
        self._free_s = [0.0] * max(1, gpus)
        self.busy_s = 0.0

    def ready_s(self, at_s: float, prompt_tokens: int) -> float:
        """Return when a prompt that comes at `at_s` has its KV at decode."""
        if self._truth is None:
            return at_s
        took_s = self._truth.prefill_us(prompt_tokens) / 1e6
        begin_s = max(at_s, heapq.heappop(self._free_s))
        heapq.heappush(self._free_s, begin_s + took_s)
        self.busy_s += took_s
        return begin_s + took_s + self._truth.transfer_us(prompt_tokens) / 1e6


def prefill_gpus(truth: RooflineTruth, sample: Iterable[TraceRequest], rate: float) -> int:
    """Return how many prefill GPUs keep below 60% for a rate, at least one."""
    took = [truth.prefill_us(r.prompt_tokens) / 1e6 for r in sample]
    if not took:
        return 1
    return max(1, math.ceil(rate * sum(took) / len(took) / 0.6))


def dealt(arrivals: Iterable[TraceRequest], pool: PrefillPool, gpus: int) -> Iterator[Arrival]:
    """Return requests with the decode GPU that each goes to, as a round-robin router deals."""
    for number, request in enumerate(arrivals):
        ready_s = pool.ready_s(request.at_s, request.prompt_tokens)
        yield Arrival(
            request.at_s, ready_s, request.prompt_tokens, request.output_tokens, number % gpus
        )


@dataclass(frozen=True, slots=True)
class JobArrival:
    """A FinetuneJob that comes at a moment."""

    at_s: float
    priority: int
    tokens: float


def job_arrivals(
    count: int,
    within_s: float,
    *,
    tokens: tuple[float, float],
    priorities: Sequence[tuple[int, float]],
    seed: int,
) -> list[JobArrival]:
    """Return jobs that come at random moments until `within_s`.

    Args:
        count: how many.
        within_s: the last of them comes before that.
        tokens: least and most of a job; any factor between them is as likely as any other.
        priorities: each value with its weight among the jobs.
        seed: of the draws.
    """
    draw = random.Random(seed)
    values, weights = [p for p, _ in priorities], [w for _, w in priorities]
    least, most = tokens
    return [
        JobArrival(
            draw.random() * within_s,
            draw.choices(values, weights)[0],
            least * (most / least) ** draw.random(),
        )
        for _ in range(count)
    ]


def read_jobs(path: Path) -> list[JobArrival]:
    """Read jobs from a CSV file with the columns at_seconds, priority and tokens.

    Raises:
        UserError: no such file, or a line that says no job.
    """
    columns = ("at_seconds", "priority", "tokens")
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            rows = list(csv.DictReader(lines))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot be read: {error}", field=str(path), remedy="Give --job-list a CSV file."
        ) from error
    jobs = []
    for number, row in enumerate(rows, start=2):
        try:
            at_s, priority, tokens = (float(row[name] or "nan") for name in columns)
        except (KeyError, TypeError, ValueError):
            at_s = priority = tokens = math.nan
        if not (0 <= at_s < LONGEST_S and abs(priority) <= 1e9 and 1 <= tokens <= 1e15):
            raise UserError(
                "says no job",
                field=f"{path}:{number}",
                remedy=f"Write the columns {', '.join(columns)}, for example 60,1000,2e6.",
            )
        jobs.append(JobArrival(at_s, int(priority), tokens))
    if not jobs:
        raise UserError("holds no job", field=str(path), remedy="Write a line for each.")
    return jobs
