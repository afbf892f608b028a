"""The stages of first light: each is measured once, kept at once, and found by --resume."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.light.processes import EPOCH, Decode, Plan, Worker, train_alone
from windrow_lab.figures.summary import SummaryWindow, throughput
from windrow_sidecar.engines.profile import Subject, document
from windrow_sidecar.qos.levels import Partitioning, PartitionLevel
from windrow_sidecar.qos.predictor import Predictor
from windrow_sidecar.qos.solo import SoloSample, solo_models

Document = dict[str, Any]
# Beside decode a tasklet takes a quarter of an objective of 10 ms at most, in the profile.
PROFILE_BOUND_US = 2_500
# What a request of a point generates before another takes its place: its context stays near.
POINT_TOKENS = 128


@dataclass(frozen=True)
class MeasureEffort:
    """Amount of measurement.

    Attributes:
        batches, context: of the profile.
        contexts: besides, of its solo points: one context cannot tell batch from context.
        load_batch: of the fixed load.
        generated: tokens of a request under load.
        objectives_ms: of the fixed load.
        steps: of a point of the profile.
        seconds: of each arm under load, and of the dedicated worker.
    """

    batches: tuple[int, ...]
    context: int
    contexts: tuple[int, ...]
    load_batch: int
    generated: int
    objectives_ms: tuple[float, ...]
    steps: int
    seconds: float


class Parts:
    """Results by stage, a file each.

    Args:
        folder: of the files.
        resume: whether files that are there count.
    """

    def __init__(self, folder: Path, *, resume: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._done: dict[str, Document] = {}
        for path in folder.glob("*.json"):
            if resume:
                self._done[path.stem] = json.loads(path.read_text())
            else:
                path.unlink()

    def __contains__(self, stage: str) -> bool:
        return stage in self._done

    def __getitem__(self, stage: str) -> Document:
        found: Document = self._done[stage]
        return found

    def get(self, stage: str, default: Document) -> Document:
        """Return what a stage found, or `default` where it was not measured."""
        return self._done.get(stage, default)

    def keep(self, stage: str, found: Document) -> Document:
        """Write a stage's result."""
        self._done[stage] = found
        draft = self._folder / f"{stage}.tmp"
        draft.write_text(json.dumps(found))
        draft.replace(self._folder / f"{stage}.json")
        return found


