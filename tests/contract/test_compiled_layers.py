"""Compiled layers learn what peft's own do, share code, and stand aside where there is none."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._inductor import config as inductor

from windrow_sidecar.finetune.adapter import compiled_layer
from windrow_sidecar.finetune.adapter.compiled_layer import Shape, use_compiled
from windrow_sidecar.finetune.adapter.layer_compiler import use_cache
from windrow_sidecar.finetune.engine.packing import LineSizes
from windrow_sidecar.finetune.engine.sizing import Windows
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.model.layer_program import program_of
from windrow_sidecar.finetune.recompute.checkpointed_layers import ALL, PlannedLayers
from windrow_sidecar.qos.view import Phase
from windrow_sidecar.testing.architectures import random_model
from windrow_sidecar.testing.equality import (
    Cut,
    our_training,
    pefts_gradients,
    pefts_training,
    small_rows,
    small_spec,
    stream_of,
    summed_gradients,
    tuned_model,
)
from windrow_sidecar.testing.rounding import apart, in_type_of, no_farther

pytestmark = pytest.mark.usefixtures("one_thread")

# One shape: compiling takes half a minute of CPU for each.
SIZES = LineSizes(line=64, most=128)
SHAPES = (Shape(2, 64, packed=True),)
LINES = Cut(packed=True, line_sizes=SIZES, program="compiled", shapes=SHAPES)
DROPS = {"lora": {"rank": 4, "alpha": 8, "dropout": 0.1}}


def stack_of(architecture="Llama", adapter=None):
    tuned = tuned_model(random_model(architecture), small_spec(adapter))
    return DecoderStack(tuned.get_base_model())


def programs_of(stack):
    return [program_of(layer) for layer in stack.layers]


def gradients_of(stream):
    while stream.peek().phase is not Phase.OPTIMIZER:
        stream.run(stream.peek())
    return summed_gradients(stream)


def test_without_a_compiler_layers_run_eagerly_and_one_line_says_why(caplog):
    stack = stack_of()
    with inductor.patch({"cpp.cxx": ("/nowhere/g++",)}), caplog.at_level("INFO"):
        why = use_compiled(stack, SHAPES)
    assert why.startswith("layers run eagerly, not compiled: there is no C++ compiler")
    assert [record.message for record in caplog.records] == [why]
    assert stack.program == "eager"


def test_layers_are_not_compiled_where_weights_move_or_units_are_drawn():
    assert "take turns in memory" in use_compiled(stack_of(), SHAPES, in_turns=True)
    stack = stack_of()
    stack.layers[0].self_attn.attention_dropout = 0.1
    assert "layer 0 drops units of its own" in use_compiled(stack, SHAPES)


def test_layers_run_eagerly_where_compiling_takes_too_long():
    stack = stack_of()
    why = use_compiled(stack, SHAPES, limit_s=0.0)
    assert why == (
        "layers run eagerly, not compiled: layer 0 comes after the time that compiling may take"
    )
    assert stack.program == "eager"


def test_a_layer_whose_path_depends_on_numbers_is_not_compiled():
    stack = stack_of()
    layer = stack.layers[0]
    own = layer.forward

    def chosen(hidden_states, *args, **kwargs):
        return own(hidden_states if hidden_states.sum() > 0 else -hidden_states, *args, **kwargs)

    layer.forward = chosen
    why = use_compiled(stack, SHAPES)
    assert why.startswith("layers run eagerly, not compiled: layer 0 cannot be traced")
    assert stack.program == "eager"


def test_what_was_compiled_is_kept_where_others_may_not_write(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    folder = use_cache({"WINDROW_RUN_DIR": str(tmp_path)})
    assert folder.is_relative_to(tmp_path)
    assert torch.__version__ in folder.name
    assert folder.stat().st_mode & 0o777 == 0o700
    assert use_cache({"WINDROW_RUN_DIR": str(tmp_path)}) is None, "somebody has chosen one"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    folder.chmod(0o777)
    assert use_cache({"WINDROW_RUN_DIR": str(tmp_path)}) is None


@pytest.mark.extended
def test_compiled_layers_share_code_and_learn_what_pefts_do():
    rows = small_rows()
    tuned = tuned_model(random_model("Llama").double(), small_spec(DROPS))
    theirs, truth = pefts_gradients(tuned, rows), pefts_training(tuned, rows)
    before = len(compiled_layer._made)
    with in_type_of(tuned):
        stream = stream_of(copy.deepcopy(tuned), rows, LINES)
        assert apart(gradients_of(stream), theirs).by_rounding
    assert stream.parts.stack.program == "compiled"
    programs = programs_of(stream.parts.stack)
    assert len(programs) > 1
    assert all(program.ran for program in programs)
    assert len(compiled_layer._made) == before + 1, "one code for all layers"
    ours = our_training(copy.deepcopy(tuned), rows, LINES)
    assert len(compiled_layer._made) == before + 1, "the next job finds it"
    for kind in ours:
        assert apart(ours[kind], truth[kind]).by_rounding, kind
    others = {
        "windows": (Cut(Windows(7), **_but(LINES)), None),
        "padded": (Cut(program="compiled", shapes=SHAPES), None),
        "under a plan": (LINES, ALL),
    }
    for name, (cut, budget) in others.items():
        with in_type_of(tuned):
            stream = stream_of(copy.deepcopy(tuned), rows, cut)
            stack = stream.parts.stack
            stack.around_layer = planned = PlannedLayers(stack.layers)
            planned.bytes_per_token = budget
            assert apart(gradients_of(stream), theirs).by_rounding, name
        assert not any(program.ran for program in programs_of(stack)), name


def _but(cut):
    return {name: getattr(cut, name) for name in ("packed", "line_sizes", "program", "shapes")}


@pytest.mark.extended
def test_in_fewer_bits_compiled_layers_err_as_pefts_own_run_does():
    rows = small_rows()
    tuned = tuned_model(random_model("Llama").to(torch.bfloat16), small_spec())
    truth = pefts_gradients(copy.deepcopy(tuned).double(), rows)
    theirs = [apart(pefts_gradients(tuned, rows, pads), truth).of_norm for pads in (0, 1)]
    stream = stream_of(copy.deepcopy(tuned), rows, LINES)
    ours = gradients_of(stream)
    assert all(program.ran for program in programs_of(stream.parts.stack))
    assert {gradient.dtype for gradient in ours.values()} == {torch.float32}
    assert no_farther([apart(ours, truth).of_norm], theirs, torch.bfloat16)
