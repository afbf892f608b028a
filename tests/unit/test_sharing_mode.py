"""A GPU is shared in space only where everything that this needs was found."""

from __future__ import annotations

import pytest

from windrow_sidecar.compute.sharing import GpuCapabilities, choose_sharing


@pytest.mark.parametrize(
    ("pod", "mode", "reason"),
    [
        (GpuCapabilities("driver 12.2", ""), "temporal", "no green contexts: driver 12.2"),
        (GpuCapabilities("", "not on PATH"), "temporal", "no MPS daemon: not on PATH"),
        (GpuCapabilities("", ""), "spatial", "capped"),
        (
            GpuCapabilities("", "", decode_sms=frozenset({1, 2}), finetune_sms=frozenset({2})),
            "spatial",  # decode on every SM meets the worker's by intent
            "capped",
        ),
        (GpuCapabilities("", "", "green"), "temporal", "could not be measured"),
        (
            GpuCapabilities("", "", "green", frozenset({0, 1}), frozenset({2, 3})),
            "spatial",
            "measured on different SMs",
        ),
        (
            GpuCapabilities("", "", "green", frozenset({0, 1, 2}), frozenset({2, 3})),
            "temporal",
            "meet on 1 SMs, 2 among them",
        ),
    ],
)
def test_what_is_missing_decides_and_is_said(pod, mode, reason):
    sharing = choose_sharing(pod)
    assert sharing.mode == mode
    assert reason in sharing.reason
