"""Lay out a checkpoint's parameters in one block of bytes that other processes may map.

The layout is such that the engine fuses without copying (q, k and v of a layer are neighbours, and
so are gate and up) while every parameter keeps its own name, shape and offset for the worker.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from windrow.errors import UserError
from windrow_sidecar.engines.builtin.llama.config import LlamaConfig
from windrow_sidecar.engines.fingerprint import served_files

# Where layers are streamed each gives whole pages back.
_STREAMED_ALIGN_BYTES = 4096
# On the host a cache line and the widest vector register; a GPU's copies and GEMMs want 16 bytes.
_ALIGN_BYTES = 64


# Names and shapes of parameters that lie side by side.
_Group = list[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter's place; sizes in bytes."""

    offset: int
    n_bytes: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """All parameters under the names that transformers gives them."""

    parameters: dict[str, Parameter]
    n_bytes: int
    dtype: torch.dtype

    def manifest(self, fingerprint: str) -> dict[str, Any]:
        """Return what the worker reads to build the same model over the same bytes."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {
            "fingerprint": fingerprint,
            "dtype": dtype,
            "tensors": {
                name: {"offset": p.offset, "shape": list(p.shape), "dtype": dtype}
                for name, p in self.parameters.items()
            },
        }


def plan_layout(config: LlamaConfig, dtype: torch.dtype = torch.float32) -> Layout:
    """Place every parameter; groups of neighbours stay together, each group starts aligned.

    `dtype`: that everything is stored and computed in.
    """
    parameters: dict[str, Parameter] = {}
    offset = 0
    for group in _groups(config):
        offset = _place(group, offset, dtype, parameters)
    return Layout(parameters, offset, dtype)


def plan_streamed_layout(config: LlamaConfig, dtype: torch.dtype) -> tuple[Layout, list[Span]]:
    """Place parameters so that the matrices of each layer lie on pages of their own.

    What every pass needs at once (embeddings, norms, the head) comes first and stays.

    Returns:
        the layout, and the bytes [begin, end) of each layer's matrices.
    """
    parameters: dict[str, Parameter] = {}
    groups = list(_groups(config))
    offset, spans = 0, []
    for group in groups:
        if not _is_streamed(group):
            offset = _place(group, offset, dtype, parameters)
    for i in range(config.layers):
        begin = offset = offset + -offset % _STREAMED_ALIGN_BYTES
        for group in groups:
            if _is_streamed(group) and group[0][0].startswith(f"model.layers.{i}."):
                offset = _place(group, offset, dtype, parameters)
        offset += -offset % _STREAMED_ALIGN_BYTES
        spans.append(Span(begin, offset))
    return Layout(parameters, offset, dtype), spans


class Span(NamedTuple):
    """Bytes [begin, end) of a model's storage."""

    begin: int
    end: int


def _is_streamed(group: _Group) -> bool:
    name = group[0][0]
    return name.startswith("model.layers.") and "norm" not in name


def _place(group: _Group, offset: int, dtype: torch.dtype, parameters: dict[str, Parameter]) -> int:
    """Place neighbours from `offset` on; return the end."""
    offset += -offset % _ALIGN_BYTES
    for name, shape in group:
        parameters[name] = Parameter(offset, prod(shape) * dtype.itemsize, shape)
        offset += parameters[name].n_bytes
    return offset


# Returns a rank's part of a parameter [...] that has that name, as the layout has it.
Cut = Callable[[str, torch.Tensor], torch.Tensor]


