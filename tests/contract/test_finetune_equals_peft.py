"""Layer by layer, window by window, micro-batch by micro-batch: the same training as peft's own.

In float64, where the two differ by nothing but rounding; in fp32 and bf16 ours is as near to that
as peft's is (see `windrow_sidecar.testing.rounding`).
"""

from __future__ import annotations

import copy
import json
import os

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from windrow.errors import UserError
from windrow_sidecar.finetune.adapter.adapters import add_adapter, save_adapter, trainable
from windrow_sidecar.finetune.engine.orders import interleaved, token_major
from windrow_sidecar.finetune.engine.sizing import Windows
from windrow_sidecar.finetune.job.packing import check_packing
from windrow_sidecar.finetune.model import window_attention as attention
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.testing.architectures import ARCHITECTURES, random_model
from windrow_sidecar.testing.equality import (
    Cut,
    our_gradients,
    our_training,
    pefts_gradients,
    pefts_training,
    small_rows,
    small_spec,
    tuned_model,
)
from windrow_sidecar.testing.rounding import apart, in_type_of, no_farther

CUTS = {
    "whole batch": Cut(),
    "micro-batches": Cut(max_tokens=64),
    "one row": Cut(max_tokens=1),
    "windows of 1": Cut(Windows(1)),
    "windows of 7, token-major": Cut(Windows(7), token_major),
    "windows of 64": Cut(Windows(64)),
    "several micro-batches a visit": Cut(Windows(7), max_tokens=64, micro_batches=3),
    "interleaved": Cut(Windows(16), interleaved, max_tokens=64, micro_batches=2),
}
PACKED = {"in one line": Cut(packed=True), "in windows of 7": Cut(Windows(7), packed=True)}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def trained(request):
    """(architecture, model with its adapter in float64, gradients of peft's first batch)."""
    tuned = tuned_model(random_model(request.param).double(), small_spec())
    return request.param, tuned, pefts_gradients(tuned, small_rows())


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_gradients_equal_those_of_peft(trained, cut):
    _, tuned, theirs = trained
    off = apart(our_gradients(copy.deepcopy(tuned), small_rows(), cut), theirs)
    assert off.by_rounding


def test_attention_of_a_window_a_few_heads_at_a_time_has_pefts_gradients(trained, monkeypatch):
    _, tuned, theirs = trained
    monkeypatch.setattr(attention, "PIECE_BYTES", 1)
    off = apart(our_gradients(copy.deepcopy(tuned), small_rows(), Cut(Windows(7))), theirs)
    assert off.by_rounding


@pytest.mark.parametrize("cut", PACKED.values(), ids=PACKED)
def test_rows_in_one_line_have_pefts_gradients_or_are_refused(trained, cut):
    architecture, tuned, theirs = trained
    off = apart(our_gradients(copy.deepcopy(tuned), small_rows(), cut), theirs)
    if architecture == "OPT":  # its mask is made without positions
        with pytest.raises(UserError, match="in layer 0 a row sees the one before") as refused:
            check_packing(DecoderStack(tuned.get_base_model()), prefix=False)
        assert refused.value.field == "spec.training.packing"
        assert off.of_norm > 0.01
        return
    with in_type_of(tuned):
        check_packing(DecoderStack(tuned.get_base_model()), prefix=False)
    assert off.by_rounding


@pytest.fixture(scope="module")
def pefts_five_steps(trained):
    return pefts_training(trained[1], small_rows())


@pytest.mark.equality
@pytest.mark.parametrize("cut", [Cut(), Cut(Windows(7), max_tokens=64)], ids=["whole", "windows"])
def test_weights_moments_losses_and_norms_of_five_steps_equal_those_of_peft(
    trained, pefts_five_steps, cut
):
    """In float64 alone: where a gradient is near 0, AdamW turns its rounding into a whole step."""
    tuned, theirs = copy.deepcopy(trained[1]), pefts_five_steps
    begun = {name: p.detach().clone() for name, p in trainable(tuned).items()}
    ours = our_training(tuned, small_rows(), cut)
    assert apart(begun, theirs["parameter"]).of_norm > 0.01
    kinds = {"parameter", "exp_avg", "exp_avg_sq", "step", "loss", "gradient norm"}
    assert ours.keys() == theirs.keys() == kinds
    assert all(t.dtype == torch.float64 for t in ours["parameter"].values())
    for kind in kinds:
        assert apart(ours[kind], theirs[kind]).by_rounding, kind


