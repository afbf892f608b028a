"""The prior of a device that was never profiled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from windrow_sidecar.engines.builtin.llama.config import read_config
from windrow_sidecar.engines.builtin.rates import step_size
from windrow_sidecar.qos.levels import host_levels
from windrow_sidecar.qos.predictor import predictor_of
from windrow_sidecar.qos.roofline import Rates, StepSize, roofline_models
from windrow_sidecar.qos.solo import SoloSample

TINY = Path(__file__).resolve().parents[2] / "models" / "windrow-tiny"
# Llama-3-8B in bf16 on an H200 of which decode gets 80% of 4.3 TB/s and 60% of 790 TFLOP/s.
LLAMA = StepSize(15_010_000_000, 7_505_000_000, 131_072)
H200 = Rates(bytes_per_us=3.44e6, flops_per_us=474e6)


def test_a_step_reads_weights_and_context_and_computes_each_request():
    model = roofline_models({132: H200}, LLAMA)[132]
    # 15.01 GB take 4,363 us, 16 x 1,024 tokens of 128 KiB 624 us, 16 requests 507 us of products.
    assert model.c0_us == pytest.approx(4363, abs=1)
    assert model.predict_us(16, 16 * 1024) == pytest.approx(4363 + 624 + 507, abs=2)


def test_a_measured_step_anchors_what_no_rate_tells():
    step = SoloSample(units=132, batch=1, context_tokens=1024, step_us=5200.0)
    bare = roofline_models({132: H200}, LLAMA)[132]
    anchored = roofline_models({132: H200}, LLAMA, [step])[132]
    assert anchored.predict_us(1, 1024) == pytest.approx(5200.0)
    assert (anchored.b0_us, anchored.k0_us) == (bare.b0_us, bare.k0_us)
    nothing = SoloSample(units=132, batch=1, context_tokens=1024, step_us=1.0)
    assert roofline_models({132: H200}, LLAMA, [nothing])[132].c0_us == 0.0


def test_the_sizes_of_a_step_are_those_of_the_checkpoint():
    size = step_size(read_config(TINY), torch.float32)
    with safe_open(TINY / "model.safetensors", "pt") as tensors:
        shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    matrices = [s for name, s in shapes.items() if len(s) == 2 and "embed_tokens" not in name]
    if not any("lm_head" in name for name in shapes):  # tied: the embedding is the projection
        matrices.append(next(s for name, s in shapes.items() if "embed_tokens" in name))
    assert size.parameters == sum(rows * columns for rows, columns in matrices)
    assert size.weight_bytes == 4 * size.parameters


def test_a_prior_calls_every_step_beyond_it_until_such_steps_were_seen():
    levels = host_levels(2)
    profile = {
        "roofline": True,
        "solo": [{"units": n, "c0Us": 2000, "b0Us": 500, "k0NsPerToken": 10} for n in (1, 2)],
    }
    predictor = predictor_of(levels, profile)
    assert predictor.extrapolates(1, 100)
    for _ in range(64):
        predictor.observe(1, batch=4, context_tokens=2000, latency_us=5000)
    assert not predictor.extrapolates(4, 2000)
    assert predictor.extrapolates(5, 2000)
