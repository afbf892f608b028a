"""Spare time of decode's own core for finetuning, and what taking it costs decode.

A decode process on the first of two cores, under a fixed load that lets it rest now and then, and
beside it trainers of the idle class without grants, in turns: one on the other core as today
(`split`); a second one on decode's core besides (`guest`); two with a thread each that the system
places where there is room, so that shares are rows (`rows`); one with two threads on both cores, so
that shares are threads (`threads`). Every arm in each round, in a new random order; figures are
compared within their round.
Example: python -m benchmarks.decode_core --json /tmp/decode_core.json
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.harness import Baseline, Result, arguments, environment, middle, write
from benchmarks.light.processes import Decode
from benchmarks.light.trainers import Trainer, at_work, decoding, tokens_between, two_cores

ALONE, SPLIT = "alone", "split"
ARMS: Mapping[str, tuple[str, ...]] = {
    ALONE: (),
    SPLIT: ("own",),
    "guest": ("own", "guest"),
    "rows": ("one", "other"),
    "threads": ("team",),
}
BATCH, CONTEXT, GENERATED = 8, 1024, 64
# Seconds that decode is busy, and idles, in turn: a fifth of the time as under the demo's load, and
# never.
LOADS = {"a fifth of the time idle": (0.4, 0.1), "never idle": (0.0, 0.0)}
SECONDS, ROUNDS = 2.5, 6
ARENA_BYTES = 128 << 20
# As good as it may get without anybody noticing.
GOAL_STRETCH = 1.02


@dataclass(slots=True)
class Turns:
    """Turns of one arm under one load, round by round."""

    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)
    begun_ended_ns: list[tuple[int, int]] = field(default_factory=list)


def main() -> None:
    """Play all rounds; print and write what they show."""
    options = arguments(__doc__).parse_args()
    cores, env = two_cores(), environment()
    with decoding(arena_bytes=ARENA_BYTES, max_batch=BATCH) as (plan, decode, ends):
        trainers: dict[str, Trainer] = {}
        for who, (cpus, threads, floats) in {
            "own": (cores[1:], 1, False),
            "guest": (cores[:1], 1, False),
            "one": (cores, 1, True),
            "other": (cores, 1, True),
            "team": (cores, 2, False),
        }.items():
            trainers[who] = Trainer(plan, who, cpus, threads, floats=floats)
            ends.callback(trainers[who].close)
            trainers[who].await_first_step()
        found = _play(decode, trainers, 1 if options.quick else ROUNDS)
        rates = _rates(found, trainers)
    write("decode_core", _results(found, rates), env, options.json)


def _play(
    decode: Decode, trainers: Mapping[str, Trainer], rounds: int
) -> dict[tuple[str, str], Turns]:
    found: dict[tuple[str, str], Turns] = defaultdict(Turns)
    draw = random.Random(7)
    for _ in range(rounds):
        for load, rest_s in LOADS.items():
            for arm in draw.sample(list(ARMS), len(ARMS)):
                with at_work([trainers[who] for who in ARMS[arm]]):
                    steps = decode.run(
                        do="run",
                        arm="alone",
                        units=1,
                        batch=BATCH,
                        context=CONTEXT,
                        generated=GENERATED,
                        seconds=SECONDS,
                        rest_s=rest_s,
                    )
                turns, took = found[load, arm], sorted(steps["latencies_us"])
                turns.p50_ms.append(statistics.median(took) / 1e3)
                turns.p99_ms.append(took[min(len(took) - 1, int(0.99 * len(took)))] / 1e3)
                turns.begun_ended_ns.append((steps["begin_ns"], steps["end_ns"]))
    return found


def _rates(
    found: Mapping[tuple[str, str], Turns], trainers: Mapping[str, Trainer]
) -> dict[tuple[str, str], list[float]]:
    """Tokens a second of all trainers of an arm, turn by turn."""
    ran = {who: trainer.all_tasklets() for who, trainer in trainers.items()}
    return {
        (load, arm): [
            sum(tokens_between(ran[who], *turn) for who in ARMS[arm]) / ((turn[1] - turn[0]) / 1e9)
            for turn in turns.begun_ended_ns
        ]
        for (load, arm), turns in found.items()
    }


def _results(
    found: Mapping[tuple[str, str], Turns], rates: Mapping[tuple[str, str], Sequence[float]]
) -> list[Result]:
    results = []
    beside_decode = [arm for arm in ARMS if arm != ALONE]
    for load in LOADS:
        alone = found[load, ALONE]
        for arm in beside_decode:
            turns, name = found[load, arm], f"decode {load}, {arm}"
            for what, took, of_alone in (
                ("p50", turns.p50_ms, alone.p50_ms),
                ("p99", turns.p99_ms, alone.p99_ms),
            ):
                stretch, spread = middle(_ratios(took, of_alone))
                baseline = Baseline(f"alone, ms, {what}", statistics.median(of_alone))
                title = f"{name}: {what} step against alone"
                results.append(
                    Result(title, stretch, "ratio", "lower", spread=spread, baseline=baseline)
                )
            if arm == SPLIT:
                continue
            beside = found[load, SPLIT]
            for what, ours, theirs, better, goal in (
                ("p50 step against split", turns.p50_ms, beside.p50_ms, "lower", GOAL_STRETCH),
                ("p99 step against split", turns.p99_ms, beside.p99_ms, "lower", None),
                ("tokens against split", rates[load, arm], rates[load, SPLIT], "higher", 1.0),
            ):
                ratio, spread = middle(_ratios(ours, theirs))
                results.append(
                    Result(f"{name}: {what}", ratio, "ratio", better, goal, spread)  # type: ignore[arg-type]
                )
        for arm in beside_decode:
            rate, spread = middle(rates[load, arm])
            name = f"decode {load}, {arm}: finetuning"
            results.append(Result(name, rate, "tokens/s", "higher", None, spread))
    return results


def _ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(ours, theirs, strict=True)]


if __name__ == "__main__":
    main()
