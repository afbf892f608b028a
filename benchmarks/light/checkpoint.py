"""Write a Llama checkpoint of random weights, layer by layer, as fast as its disk takes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.shapes import write_shape

_STD = 0.02
_INDEX = "model.safetensors.index.json"
# SGLang reads the class of a tokenizer from there.
_TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|bos|>",
    "eos_token": "<|eos|>",
}


def write_checkpoint(folder: Path, shape: str, device: str) -> Path:
    """Return a model directory of that shape with weights, its tokenizer and its index.

    The index is written last, so that one which is there is whole: it is not written again. Weights
    are drawn on `device` from one seed, normal with a deviation of 0.02; norms are ones.
    """
    if (folder / _INDEX).exists():
        return folder
    write_shape(folder, shape)
    (folder / "tokenizer_config.json").write_text(json.dumps(_TOKENIZER))
    config = json.loads((folder / "config.json").read_text())
    draw = torch.Generator(device).manual_seed(1)
    where: dict[str, str] = {}
    n_bytes = 0
    for number, shapes in enumerate(_parts(config)):
        name = f"model-{number:05d}.safetensors"
        dtype = getattr(torch, config["dtype"])
        tensors = {
            each: torch.ones(size, dtype=dtype)
            if each.endswith("norm.weight")
            else torch.empty(size, device=device).normal_(0, _STD, generator=draw).to(dtype).cpu()
            for each, size in shapes.items()
        }
        save_file(tensors, folder / name, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, name)
        n_bytes += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": n_bytes}, "weight_map": where}
    (folder / _INDEX).write_text(json.dumps(index))
    return folder


def _parts(config: dict[str, int]) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield names and shapes of tensors by file: one for each layer, and what is around them."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    vocab = config["vocab_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        yield {
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}post_attention_layernorm.weight": (hidden,),
            f"{at}self_attn.q_proj.weight": (q, hidden),
            f"{at}self_attn.k_proj.weight": (kv, hidden),
            f"{at}self_attn.v_proj.weight": (kv, hidden),
            f"{at}self_attn.o_proj.weight": (hidden, q),
            f"{at}mlp.gate_proj.weight": (inner, hidden),
            f"{at}mlp.up_proj.weight": (inner, hidden),
            f"{at}mlp.down_proj.weight": (hidden, inner),
        }
    around: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.get("tie_word_embeddings"):
        around["lm_head.weight"] = (vocab, hidden)
    yield around
