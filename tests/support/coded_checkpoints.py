"""Checkpoints whose weights are codes, made by each format's definition, and what they stand for.

Written from the formats' documents, number by number in float64: nothing of the code under test.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from windrow_sidecar.testing.models import save_byte_tokenizer

Stored = tuple[dict[str, Tensor], Tensor]
"""The tensors behind a module's name, and the weight that they stand for in float64."""

_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def _grid(scales: Tensor, rows: int, columns: int, block: tuple[int, int]) -> Tensor:
    """The scale of each element."""
    down, across = torch.arange(rows) // block[0], torch.arange(columns) // block[1]
    return scales[down[:, None], across[None]]


def eight_bits(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scales, float64 weight) of E4M3 with a scale for each block, short ones included."""
    rows, columns = weight.shape
    down, across = -(-rows // block[0]), -(-columns // block[1])
    scales = torch.zeros(down, across)
    for i in range(down):
        for j in range(across):
            part = weight[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            scales[i, j] = part.abs().max() / 448
    each = _grid(scales.double(), rows, columns, block)
    codes = (weight.double() / each).float().to(torch.float8_e4m3fn)
    return codes, scales, codes.double() * each


def four_bits(weight: Tensor, scales: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """(bytes, float64 weight) of E2M1 with a scale for each group of a row; the low bits first."""
    rows, columns = weight.shape
    each = _grid(scales.double(), rows, columns, (1, group))
    numbers = weight.double() / each
    nearest = (numbers.abs()[..., None] - _FP4).abs().argmin(-1)
    codes = nearest + 8 * (numbers < 0)
    bytes_ = (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)
    return bytes_, torch.where(numbers < 0, -1.0, 1.0) * _FP4[nearest] * each


def powers_of_two(weight: Tensor, group: int) -> Tensor:
    """E8M0 bytes for each group of a row: the largest number becomes at most 6."""
    peaks = weight.unflatten(1, (-1, group)).abs().amax(-1).double()
    return (torch.ceil(torch.log2(peaks / 6)) + 127).to(torch.uint8)


def in_blocks(weight: Tensor) -> Stored:
    """DeepSeek, Qwen3."""
    codes, scales, numbers = eight_bits(weight, (16, 16))
    return {"weight": codes, "weight_scale_inv": scales}, numbers


def by_tensor(weight: Tensor) -> Stored:
    """ModelOpt, AutoFP8: one number, and one for activations, which training leaves alone."""
    codes, scales, numbers = eight_bits(weight, (weight.shape[0], weight.shape[1]))
    return {
        "weight": codes,
        "weight_scale": scales.reshape(()),
        "input_scale": torch.tensor(0.5),
    }, numbers


def by_channel(weight: Tensor) -> Stored:
    """compressed-tensors: one number a row."""
    codes, scales, numbers = eight_bits(weight, (1, weight.shape[1]))
    return {"weight": codes, "weight_scale": scales}, numbers


def in_powers(weight: Tensor) -> Stored:
    """compressed-tensors: MXFP4."""
    bytes_ = powers_of_two(weight, 32)
    scales = torch.exp2(bytes_.double() - 127)
    codes, numbers = four_bits(weight, scales, 32)
    return {"weight_packed": codes, "weight_scale": bytes_}, numbers


def nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(codes, E4M3 scales, one factor, float64 weight), groups of 16."""
    factor = (weight.abs().max() / (6 * 448)).float()
    peaks = weight.unflatten(1, (-1, 16)).abs().amax(-1)
    scales = (peaks / 6 / factor).clamp(2**-6).to(torch.float8_e4m3fn)
    codes, numbers = four_bits(weight, scales.double() * factor.double(), 16)
    return codes, scales, factor, numbers


def of_modelopt(weight: Tensor) -> Stored:
    """ModelOpt's NVFP4: scales are multiplied by a factor."""
    codes, scales, factor, numbers = nvfp4(weight)
    return {"weight": codes, "weight_scale": scales, "weight_scale_2": factor}, numbers


def of_compressed(weight: Tensor) -> Stored:
    """compressed-tensors' NVFP4: scales are divided by a power of two here, so that both agree."""
    power = torch.exp2(torch.log2(6 * 448 / weight.abs().max()).floor()).float().reshape(1)
    peaks = weight.unflatten(1, (-1, 16)).abs().amax(-1)
    scales = (peaks / 6 * power).clamp(2**-6).to(torch.float8_e4m3fn)
    codes, numbers = four_bits(weight, scales.double() / power.double(), 16)
    return {
        "weight_packed": codes,
        "weight_scale": scales,
        "weight_global_scale": power,
    }, numbers