@pytest.mark.equality
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_in_fewer_bits_the_error_is_that_of_pefts_own_run(trained, dtype):
    architecture, _, _ = trained
    rows = small_rows()
    tuned = tuned_model(random_model(architecture).to(dtype), small_spec())
    truth = pefts_gradients(copy.deepcopy(tuned).double(), rows)
    theirs = [apart(pefts_gradients(tuned, rows, pads), truth).of_norm for pads in (0, 1)]
    cuts = (Cut(), Cut(Windows(7)), Cut(Windows(16)))
    ours = [apart(our_gradients(copy.deepcopy(tuned), rows, cut), truth).of_norm for cut in cuts]
    assert no_farther(ours, theirs, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gradients_are_summed_in_fp32_whatever_the_base_is_in(dtype):
    tuned = tuned_model(
        random_model("Qwen2").to(dtype), small_spec(small(ADAPTERS["a whole norm"][1]))
    )
    assert dtype in {p.dtype for p in trainable(tuned).values()}
    found = our_gradients(tuned, small_rows(), Cut(Windows(7), max_tokens=64))
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}


ADAPTERS = {
    "dropout": ("Llama", {"lora": {"dropout": 0.3}}),
    "patterns": ("Llama", {"lora": {"rankPattern": {"q_proj": 2}, "alphaPattern": {"up_proj": 3}}}),
    "rank-stabilised": ("Llama", {"lora": {"useRslora": True}}),
    "weight-decomposed": ("Llama", {"lora": {"useDora": True, "dropout": 0.1}}),
    "gaussian": ("Llama", {"lora": {"initLoraWeights": "gaussian"}}),
    "some layers": ("Llama", {"lora": {"layersToTransform": [1]}}),
    "by pattern": ("Llama", {"lora": {"targetPattern": r".*\.[12]\..*(q|up)_proj"}}),
    "queries alone": ("Llama", {"lora": {"targetModules": "q_proj"}}),
    "all but one": ("Llama", {"lora": {"excludeModules": "gate_proj"}}),
    "all biases": ("OPT", {"lora": {"bias": "all"}}),
    "biases of targets": ("OPT", {"lora": {"bias": "lora_only", "targetModules": "v_proj"}}),
    "a whole head": ("Qwen2", {"lora": {"modulesToSave": "lm_head", "targetModules": "v_proj"}}),
    "a whole norm": ("Qwen2", {"lora": {"modulesToSave": "norm,input_layernorm"}}),
    "ia3": ("Llama", {"type": "ia3"}),
    "ia3 by name": ("OPT", {"type": "ia3", "ia3": {"targetModules": "k_proj,fc1"}}),
    "experts, mixtral": ("Mixtral", {"lora": {"targetModules": "w1,w2,w3"}}),
    "experts, qwen": (
        "Qwen3Moe",
        {"lora": {"targetModules": "q_proj,gate_proj,up_proj,down_proj"}},
    ),
    "above the width": (
        "Llama",
        {"lora": {"rank": 40, "alpha": 0.5, "alphaPattern": {"q_proj": 9.5}}},
    ),
    "ia3 by structure": ("Olmo2", {"type": "ia3"}),
    "ia3, fused": ("Phi3", {"type": "ia3"}),
    "ia3, experts": ("Qwen3Moe", {"type": "ia3"}),
    "prefix": ("Qwen3", {"type": "prefix", "prefix": {"virtualTokens": 5}}),
    "prefix, sliding": ("Gemma3Text", {"type": "prefix", "prefix": {"virtualTokens": 5}}),
    "prefix, learned positions": ("OPT", {"type": "prefix"}),
    "prefix by mlp": ("Llama", {"type": "prefix", "prefix": {"projectionSize": 12}}),
}


def small(adapter):
    """The adapter with a rank that fits into every module."""
    if "lora" not in adapter:
        return adapter
    return {**adapter, "lora": {"rank": 4, "alpha": 8, **adapter["lora"]}}


@pytest.mark.parametrize(("architecture", "adapter"), ADAPTERS.values(), ids=ADAPTERS)
@pytest.mark.parametrize(
    "cut", [Cut(), Cut(Windows(7), token_major), Cut(max_tokens=64)], ids=["whole", "7", "rows"]
)
def test_every_option_of_an_adapter_equals_peft(architecture, adapter, cut):
    tuned = tuned_model(random_model(architecture).double(), small_spec(small(adapter)))
    theirs = pefts_gradients(tuned, small_rows())
    off = apart(our_gradients(copy.deepcopy(tuned), small_rows(), cut), theirs)
    assert off.by_rounding


