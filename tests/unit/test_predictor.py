from __future__ import annotations

import math
import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windrow.errors import UserError
from windrow_sidecar.qos.co_run import CoRunFactors, co_run_model
from windrow_sidecar.qos.levels import Partitioning, PartitionLevel, host_levels, overlapping_levels
from windrow_sidecar.qos.policies import FIGURES
from windrow_sidecar.qos.predictor import START_MARGIN, Predictor
from windrow_sidecar.qos.solo import SoloStepModel

LESSONS, PARTS_A_LESSON = int(FIGURES["lessons"]), int(FIGURES["parts_a_lesson"])
SOLO = {units: SoloStepModel(1000 + 800 / units, 400 / units, 0.5 / units) for units in range(1, 9)}


def test_alone_is_stage_one_and_beside_a_worker_is_multiplied():
    predictor = Predictor(host_levels(4), SOLO, CoRunFactors(b1=1.2, k1=1.4))
    alone, one, two, three = predictor.predict_us(8, 4000)
    assert alone == pytest.approx(SOLO[4].predict_us(8, 4000))
    assert one == pytest.approx(SOLO[3].predict_us(8, 4000) * (1.2 * 0.75 + 1.4 * 0.25))
    assert two == pytest.approx(SOLO[2].predict_us(8, 4000) * 1.3)
    assert three == pytest.approx(SOLO[1].predict_us(8, 4000) * (1.2 * 0.25 + 1.4 * 0.75))


def test_the_prior_costs_five_percent_on_complementary_units():
    predictor = Predictor(host_levels(2), SOLO)
    assert predictor.predict_us(8, 4000)[1] == pytest.approx(1.05 * SOLO[1].predict_us(8, 4000))
    assert co_run_model({"coRun": {"b1": 2.0, "k1": 2.0, "samples": 0}}) == CoRunFactors()
    assert co_run_model({"coRun": {"b1": 1.1, "k1": 1.3, "samples": 40}}) == CoRunFactors(1.1, 1.3)


def test_least_squares_finds_both_coefficients_from_noisy_steps():
    levels, rng = host_levels(4), random.Random(1)
    predictor = Predictor(levels, SOLO)
    for _ in range(600):
        index = rng.choice((1, 2, 3))
        split = levels.splits[index]
        batch = rng.randint(1, 16)
        factor = 1.1 * split.decode_units / 4 + 1.5 * split.finetune_units / 4
        latency = SOLO[split.decode_units].predict_us(batch, 3000) * factor * rng.gauss(1, 0.03)
        predictor.observe(index, batch=batch, context_tokens=3000, latency_us=latency)
    # Noise of 0.03 x 1.3 in the ratio, over (1 + 0.99) / (1 - 0.99) = 199 steps that count; the
    # inverse of the shares' second moments has 7 on its diagonal: 0.039 x sqrt(7 / 199) = 0.0073.
    assert predictor.co_run.b1 == pytest.approx(1.1, abs=5 * 0.0073)
    assert predictor.co_run.k1 == pytest.approx(1.5, abs=5 * 0.0073)
    # On its way from 8% to 1.645 x 3%.
    assert 1.645 * 0.03 < predictor.margin < START_MARGIN


def test_one_level_for_ever_stays_stable_and_follows_a_change():
    predictor = Predictor(host_levels(2), SOLO)
    solo = SOLO[1].predict_us(6, 2000)
    for factor in (1.1, 1.6, 1.2):
        for _ in range(3000):
            predictor.observe(1, batch=6, context_tokens=2000, latency_us=solo * factor)
        # 0.99**3000 of the former factor is left: nothing but rounding.
        assert predictor.predict_us(6, 2000)[1] == pytest.approx(solo * factor, rel=1e-12)


