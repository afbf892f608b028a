"""Packed layers learn what peft's own do, and stand aside where they cannot run a model."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from support.examplejob import example_job

from windrow.errors import UserError
from windrow.rundir import ENV_LAYER_PROGRAM
from windrow_sidecar.compute.host_device import HostDevice
from windrow_sidecar.finetune.adapter import layer_programs
from windrow_sidecar.finetune.adapter.adapters import ADAPTER
from windrow_sidecar.finetune.adapter.layer_programs import use_program, wanted_program
from windrow_sidecar.finetune.adapter.packed_copies import one_matrix
from windrow_sidecar.finetune.engine.orders import token_major
from windrow_sidecar.finetune.engine.sizing import WholeRows, Windows
from windrow_sidecar.finetune.engine.suspension import BrokenOff
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.model.layer_program import program_of
from windrow_sidecar.finetune.recompute.checkpointed_layers import PlannedLayers
from windrow_sidecar.finetune.recompute.planning import largest, smallest
from windrow_sidecar.finetune.standalone.preview import Preview
from windrow_sidecar.qos.view import Phase
from windrow_sidecar.testing.architectures import random_model
from windrow_sidecar.testing.equality import (
    Cut,
    our_gradients,
    our_training,
    pefts_gradients,
    pefts_training,
    small_rows,
    small_spec,
    stream_of,
    tuned_model,
)
from windrow_sidecar.testing.rounding import apart, in_type_of, no_farther

pytestmark = pytest.mark.usefixtures("one_thread")

WHOLE = Cut(program="packed")
WINDOWS = Cut(Windows(7), token_major, program="packed")
CUTS = {"whole": WHOLE, "windows": WINDOWS, "in one line": Cut(packed=True, program="packed")}
DORA = {"lora": {"rank": 4, "alpha": 8, "useDora": True}}
SCALED = {
    "rank": 4,
    "alpha": 8,
    "useRslora": True,
    "rankPattern": {"q_proj": 2, "down_proj": 6},
    "alphaPattern": {"up_proj": 3},
}
# What each of the others adds: biases, norms of heads, windows of attention.
MODELS = {
    "Llama": ("Llama", None),
    "Llama, DoRA": ("Llama", DORA),
    "Llama, ranks and scales": ("Llama", {"lora": SCALED}),
    "Llama, some": (
        "Llama",
        {"lora": {"rank": 4, "layersToTransform": [1], "targetModules": "v_proj,up_proj"}},
    ),
    "Qwen2, DoRA": ("Qwen2", DORA),
    "Qwen3": ("Qwen3", None),
    "Mistral": ("Mistral", None),
}


def tuned_of(name, dtype):
    architecture, adapter = MODELS[name]
    return tuned_model(random_model(architecture).to(dtype), small_spec(adapter))


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_packed_layers_equal_those_of_peft(name, monkeypatch):
    tuned = tuned_of(name, torch.float64)
    theirs = pefts_gradients(tuned, small_rows())
    for cut in CUTS.values():
        assert apart(our_gradients(copy.deepcopy(tuned), small_rows(), cut), theirs).by_rounding
    monkeypatch.setattr(layer_programs, "_repack", lambda layer: None)  # as decode lays them out
    assert apart(our_gradients(copy.deepcopy(tuned), small_rows(), WHOLE), theirs).by_rounding


@pytest.mark.equality
@pytest.mark.parametrize("name", ["Llama", "Qwen2, DoRA"])
def test_five_steps_of_packed_layers_equal_those_of_peft(name):
    tuned = tuned_of(name, torch.float64)
    theirs, ours = pefts_training(tuned, small_rows()), our_training(tuned, small_rows(), WINDOWS)
    assert ours.keys() == theirs.keys()
    for kind in ours:
        assert apart(ours[kind], theirs[kind]).by_rounding, kind


@pytest.mark.equality
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["Llama", "Qwen2, DoRA", "Qwen3"])
def test_in_fewer_bits_packed_layers_err_as_pefts_own_run_does(name, dtype):
    rows, tuned = small_rows(), tuned_of(name, dtype)
    truth = pefts_gradients(copy.deepcopy(tuned).double(), rows)
    theirs = [apart(pefts_gradients(tuned, rows, pads), truth).of_norm for pads in (0, 1)]
    found = [our_gradients(copy.deepcopy(tuned), rows, cut) for cut in (WHOLE, WINDOWS)]
    assert {gradient.dtype for of in found for gradient in of.values()} == {torch.float32}
    assert no_farther([apart(of, truth).of_norm for of in found], theirs, dtype)


@pytest.mark.parametrize("name", ["Llama, DoRA", "Qwen3"])
def test_gradients_of_packed_layers_are_bit_equal_for_every_budget(name):
    tuned = tuned_of(name, torch.bfloat16)

    def gradients(bytes_per_token, planned):
        copied = copy.deepcopy(tuned)
        stream = stream_of(copied, small_rows(), WHOLE)
        stack = stream.parts.stack
        if planned:
            around = stack.around_layer = PlannedLayers(stack.layers)
            around.bytes_per_token = bytes_per_token
        while stream.peek().phase is not Phase.OPTIMIZER:
            stream.run(stream.peek())
        return [t for key, t in stream.tensors().items() if key.startswith("sum/")], stack

    expected, stack = gradients(None, planned=False)
    at = stack.begin(torch.ones(1, 11, dtype=torch.int64))
    args = (at.inputs[0].requires_grad_(), *at.calls[0].args)
    graph = PlannedLayers(stack.layers).recording(0, args, at.calls[0].kwargs).graph
    most, least = largest(graph).kept_bytes / 11, smallest(graph).kept_bytes / 11
    assert least < 0.9 * most
    for budget in (most, (most + least) / 2, least / 2, 0):
        found, _ = gradients(budget, planned=True)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), budget


def test_a_packed_layer_that_is_broken_off_learns_nothing_and_runs_again():
    tuned = tuned_of("Llama", torch.float64)
    expected = our_gradients(copy.deepcopy(tuned), small_rows(), WHOLE)
    asked, broken, breaks = [], 0, iter((0, 1, 0, 1))
    left = next(breaks)
    with in_type_of(tuned):
        stream = stream_of(tuned, small_rows(), WHOLE)

        def point():
            nonlocal left
            asked.append(at.phase)
            if at.phase is Phase.BACKWARD:
                left -= 1
                if left == -1:
                    raise BrokenOff

        for layer in stream.parts.stack.layers:
            program_of(layer).point = point
        while (at := stream.peek()).phase is not Phase.OPTIMIZER:
            try:
                stream.run(at)
            except BrokenOff:
                broken, left = broken + 1, next(breaks, len(asked) * 100)
                assert all(p.grad is None for p in layer_gradients(stream, at))
    assert broken == 4
    assert {Phase.FORWARD, Phase.BACKWARD} == set(asked)
    sums = {k.removeprefix("sum/"): t for k, t in stream.tensors().items() if "sum/" in k}
    assert all(torch.equal(sums[name], expected[name]) for name in expected)


def layer_gradients(stream, at):
    layers = stream.parts.stack.layers
    return [p for p in layers[at.layer].parameters() if p.requires_grad]


def test_memory_of_packed_copies_goes_with_the_job_and_comes_back():
    tuned = tuned_of("Llama, DoRA", torch.float32)
    stack = DecoderStack(tuned.get_base_model())
    assert use_program(stack, "packed", adapter=ADAPTER, repacks=True) == ""
    program, attention = program_of(stack.layers[0]), stack.layers[0].self_attn
    weights = [getattr(attention, f"{name}_proj").get_base_layer().weight for name in "qkv"]
    assert one_matrix(weights).data_ptr() == weights[0].data_ptr()
    assert program.products == 4
    before, held = stack.begin(stack.probe), dict(program.tensors)
    made = stack.layers[0](before.inputs[0], *before.calls[0].args, **before.calls[0].kwargs)
    stack.move_buffers(to_host=True)
    assert held
    assert not program.tensors
    again = stack.layers[0](before.inputs[0], *before.calls[0].args, **before.calls[0].kwargs)
    assert torch.equal(made, again)
    assert program.tensors.keys() == held.keys()


REFUSED = {
    "dropout": ("Llama", {"lora": {"dropout": 0.1}}, "layer 0 q_proj has dropout"),
    "another model": ("Gemma2", None, "Gemma2DecoderLayer is not a layer of llama, mistral"),
    "ia3": ("Llama", {"type": "ia3"}, "k_proj is a "),
    "a norm": (
        "Qwen2",
        {"lora": {"modulesToSave": "input_layernorm"}},
        "in layer 0 input_layernorm.modules_to_save.default.weight learns",
    ),
    "biases": ("Qwen2", {"lora": {"bias": "all"}}, "learns itself"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_cannot_run_packed_run_eagerly_and_one_line_says_why(name, caplog):
    architecture, adapter, why = REFUSED[name]
    tuned = tuned_model(random_model(architecture), small_spec(adapter))
    stack = DecoderStack(tuned.get_base_model())
    with caplog.at_level(logging.INFO, logger=layer_programs.__name__):
        assert why in use_program(stack, "packed", adapter=ADAPTER)
    assert stack.program == "eager"
    (line,) = caplog.messages
    assert why in line


def test_layers_that_compute_something_else_packed_run_eagerly():
    tuned = tuned_of("Qwen3", torch.float32)
    stack = DecoderStack(tuned.get_base_model())
    stack.layers[1].mlp.act_fn = torch.nn.Tanh()
    why = use_program(stack, "packed", adapter=ADAPTER)
    assert why == "layer 1 gives another result packed than as the model computes it"
    assert program_of(stack.layers[0]) is None


def test_a_worker_is_asked_by_its_environment(tmp_path, monkeypatch):
    assert wanted_program({}) == "eager"
    with pytest.raises(UserError, match="'fastest' is not a valid layer program") as refused:
        wanted_program({ENV_LAYER_PROGRAM: "fastest"})
    assert refused.value.field == ENV_LAYER_PROGRAM
    monkeypatch.setenv(ENV_LAYER_PROGRAM, "packed")
    shown = Preview(example_job(tmp_path), WholeRows(), "layer-major", 1, 1, HostDevice())
    assert shown.session.stream.parts.stack.program == "packed"