@pytest.mark.parametrize(
    "name", ["dropout", "weight-decomposed", "a whole head", "a whole norm", "ia3", "prefix"]
)
def test_in_bf16_every_kind_of_adapter_has_the_error_of_pefts_own_run(name):
    architecture, adapter = ADAPTERS[name]
    model, spec = random_model(architecture).bfloat16(), small_spec(small(adapter))
    ours, theirs = [], []
    # Few numbers learn in some kinds: over several batches the luck of rounding evens out.
    for rows in map(small_rows, (8, 11, 14, 17)):
        tuned = tuned_model(copy.deepcopy(model), spec)
        truth = pefts_gradients(copy.deepcopy(tuned).double(), rows)
        theirs.append(apart(pefts_gradients(tuned, rows), truth).of_norm)
        ours.append(apart(our_gradients(tuned, rows, Cut(Windows(7))), truth).of_norm)
    assert no_farther(ours, theirs, torch.bfloat16)


@pytest.mark.parametrize("architecture", ["Mixtral", "Qwen3Moe"])
def test_all_linear_means_attention_on_a_mixture_of_experts(architecture):
    tuned = add_adapter(random_model(architecture), small_spec())
    assert all(".self_attn." in name for name in trainable(tuned))
    adapted = {name.split(".self_attn.")[1].split(".")[0] for name in trainable(tuned)}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize(
    ("architecture", "lora", "option", "words"),
    [
        ("Llama", {"targetModules": "w_proj"}, "targetModules", "up_proj"),
        ("Llama", {"targetPattern": "q_proj"}, "targetPattern", "whole name"),
        ("Llama", {"targetModules": "q_proj,v_prj"}, "targetModules", "no module 'v_prj'"),
        ("Llama", {"targetModules": "mlp.q_proj,v_proj"}, "targetModules", "'mlp.q_proj'"),
        ("Llama", {"targetModules": ["all-linear", "lm_head"]}, "targetModules", "'all-linear'"),
        ("Llama", {"rankPattern": {"gate": 2}}, "rankPattern", "gate"),
        ("Llama", {"alphaPattern": {"gate": 2}}, "alphaPattern", "gate"),
        ("Llama", {"layersToTransform": [3]}, "layersToTransform", "There are 3"),
        ("Llama", {"targetModules": "embed_tokens"}, "targetModules", "embedding"),
        ("Llama", {"modulesToSave": "lm_head"}, "modulesToSave", "embedding"),
        ("Llama", {"modulesToSave": "embed_tokens"}, "modulesToSave", "embedding"),
        ("Llama", {"modulesToSave": "hed"}, "modulesToSave", "'hed'"),
        ("Llama", {"excludeModules": "k_prj"}, "excludeModules", "'k_prj'"),
        (
            "Mixtral",
            {"targetModules": "experts"},
            "targetModules",
            "MixtralExperts is not supported",
        ),
        ("Mixtral", {"targetModules": "w0"}, "targetModules", "q_proj, v_proj, w1, w2, w3."),
        ("Mixtral", {"targetModules": "w1"}, "targetModules", "targeting w3"),
        ("Mixtral", {"targetModules": "w1,w2,w3", "dropout": 0.1}, "dropout", "expert"),
        ("Mixtral", {"targetPattern": r".*experts.*w2", "dropout": 0.1}, "dropout", "expert"),
        ("Qwen3Moe", {"targetModules": "down_proj", "useDora": True}, "useDora", "experts"),
    ],
)
def test_an_option_that_cannot_be_honoured_is_refused(architecture, lora, option, words):
    with pytest.raises(UserError) as caught:
        add_adapter(random_model(architecture), small_spec(small({"lora": lora})))
    assert caught.value.field == f"spec.adapter.lora.{option}"
    assert words in str(caught.value)


def test_targets_of_ia3_that_are_not_there_are_named_with_those_that_are():
    spec = small_spec({"type": "ia3", "ia3": {"targetModules": "zzz"}})
    with pytest.raises(
        UserError, match=r"the model has no module 'zzz'\. Name some of down_proj, "
    ) as no:
        add_adapter(random_model("Llama"), spec)
    assert no.value.field == "spec.adapter.ia3.targetModules"
    assert "all-linear" not in str(no.value)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks
@pytest.mark.filterwarnings("ignore:.*gate_up_proj:RuntimeWarning")  # see add_adapter
@pytest.mark.parametrize(
    "name", ["experts, mixtral", "experts, qwen", "ia3, fused", "a whole norm"]
)
def test_what_is_saved_is_loaded_by_peft_as_the_same_adapter(tmp_path, name):
    architecture, adapter = ADAPTERS[name]
    tuned = tuned_model(random_model(architecture), small_spec(small(adapter))).eval()
    save_adapter(tuned, tmp_path)
    loaded = PeftModel.from_pretrained(random_model(architecture), tmp_path)
    ids = torch.arange(20)[None]
    assert torch.equal(loaded(ids).logits, tuned(ids).logits)


