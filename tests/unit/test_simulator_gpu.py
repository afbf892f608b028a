"""The simulator agrees with every committed run of a GPU, given that run's own worker rate."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from windrow.errors import UserError
from windrow_simulator import calibration
from windrow_simulator.gpu_runs import compare
from windrow_simulator.hardware import gpu_named, model_named
from windrow_simulator.truth import RooflineTruth
from windrow_simulator.worker_rate import joint_rate, other_bound

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
RUNS = sorted(
    path
    for path in RESULTS.glob("*/first_light*.json")
    if json.loads(path.read_text())["environment"].get("driver") == "cuda"
)


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_simulated_eta_is_near_what_was_measured_on_a_gpu(path):
    arms = compare(path)
    assert {arm.policy for arm in arms} == {"naive", "windrow"}
    assert len({arm.objective_ms for arm in arms}) == 4
    for arm in arms:
        if arm.eta < 0.2:
            assert arm.simulated_eta == pytest.approx(arm.eta, abs=0.03), arm
        else:
            assert arm.simulated_eta == pytest.approx(arm.eta, rel=0.15), arm
        # Steps are looser: the law knows the worker's rate, and nothing of its kernels.
        assert arm.simulated_tpot_p50_ms == pytest.approx(arm.tpot_p50_ms, rel=0.15), arm


def test_rates_that_are_assumed_are_those_of_the_committed_run():
    run = json.loads((RESULTS / "h200" / "first_light.json").read_text())
    values = {row["name"]: row["value"] for row in run["results"]}
    assert pytest.approx(values["dedicated worker"], rel=1e-4) == calibration.DEDICATED
    assert pytest.approx(values["worker on lent memory, decode idle"], rel=1e-4) == calibration.LENT


def test_a_worker_has_the_rates_that_were_given():
    gpu, model = gpu_named("h200"), model_named("llama-3-8b")
    truth = RooflineTruth(gpu, model, model, calibration.measured((7000.0, 3000.0)), disjoint=False)
    assert truth.dedicated_rate * 1e6 == pytest.approx(7000)
    idle = truth.queue.bound(truth.finetune_rate(132, beside_decode=False))
    assert idle * 1e6 == pytest.approx(3000)
    # Half of a row costs the host as much as a whole one.
    assert truth.queue.bound(1.0, 512) == pytest.approx(joint_rate(1.0, truth.queue.rate / 2))


def test_two_bounds_of_a_rate_worked_by_hand():
    assert joint_rate(100.0, 100.0) == pytest.approx(100 / 2 ** (2 / 3))
    assert joint_rate(100.0, math.inf) == 100
    assert joint_rate(100.0, 0.0) == 0
    assert joint_rate(60.0, other_bound(50.0, 60.0)) == pytest.approx(50)
    assert math.isinf(other_bound(60.0, 60.0))


def test_a_file_that_is_not_a_run_of_a_gpu_is_refused(tmp_path):
    (tmp_path / "other.json").write_text('{"benchmark": "memory"}')
    with pytest.raises(UserError, match="not a result of first light"):
        compare(tmp_path / "other.json")
    with pytest.raises(UserError, match="cannot be read"):
        compare(tmp_path / "nothing.json")
