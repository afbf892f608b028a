from __future__ import annotations

from datetime import UTC, datetime

import pytest

from windrow.crd import LatencyProfileSpec
from windrow_sidecar.engines.profile import EFFORTS, Subject, document, host_splits, plan
from windrow_sidecar.qos.solo import SoloSample, solo_models

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
    assert len(splits) == min(units, 8)
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
