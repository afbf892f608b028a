"""Check what the benchmarks of decode beside trainers make of steps and tasklets."""

from __future__ import annotations

import pytest

from benchmarks import decode_core, phases
from benchmarks.light.trainers import share_within, tokens_between
from windrow.eventlog import TaskletEvent


def tasklet(phase: str, layer: int, start: int, end: int, tokens: int = 100) -> TaskletEvent:
    return TaskletEvent("job", 1, 0, phase, layer, tokens, 0, start, end, 1)


def test_tokens_between_two_moments_count_layers_in_part():
    ran = [
        tasklet("fwd", 0, 0, 10),
        tasklet("fwd", 1, 10, 20),
        tasklet("loss", 2, 20, 30),
        tasklet("bwd", 1, 30, 50),
        tasklet("bwd", 0, 50, 70),
        tasklet("opt", 0, 70, 80, tokens=0),
    ]
    assert tokens_between(ran, 0, 80) == 100
    assert tokens_between(ran, 0, 15) == 37.5  # a layer and a half of four
    assert tokens_between(ran, 40, 60) == 25
    assert share_within(ran[3], 45, 100) == 0.25


def steps(stretches: dict[str, float], *, noise: float = 0.0) -> list[phases.Step]:
    return [
        phases.Step(point, number, stretch * (1 + noise * (-1) ** index), phase, pure=True)
        for index, point in enumerate(phases.POINTS)
        for number in range(10)
        for phase, stretch in stretches.items()
    ]


def held_out(of: list[phases.Step]) -> dict[str, float]:
    found = {result.name: result.value for result in phases.figures(of)}
    return {name: value for name, value in found.items() if "held-out error of a worker" in name}


def test_a_factor_for_each_phase_wins_where_phases_differ_and_only_there():
    one, apart = held_out(steps({phases.FORWARD: 1.1, phases.BACKWARD: 1.5})).values()
    assert apart == pytest.approx(0, abs=0.01)
    assert one > 10
    one, apart = held_out(steps({phases.FORWARD: 1.2, phases.BACKWARD: 1.2}, noise=0.1)).values()
    assert apart == pytest.approx(one)
    assert one > 5


def test_steps_are_counted_for_what_ran_as_they_began():
    ran = [tasklet("fwd", 0, 0, 1_000_000), tasklet("bwd", 0, 1_000_000, 3_000_000)]
    found = {"ends_ns": [900_000, 1_900_000], "latencies_us": [800.0, 1000.0]}
    first, second = phases._overlaid(ran, (4, 512), 0, 500.0, found)
    assert (first.phase, first.pure, first.stretch) == (phases.FORWARD, True, 1.6)
    assert (second.phase, second.pure, second.stretch) == (phases.FORWARD, False, 2.0)


def test_arms_are_compared_within_their_round():
    found, rates = {}, {}
    for load in decode_core.LOADS:
        for arm in decode_core.ARMS:
            slower = 1.5 if arm == "guest" else 1.0
            turns = decode_core.Turns(
                [10.0 * slower, 20.0 * slower], [30.0, 60.0], [(0, 1), (1, 2)]
            )
            found[load, arm], rates[load, arm] = turns, [1000.0 * slower, 2000.0 * slower]
    told = {result.name: result for result in decode_core._results(found, rates)}
    for load in decode_core.LOADS:
        assert told[f"decode {load}, guest: p50 step against split"].value == 1.5
        assert told[f"decode {load}, guest: p50 step against split"].met is False
        assert told[f"decode {load}, guest: p99 step against split"].value == 1.0
        assert told[f"decode {load}, guest: tokens against split"].value == 1.5
        assert told[f"decode {load}, rows: p50 step against alone"].value == 1.0
