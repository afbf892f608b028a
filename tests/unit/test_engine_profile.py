from __future__ import annotations

from datetime import UTC, datetime

import pytest

from windrow.crd import LatencyProfileSpec
from windrow.errors import UserError
from windrow_cli.profile import summary, write_plot
from windrow_sidecar.engines.profile import (
    EFFORTS,
    Subject,
    check_subject,
    document,
    host_splits,
    plan,
    plan_co_run,
)
from windrow_sidecar.qos.co_run import CoRunSample, co_run_model, fit_co_run
from windrow_sidecar.qos.solo import SoloSample, SoloStepModel, solo_models
from windrow_sidecar.qos.view import LEVELS_MAX

SUBJECT = Subject("host:2-cores", "host", "builtin", "0.1.0", "f" * 64)


def test_every_split_of_a_small_set_is_measured_with_several_contexts():
    points = plan(
        host_splits(2), EFFORTS["quick"], max_batch=64, max_tokens=16384, max_context=32768
    )
    assert {point.units for point in points} == {1, 2}
    assert {(p.batch, p.context) for p in points if p.units == 1} >= {
        (1, 256),
        (8, 2048),
        (16, 1024),
    }
    assert all(point.batch * point.context <= 16384 for point in points)


def test_no_point_is_longer_than_a_request_may_be():
    points = plan(host_splits(2), EFFORTS["quick"], max_batch=8, max_tokens=9999, max_context=1024)
    assert {point.context for point in points} == {256}


@pytest.mark.parametrize("units", [1, 2, 3, 8, 9, 64, 192])
def test_splits_go_from_decode_alone_to_one_core_for_decode(units):
    splits = host_splits(units).splits
    assert len(splits) == min(units, LEVELS_MAX)
    assert splits[0].decode_units == units
    assert splits[-1].decode_units == 1
    assert all(split.decode_units + split.finetune_units == units for split in splits)


def test_the_document_is_a_latency_profile_that_predicts_what_was_measured():
    samples = [
        SoloSample(
            units, batch, batch * context, 1000 / units + 100 * batch + 0.5 * batch * context
        )
        for units in (1, 2)
        for batch in (4, 8, 16)
        for context in (256, 1024)
    ]
    made = document(SUBJECT, samples, taken_at=datetime(2025, 1, 2, tzinfo=UTC))
    spec = LatencyProfileSpec.model_validate(made)
    assert [level.units for level in spec.solo] == [1, 2]
    assert len(spec.samples) == len(samples)
    model = solo_models(made)[2]
    assert model.predict_us(8, 8192) == pytest.approx(500 + 800 + 4096)


ALONE_US = {1: 6000.0, 2: 4000.0, 3: 3000.0, 4: 2500.0}
SOLO = {units: SoloStepModel(us, 0.0, 0.0) for units, us in ALONE_US.items()}


def beside(units: int, finetune: int, stretch: float) -> CoRunSample:
    step = SoloSample(units, 4, 2000, SOLO[units].predict_us(4, 2000) * stretch)
    return CoRunSample(step, finetune, 900.0)


def test_steps_beside_a_load_are_planned_for_every_split_in_turn():
    splits, bounds = host_splits(4), {"max_batch": 64, "max_tokens": 9000, "max_context": 4096}
    assert plan_co_run(splits, EFFORTS["quick"], **bounds) == []
    points = plan_co_run(splits, EFFORTS["full"], **bounds)
    assert [p.finetune_units for p in points[:3]] == [1, 2, 3]
    assert {(p.alone.batch, p.alone.context) for p in points} == {(4, 512), (16, 512), (4, 2048)}
    assert all(p.alone.units + p.finetune_units == 4 for p in points)


def test_both_factors_are_found_where_there_are_several_levels():
    # stretch = 1.1 * s_inf + 1.5 * s_ft; three levels eight times, against a prior of one point.
    samples = [beside(4 - n, n, 1.1 * (4 - n) / 4 + 1.5 * n / 4) for n in (1, 2, 3)] * 8
    factors, error = fit_co_run(samples, SOLO, 4)
    for finetune in (1, 2, 3):
        wanted = 1.1 * (4 - finetune) / 4 + 1.5 * finetune / 4
        # The prior pulls by at most its share of the information, 1 of 3.5, of what it is off.
        assert factors.factor((4 - finetune) / 4, finetune / 4) == pytest.approx(wanted, rel=0.05)
    assert error < 5


def test_with_one_level_the_stretch_of_that_level_is_what_was_measured():
    factors, _ = fit_co_run([beside(1, 1, 1.4)] * 50, SOLO, 2)
    # 50 points of half of a square each against a prior of one: 25 / 26 of the way from 1.05.
    assert factors.factor(0.5, 0.5) == pytest.approx(1.05 + 0.35 * 25 / 26, abs=1e-9)


def test_what_was_measured_beside_a_load_is_read_back_and_shown(tmp_path):
    alone = [SoloSample(u, b, b * 512, 1000 / u + 100 * b) for u in (1, 2) for b in (4, 8, 16)]
    fitted = document(SUBJECT, alone, taken_at=datetime(2025, 1, 2, tzinfo=UTC))
    step = SoloSample(1, 4, 2048, 1.3 * solo_models(fitted)[1].predict_us(4, 2048))
    made = document(
        SUBJECT,
        alone,
        taken_at=datetime(2025, 1, 2, tzinfo=UTC),
        co_run=[CoRunSample(step, 1, 900.0)] * 20,
        noise_percent=2.5,
        units=2,
    )
    spec = LatencyProfileSpec.model_validate(made)
    assert co_run_model(made).factor(0.5, 0.5) == pytest.approx(1.3, abs=0.03)
    assert spec.samples[-1].finetune_tokens_per_second == 900.0
    assert "scatter by 2.5%" in summary(spec)
    write_plot(spec, tmp_path / "plot.html")
    assert "decode 1, worker 1" in (tmp_path / "plot.html").read_text()


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("device", "gpu:NVIDIA-H200", "another device: 'gpu:NVIDIA-H200', here it is 'host:2-c"),
        ("driver", "cuda", "another driver"),
        ("engine", "sglang", "another engine: 'sglang'"),
        ("engineVersion", "0.0.9", "another engine version: '0.0.9', here it is '0.1.0'"),
        ("modelFingerprint", "e" * 64, "another model"),
        ("tensorParallel", 2, "another tensor parallelism: 2, here it is 1"),
    ],
)
def test_a_profile_of_something_else_is_refused_by_name(field, value, said):
    samples = [SoloSample(2, 4, 1024, 1000.0)]
    made = document(SUBJECT, samples, taken_at=datetime(2025, 1, 2, tzinfo=UTC))
    check_subject(made, SUBJECT)
    with pytest.raises(UserError, match=said):
        check_subject(made | {field: value}, SUBJECT)
