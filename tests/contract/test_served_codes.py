"""A worker computes over the codes that decode serves, as SGLang keeps them after loading."""

from __future__ import annotations

import json
import resource

import pytest
import torch
from safetensors.torch import load_file
from support.coded_checkpoints import recode
from torch import nn
from torch.utils.dlpack import from_dlpack

from windrow.errors import UserError
from windrow_sidecar.engines.sglang.weights import share_model
from windrow_sidecar.finetune.engine.sizing import Windows
from windrow_sidecar.finetune.model.coded import CodedExperts, CodedLinear
from windrow_sidecar.finetune.model.loading import ExportedWeights, load_base
from windrow_sidecar.finetune.model.precision import WeightForm
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

SIZES = {"hidden_size": 32, "intermediate_size": 64}
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def served(folder, by_row=False) -> nn.Module:
    """Return tensors as SGLang holds them: fused parts, experts in one, the rest as it is.

    By its Fp8LinearMethod and Fp8MoEMethod of 0.5.23: with scales for blocks weights [out, in] and
    `weight_scale_inv`; with one for a tensor (`by_row`) weights transposed and a scale a row.
    """
    left = load_file(folder / "model.safetensors")
    held = {}

    def fuse(parts: list[dict[str, torch.Tensor]], into: str) -> None:
        for last in parts[0]:
            pieces = [part[last] for part in parts]
            if last == "weight_scale":
                pieces = [
                    piece.reshape(1, 1).expand(part["weight"].shape[0], 1)
                    for piece, part in zip(pieces, parts, strict=True)
                ]
            whole = torch.cat(pieces)
            held[f"{into}.{last}"] = whole

    modules = {}
    for name, tensor in left.items():
        module, _, last = name.rpartition(".")
        if last != "input_scale":
            modules.setdefault(module, {})[last] = tensor
    done = set()
    for module in modules:
        before, _, part = module.rpartition(".")
        group = next((g for g, parts in FUSED.items() if part in parts), "")
        if ".experts." in module or module in done:
            continue
        of = [f"{before}.{p}" for p in FUSED[group]] if group else [module]
        done |= set(of)
        fuse([modules[m] for m in of], f"{before}.{group}" if group else module)
    for prefix in {m.split(".experts.")[0] for m in modules if ".experts." in m}:
        numbers = range(sum(f"{prefix}.experts." in m for m in modules) // 3)
        for into, names in (("w13", ("gate_proj", "up_proj")), ("w2", ("down_proj",))):
            for last in modules[f"{prefix}.experts.0.down_proj"]:
                held[f"{prefix}.experts.{into}_{last}"] = torch.stack(
                    [
                        torch.cat([modules[f"{prefix}.experts.{n}.{p}"][last] for p in names])
                        for n in numbers
                    ]
                )
    model = nn.Module()
    for name, tensor in held.items():
        at = model
        *path, last = name.split(".")
        for step in path:
            if not hasattr(at, step):
                at.add_module(step, nn.Module())
            at = getattr(at, step)
        coded = by_row and last == "weight" and tensor.dtype == torch.float8_e4m3fn
        at.register_parameter(
            last, nn.Parameter(tensor.contiguous().t() if coded else tensor, requires_grad=False)
        )
    return model


def exported(shared, folder) -> ExportedWeights:
    shared.write_manifest(folder / "manifest.json", "f")
    manifest = json.loads((folder / "manifest.json").read_text())
    return ExportedWeights(manifest, from_dlpack(shared.shared.tensor()))


@pytest.mark.parametrize(
    ("architecture", "sizes", "name"),
    [
        ("Qwen2", {}, "fp8 in blocks"),
        ("Llama", {}, "fp8 by tensor (AutoFP8)"),
        ("Qwen3Moe", {"moe_intermediate_size": 32}, "fp8 in blocks"),
    ],
)
def test_gradients_over_served_codes_equal_those_of_peft_and_nothing_is_copied(
    tmp_path, architecture, sizes, name
):
    plain, folder, numbers = (tmp_path / part for part in ("plain", "coded", "numbers"))
    random_model(architecture, **SIZES, **sizes).save_pretrained(plain)
    recode(plain, folder, numbers, name)
    model = served(folder, by_row="tensor" in name)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    shared = share_model(model, folder, "host")
    for n, parameter in model.named_parameters():
        assert torch.equal(
            parameter.contiguous().view(torch.uint8), before[n].contiguous().view(torch.uint8)
        )
        assert parameter.stride() == before[n].stride()
    weights = exported(shared, tmp_path)
    base = load_base(folder, weights)
    first = weights.storage.data_ptr()
    held = [*base.model.parameters()]
    for module in base.model.modules():
        if isinstance(module, CodedLinear | CodedExperts):
            held += module.buffers()
    assert len(held) > len(list(base.model.parameters()))
    assert all(first <= t.data_ptr() < first + weights.storage.numel() for t in held)

    adapter = small_spec({"lora": {"rank": 4, "alpha": 8, "targetModules": "q_proj,o_proj"}})
    wide = load_base(numbers, form=WeightForm(torch.float64)).model
    theirs = pefts_gradients(tuned_model(wide, adapter), small_rows())
    for module in base.model.modules():
        if isinstance(module, CodedLinear | CodedExperts):
            module._dtype = torch.float64
    ours = our_gradients(tuned_model(base.model.double(), adapter), small_rows(), Cut(Windows(7)))
    assert apart(ours, theirs).by_rounding


@pytest.mark.parametrize("what", ["codes", "scales"])
def test_codes_that_are_served_otherwise_than_in_the_file_are_not_shared(tmp_path, what):
    plain, folder, numbers = (tmp_path / part for part in ("plain", "coded", "numbers"))
    random_model("Llama", num_hidden_layers=1, **SIZES).save_pretrained(plain)
    recode(plain, folder, numbers, "fp8 in blocks")
    model = served(folder)
    layer = model.get_submodule("model.layers.0.mlp.gate_up_proj")
    part = layer.weight.data.view(torch.uint8) if what == "codes" else layer.weight_scale_inv.data
    part[0] += 1
    with pytest.raises(UserError, match=r"gate_proj\.weight\w* is served with other values"):
        share_model(model, folder, "host")


def test_without_room_for_the_copy_the_model_stays_as_it_is_and_only_sharing_is_left_out(
    tmp_path,
):
    random_model("Llama", num_hidden_layers=1, **SIZES).save_pretrained(tmp_path / "plain")
    recode(tmp_path / "plain", tmp_path / "coded", tmp_path / "numbers", "fp8 in blocks")
    model = served(tmp_path / "coded")
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    no_room = resource.RLIMIT_FSIZE, (1 << 12, resource.RLIM_INFINITY)
    held = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(*no_room)
    try:
        with pytest.raises(UserError, match="no room for a copy of"):
            share_model(model, tmp_path / "coded", "host")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, held)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before
