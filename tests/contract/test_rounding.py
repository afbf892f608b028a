"""Float64 runs keep nothing in fp32, so two of them differ by more than rounding only if wrong."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from windrow_sidecar.finetune.engine.sizing import Windows
from windrow_sidecar.testing.architectures import random_model
from windrow_sidecar.testing.equality import (
    Cut,
    our_training,
    pefts_training,
    small_rows,
    small_spec,
    tuned_model,
)
from windrow_sidecar.testing.rounding import ROUNDING, apart, in_float64, no_farther

pytestmark = pytest.mark.usefixtures("one_thread")


class Narrow(TorchDispatchMode):
    """Notes every operation that makes a tensor narrower than float64."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else [made]:
            if isinstance(one, torch.Tensor) and one.dtype in (torch.float32, torch.bfloat16):
                self.seen.add(f"{func} {list(one.shape)}")
        return made


# Norms in fp32, a capped and scaled head, experts with a router: what models widen to fp32.
@pytest.mark.parametrize("architecture", ["Llama", "Gemma2", "Qwen3Moe", "GPTJ"])
def test_both_ways_compute_in_float64_throughout(architecture):
    tuned = tuned_model(random_model(architecture).double(), small_spec())
    with Narrow() as narrow:
        pefts_training(tuned, small_rows())
        cut = Cut() if architecture == "GPTJ" else Cut(Windows(7), max_tokens=64)
        our_training(copy.deepcopy(tuned), small_rows(), cut)
    # AdamW counts its steps in a number in fp32, of each parameter or for all of them; deepcopy
    # clones it.
    n = sum(parameter.requires_grad for parameter in tuned.parameters())
    count = {"aten.zeros.default []", "aten.clone.default []", "aten.detach.default []"}
    count |= {f"aten.expand.default [{n}]", f"aten.clone.default [{n}]", "aten.unbind.int []"}
    assert narrow.seen <= count


def test_afterwards_torch_is_as_it_was():
    with in_float64():
        assert torch.zeros(1).dtype == torch.zeros(1, dtype=torch.float32).dtype == torch.float64
    assert torch.zeros(1).dtype == torch.ones(1).double().float().dtype == torch.float32


def test_one_result_in_fp32_is_no_rounding_of_float64():
    right = {"w": torch.rand(100, dtype=torch.float64) + 1}
    assert apart({"w": right["w"] * (1 + 2**-52)}, right).by_rounding
    assert not apart({"w": right["w"].float()}, right).by_rounding
    assert not apart({"w": right["w"] * (1 + 2 * ROUNDING)}, right).by_rounding


def test_an_error_that_is_twice_that_of_the_ordinary_way_is_told():
    assert no_farther([1e-6, 1.8e-6, 1e-6], [1e-6], torch.float32)
    assert not no_farther([2e-6] * 3, [1e-6] * 3, torch.float32)
    assert no_farther([2e-8], [0.0], torch.float32), "the result is rounded to be held"
