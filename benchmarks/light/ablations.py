"""Protections of decode off one at a time, with the built-in engine and a worker at work.

Decode and worker are the processes of first light, under the hook that serves. A load of few
requests has surges that decode can just hold on all of its cores; the objective is what it needs
alone, and a fifth. In each round every arm plays once, in a new random order.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.harness import Baseline, Result, middle
from benchmarks.light.measure import Bench, Document, MeasureEffort, Parts
from benchmarks.light.processes import EPOCH, Plan
from windrow_lab.figures.paired import Interval, interval_of, order_of

ALONE = "alone"
# Of decode's own median step in a surge.
FACTOR = 1.2
# An outdated profile tells of a device so many times as fast.
FASTER = 2.0
ARENA_BYTES = 384 << 20


@dataclass(frozen=True)
class Arm:
    """All protections but some, with a profile that is right or of a faster device."""

    name: str
    without: tuple[str, ...] = ()
    outdated: bool = False


ARMS = (
    Arm("all on"),
    Arm("without predictor", ("predictor",)),
    Arm("without predictor and guard", ("predictor", "guard")),
    Arm("without handover", ("handover",)),
    Arm("outdated profile, all on", outdated=True),
    Arm("outdated profile, without guard", ("guard",), outdated=True),
)


# The load: a few requests that are always there, and surges of many (`benchmarks.light.load`).
STEADY = 4
SURGE = {"requests": 92, "context": 24, "generated": 24, "every_s": 2.0}
EFFORT = MeasureEffort(
    batches=(STEADY, 48, 96),
    context=24,
    contexts=(48,),
    load_batch=STEADY,
    generated=48,
    objectives_ms=(),
    steps=32,
    seconds=8.0,
)


class Ablations(Bench):
    """The profile, then rounds of all arms."""

    def __init__(
        self,
        plan: Plan,
        parts: Parts,
        effort: MeasureEffort,
        say: Callable[[str], None],
        *,
        rounds: int,
        arms: Sequence[Arm] = ARMS,
    ) -> None:
        super().__init__(plan, parts, effort, say)
        self._rounds, self._arms = rounds, {arm.name: arm for arm in arms}

    @property
    def objective_ms(self) -> float:
        """Step time that decode alone needs in surges, and a fifth."""
        return float(self.parts["objective"]["ms"])

    def turns(self) -> dict[str, list[Turn]]:
        """Return the turns of each arm, by round."""
        return {
            name: [
                Turn.of(self.parts[stage_of(n, name)], self.objective_ms)
                for n in range(self._rounds)
            ]
            for name in (ALONE, *self._arms)
        }

    def _stages(self) -> Iterator[tuple[str, Callable[[], Document]]]:
        yield "dedicated", self._dedicated
        yield "solo", self._solo
        yield "settle", self._alone
        yield "objective", self._objective
        yield "corun", self._corun
        for n in range(self._rounds):
            for name in order_of([ALONE, *self._arms], first=[], last=[], seed=1, round_=n):
                yield stage_of(n, name), self._turn(self._arms.get(name))

    def _alone(self) -> Document:
        self._at_work()  # it loads, and must not do so beside what is measured
        return self._under_load({"arm": "alone", "surge": SURGE})

    def _objective(self) -> Document:
        settled = self.parts["settle"]
        return {"ms": FACTOR * statistics.median(of_surges(settled, "latencies_us")) / 1e3}

    def _turn(self, arm: Arm | None) -> Callable[[], Document]:
        if arm is None:
            return self._alone

        def measure() -> Document:
            worker = self._at_work()
            profile = self.parts["corun"]["profile"]
            found = self._under_load(
                {
                    "arm": "windrow",
                    "surge": SURGE,
                    "objective_ms": self.objective_ms,
                    "epoch": EPOCH,
                    "profile": faster(profile, FASTER) if arm.outdated else profile,
                    "without": arm.without,
                }
            )
            return {**found, **worker.done_within(found["begin_ns"], found["end_ns"])}

        return measure


def stage_of(n: int, arm: str) -> str:
    """Return the name of an arm's turn in a round; a file has it."""
    return f"{n}-{arm.replace(' ', '-').replace(',', '')}"


def faster(profile: Document, times: float) -> Document:
    """Return the profile that a device so many times as fast would have."""
    found = copy.deepcopy(profile)
    for row in found["solo"]:
        for coefficient in ("c0Us", "b0Us", "k0NsPerToken"):
            row[coefficient] /= times
    for sample in found["samples"]:
        sample["stepUs"] /= times
    return found