def in_words(codes: Tensor, places: Sequence[int] = range(8)) -> Tensor:
    """Eight codes of four bits a word along the last dimension; `places`: which come where."""
    of = codes.to(torch.int64).unflatten(-1, (-1, 8))
    words = sum(of[..., column] << 4 * place for place, column in enumerate(places))
    return torch.as_tensor(words).to(torch.int32)


def from_a_zero(weight: Tensor, group_of: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(codes [out, in], zeros and scales [groups, out], float64 weight), 0 to 15 about a zero.

    `group_of`: each column's group. The first row has a zero of 0.
    """
    codes, numbers = torch.zeros_like(weight), torch.zeros_like(weight, dtype=torch.float64)
    zeros, scales = [], []
    for group in range(int(group_of.max()) + 1):
        at = group_of == group
        low, high = weight[:, at].amin(1).clamp(max=0), weight[:, at].amax(1).clamp(min=0)
        low[0] = 0.0
        scale = ((high - low) / 15).clamp(2**-10).half()
        zero = (-low / scale.float()).round()
        of = (weight[:, at] / scale.float()[:, None] + zero[:, None]).round().clamp(0, 15)
        codes[:, at], numbers[:, at] = of, (of - zero[:, None]).double() * scale.double()[:, None]
        zeros.append(zero)
        scales.append(scale)
    return codes, torch.stack(zeros), torch.stack(scales), numbers


def of_gptq(weight: Tensor, *, ordered: bool = False) -> Stored:
    """AutoGPTQ: words down the columns of a transposed weight, zeros less one."""
    columns = torch.arange(weight.shape[1])
    if ordered:  # by how much each counts for the loss: any order
        columns = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(5))
    codes, zeros, scales, numbers = from_a_zero(weight, columns // 16)
    return {
        "qweight": in_words(codes).t(),
        "qzeros": in_words((zeros.int() - 1) & 15),
        "scales": scales,
        "g_idx": (columns // 16).to(torch.int32),
    }, numbers


def of_gptq_ordered(weight: Tensor) -> Stored:
    """AutoGPTQ with `desc_act`."""
    return of_gptq(weight, ordered=True)


def of_awq(weight: Tensor) -> Stored:
    """AutoAWQ: words along the rows of a transposed weight, in the order of its kernel."""
    codes, zeros, scales, numbers = from_a_zero(weight, torch.arange(weight.shape[1]) // 16)
    places = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": in_words(codes.t(), places),
        "qzeros": in_words(zeros, places),
        "scales": scales,
    }, numbers


def of_whole_numbers(weight: Tensor) -> Stored:
    """compressed-tensors: four bits about 8, a scale for 16 of a row."""
    scales = (weight.unflatten(1, (-1, 16)).abs().amax(-1) / 7).half()
    each = _grid(scales.double(), *weight.shape, (1, 16))
    codes = (weight.double() / each).round().clamp(-8, 7)
    return {
        "weight_packed": in_words(codes + 8),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }, codes * each


def of_bytes(weight: Tensor) -> Stored:
    """compressed-tensors: eight bits, a scale for a row."""
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight.double() / scales.double()).round().clamp(-127, 127)
    return {"weight": codes.to(torch.int8), "weight_scale": scales}, codes * scales.double()


def _group(**weights: Any) -> dict[str, Any]:
    return {"group_0": {"targets": ["Linear"], "weights": weights}}


_COMPRESSED = {"quant_method": "compressed-tensors", "ignore": ["lm_head"]}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Stored]]] = {
    "fp8 in blocks": (
        {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"},
        in_blocks,
    ),
    "fp8 by tensor (AutoFP8)": ({"quant_method": "fp8", "activation_scheme": "static"}, by_tensor),
    "fp8 by tensor (ModelOpt)": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        by_tensor,
    ),
    "fp8 by channel (compressed-tensors)": (
        {
            **_COMPRESSED,
            "format": "float-quantized",
            "config_groups": _group(num_bits=8, type="float", strategy="channel"),
        },
        by_channel,
    ),
    "mxfp4 (compressed-tensors)": (
        {
            **_COMPRESSED,
            "format": "mxfp4-pack-quantized",
            "config_groups": _group(num_bits=4, type="float", strategy="group", group_size=32),
        },
        in_powers,
    ),
    "nvfp4 (ModelOpt)": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, of_modelopt),
    "nvfp4 (compressed-tensors)": (
        {
            **_COMPRESSED,
            "format": "nvfp4-pack-quantized",
            "config_groups": _group(num_bits=4, type="float", strategy="tensor_group"),
        },
        of_compressed,
    ),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False}, of_gptq),
    "gptq with desc_act": (
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True},
        of_gptq_ordered,
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"},
        of_awq,
    ),
    "int4 (compressed-tensors)": (
        {
            **_COMPRESSED,
            "format": "pack-quantized",
            "config_groups": _group(num_bits=4, type="int", strategy="group", group_size=16),
        },
        of_whole_numbers,
    ),
    "int8 (compressed-tensors)": (
        {
            **_COMPRESSED,
            "format": "int-quantized",
            "config_groups": _group(num_bits=8, type="int", strategy="channel"),
        },
        of_bytes,
    ),
}


def save_coded(model: Any, folder: Path, name: str) -> dict[str, Tensor]:
    """Store the linear layers of a model's decoder in a format; the rest stays plain.

    Returns the numbers that its codes stand for, by parameter, in float64.
    """
    stated, encode = FORMATS[name]
    stored: dict[str, Tensor] = {}
    stands_for: dict[str, Tensor] = {}
    linear = {
        f"{at}.weight"
        for at, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and at != "lm_head"
    }
    tied = set(getattr(model, "all_tied_weights_keys", {}) or {})
    for key, tensor in model.state_dict().items():
        if key in linear:
            parts, stands_for[key] = encode(tensor.float())
            module = key.removesuffix(".weight")
            stored |= {f"{module}.{part}": t.contiguous() for part, t in parts.items()}
        elif key not in tied:
            stored[key] = tensor.contiguous()
    save_checkpoint(model, folder, stored, stated)
    return stands_for


def save_checkpoint(
    model: Any, folder: Path, stored: Mapping[str, Tensor], stated: Mapping[str, Any]
) -> None:
    """Write tensors, the model's config.json with what is stated of them, and a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(stored), folder / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": dict(stated)}
    config["architectures"] = [type(model).__name__]
    path.write_text(json.dumps(config))
    save_byte_tokenizer(folder)


def recode(plain: Path, folder: Path, numbers: Path, name: str) -> None:
    """Store a saved model's projections, those of single experts too, in a format.

    Args:
        plain: of the model, in one file, as transformers saves it.
        folder: to write it to, with codes.
        numbers: to write it to, with the numbers that these stand for, in float64.
        name: of the format; "mxfp4 (GPT-OSS)" is that of experts in one tensor.
    """
    config = json.loads((plain / "config.json").read_text())
    coded, wide = {}, {}
    for key, tensor in load_file(plain / "model.safetensors").items():
        wide[key] = tensor.double()
        if name == "mxfp4 (GPT-OSS)":
            if re.search(r"experts\.(gate_up|down)_proj$", key):
                parts, wide[key] = experts_in_powers(tensor.float())
                coded |= {f"{key}_{part}": t for part, t in parts.items()}
                continue
        elif re.search(r"(_proj\w*|\.w[123])\.weight$", key) and tensor.dim() == 2:
            parts, wide[key] = FORMATS[name][1](tensor.float())
            module = key.removesuffix(".weight")
            coded |= {f"{module}.{part}": t.contiguous() for part, t in parts.items()}
            continue
        coded[key] = tensor
    for at, tensors, stated in (
        (folder, coded, {"quant_method": "mxfp4"} if "OSS" in name else FORMATS[name][0]),
        (numbers, wide, None),
    ):
        at.mkdir()
        save_file(tensors, at / "model.safetensors", metadata={"format": "pt"})
        said = config | ({"quantization_config": stated} if stated else {})
        (at / "config.json").write_text(json.dumps(said))
        save_byte_tokenizer(at)


def experts_in_powers(experts: Tensor) -> Stored:
    """GPT-OSS: [experts, in, out], of which codes run along in, 16 bytes for each scale."""
    codes, scales, numbers = [], [], []
    for weight in experts.transpose(1, 2):
        parts, of = in_powers(weight.contiguous())
        codes.append(parts["weight_packed"].unflatten(1, (-1, 16)))
        scales.append(parts["weight_scale"])
        numbers.append(of.t())
    return {"blocks": torch.stack(codes), "scales": torch.stack(scales)}, torch.stack(numbers)
