"""Triton's kernels of packed layers, interpreted, compute what torch's operators and peft do."""

from __future__ import annotations

import copy
import logging

import pytest
import torch

from windrow_sidecar.compute import kernel_launch
from windrow_sidecar.finetune.adapter import fused_layer, layer_programs
from windrow_sidecar.finetune.adapter.adapters import ADAPTER
from windrow_sidecar.finetune.adapter.layer_programs import use_program
from windrow_sidecar.finetune.adapter.packed_linears import PackedLinears
from windrow_sidecar.finetune.engine.orders import token_major
from windrow_sidecar.finetune.engine.sizing import Windows
from windrow_sidecar.finetune.engine.suspension import BrokenOff
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.model.layer_program import program_of
from windrow_sidecar.finetune.recompute.checkpointed_layers import PlannedLayers
from windrow_sidecar.qos.view import Phase
from windrow_sidecar.testing.architectures import random_model
from windrow_sidecar.testing.equality import (
    Cut,
    our_gradients,
    pefts_gradients,
    small_rows,
    small_spec,
    stream_of,
    tuned_model,
)
from windrow_sidecar.testing.rounding import apart, in_type_of, no_farther

pytest.importorskip("triton")  # interpreted: see conftest.py
pytestmark = pytest.mark.usefixtures("one_thread")

WHOLE = Cut(program="packed")
WINDOWS = Cut(Windows(7), token_major, program="packed")
FEW = small_rows(2)  # interpreting takes milliseconds for each program
ONE = FEW[:1]
# Of one scale: alpha over rank.
UNEVEN = {
    "lora": {
        "rank": 4,
        "alpha": 8,
        "rankPattern": {"q_proj": 2, "down_proj": 6},
        "alphaPattern": {"q_proj": 4, "down_proj": 12},
    }
}


def tuned_of(architecture, dtype, adapter=None):
    return tuned_model(random_model(architecture).to(dtype), small_spec(adapter))


@pytest.fixture
def interpreted(monkeypatch):
    """Kernels run on the host; the check at load has a test of its own, and takes a second."""
    monkeypatch.setattr(fused_layer, "why_not", lambda device: "")
    monkeypatch.setattr(layer_programs, "_fused_differs", lambda stack, program: "")


@pytest.mark.parametrize(
    ("architecture", "rows", "cut"),
    [("Llama", FEW, WHOLE), ("Qwen2", ONE, WINDOWS)],  # Qwen2's have biases
    ids=["whole", "windows"],
)
def test_gradients_of_fused_layers_equal_those_of_peft(
    architecture, rows, cut, interpreted, monkeypatch
):
    tuned = tuned_of(architecture, torch.float64, UNEVEN)
    theirs = pefts_gradients(tuned, rows)
    apart_by_torch = lambda *_: pytest.fail("a function ran by torch's operators")  # noqa: E731
    monkeypatch.setattr(PackedLinears, "backward", apart_by_torch)
    assert apart(our_gradients(copy.deepcopy(tuned), rows, cut), theirs).by_rounding


# Not in bf16, whose products Triton's interpreter takes as integers.
def test_in_fp32_fused_layers_err_as_pefts_own_run_does(interpreted):
    tuned = tuned_of("Llama", torch.float32, UNEVEN)
    truth = pefts_gradients(copy.deepcopy(tuned).double(), ONE)
    theirs = [apart(pefts_gradients(tuned, ONE, pads), truth).of_norm for pads in (0, 1)]
    found = our_gradients(copy.deepcopy(tuned), ONE, WHOLE)
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    assert no_farther([apart(found, truth).of_norm], theirs, torch.float32)


def test_a_plan_recorded_with_torchs_operators_runs_with_fused_layers(interpreted):
    tuned = tuned_of("Llama", torch.float64)
    expected = pefts_gradients(tuned, ONE)
    with in_type_of(tuned):
        stream = stream_of(tuned, ONE, WHOLE)
        stack = stream.parts.stack
        around = stack.around_layer = PlannedLayers(stack.layers)
        around.bytes_per_token = 0
        while stream.peek().phase is not Phase.OPTIMIZER:
            stream.run(stream.peek())
    found = {k.removeprefix("sum/"): t for k, t in stream.tensors().items() if "sum/" in k}
    assert apart(found, expected).by_rounding


