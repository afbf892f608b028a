"""Architectures with odd parts: the same gradients as peft's own training, or a refusal by name."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from windrow.errors import UserError
from windrow_sidecar.finetune.adapter.adapters import check_reach, trainable
from windrow_sidecar.finetune.data.split import BatchPlan
from windrow_sidecar.finetune.engine.orders import token_major
from windrow_sidecar.finetune.engine.sizing import Windows
from windrow_sidecar.finetune.job.packing import check_packing
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.model.token_dropout import DropoutKeys
from windrow_sidecar.finetune.tasklets import TokenWindow
from windrow_sidecar.testing.architectures import FURTHER, random_model
from windrow_sidecar.testing.equality import (
    BATCH,
    SEED,
    STEPS,
    Cut,
    our_gradients,
    our_training,
    pefts_gradients,
    pefts_training,
    small_rows,
    small_spec,
    tuned_model,
)
from windrow_sidecar.testing.rounding import ROUNDING, apart, in_type_of

# Their attention is code of their own, which cannot be made to look at a part of a row.
WHOLE_ROWS_ONLY = {"Bloom", "CodeGen", "GPTJ", "GPTNeo", "Mpt"}
# Their biases go by the place in the line; of GptOss the mask does.
NEVER_PACKED = {"Bloom", "Mpt", "GptOss"}
# One head of keys for all queries: peft makes prefixes of as many heads as there are of queries.
NO_PREFIX = {*WHOLE_ROWS_ONLY, "GPTBigCode"}
WITH_PREFIX = [name for name in FURTHER if name not in NO_PREFIX]

pytestmark = pytest.mark.usefixtures("one_thread")


def assert_equal_to_peft(tuned, cut, theirs=None):
    theirs = theirs or pefts_gradients(tuned, small_rows())
    assert apart(our_gradients(copy.deepcopy(tuned), small_rows(), cut), theirs).by_rounding


@pytest.mark.parametrize("architecture", FURTHER)
def test_gradients_equal_those_of_peft_however_the_work_is_cut(architecture):
    tuned = tuned_model(random_model(architecture).double(), small_spec())
    theirs, cuts = pefts_gradients(tuned, small_rows()), [Cut(), Cut(max_tokens=1)]
    with in_type_of(tuned):
        stack = DecoderStack(tuned.get_base_model())
    if architecture in WHOLE_ROWS_ONLY:
        assert "tokens other than by transformers' attention functions" in stack.windows_refused
    else:
        assert stack.windows_refused == ""
        cuts.append(Cut(Windows(7), token_major, max_tokens=64, micro_batches=2))
    if architecture in NEVER_PACKED:
        with pytest.raises(UserError, match="a row sees the one before it"), in_type_of(tuned):
            check_packing(stack, prefix=False)
    else:
        with in_type_of(tuned):
            check_packing(stack, prefix=False)
        cuts.append(Cut(packed=True))
    for cut in cuts:
        assert_equal_to_peft(tuned, cut, theirs)


@pytest.mark.parametrize("architecture", WITH_PREFIX)
def test_a_prefix_equals_pefts(architecture):
    # Shorter than the windows of those that have them.
    spec = small_spec({"type": "prefix", "prefix": {"virtualTokens": 5}})
    tuned = tuned_model(random_model(architecture).double(), spec)
    with in_type_of(tuned):
        check_reach(tuned, DecoderStack(tuned.get_base_model()))
    for cut in (Cut(), Cut(Windows(7))):
        assert_equal_to_peft(tuned, cut)


@pytest.mark.parametrize(
    ("architecture", "adapter"),
    [
        ("GPT2", {"lora": {"rank": 4, "targetModules": "c_attn,c_proj", "useDora": True}}),
        ("GPT2", {"lora": {"rank": 4, "layersToTransform": [1]}}),
        ("GPT2", {"type": "ia3"}),
        ("Bloom", {"type": "ia3"}),
        ("GPTJ", {"lora": {"rank": 4, "modulesToSave": "ln_f"}}),
    ],
)
def test_other_adapters_equal_pefts(architecture, adapter):
    tuned = tuned_model(random_model(architecture).double(), small_spec(adapter))
    assert_equal_to_peft(tuned, Cut())


GROWING_ROPE = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0, 1.0, 1.0, 1.0],
        "long_factor": [1.0, 1.5, 2.0, 4.0],
    },
}


@pytest.mark.parametrize("rope", GROWING_ROPE.values(), ids=GROWING_ROPE)
def test_positions_that_follow_the_longest_row_follow_that_of_the_step_however_it_is_cut(rope):
    of_most = 16 if rope["rope_type"] == "dynamic" else 128
    options = {"rope_parameters": rope, "max_position_embeddings": of_most}
    tuned = tuned_model(random_model("Llama", **options).double(), small_spec())
    theirs = pefts_gradients(tuned, small_rows())
    for cut in (
        Cut(max_tokens=1),
        Cut(packed=True),
        Cut(Windows(5), packed=True, max_tokens=60, micro_batches=2),
        Cut(Windows(7), token_major, max_tokens=64),
    ):
        assert_equal_to_peft(tuned, cut, theirs)


def forgetting(model):
    """Let each call of a model begin with the positions that it was built with."""

    def forget(rotary, _):
        rotary.max_seq_len_cached = rotary.original_max_seq_len
        rotary.register_buffer("inv_freq", rotary.original_inv_freq, persistent=False)

    model.model.rotary_emb.register_forward_pre_hook(forget)
    return model


def test_over_several_steps_dynamic_positions_differ_from_pefts_by_what_transformers_remembers():
    """Its rotation goes by the longest row so far, ours by the longest of the step.

    So the same rows in another order, or after a resume, are the same training. All else is equal:
    with that memory taken from it, peft's loop learns what ours does.
    """
    options = {"rope_parameters": GROWING_ROPE["dynamic"], "max_position_embeddings": 16}
    rows, model = small_rows(), random_model("Llama", **options).double()
    without_memory = tuned_model(forgetting(copy.deepcopy(model)), small_spec())
    tuned = tuned_model(model, small_spec())
    longest = [
        max(rows[i].length for i in BatchPlan(len(rows), BATCH, SEED).rows_of(step))
        for step in range(STEPS)
    ]
    first_shorter = next(
        i for i, length in enumerate(longest) if length < max(longest[:i], default=0)
    )

    theirs, forgot = pefts_training(tuned, rows), pefts_training(without_memory, rows)
    ours = our_training(tuned, rows, Cut(Windows(7), max_tokens=64))
    for kind in ours:
        assert apart(ours[kind], forgot[kind]).by_rounding, kind
    off = (ours["loss"]["of each step"] / theirs["loss"]["of each step"] - 1).abs()
    assert off[:first_shorter].max() <= ROUNDING
    assert off[first_shorter] > ROUNDING


HEADS = {
    "Qwen2": {"targetModules": "lm_head,q_proj", "dropout": 0.2},
    "Granite": {"targetModules": "lm_head,v_proj", "dropout": 0.2},
    "GPTJ": {"targetModules": "lm_head,q_proj", "dropout": 0.2},
}
HEAD_CUTS = {
    "whole": Cut(),
    "rows": Cut(max_tokens=1),
    "packed": Cut(packed=True),
    "windows of 7": Cut(Windows(7)),
}


@pytest.mark.parametrize("architecture", HEADS)
@pytest.mark.parametrize("name", HEAD_CUTS)
def test_an_adapter_of_the_head_drops_the_units_of_the_tokens_that_it_sees(
    architecture, name, monkeypatch
):
    if architecture in WHOLE_ROWS_ONLY and name == "windows of 7":
        name = "whole"
    # Several slices a row, so that each has to know its own tokens.
    monkeypatch.setattr("windrow_sidecar.finetune.model.loss.SLICE_ELEMENTS", 96 * 5)
    spec = small_spec({"lora": {"rank": 4, **HEADS[architecture]}})
    tuned = tuned_model(random_model(architecture).double(), spec)
    assert any("lm_head" in name for name in trainable(tuned))
    assert_equal_to_peft(tuned, HEAD_CUTS[name])


DROPS_EMBEDDINGS = {"Starcoder2": "embedding_dropout", "Phi": "embd_pdrop"}


@pytest.mark.parametrize("architecture", DROPS_EMBEDDINGS)
def test_units_of_embeddings_are_dropped_by_seed_step_row_and_token(architecture):
    tuned = tuned_model(random_model(architecture), small_spec())
    # The process's position in torch's own random numbers says nothing.
    first = our_gradients(copy.deepcopy(tuned), small_rows(), Cut())
    torch.rand(3)
    again = our_gradients(copy.deepcopy(tuned), small_rows(), Cut())
    assert all(torch.equal(first[name], again[name]) for name in first)
    plain = random_model(architecture, **{DROPS_EMBEDDINGS[architecture]: 0.0})
    without = tuned_model(plain, small_spec())
    assert apart(first, our_gradients(without, small_rows(), Cut())).of_norm > 0.05


def test_the_share_that_is_dropped_of_embeddings_is_the_models_at_every_shape_and_turn():
    model = random_model("Starcoder2")
    tuned = tuned_model(model, small_spec()).train()
    stack, ids = DecoderStack(tuned.get_base_model()), torch.arange(2, 90)[None].repeat(4, 1)
    keys = DropoutKeys()
    seen = []
    for step in (0, 1, 0):
        keys.at(17, step, range(4), TokenWindow(0, ids.shape[1]))
        seen.append(stack.begin(ids, dropout=keys).inputs[0])
    shares = [float((x == 0).float().mean()) for x in seen]
    # So many draws of 0.2, five standard deviations.
    assert shares == pytest.approx([0.2] * 3, abs=5 * math.sqrt(0.2 * 0.8 / seen[0].numel()))
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])
    plain = model.get_input_embeddings()(ids)
    kept = seen[0] != 0
    # A product with 1 / 0.8 in place of the division: two roundings.
    rounded = 2 * torch.finfo(torch.float32).eps
    assert torch.allclose(seen[0][kept], plain[kept] / 0.8, rtol=rounded, atol=0)


@pytest.mark.parametrize(
    ("architecture", "options", "adapter", "field", "words"),
    [
        ("Bloom", {}, {"type": "prefix"}, "spec.adapter.type", "cannot take a prefix: layer 0"),
        ("GPTBigCode", {}, {"type": "prefix"}, "spec.adapter.type", "that its attention takes"),
        (
            "OPT",
            {"word_embed_proj_dim": 16},
            {"lora": {"rank": 4}},
            "spec.adapter.lora.targetModules",
            "project_in comes before the first layer",
        ),
        (
            "Bloom",
            {},
            {"lora": {"rank": 4, "bias": "all"}},
            "spec.adapter.lora.bias",
            "word_embeddings_layernorm comes before the first layer",
        ),
    ],
)
def test_an_adapter_that_would_learn_nothing_is_refused(
    architecture, options, adapter, field, words
):
    tuned = tuned_model(random_model(architecture, **options), small_spec(adapter))
    with pytest.raises(UserError) as refused:
        check_reach(tuned, DecoderStack(tuned.get_base_model()))
    assert refused.value.field == field
    assert words in refused.value.problem


def test_projections_behind_the_last_layer_belong_to_the_norm():
    adapter = {"lora": {"rank": 4, "excludeModules": "project_in"}}
    model = random_model("OPT", word_embed_proj_dim=16).double()
    tuned = tuned_model(model, small_spec(adapter))
    stack = DecoderStack(tuned.get_base_model())
    check_reach(tuned, stack)
    assert any("project_out" in name for name in trainable(tuned))
    for cut in (Cut(), Cut(Windows(7))):
        assert_equal_to_peft(tuned, cut)