def test_one_disturbed_step_moves_the_prediction_by_a_few_percent_only():
    predictor = Predictor(host_levels(2), SOLO)
    solo = SOLO[1].predict_us(6, 2000)
    for _ in range(500):
        predictor.observe(1, batch=6, context_tokens=2000, latency_us=solo * 1.1)
    before = predictor.predict_us(6, 2000)[1]
    predictor.observe(1, batch=6, context_tokens=2000, latency_us=solo * 50)
    assert predictor.predict_us(6, 2000)[1] / before < 1.05


def test_the_margin_ends_at_the_95th_percentile_of_the_residual():
    predictor, rng = Predictor(host_levels(2), SOLO), random.Random(2)
    solo = SOLO[1].predict_us(6, 2000)
    residuals = [
        predictor.observe(1, batch=6, context_tokens=2000, latency_us=solo * rng.uniform(1.0, 1.4))
        for _ in range(6000)
    ]
    over = sum(r > predictor.margin for r in residuals[2000:]) / 4000
    # A tracker that moves by 1e-3 jitters by sqrt(1e-3 x 0.95 x 0.05 / (2 x 3)) where residuals
    # have a density of 1.2 / 0.4 = 3 an unit: by 0.0028, which is 0.0084 of the steps.
    assert over == pytest.approx(0.05, abs=3 * 0.0084)


def test_short_steps_hardly_count_beside_those_near_the_objective():
    predictor, rng = Predictor(host_levels(2), SOLO), random.Random(3)
    objective = 2.2 * SOLO[1].predict_us(16, 8000)
    for i in range(20_000):
        near = i % 3 == 0
        batch, context = (32, 16_000) if near else (4, 0)
        factor = rng.uniform(1.15, 1.25) if near else rng.uniform(1.2, 2.0)
        latency = SOLO[1].predict_us(batch, context) * factor
        predictor.observe(
            1, batch=batch, context_tokens=context, latency_us=latency, objective_us=objective
        )
    found = predictor.predict_us(32, 16_000)[1] / SOLO[1].predict_us(32, 16_000)
    # The short ones, two of three, weigh 0.023 each: 1.218. All alike would be 1.47. The noise of
    # 0.1 / sqrt(3) over 199 / 3 steps that count is 0.007.
    assert found == pytest.approx(1.218, abs=5 * 0.007)
    assert predictor.margin < 0.12


def test_a_step_alone_teaches_nothing_about_the_worker():
    predictor = Predictor(host_levels(2), SOLO)
    residual = predictor.observe(0, batch=6, context_tokens=0, latency_us=1e6)
    assert residual > 1
    assert (predictor.co_run, predictor.margin) == (CoRunFactors(), START_MARGIN)


def test_a_profile_without_a_level_is_refused():
    with pytest.raises(UserError, match=r"profile\.solo.*\[1\]"):
        Predictor(host_levels(2), {2: SOLO[2]})


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.integers(0, 512),
            st.integers(0, 10**6),
            st.floats(1, 1e8),
        ),
        max_size=200,
    )
)
def test_whatever_is_measured_a_worker_never_makes_decode_faster(steps):
    levels = host_levels(4)
    predictor = Predictor(levels, SOLO)
    for split, batch, context, latency in steps:
        predictor.observe(split, batch=batch, context_tokens=context, latency_us=latency)
    for split, predicted in zip(levels.splits, predictor.predict_us(8, 4000), strict=True):
        assert math.isfinite(predicted)
        assert predicted >= SOLO[split.decode_units].predict_us(8, 4000) * (
            1 - 4 * sys.float_info.epsilon
        )
    assert FIGURES["margin_min"] <= predictor.margin <= FIGURES["margin_max"]


def test_levels_name_their_splits():
    host = host_levels(3)
    assert host.splits == (PartitionLevel(0, 3), PartitionLevel(1, 2), PartitionLevel(2, 1))
    assert [host.allowed(p) for p in (0, 32, 34, 67, 100)] == [1, 1, 2, 3, 3]
    assert host.index_of(2) == 2
    assert host.index_of(7) == 0
    gpu = overlapping_levels(132, (16, 64))
    assert gpu.splits == (PartitionLevel(0, 132), PartitionLevel(16, 132), PartitionLevel(64, 132))


