"""A rank's part of a Llama model, and the pass over it that sums over the ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch.nn import functional

from windrow.errors import UserError
from windrow_sidecar.compute.communicator import Communicator
from windrow_sidecar.engines.builtin.kv.kvcache import KvCache
from windrow_sidecar.engines.builtin.llama.config import LlamaConfig
from windrow_sidecar.engines.builtin.llama.model import LlamaModel
from windrow_sidecar.engines.builtin.llama.weights import Layout
from windrow_sidecar.engines.shard_cuts import BY_WORDS, ShardSizes


@dataclass(frozen=True, slots=True)
class EngineShard:
    """One rank's part of the engine's model.

    Attributes:
        rank: from 0.
        sizes: of every rank's part.
        whole: the model's configuration.
        ranks: collectives of all ranks.
    """

    rank: int
    sizes: ShardSizes
    whole: LlamaConfig
    ranks: Communicator

    @property
    def config(self) -> LlamaConfig:
        """The configuration of the part: its heads, inner units and words."""
        return replace(
            self.whole,
            heads=self.sizes.heads,
            kv_heads=self.sizes.key_value_heads,
            intermediate=self.sizes.inner_units,
            vocab=self.sizes.words,
        )

    @property
    def kv_heads(self) -> tuple[int, int, int]:
        """First and last (exclusive) key-value head of the part, and how many the model has."""
        begin = self.rank // self.sizes.copies * self.sizes.key_value_heads
        return begin, begin + self.sizes.key_value_heads, self.whole.kv_heads

    def cut(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rank's part of a parameter [...]; words are padded with zeros."""
        part = self.sizes.part(name, self.rank)
        if part.dim is None:
            return tensor
        taken = tensor.narrow(part.dim, part.begin, part.end - part.begin)
        if name.rpartition(".")[0].rpartition(".")[2] in BY_WORDS:
            padding = self.sizes.words - taken.shape[0]
            taken = torch.cat([taken, taken.new_zeros(padding, *taken.shape[1:])])
        return taken


def shard_sizes(config: LlamaConfig, ranks: int) -> ShardSizes:
    """Return the sizes of a model's parts on so many ranks.

    Raises:
        UserError: it cannot be cut so.
    """
    of_config = SimpleNamespace(
        model_type="llama",
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        intermediate_size=config.intermediate,
        vocab_size=config.vocab,
        hidden_size=config.hidden,
        head_dim=config.head_dim,
    )
    try:
        return ShardSizes.of(of_config, ranks)
    except UserError as error:
        raise UserError(
            error.problem,
            field="--tp-size",
            remedy=error.remedy,
            reason="TensorParallelUnsupported",
        ) from error


class ShardedLlama(LlamaModel):
    """The pass over a rank's part: all ranks run it together, on the same tokens.

    Args:
        shard: whose part it is.
        layout: of the part.
        storage: its bytes, as of `LlamaModel`.
        cache: of the part's key-value heads.
    """

    def __init__(
        self, shard: EngineShard, layout: Layout, storage: torch.Tensor, cache: KvCache
    ) -> None:
        super().__init__(shard.config, layout, storage, cache)
        self._ranks, self._vocabulary = shard.ranks, shard.whole.vocab
        self._words = shard.sizes.words_of(shard.rank)

    def add_product(
        self, x: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """Add the sum over the ranks of their rows [n, units] times their weights to `x`."""
        return x.add_(self._ranks.sum(functional.linear(rows, weight)))

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of tokens [n]: [n, hidden]; each rank adds its own words."""
        begin, end = self._words
        mine = (tokens >= begin) & (tokens < end)
        rows = super().embed((tokens - begin).where(mine, 0))
        return self._ranks.sum(rows * mine[:, None])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [n, vocab] on rank 0, and on the others [0, vocab]: it alone chooses tokens."""
        parts = self._ranks.gathered(super().logits(hidden))
        if not parts:
            return hidden.new_empty(0, self._vocabulary)
        return torch.cat(parts, -1)[:, : self._vocabulary]