def _whole(_name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a parameter, [...]."""
    return tensor


def load_weights(model_dir: Path, layout: Layout, storage: torch.Tensor, cut: Cut = _whole) -> None:
    """Read the checkpoint into `storage` (uint8 [layout.n_bytes]), converting to its dtype.

    `cut`: takes what `storage` has of each parameter; default: all of it.

    Raises UserError for a parameter that is missing or has another shape.
    """
    missing = set(layout.parameters)
    for path in served_files(model_dir):
        with safe_open(path, framework="pt") as checkpoint:
            for name in missing & set(checkpoint.keys()):
                _copy(cut(name, checkpoint.get_tensor(name)), name, layout, storage)
                missing.discard(name)
    if missing:
        raise UserError(
            f"the checkpoint lacks {len(missing)} parameters, {min(missing)} among them",
            field="--model-path",
            remedy="Copy the checkpoint again, with all its shards.",
            reason="ModelUnreadable",
        )


def view(layout: Layout, storage: torch.Tensor, *names: str) -> torch.Tensor:
    """Return a parameter, or neighbours stacked along their first dimension, as a view.

    Args:
        layout: says where each is, and its dtype.
        storage: uint8 [layout.n_bytes]; the result is in its memory and keeps it alive.
        names: of neighbours, in their order, alike in all but the first dimension.
    """
    parts = [layout.parameters[name] for name in names]
    end = parts[-1].offset + parts[-1].n_bytes
    flat = storage[parts[0].offset : end].view(layout.dtype)
    return flat.view(sum(p.shape[0] for p in parts), *parts[0].shape[1:])


def write_manifest(path: Path, layout: Layout, fingerprint: str, ranks: int = 1) -> None:
    """Write the manifest so that a reader sees either nothing or all of it.

    `ranks`: over which the model is cut, where the layout is that of one of them. Its arena lends.
    """
    draft = path.with_suffix(".tmp")
    found = {**layout.manifest(fingerprint), "ranks": ranks, "lends": True}
    draft.write_text(json.dumps(found))
    os.replace(draft, path)


def check_stored(name: str, wanted: tuple[int, ...], found: tuple[int, ...] | None) -> None:
    """Compare the shape of a stored parameter with what config.json says; None: there is none.

    Raises:
        UserError: they differ, or it is not stored as floating-point numbers.
    """
    if found is None:
        raise UserError(
            f"the checkpoint lacks {name}, or stores it in another form than plain numbers",
            field="--model-path",
            remedy="Copy the checkpoint again, with all its shards, as plain safetensors.",
            reason="ModelUnreadable",
        )
    if found != wanted:
        raise UserError(
            f"{name} has shape {found} where config.json says {wanted}",
            field="--model-path",
            remedy="Use the config.json that belongs to these weights.",
            reason="ModelUnreadable",
        )


def _copy(tensor: torch.Tensor, name: str, layout: Layout, storage: torch.Tensor) -> None:
    check_stored(name, layout.parameters[name].shape, tuple(tensor.shape))
    if tensor.dtype.itemsize < 2 or not tensor.is_floating_point():
        raise UserError(
            f"{name} is stored as {tensor.dtype}, a type that no weight may have",
            field="--model-path",
            remedy="Use the model's plain weights.",
            reason="ModelUnreadable",
        )
    view(layout, storage, name).copy_(tensor)


def _groups(config: LlamaConfig) -> Iterator[_Group]:
    hidden, inner = config.hidden, config.intermediate
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    yield [("model.embed_tokens.weight", (config.vocab, hidden))]
    for i in range(config.layers):
        layer = f"model.layers.{i}"
        yield [(f"{layer}.input_layernorm.weight", (hidden,))]
        yield [
            (f"{layer}.self_attn.q_proj.weight", (q, hidden)),
            (f"{layer}.self_attn.k_proj.weight", (kv, hidden)),
            (f"{layer}.self_attn.v_proj.weight", (kv, hidden)),
        ]
        yield [(f"{layer}.self_attn.o_proj.weight", (hidden, q))]
        yield [(f"{layer}.post_attention_layernorm.weight", (hidden,))]
        yield [
            (f"{layer}.mlp.gate_proj.weight", (inner, hidden)),
            (f"{layer}.mlp.up_proj.weight", (inner, hidden)),
        ]
        yield [(f"{layer}.mlp.down_proj.weight", (hidden, inner))]
    yield [("model.norm.weight", (hidden,))]
    if not config.tied_embeddings:
        yield [("lm_head.weight", (config.vocab, hidden))]


# As transformers initialises Llama (`initializer_range`): logits stay finite at any depth.
_STD = 0.02


def fill_random(
    layout: Layout,
    storage: torch.Tensor,
    seed: int,
    whole: Layout | None = None,
    cut: Cut = _whole,
) -> None:
    """Write weights drawn with `seed` into `storage` (uint8 [layout.n_bytes], on any device).

    Norms are ones. The same seed gives the same bytes on the same kind of device. A rank draws the
    whole model's, parameter by parameter, and keeps its part.

    Args:
        layout: of `storage`.
        storage: gets the weights.
        seed: of the draw.
        whole: layout of the whole model; None: `layout` is.
        cut: takes what `storage` has of each parameter.
    """
    draw = torch.Generator(device=storage.device).manual_seed(seed)
    for name in layout.parameters:
        parameter = view(layout, storage, name)
        if "norm" in name:
            parameter.fill_(1.0)
        elif whole is None:
            parameter.normal_(0.0, _STD, generator=draw)
        else:
            drawn = parameter.new_empty(whole.parameters[name].shape)
            parameter.copy_(cut(name, drawn.normal_(0.0, _STD, generator=draw)))