def test_a_fused_layer_that_is_broken_off_backward_learns_nothing_and_runs_again(interpreted):
    tuned = tuned_of("Llama", torch.float64)
    expected = pefts_gradients(tuned, ONE)
    broken = []
    with in_type_of(tuned):
        stream = stream_of(tuned, ONE, WHOLE)

        def point():
            # The third of a backward's points is behind the MLP's, before attention's.
            broken.append(at.phase)
            if broken.count(Phase.BACKWARD) in (1, 3):
                raise BrokenOff

        layers = stream.parts.stack.layers
        for layer in layers:
            program_of(layer).point = point
        while (at := stream.peek()).phase is not Phase.OPTIMIZER:
            try:
                stream.run(at)
            except BrokenOff:
                assert all(p.grad is None for p in layers[at.layer].parameters())
    found = {k.removeprefix("sum/"): t for k, t in stream.tensors().items() if "sum/" in k}
    assert apart(found, expected).by_rounding


def packed_stack(architecture="Llama", adapter=None):
    tuned = tuned_of(architecture, torch.float32, adapter)
    stack = DecoderStack(tuned.get_base_model())
    assert use_program(stack, "packed", adapter=ADAPTER, repacks=True) == ""
    return stack, [program_of(layer) for layer in stack.layers]


def test_copies_of_all_layers_are_made_at_once_and_each_b_in_its_place(interpreted):
    _, programs = packed_stack(adapter=UNEVEN)
    first, second = programs[:2]
    assert second.fused is not None
    first.refresh()
    second.refresh()
    with torch.no_grad():
        for parameter in (*first.gate_up.learns, *second.qkv.learns):
            parameter.add_(1.0)
    first.refresh()
    of_query = second.qkv.projections[0].a
    assert torch.equal(second.qkv.a[: len(of_query)], of_query)
    for group in (second.qkv, first.gate_up):
        packed = group.b.clone()
        group.pack_b, group._seen = None, ()
        group.b.zero_()
        group.refresh()
        assert torch.equal(packed, group.b)


NOT_FUSED = {
    "norms of heads": ("Qwen3", None, "in layer 0 heads have norms"),
    "magnitudes": (
        "Llama",
        {"lora": {"rank": 4, "alpha": 8, "useDora": True}},
        "in layer 0 qkv has magnitudes",
    ),
    "some adapters": (
        "Llama",
        {"lora": {"rank": 4, "targetModules": "q_proj"}},
        "in layer 0 o has no adapter",
    ),
    "scales": (
        "Llama",
        {"lora": {"rank": 4, "alpha": 8, "alphaPattern": {"up_proj": 3}}},
        "in layer 0 gate_up has adapters of several scales",
    ),
}


@pytest.mark.parametrize("name", NOT_FUSED)
def test_layers_that_kernels_cannot_run_take_torchs_operators(name, interpreted, caplog):
    architecture, adapter, why = NOT_FUSED[name]
    with caplog.at_level(logging.INFO, logger=layer_programs.__name__):
        _, programs = packed_stack(architecture, adapter)
    assert all(program.fused is None for program in programs)
    assert why in caplog.messages[-1]


def test_kernels_need_a_gpu_and_triton(monkeypatch):
    assert fused_layer.why_not(torch.device("cpu")) == "the layers are not on a GPU"
    monkeypatch.setattr(fused_layer.importlib.util, "find_spec", lambda name: None)
    assert fused_layer.why_not(torch.device("cuda")) == "Triton is not installed"


def test_kernels_that_compute_something_else_or_fail_at_load_are_not_used(monkeypatch, caplog):
    from windrow_sidecar.finetune.adapter import layer_kernels

    monkeypatch.setattr(fused_layer, "why_not", lambda device: "")
    with caplog.at_level(logging.INFO, logger=layer_programs.__name__):
        _, programs = packed_stack()
        assert programs[0].fused is not None
        kernel_launch._shared.cache_clear()
        monkeypatch.setattr(layer_kernels, "swiglu_back", layer_kernels.swiglu)
        _, programs = packed_stack()
    kernel_launch._shared.cache_clear()
    assert all(program.fused is None for program in programs)
    assert all(p.grad is None for program in programs for g in program.groups for p in g.learns)
    assert "Triton's kernels: they do not run (" in caplog.messages[-1]
