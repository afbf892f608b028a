"""A GPU is shared in space only where everything that this needs was found."""

from __future__ import annotations

import pytest

from windrow_sidecar.compute.mode import Ground, choose_sharing


@pytest.mark.parametrize(
    ("ground", "mode", "reason"),
    [
        (Ground("driver 12.2", ""), "temporal", "no green contexts: driver 12.2"),
        (Ground("", "not on PATH"), "temporal", "no MPS daemon: not on PATH"),
        (Ground("", ""), "spatial", "capped"),
        (
            Ground("", "", decode_sms=frozenset({1, 2}), finetune_sms=frozenset({2})),
            "spatial",  # decode on every SM meets the worker's by intent
            "capped",
        ),
        (Ground("", "", "green"), "temporal", "could not be measured"),
        (
            Ground("", "", "green", frozenset({0, 1}), frozenset({2, 3})),
            "spatial",
            "measured on different SMs",
        ),
        (
            Ground("", "", "green", frozenset({0, 1, 2}), frozenset({2, 3})),
            "temporal",
            "meet on 1 SMs, 2 among them",
        ),
    ],
)
def test_what_is_missing_decides_and_is_said(ground, mode, reason):
    sharing = choose_sharing(ground)
    assert sharing.mode == mode
    assert reason in sharing.reason
