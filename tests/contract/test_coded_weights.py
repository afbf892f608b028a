"""Train over weights that are codes as peft does over the numbers that they stand for."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.coded_checkpoints import FORMATS, eight_bits, recode, save_coded

from windrow.errors import UserError
from windrow_sidecar.engines.weight_formats import weight_format
from windrow_sidecar.finetune.engine.sizing import Windows
from windrow_sidecar.finetune.model import coded
from windrow_sidecar.finetune.model.boundaries import TorchBoundaries
from windrow_sidecar.finetune.model.codecs import CODECS
from windrow_sidecar.finetune.model.coded import CodedExperts, CodedLinear, weight_elements
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.model.loading import load_base
from windrow_sidecar.finetune.model.precision import WeightForm
from windrow_sidecar.finetune.model.shallow_clone import shallow_clone
from windrow_sidecar.finetune.model.whole import check_numbers
from windrow_sidecar.finetune.recompute.checkpointed_layers import PlannedLayers
from windrow_sidecar.finetune.recompute.layer_graph import OpKind
from windrow_sidecar.finetune.recompute.planning import largest, smallest
from windrow_sidecar.testing.architectures import random_model
from windrow_sidecar.testing.equality import (
    Cut,
    our_gradients,
    pefts_gradients,
    small_rows,
    small_spec,
    tuned_model,
)
from windrow_sidecar.testing.rounding import apart

pytestmark = pytest.mark.usefixtures("one_thread")

# Sizes that groups of 16 and of 32 divide.
SIZES = {"hidden_size": 32, "intermediate_size": 64}
# Rows and columns that blocks of 16 do not divide: the last block of each is short.
SHORT = {"hidden_size": 40, "intermediate_size": 56, "head_dim": 6}
WIDE = WeightForm(torch.float64)
UP = "model.layers.1.mlp.up_proj"


def over_codes(folder, name, architecture="Llama", **sizes):
    """(a model over a checkpoint of codes, the same over the numbers that these stand for)."""
    plain = random_model(architecture, **(sizes or SIZES)).double()
    numbers = save_coded(plain.float(), folder, name)
    plain.double()
    base = load_base(folder, form=WIDE)
    with torch.no_grad():
        for key, tensor in numbers.items():
            plain.get_parameter(key).copy_(tensor)
    return base, plain


@pytest.mark.parametrize("name", FORMATS)
def test_gradients_over_codes_equal_those_of_peft_over_their_numbers(tmp_path, name):
    base, plain = over_codes(tmp_path, name, **SIZES, num_hidden_layers=1)
    theirs = pefts_gradients(tuned_model(plain, small_spec()), small_rows())
    tuned = tuned_model(base.model, small_spec())
    cut = Cut(Windows(7), max_tokens=64)
    assert apart(our_gradients(tuned, small_rows(), cut), theirs).by_rounding


@pytest.mark.parametrize(
    ("architecture", "adapter"),
    [
        ("Mistral", None),
        ("Qwen2", {"lora": {"useDora": True}}),
        ("Qwen2", {"lora": {"bias": "all", "targetModules": "q_proj,up_proj"}}),
        ("Qwen3", {"type": "ia3"}),
    ],
)
def test_blocks_may_be_short_and_other_adapters_learn_as_over_numbers(
    tmp_path, architecture, adapter
):
    base, plain = over_codes(tmp_path, "fp8 in blocks", architecture, **SHORT)
    spec = small_spec(adapter)
    theirs = pefts_gradients(tuned_model(plain, spec), small_rows())
    ours = our_gradients(tuned_model(base.model, spec), small_rows(), Cut())
    assert apart(ours, theirs).by_rounding


LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}
MIXTURES = {
    "Mixtral": {},
    "Qwen3Moe": {"moe_intermediate_size": 32},
    "DeepseekV2": LATENT,
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12},
}


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("Mixtral", "fp8 in blocks"),
        ("Qwen3Moe", "fp8 by tensor (ModelOpt)"),
        ("DeepseekV2", "fp8 in blocks"),
        ("DeepseekV2", "nvfp4 (ModelOpt)"),
        ("GptOss", "mxfp4 (GPT-OSS)"),
        ("Qwen3Moe", "gptq"),
        ("Mixtral", "gptq with desc_act"),
        ("Mixtral", "awq"),
    ],
)
def test_mixtures_of_experts_and_latent_attention_have_pefts_gradients(
    tmp_path, architecture, name
):
    plain, folder, numbers = (tmp_path / part for part in ("plain", "coded", "numbers"))
    random_model(architecture, **SIZES, **MIXTURES[architecture]).save_pretrained(plain)
    recode(plain, folder, numbers, name)
    spec = small_spec({"lora": {"rank": 4, "alpha": 8, "targetModules": "q_proj,o_proj"}})
    theirs = pefts_gradients(tuned_model(load_base(numbers, form=WIDE).model, spec), small_rows())
    base = load_base(folder, form=WIDE)
    assert sum(isinstance(m, CodedExperts) for m in base.model.modules()) >= 2
    ours = our_gradients(tuned_model(base.model, spec), small_rows(), Cut())
    assert apart(ours, theirs).by_rounding
    check_numbers(base.model)
    assert isinstance(shallow_clone(base).model, type(base.model))


def test_experts_that_are_incomplete_or_do_not_lie_in_one_tensor_are_refused(tmp_path):
    plain, folder, numbers = (tmp_path / part for part in ("plain", "coded", "numbers"))
    random_model("Mixtral", **SIZES).save_pretrained(plain)
    recode(plain, folder, numbers, "fp8 in blocks")
    tensors = load_file(folder / "model.safetensors")
    name = next(n for n in tensors if n.endswith("experts.2.w3.weight"))
    kept = {n: t for n, t in tensors.items() if not n.startswith(name)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"experts\.2 has no up_proj or w3 that is codes"):
        load_base(folder)
    other = tmp_path / "other"
    recode(plain, other, tmp_path / "more", "gptq with desc_act")
    tensors = load_file(other / "model.safetensors")
    name = next(n for n in tensors if n.endswith("experts.2.w3.g_idx"))
    tensors[name] = tensors[name].flip(0)
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="gate_up_proj: the columns of an expert's weights are in"):
        load_base(other)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("coded")
    save_coded(random_model("Llama", **SIZES), folder, "fp8 in blocks")
    return folder


def test_weights_are_held_as_codes_and_made_in_one_buffer(stored, monkeypatch):
    monkeypatch.setattr(coded, "_buffers", {})
    base = load_base(stored)
    layers = [m for m in base.model.modules() if isinstance(m, CodedLinear)]
    assert len(layers) == 7 * 3
    assert not any("proj" in name for name, _ in base.model.named_parameters())
    on_disk = load_file(stored / "model.safetensors")
    held = sum(part.nbytes for layer in layers for part in layer.parts)
    assert held == sum(t.nbytes for name, t in on_disk.items() if "_proj." in name)
    tuned = tuned_model(base.model, small_spec())
    our_gradients(tuned, small_rows(), Cut(Windows(7)))
    largest = max(layer.in_features * layer.out_features for layer in layers)
    assert coded.buffer_bytes() == largest * 4


def test_no_numbers_are_kept_for_the_backward(stored):
    layer = next(m for m in load_base(stored).model.modules() if isinstance(m, CodedLinear))
    saved: list[torch.Tensor] = []
    x = torch.randn(3, layer.in_features, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        out = layer(x)
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in layer.parts}
    out.sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(3, -1))


def test_a_layer_over_codes_is_recorded_and_runs_again_within_any_budget(stored):
    tuned = tuned_model(load_base(stored).model, small_spec()).train()
    stack = DecoderStack(tuned.get_base_model())
    expected = layer_gradients(stack)
    planned = stack.around_layer = PlannedLayers(stack.layers)
    at = stack.begin(torch.ones(2, 11, dtype=torch.int64))
    inputs = (at.inputs[0].requires_grad_(), *at.calls[0].args)
    recording = planned.recording(0, inputs, at.calls[0].kwargs)
    assert [op.kind for op in recording.graph.ops if "coded" in op.name] == [OpKind.GEMM] * 7
    least = smallest(recording.graph).kept_bytes
    for budget in (largest(recording.graph).kept_bytes, least, least // 2, 0):
        planned.bytes_per_token = budget / 22
        found = layer_gradients(stack)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), budget


def layer_gradients(stack) -> list[torch.Tensor]:
    at = stack.begin(torch.arange(22).view(2, 11) * 3 % 90)
    for layer in range(stack.depth):
        stack.forward(at, layer, at.whole, TorchBoundaries(), learn=True)
    at.gradient = torch.linspace(-1, 1, at.inputs[-1].numel()).view(at.inputs[-1].shape)
    for layer in reversed(range(stack.depth)):
        stack.backward(at, layer, at.whole)
    found = [p.grad for p in stack.model.parameters() if p.requires_grad]
    stack.model.zero_grad(set_to_none=True)
    return [at.gradient, *found]


def test_jobs_share_the_codes_and_sizes_count_the_numbers(stored):
    base = load_base(stored)
    clone = shallow_clone(base).model
    theirs = dict(clone.named_modules())
    plain = random_model("Llama", **SIZES)
    for name, module in base.model.named_modules():
        if isinstance(module, CodedLinear):
            assert [t.data_ptr() for t in theirs[name].parts] == [
                t.data_ptr() for t in module.parts
            ]
            assert theirs[name] is not module
    for ours, module in zip(base.model.model.layers, plain.model.layers, strict=True):
        assert weight_elements(ours) == sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_numbers_are_rounded_once_to_the_type_that_is_computed_in(dtype):
    weight = torch.randn(40, 48, generator=torch.Generator().manual_seed(2))
    codes, scales, numbers = eight_bits(weight, (16, 16))
    wide = torch.promote_types(torch.float32, dtype)
    expected = numbers.to(wide).to(dtype)
    parts = [codes.view(torch.uint8), scales]
    assert torch.equal(coded.decoded(parts, "fp8", (40, 48, 16, 16), dtype), expected)
    several = torch.randn(40, 48, generator=torch.Generator().manual_seed(2)).repeat(60, 20)
    codes, scales, numbers = eight_bits(several, (16, 16))  # more than one band of rows
    parts = [codes.view(torch.uint8), scales]
    found = coded.decoded(parts, "fp8", (2400, 960, 16, 16), dtype)
    assert torch.equal(found, numbers.to(wide).to(dtype))


def test_codes_that_stand_for_no_number_are_found(stored):
    model = load_base(stored).model
    check_numbers(model)
    model.get_submodule(UP).weight_scales[0, 0] = torch.nan
    with pytest.raises(UserError, match=rf"{UP}\.weight holds numbers that are not finite"):
        check_numbers(model)


def test_a_module_over_codes_is_not_trained_as_a_whole(stored):
    spec = small_spec({"lora": {"modulesToSave": "up_proj", "targetModules": "q_proj"}})
    with pytest.raises(UserError, match=r"up_proj is kept in fp8, and only floating-point"):
        tuned_model(load_base(stored).model, spec)


def without(name):
    return lambda tensors, stated: tensors.pop(name)


def replaced(name, tensor):
    return lambda tensors, stated: tensors.update({name: tensor})


def saying(**fields):
    return lambda tensors, stated: stated.update(fields)


def plainly(tensors, stated):
    for name in [n for n in tensors if n.endswith("_scale_inv")]:
        weight = name.removesuffix("_scale_inv")
        del tensors[name]
        tensors[weight] = tensors[weight].float()


SCALES = f"{UP}.weight_scale_inv"
COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (without(SCALES), f"{UP}.weight is stored by fp8 and has no {SCALES}"),
        (replaced(SCALES, torch.ones(4, 3)), f"{SCALES} has shape [4, 3], by config.json it has"),
        (replaced(SCALES, torch.ones(4, 2).int()), f"{SCALES} is stored as I32, fp8 has F32 or"),
        (saying(weight_block_size=[8, 8]), "by config.json it has [4, "),
        (saying(fmt="e5m2"), "the type e5m2 of fp8 has no codec here"),
        (saying(modules_to_not_convert=[UP]), f"config.json leaves {UP} plain ({UP}), and its"),
        (plainly, "config.json says that weights are stored by fp8, and no tensor is"),
        (
            saying(
                **COMPRESSED,
                config_groups={"group_0": {"weights": {"num_bits": 8, "type": "int"}}},
            ),
            "the format pack-quantized (int of 8 bits) of compressed-tensors has no codec here",
        ),
        (
            saying(quant_method="modelopt", quant_algo="W4A16_AWQ"),
            "W4A16_AWQ of modelopt has no codec here",
        ),
        (
            replaced("model.odd", torch.ones(2, dtype=torch.int32)),
            "it holds model.odd, which is not a tensor of this model",
        ),
        (replaced(f"{UP}.weight", torch.ones(64, 32)), f"it holds {SCALES}, which is not a tensor"),
    ],
)
def test_a_checkpoint_that_cannot_be_computed_with_is_refused_by_name(
    stored, tmp_path, breaks, words
):
    folder = shutil.copytree(stored, tmp_path / "broken")
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    breaks(tensors, config["quantization_config"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as refused:
        load_base(folder)
    assert words in refused.value.problem
    assert (refused.value.field, refused.value.reason) == ("spec.model.name", "ModelUnsupported")


@pytest.mark.parametrize(
    ("name", "stated", "change", "words"),
    [
        ("gptq", {"bits": 3}, {}, "a scheme of 3 bits of gptq has no codec here"),
        ("gptq", {"checkpoint_format": "marlin"}, {}, "the layout marlin of gptq has no codec"),
        ("gptq", {"dynamic": {"-:.*down.*": {}}}, {}, "differs by module (dynamic) of gptq has no"),
        ("gptq", {"group_size": 24}, {}, "groups of 24 do not divide rows of 32"),
        ("gptq", {"group_size": 32}, {}, "x.qzeros has shape [2, 2], by config.json it has [1, 2]"),
        ("gptq", {}, {"x.scales": None}, "x.weight is stored by gptq and has no x.scales"),
        ("gptq", {}, {"x.scales": torch.ones(2, 16).int()}, "x.scales is stored as I32, gptq has"),
        ("gptq with desc_act", {}, {"x.g_idx": None}, "x.weight is stored by gptq and has no x.g_"),
        ("awq", {"version": "gemv"}, {}, "the layout gemv of awq has no codec here"),
        ("awq", {"zero_point": False}, {}, "a scheme without zero points of awq has no codec"),
        ("awq", {}, {"x.qzeros": torch.ones(2, 16).int()}, "x.qzeros has shape [2, 16], by config"),
        (
            "int4 (compressed-tensors)",
            {
                "config_groups": {
                    "g": {"weights": {"type": "int", "num_bits": 4, "symmetric": False}}
                }
            },
            {},
            "pack-quantized with zero points of compressed-tensors has no codec here",
        ),
        (
            "int4 (compressed-tensors)",
            {},
            {"x.weight_g_idx": torch.zeros(32).int()},
            "x.weight, whose groups are in an order of its own, of compressed-tensors has no codec",
        ),
    ],
)
def test_whole_numbers_of_another_layout_are_refused_by_name(tmp_path, name, stated, change, words):
    said, encode = FORMATS[name]
    parts, _ = encode(torch.randn(16, 32, generator=torch.Generator().manual_seed(1)))
    tensors = {f"x.{part}": tensor.contiguous() for part, tensor in parts.items()} | change
    kept = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    save_file(kept, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {**said, **stated}}))
    with pytest.raises(UserError) as refused:
        weight_format(tmp_path)
    assert words in refused.value.problem


def test_every_codec_has_a_format_whose_gradients_are_compared(tmp_path):
    seen = set()
    for name in FORMATS:
        save_coded(random_model("Llama", num_hidden_layers=1, **SIZES), tmp_path / name, name)
        seen |= {coding.codec for coding in weight_format(tmp_path / name).codings.values()}
    assert seen == CODECS.keys()
