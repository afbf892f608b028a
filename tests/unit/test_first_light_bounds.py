from __future__ import annotations

import pytest

from benchmarks.light.bounds import Roofline

# Llama-3-8B on an H200: 15.01 GB of weights, 128 KiB of KV a token, 4.3 TB/s, 132 SMs by 8.
H200 = Roofline(4300, 132, 8, 15_010_000_000, 131_072)
CONTEXT = 1024
# By batch, for objectives of 8, 10, 15, 20 and 40 ms: eta in turn / at once, in percent.
BOUNDS = {
    8: "34/64 47/70 65/82 74/88 87/94",
    16: "30/64 44/70 63/82 72/82 86/88",
    32: "22/58 38/70 59/76 69/82 84/88",
    64: "07/52 25/58 50/76 63/82 81/88",
}


@pytest.mark.parametrize("batch", BOUNDS)
def test_the_bounds_of_an_8b_model_on_an_h200(batch):
    for pair, objective_ms in zip(BOUNDS[batch].split(), (8, 10, 15, 20, 40), strict=True):
        temporal, spatial = (int(percent) / 100 for percent in pair.split("/"))
        assert H200.temporal(batch, CONTEXT, objective_ms) == pytest.approx(
            temporal, abs=0.005
        )  # whole percents
        assert H200.spatial(batch, CONTEXT, objective_ms) == pytest.approx(spatial, abs=0.005)


@pytest.mark.parametrize(("batch", "step_ms"), [(8, 5.3), (16, 5.6), (32, 6.2), (64, 7.5)])
def test_a_step_takes_its_bytes_at_four_fifths_of_the_bandwidth(batch, step_ms):
    assert H200.step_ms(batch, CONTEXT) == pytest.approx(step_ms, abs=0.05)  # a tenth


def test_an_objective_below_the_step_leaves_nothing():
    assert H200.temporal(32, CONTEXT, 5.0) == 0.0
    assert H200.spatial(32, CONTEXT, 5.0) == 0.0