@pytest.mark.parametrize(("alpha", "kept"), [(32, int), (32.0, int), (12.5, float)])
def test_another_engine_reads_the_alpha_that_was_asked_for(tmp_path, alpha, kept):
    save_adapter(
        add_adapter(random_model("Llama"), small_spec({"lora": {"alpha": alpha}})), tmp_path
    )
    found = json.loads((tmp_path / "adapter_config.json").read_text())["lora_alpha"]
    assert (found, type(found)) == (alpha, kept)


SERVED = {
    "rank-stabilised": {"rank": 16, "alpha": 8, "useRslora": True},
    "rank-stabilised, an odd rank": {"rank": 3, "alpha": 5, "useRslora": True},
    "ranks": {"rank": 4, "alpha": 8, "rankPattern": {"q_proj": 2, "down_proj": 6}},
    "above the width": {"rank": 40, "alpha": 0.5, "alphaPattern": {"q_proj": 9.5}},
    "scales": {"rank": 4, "alpha": 8, "alphaPattern": {"v_proj": 32}},
    "all of them": {
        **{"rank": 4, "alpha": 8, "useRslora": True},
        **{"rankPattern": {"q_proj": 2}, "alphaPattern": {"v_proj": 3}},
    },
    "a pattern of targets": {"targetPattern": r".*\.(q|v)_proj", "useRslora": True},
    "some layers": {"layersToTransform": [1], "targetModules": "q_proj", "useRslora": True},
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks
@pytest.mark.parametrize("name", SERVED)
def test_a_server_that_knows_rank_and_alpha_alone_computes_what_was_trained(tmp_path, name):
    tuned = tuned_model(random_model("Llama").double(), small_spec({"lora": SERVED[name]})).eval()
    save_adapter(tuned, tmp_path)
    said = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (said["use_rslora"], said["rank_pattern"], said["alpha_pattern"]) == (False, {}, {})
    assert isinstance(said["target_modules"], list)
    loaded = PeftModel.from_pretrained(random_model("Llama").double(), tmp_path)
    ids = torch.arange(20)[None]
    torch.testing.assert_close(loaded(ids).logits, tuned(ids).logits, rtol=1e-12, atol=1e-12)
    weights = load_file(tmp_path / "adapter_model.safetensors")
    for key, a in weights.items():
        if "lora_A" not in key:
            continue
        module = loaded.get_submodule(key.removesuffix(".lora_A.weight"))
        b = weights[key.replace("lora_A", "lora_B")]
        assert a.shape[0] == b.shape[1] == said["r"]
        served = b @ a * (said["lora_alpha"] / said["r"])
        trained = tuned.get_submodule(key.removesuffix(".lora_A.weight")).get_delta_weight(
            "default"
        )
        torch.testing.assert_close(served, trained, rtol=1e-12, atol=1e-12)
        assert module.r["default"] == said["r"]


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_the_files_of_an_adapter_have_the_mode_that_the_umask_gives(tmp_path, umask):
    tuned, before = add_adapter(random_model("Llama"), small_spec()), os.umask(umask)
    try:
        save_adapter(tuned, tmp_path)
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
    mode = 0o666 & ~umask
    assert modes == {"adapter_model.safetensors": mode, "adapter_config.json": mode}


def test_a_second_adapter_and_a_prefix_beyond_the_sliding_window_are_refused():
    tuned = add_adapter(random_model("Llama"), small_spec())
    with pytest.raises(UserError, match="carries an adapter already") as refused:
        add_adapter(tuned.get_base_model(), small_spec())
    assert refused.value.field == "spec.model.name"
    with pytest.raises(UserError, match="sliding window of 12"):
        add_adapter(random_model("Mistral"), small_spec({"type": "prefix"}))


def test_a_bias_that_learns_is_no_longer_the_bases_memory():
    model = random_model("OPT")
    bases = [p.data for p in model.parameters()]
    tuned = add_adapter(model, small_spec({"lora": {"rank": 4, "bias": "all"}}))
    learning = {p.data_ptr() for p in trainable(tuned).values()}
    assert not learning & {tensor.data_ptr() for tensor in bases}


def test_a_layer_that_drops_units_by_itself_runs_on_whole_rows_only():
    stack = DecoderStack(random_model("OPT", dropout=0.1))
    assert stack.own_dropout
    assert stack.windows_refused == "its layers apply dropout of their own"
    assert DecoderStack(random_model("OPT")).windows_refused == ""


def test_a_layer_whose_router_draws_runs_on_whole_rows_though_few_tokens_do_not_show_it():
    # It draws among experts that are close; of the probe's tokens none has such ones.
    stack = DecoderStack(random_model("Phimoe", num_local_experts=4, num_experts_per_tok=2))
    assert stack.own_dropout
    assert stack.windows_refused == "its layers apply dropout of their own"