def of_surges(part: Document, field: str) -> list[float]:
    """Return a figure of the steps with most of a surge in the batch."""
    most = STEADY + SURGE["requests"] // 2
    return [value for value, n in zip(part[field], part["batches"], strict=True) if n > most]


@dataclass(frozen=True)
class Turn:
    """Result of one arm in one round."""

    over_percent: float  # of its steps
    surge_over_percent: float  # of those with a surge in the batch
    row: int  # most steps over the objective one after the other
    wait_ms: float  # the longest of a surge, until its last request has a token
    tokens_per_second: float
    retractions: int

    @classmethod
    def of(cls, part: Document, objective_ms: float) -> Turn:
        """Return a turn from the files that it left."""
        over = [us > 1e3 * objective_ms for us in part["latencies_us"]]
        in_surge = [us > 1e3 * objective_ms for us in of_surges(part, "latencies_us")]
        row = longest = 0
        for late in over:
            row = row + 1 if late else 0
            longest = max(longest, row)
        return cls(
            100 * sum(over) / len(over),
            100 * sum(in_surge) / max(1, len(in_surge)),
            longest,
            max(part["surge_waits_us"], default=0.0) / 1e3,
            part.get("tokens_per_second", 0.0),
            part["retractions"],
        )


def more_than_alone(found: dict[str, list[Turn]], arm: str) -> Interval:
    """Return how many points more of an arm's steps are over the objective than alone's."""
    pairs = zip(found[arm], found[ALONE], strict=True)
    return interval_of([ours.over_percent - alone.over_percent for ours, alone in pairs])


def results(found: dict[str, list[Turn]], dedicated: float, objective_ms: float) -> list[Result]:
    """Return the figures, medians of the rounds, each beside that of decode alone."""
    rows: list[Result] = [Result("objective", objective_ms, "ms", "lower")]
    figures = (
        ("steps over", "over_percent", "%"),
        ("steps of surges over", "surge_over_percent", "%"),
        ("steps over in a row, most", "row", ""),
        ("longest wait of a surge", "wait_ms", "ms"),
        ("requests thrown out of the batch", "retractions", ""),
    )
    for arm in [name for name in found if name != ALONE]:
        for name, field, unit in figures:
            of = {who: middle([getattr(t, field) for t in found[who]]) for who in (arm, ALONE)}
            beside = Baseline(ALONE, of[ALONE][0])
            value, spread = of[arm]
            rows.append(Result(f"{arm}: {name}", value, unit, "lower", None, spread, beside))
        eta, spread = middle([turn.tokens_per_second / dedicated for turn in found[arm]])
        rows.append(Result(f"{arm}: eta", eta, "", "higher", None, spread))
        more = more_than_alone(found, arm)
        for what, points in (("median", more.median), ("low", more.low), ("high", more.high)):
            name = f"{arm}: steps over, more than alone, {what}"
            rows.append(Result(name, points, "points", "lower"))
    return rows


def plan_of(folder: Path) -> Plan:
    """Return the plan of decode and worker; `folder`: a short path, since sockets are in it."""
    most = STEADY + int(SURGE["requests"])
    return Plan.of(
        folder,
        "small",
        row_tokens=64,
        rows_a_step=1,
        device="cpu",
        arena_bytes=ARENA_BYTES,
        max_batch=most,
        kv_tokens=most * 4 * EFFORT.context,
        all_threads=True,
    )


def run(rounds: int) -> tuple[list[Result], Document]:
    """Play all arms; return the figures and what they were measured with.

    Raises ProcessEnded.
    """
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="wr-") as name:
        parts = Parts(Path(name) / "parts", resume=False)
        bench = Ablations(plan_of(Path(name)), parts, EFFORT, console.print, rounds=rounds)
        try:
            bench.run()
        finally:
            bench.close()
        return report(bench, rounds)


def report(bench: Ablations, rounds: int) -> tuple[list[Result], Document]:
    """Return the figures of what was played, and what they were measured with."""
    dedicated = bench.parts["dedicated"]["tokens_per_second"]
    how = {"rounds": rounds, "steady": STEADY, "surge": SURGE, "seconds": EFFORT.seconds}
    return results(bench.turns(), dedicated, bench.objective_ms), how
