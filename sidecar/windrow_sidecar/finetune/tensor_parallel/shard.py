"""Build one rank's shard of a base model: transformers' own layers over parts of their weights.

The model is built from a configuration with a rank's share of heads, inner units and words, so its
modules are the ordinary ones; hooks at attention, MLP, embedding and head add the collectives. No
rank reads or holds more than its part, and nothing is gathered.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from windrow_sidecar.compute.communicator import Communicator
from windrow_sidecar.engines.shard_cuts import BY_WORDS, ShardSizes, TensorPart, refused
from windrow_sidecar.engines.streaming.tensor_files import absent, read, stored_tensors
from windrow_sidecar.engines.weight_formats import weight_format
from windrow_sidecar.finetune.model.coded import CodedTensor
from windrow_sidecar.finetune.model.overlay import build_over
from windrow_sidecar.finetune.model.precision import WeightForm
from windrow_sidecar.finetune.model.structure import find_layers


def sharded(
    tensors: Mapping[str, Callable[[], Tensor]],
    config: Any,  # noqa: ANN401 - of transformers
    ranks: Communicator,
    dtype: torch.dtype,
    where: str = "the given weights",
) -> nn.Module:
    """Return a rank's model, whose layers sum over the ranks where they have to.

    Args:
        tensors: of the whole model by parameter; each function returns one, [...].
        config: of the whole model.
        ranks: that share it.
        dtype: of the model.
        where: says in errors whence the tensors are.

    Raises:
        UserError: the model cannot be cut so; see also `build_over`.
    """
    sizes = ShardSizes.of(config, ranks.ranks)
    parts = {}
    for name, whole in tensors.items():
        parts[name] = _taken(whole(), sizes.part(name, ranks.rank), name, sizes, ranks.rank)
    model = build_over(parts, _config_of_shard(config, sizes), dtype, where)
    _add_collectives(model, sizes, ranks)
    return model.requires_grad_(requires_grad=False)


def over_parts(
    parts: Mapping[str, Tensor | CodedTensor],
    config: Any,  # noqa: ANN401 - of transformers
    ranks: Communicator,
    dtype: torch.dtype,
    where: str = "the given weights",
) -> nn.Module:
    """Return a rank's model over tensors that are its part already, such as decode's own.

    Args:
        parts: of the rank by parameter, [...] each; used as they lie.
        config: of the whole model.
        ranks: that share it.
        dtype: of the model.
        where: says in errors whence the tensors are.

    Raises:
        UserError: see `sharded`.
    """
    sizes = ShardSizes.of(config, ranks.ranks)
    own = {name: _once(name, part, ranks.rank) for name, part in parts.items()}
    model = build_over(own, _config_of_shard(config, sizes), dtype, where)
    _add_collectives(model, sizes, ranks)
    return model.requires_grad_(requires_grad=False)


def read_shard(directory: Path, config: Any, form: WeightForm, ranks: Communicator) -> nn.Module:  # noqa: ANN401
    """Build a rank's model from the files of a checkpoint, one tensor at a time.

    Raises:
        UserError: it is stored as codes, or is to be quantised; see also `sharded`.
        OSError: a file cannot be read.
    """
    if form.quantization != "none":
        raise refused(
            f"{form.quantization} weights are not cut over ranks yet",
            "Write none, or train on one rank.",
            field="spec.model.quantization",
        )
    if (stored_as := weight_format(directory)).codings:
        raise refused(
            f"{directory} stores its weights by {stored_as.method}, and codes are not cut over "
            "ranks yet",
            "Use the model's plain weights, or train on one rank.",
        )
    tensors = {name: _reading(at, form.dtype) for name, at in stored_tensors(directory).items()}
    return sharded(tensors, config, ranks, form.dtype, str(directory))


def stand_in(config: Any, dtype: torch.dtype) -> nn.Module:  # noqa: ANN401 - of transformers
    """Return the whole model over weights of NaN that take no memory: for its adapter's shapes."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config, dtype=dtype)
    tensors = {name: absent(tuple(p.shape), dtype) for name, p in shapes.named_parameters()}
    model = build_over(tensors, config, dtype)
    return model.requires_grad_(requires_grad=False)


def _reading(at: Any, dtype: torch.dtype) -> Callable[[], Tensor]:  # noqa: ANN401
    return lambda: read(at, dtype)


def _taken(whole: Tensor, part: TensorPart, name: str, sizes: ShardSizes, rank: int) -> Tensor:
    """Return a rank's part in memory of its own; words are padded with zeros."""
    if part.dim is None:
        taken: Tensor = _once(name, whole, rank)
        return taken
    taken = whole.narrow(part.dim, part.begin, part.end - part.begin).clone()
    if name.rpartition(".")[0].rpartition(".")[2] in BY_WORDS:
        padding = sizes.words - taken.shape[0]
        taken = torch.cat([taken, taken.new_zeros(padding, *taken.shape[1:])])
    return taken


def _once(name: str, whole: Any, rank: int) -> Any:  # noqa: ANN401 - a tensor, or codes
    """Return a parameter; a row-parallel layer's bias on one rank: their outputs are summed."""
    adds = rank == 0 or not name.endswith((".o_proj.bias", ".down_proj.bias"))
    return whole if adds else torch.zeros_like(whole)


def _config_of_shard(config: Any, sizes: ShardSizes) -> Any:  # noqa: ANN401 - of transformers
    shard = copy.deepcopy(config)
    shard.head_dim = sizes.head_units
    shard.num_attention_heads, shard.num_key_value_heads = sizes.heads, sizes.key_value_heads
    shard.intermediate_size, shard.vocab_size = sizes.inner_units, sizes.words
    shard.pad_token_id = None  # its embedding is a row like any other here
    return shard


def _add_collectives(model: nn.Module, sizes: ShardSizes, ranks: Communicator) -> None:
    """Let attention, MLP, embedding and head of a shard sum over the ranks."""
    decoder: Any = model.get_decoder()  # type: ignore[operator]

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        if args:
            return (ranks.into_layers(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": ranks.into_layers(kwargs["hidden_states"])}

    def leave(_: nn.Module, args: tuple[Any, ...], made: Any) -> Any:  # noqa: ANN401
        if isinstance(made, tuple):
            return (ranks.out_of_layers(made[0]), *made[1:])
        return ranks.out_of_layers(made)

    for layer in find_layers(decoder, decoder.config):
        for block in (layer.self_attn, layer.mlp):
            block.register_forward_pre_hook(enter, with_kwargs=True)  # type: ignore[union-attr]
            block.register_forward_hook(leave)  # type: ignore[union-attr]
    begin, end = sizes.words_of(ranks.rank)

    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    embedding.forward = _ShardedEmbedding(embedding, begin, end, ranks)
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    head.register_forward_pre_hook(enter, with_kwargs=True)


class _ShardedEmbedding:
    """Looks words up that are cut over the ranks: each adds the rows of its own."""

    def __init__(self, embedding: nn.Module, begin: int, end: int, ranks: Communicator) -> None:
        self._embedding, self._words, self._ranks = embedding, (begin, end), ranks

    def __call__(self, ids: Tensor) -> Tensor:
        """Return [rows, tokens, hidden] for token ids, int64 [rows, tokens]."""
        begin, end = self._words
        mine = (ids >= begin) & (ids < end)
        weight: Tensor = self._embedding.weight  # type: ignore[assignment]
        rows = nn.functional.embedding((ids - begin).where(mine, 0), weight)
        return self._ranks.out_of_layers(rows * mine[..., None])