class Bench:
    """Decode and worker, started when a stage first needs them."""

    def __init__(
        self, plan: Plan, parts: Parts, effort: MeasureEffort, say: Callable[[str], None]
    ) -> None:
        self._plan, self.parts, self._effort, self._say = plan, parts, effort, say
        self._decode: Decode | None = None
        self._worker: Worker | None = None

    def close(self) -> None:
        """End the processes: the worker first, for it borrows from decode."""
        for process in (self._worker, self._decode):
            if process is not None:
                process.close()

    def run(self) -> None:
        """Measure every stage that is not there yet, in order."""
        for stage, measure in self._stages():
            if stage in self.parts:
                self._say(f"{stage}: measured before")
                continue
            began_s = time.monotonic()
            self.parts.keep(stage, measure())
            self._say(f"{stage}: {time.monotonic() - began_s:.1f} s")

    def _stages(self) -> Iterator[tuple[str, Callable[[], Document]]]:
        # The worker alone first: decode's memory would be missing to it, or be in its way.
        yield "dedicated", self._dedicated
        yield "solo", self._solo
        yield "alone", lambda: self._under_load({"arm": "alone"})
        yield "naive", self._naive
        yield "beside-idle", self._beside_idle
        # Without MPS a GPU is shared in time only: no share exists to measure or to grant.
        arms = ["gaps"]
        if len(self.parts["device"]["splits"]) > 1:
            yield "corun", self._corun
            arms.insert(0, "windrow")
        for objective in self._effort.objectives_ms:
            for arm in arms:
                yield f"{arm}-{objective:g}", self._shared(arm, objective)

    # --- what stages share

    def _at_decode(self) -> Decode:
        if self._decode is None:
            self._say("starting decode")
            self._decode = Decode(self._plan)
            self.parts.keep("device", self._decode.facts)
        return self._decode

    def _at_work(self) -> Worker:
        if self._worker is None:
            decode = self._at_decode()
            self._say("starting the worker beside decode")
            self._worker = Worker(self._plan)
            self._worker.await_offer(decode)
        return self._worker

    def _levels(self) -> Partitioning:
        facts = self._at_decode().facts
        return Partitioning(
            facts["units"], tuple(PartitionLevel(*pair) for pair in facts["splits"])
        )

    def _point(self, batch: int, context: int, **arm: Any) -> Document:
        """Steps at one point of the profile."""
        found = self._at_decode().run(
            do="run",
            batch=batch,
            context=context,
            generated=min(POINT_TOKENS, context),
            together=True,
            steps=self._effort.steps,
            **arm,
        )
        return {
            "batch": batch,
            "context": context,
            "context_tokens": found["context_tokens"],
            "step_us": statistics.median(found["latencies_us"]),
            "p99_us": _quantile(found["latencies_us"], 0.99),
        }

    def _under_load(self, arm: Document, **bounds: Any) -> Document:
        effort = self._effort
        bounds = bounds or {"seconds": effort.seconds}
        return self._at_decode().run(
            do="run",
            batch=effort.load_batch,
            context=effort.context,
            generated=effort.generated,
            **arm,
            **bounds,
        )

    # --- stages

    def _dedicated(self) -> Document:
        measured = throughput(train_alone(self._plan, "dedicated", self._effort.seconds).tasklets)
        return {"tokens_per_second": measured.tokens_per_second, "steps": measured.steps}

    def _solo(self) -> Document:
        """Decode alone on each of its shares, at several contexts: stage 1 of the predictor."""
        began_s, rows = time.monotonic(), []
        effort = self._effort
        decode = self._at_decode()
        for units in dict.fromkeys(decode_units for _, decode_units in decode.facts["splits"]):
            for context in sorted({effort.context, *effort.contexts}):
                for batch in effort.batches:
                    point = self._point(batch, context, arm="alone", units=units)
                    rows.append({"units": units, **point})
        return {"seconds": time.monotonic() - began_s, "points": rows}

    def _beside_idle(self) -> Document:
        """The worker beside a decode without a request: what memory that is lent costs it."""
        worker = self._at_work()
        found = self._at_decode().run(do="rest", seconds=self._effort.seconds)
        return worker.done_within(found["begin_ns"], found["end_ns"])

    def _corun(self) -> Document:
        """Measure beside the worker on each of its shares: the predictor's stage 2, and profile."""
        worker = self._at_work()
        began_s, rows = time.monotonic(), []
        splits = self._at_decode().facts["splits"]
        for split in range(1, len(splits)):
            for batch in self._effort.batches:
                point = self._point(
                    batch,
                    self._effort.context,
                    arm="share",
                    split=split,
                    bound_us=PROFILE_BOUND_US,
                )
                rows.append({"split": split, "units": splits[split][0], **point})
        seconds = time.monotonic() - began_s
        worker.done_within(0, 0)  # raises where it has ended meanwhile
        return {"seconds": seconds, "points": rows, "profile": self._profile(rows)}

    def _profile(self, corun: list[Document]) -> Document:
        facts, levels = self._at_decode().facts, self._levels()
        solo = [
            SoloSample(p["units"], p["batch"], p["context_tokens"], p["step_us"])
            for p in self.parts["solo"]["points"]
        ]
        subject = Subject(facts["label"], self._plan.device, "builtin", "first-light", "0" * 64)
        profile = document(subject, solo, taken_at=datetime.now(UTC))
        predictor = Predictor(levels, solo_models(profile))
        for point in corun:
            predictor.observe(
                point["split"],
                batch=point["batch"],
                context_tokens=point["context_tokens"],
                latency_us=point["step_us"],
            )
        model = predictor.co_run
        return profile | {"coRun": {"b1": model.b1, "k1": model.k1, "samples": len(corun)}}

    def _naive(self) -> Document:
        """The worker that knows of no decode, beside a decode that knows of no worker."""
        until = self._plan.folder / "naive-ended"
        until.unlink(missing_ok=True)
        decode, effort = self._at_decode(), self._effort
        decode.send(
            do="run",
            arm="alone",
            batch=effort.load_batch,
            context=effort.context,
            generated=effort.generated,
            until=str(until),
        )
        try:
            events = train_alone(self._plan, "naive", effort.seconds)
        finally:
            until.touch()
            found = decode.answer()
        steps = [t.end_ns for t in events.tasklets if t.phase == "opt"]
        begin_ns, end_ns = (steps[0], steps[-1]) if steps else (0, 0)
        within = [
            latency
            for latency, at_ns in zip(found["latencies_us"], found["ends_ns"], strict=True)
            if begin_ns <= at_ns <= end_ns
        ]
        window = SummaryWindow(begin_ns, end_ns, 0.0, end_ns)
        done = throughput(events.tasklets, window)
        return {
            "latencies_us": within,
            "tokens_per_second": done.tokens_per_second,
            "optimizer_steps": done.steps,
        }

    def _shared(self, arm: str, objective_ms: float) -> Callable[[], Document]:
        def measure() -> Document:
            worker = self._at_work()
            asked: Document = {"arm": arm, "objective_ms": objective_ms, "epoch": EPOCH}
            if arm == "windrow":
                asked["profile"] = self.parts["corun"]["profile"]
            found = self._under_load(asked)
            done = worker.done_within(found["begin_ns"], found["end_ns"])
            return {"latencies_us": found["latencies_us"], **done}

        return measure


def _quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]
