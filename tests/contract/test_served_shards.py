"""A worker's rank maps the part of the model that SGLang's rank of its number holds."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.dlpack import from_dlpack

from windrow.errors import UserError
from windrow_sidecar.engines.sglang.weight_cuts import cut_of
from windrow_sidecar.engines.sglang.weights import share_model
from windrow_sidecar.engines.shard_cuts import ShardSizes
from windrow_sidecar.finetune.model.loading import ExportedWeights
from windrow_sidecar.testing.architectures import random_model

pytestmark = pytest.mark.usefixtures("one_thread")

# Four ranks have two key-value heads: each is on two of them. Words are padded to 128.
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 72,
}


class Held(nn.Module):
    """Parameters under names with dots, and the configuration of the whole model."""

    def __init__(self, config, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.config = config
        for name, tensor in tensors.items():
            at = self
            *path, last = name.split(".")
            for step in path:
                if not hasattr(at, step):
                    at.add_module(step, nn.Module())
                at = getattr(at, step)
            at.register_parameter(last, nn.Parameter(tensor.clone(), requires_grad=False))


def cut(name: str, whole: torch.Tensor, rank: int, ranks: int, key_values: int) -> torch.Tensor:
    """Return a rank's part, by SGLang's `linear.py` and `vocab_parallel_embedding.py` (0.5.23)."""
    part = name.split(".")[-2]
    if part in ("embed_tokens", "lm_head"):
        padded = -(-whole.shape[0] // 64) * 64
        rows = torch.cat([whole, whole.new_zeros(padded - whole.shape[0], *whole.shape[1:])])
        return rows.chunk(ranks)[rank]
    if part in ("k_proj", "v_proj"):
        copies = max(1, ranks // key_values)
        return whole.chunk(min(ranks, key_values))[rank // copies]
    if part in ("q_proj", "gate_proj", "up_proj"):
        return whole.chunk(ranks)[rank]
    if part in ("o_proj", "down_proj") and whole.dim() == 2:
        return whole.chunk(ranks, 1)[rank]
    return whole


def served(folder, config, rank: int, ranks: int) -> tuple[Held, dict[str, torch.Tensor]]:
    """Return a rank's model as SGLang holds it, and its parts by the checkpoint's names."""
    whole = load_file(folder / "model.safetensors")
    parts = {n: cut(n, w, rank, ranks, config.num_key_value_heads) for n, w in whole.items()}
    held = dict(parts)
    for fused, names in (
        ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
        ("gate_up_proj", ("gate_proj", "up_proj")),
    ):
        for first in [name for name in parts if f".{names[0]}." in name]:
            pieces = [held.pop(first.replace(names[0], each)) for each in names]
            held[first.replace(names[0], fused)] = torch.cat(pieces)
    return Held(config, held), parts


def model_in(folder, architecture: str):
    model = random_model(architecture, **SIZES)
    model.save_pretrained(folder)
    return model.config


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_every_rank_exports_its_part_under_the_checkpoints_names(tmp_path, architecture, ranks):
    config = model_in(tmp_path, architecture)
    sizes = ShardSizes.of(config, ranks)
    for rank in range(ranks):
        model, parts = served(tmp_path, config, rank, ranks)
        shared = share_model(model, tmp_path, "host", cut_of(model, tmp_path, ranks, rank))
        shared.write_manifest(tmp_path / "manifest.json", "f")
        manifest = json.loads((tmp_path / "manifest.json").read_text())
        assert manifest["ranks"] == ranks
        found = ExportedWeights(manifest, from_dlpack(shared.shared.tensor())).tensors()
        assert found.keys() == parts.keys()
        for name, part in parts.items():
            assert torch.equal(found[name], part), name
            taken = sizes.part(name, rank)  # as the worker would read it from the files
            if taken.dim is not None and "embed_tokens" not in name and "lm_head" not in name:
                assert found[name].shape[taken.dim] == taken.end - taken.begin


def test_a_rank_that_serves_another_ranks_part_shares_nothing(tmp_path):
    config = model_in(tmp_path, "Llama")
    model, _ = served(tmp_path, config, 1, 2)
    with pytest.raises(UserError, match="served with other values"):
        share_model(model, tmp_path, "host", cut_of(model, tmp_path, 2, 0))


def test_padding_that_is_not_zero_is_not_shared(tmp_path):
    config = model_in(tmp_path, "Llama")
    model, _ = served(tmp_path, config, 1, 2)
    model.get_parameter("model.embed_tokens.weight").data[-1] = float("nan")
    with pytest.raises(UserError, match="embed_tokens"):
        share_model(model, tmp_path, "host", cut_of(model, tmp_path, 2, 1))


@pytest.mark.parametrize(("architecture", "sizes"), [("Gemma", {}), ("Llama", {"ranks": 3})])
def test_a_model_that_no_worker_trains_over_ranks_is_refused_by_name(tmp_path, architecture, sizes):
    ranks = sizes.get("ranks", 2)
    config = model_in(tmp_path, architecture)
    model, _ = served(tmp_path, config, 0, 1)
    with pytest.raises(UserError) as refused:
        cut_of(model, tmp_path, ranks, 0)
    assert refused.value.field == f"--tp-size {ranks}"
    assert refused.value.reason == "TensorParallelUnsupported"