@pytest.mark.parametrize(
    "splits",
    [
        (),
        (PartitionLevel(1, 1),),
        (PartitionLevel(0, 2), PartitionLevel(1, 2), PartitionLevel(1, 1)),
        (PartitionLevel(0, 2), PartitionLevel(3, 1)),
        (PartitionLevel(0, 2), PartitionLevel(1, 0)),
    ],
)
def test_splits_that_a_device_cannot_do_are_refused(splits):
    with pytest.raises(UserError, match=r"levels\.splits"):
        Partitioning(2, splits)


def test_beyond_the_profile_it_says_so_until_it_has_seen_as_much():
    predictor = Predictor(host_levels(2), SOLO, profiled=(16, 20_000))
    assert not predictor.extrapolates(16, 20_000)
    assert predictor.extrapolates(17, 1000)
    assert predictor.extrapolates(4, 20_001)
    for _ in range(64):
        predictor.observe(1, batch=20, context_tokens=9000, latency_us=9000)
    assert not predictor.extrapolates(20, 20_000)
    assert predictor.extrapolates(21, 20_000)


def test_a_kind_of_step_that_the_line_does_not_fit_is_corrected_and_no_other():
    predictor = Predictor(host_levels(2), SOLO, CoRunFactors(1.0, 1.0))
    line = predictor.predict(12, 5000)[0][1]
    other = predictor.predict(40, 5000)[0][1]
    for i in range(400):
        # Batches of 9 to 16 with a backward beside them take a tenth longer than with a forward.
        phase = 1 + 2 * (i % 2)
        latency_us = line * (1.1 if phase == 3 else 1.0)
        predictor.observe(1, batch=12, context_tokens=5000, latency_us=latency_us, phase=phase)
    # Least squares settle between both, at 1.05; records bring each where it was measured.
    assert predictor.predict(12, 5000, 3)[0][1] == pytest.approx(1.1 * line, rel=0.01)
    assert predictor.predict(12, 5000, 1)[0][1] == pytest.approx(line, rel=0.01)
    assert predictor.predict(12, 5000)[0][1] == pytest.approx(1.05 * line, rel=0.02)
    assert predictor.predict(40, 5000, 3)[0][1] == pytest.approx(1.05 * other, rel=0.02)


@pytest.mark.parametrize(
    ("form", "factor_moves", "records_move"),
    [("windrow", True, True), ("llmstation", False, True), ("harli", False, False)],
)
def test_the_papers_forms_learn_what_the_papers_learn(form, factor_moves, records_move):
    predictor = Predictor(host_levels(2), SOLO, form=form)
    first = predictor.predict_us(8, 4000)[1]
    for _ in range(40):
        predictor.observe(1, batch=8, context_tokens=4000, latency_us=1.2 * first)
    assert (predictor.co_run != CoRunFactors()) == factor_moves
    assert bool(predictor.known_kinds) == records_move
    moved = predictor.predict_us(8, 4000)[1] / first
    assert moved == pytest.approx(1.0 if form == "harli" else 1.2, rel=0.02)


def test_steps_beside_a_share_teach_what_a_worker_costs_and_parts_of_steps_use_that_up():
    predictor = Predictor(host_levels(2), SOLO)
    for _ in range(LESSONS):
        assert not predictor.taught
        predictor.observe(1, batch=4, context_tokens=400, latency_us=2000)
    assert predictor.taught
    predictor.observe(1, batch=4, context_tokens=400, latency_us=2000)
    for _ in range(PARTS_A_LESSON):
        assert predictor.taught
        predictor.follow(0.0)
    predictor.follow(0.0)
    assert not predictor.taught, "one step beside a share pays for twenty parts"


def test_what_a_profile_has_measured_beside_a_worker_counts():
    assert Predictor(host_levels(2), SOLO, CoRunFactors(b1=1.2, k1=1.4)).taught
    assert not Predictor(host_levels(2), SOLO, CoRunFactors()).taught
