"""Rows of first light from what its stages leave behind, for a GPU that nobody has here."""

from __future__ import annotations

import pytest

from benchmarks.light.figures import results
from benchmarks.light.measure import MeasureEffort, Parts

EFFORT = MeasureEffort(
    batches=(32,),
    context=1024,
    contexts=(),
    load_batch=32,
    generated=128,
    objectives_ms=(10.0, 20.0),
    steps=1,
    seconds=1.0,
)
DEVICE = {
    "label": "gpu:H200",
    "units": 132,
    "group_units": 8,
    "splits": [[0, 132], [64, 132]],
    "ready_s": 20.0,
    "weight_bytes": 15_010_000_000,
    "kv_token_bytes": 131_072,
    "captures": {"graphs": 7, "seconds": 4.0, "n_bytes": 1 << 30},
    "copy_gb_s": 4300.0,
}


def arm(step_ms: float, tokens_per_second: float) -> dict:
    latencies = [1000 * step_ms] * 99 + [1000 * 12.0]
    return {
        "latencies_us": latencies,
        "tokens_per_second": tokens_per_second,
        "optimizer_steps": 50,
    }


@pytest.fixture
def parts(tmp_path) -> Parts:
    point = {"batch": 32, "context": 1024, "step_us": 6200.0, "p99_us": 6500.0}
    kept = Parts(tmp_path, resume=False)
    for stage, found in {
        "device": DEVICE,
        "dedicated": {"tokens_per_second": 15_000.0},
        "solo": {"seconds": 8.0, "points": [{**point, "units": 132}]},
        "corun": {"seconds": 20.0, "points": [{**point, "units": 64, "step_us": 7000.0}]},
        "alone": arm(6.2, 0.0),
        "naive": arm(25.0, 14_000.0),
        "gaps-10": arm(9.5, 5_000.0),
        "gaps-20": arm(19.0, 9_000.0),
        "windrow-10": arm(9.0, 10_000.0),
        "windrow-20": arm(9.0, 12_500.0),
    }.items():
        kept.keep(stage, found)
    return Parts(tmp_path, resume=True)


def test_eta_is_held_to_both_bounds_of_a_gpu(parts):
    rows = {row.name: row for row in results(parts, EFFORT)}
    spatial = rows["windrow at 10 ms: share of the spatial bound"]
    assert spatial.baseline.value == pytest.approx(92 / 132)
    assert spatial.value == pytest.approx(10 / 15 / (92 / 132))
    assert (spatial.goal, spatial.met) == (0.9, True)
    temporal = rows["windrow at 20 ms: share of the temporal bound"]
    # A step alone by the roofline: its bytes at four fifths of the bandwidth, and 0.6 ms.
    step_ms = (15_010_000_000 + 32 * 1024 * 131_072) / (0.8 * 4300e6) + 0.6
    assert temporal.value == pytest.approx(12.5 / 15 / (1 - step_ms / 20))
    assert temporal.goal == 1.0
    assert rows["profile, solo and co-run"].goal == 60.0


def test_an_arm_without_an_objective_is_judged_by_each(parts):
    rows = {row.name: row.value for row in results(parts, EFFORT)}
    assert rows["naive at 10 ms: steps over"] == 100.0
    assert rows["naive at 20 ms: steps over"] == 99.0
    assert rows["windrow at 10 ms: steps over"] == 1.0
    assert rows["windrow at 10 ms: TPOT p50"] == 9.0
    assert rows["gaps at 20 ms: eta"] == pytest.approx(0.6)


def test_on_the_host_no_bound_and_no_goal_is_claimed(parts):
    parts.keep("device", DEVICE | {"copy_gb_s": None, "captures": None})
    rows = results(parts, EFFORT)
    assert {row.goal for row in rows} == {None}
    assert not any("bound" in row.name or "capture" in row.name for row in rows)


def test_a_gpu_that_is_shared_in_time_only_has_figures_of_the_other_arms(parts, tmp_path):
    for path in [*tmp_path.glob("windrow-*"), tmp_path / "corun.json"]:
        path.unlink()
    rows = {row.name: row for row in results(Parts(tmp_path, resume=True), EFFORT)}
    assert rows["profile, solo and co-run"].value == 8.0
    assert rows["gaps at 10 ms: eta"].value == pytest.approx(1 / 3)
    assert not any("windrow" in name or "beside the worker" in name for name in rows)


def test_parts_of_an_earlier_run_count_only_when_it_is_resumed(tmp_path):
    Parts(tmp_path, resume=False).keep("solo", {"seconds": 1.0})
    assert "solo" in Parts(tmp_path, resume=True)
    assert "solo" not in Parts(tmp_path, resume=False)
    assert "solo" not in Parts(tmp_path, resume=True)
