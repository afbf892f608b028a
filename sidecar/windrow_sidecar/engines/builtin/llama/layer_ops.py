"""The operations between the matrix products of a layer, which also write K and V; in torch.

`triton_ops.py` does the same in fewer launches; one contract suite holds both.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch.nn import functional

from windrow_sidecar.engines.builtin.kv.kvcache import KvCache
from windrow_sidecar.engines.builtin.llama.config import LlamaConfig
from windrow_sidecar.engines.builtin.llama.rope import RotaryTable


class Placed(NamedTuple):
    """Positions of a pass's tokens, int64 [n] each, and what the operations derived from them."""

    positions: torch.Tensor  # in their requests
    slots: torch.Tensor  # rows of `KvCache.key_slots[l]`
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None


class LayerOps(Protocol):
    """Operations of a layer on one stream; each result is new memory and each call capturable."""

    def place(self, positions: torch.Tensor, slots: torch.Tensor) -> Placed:
        """Prepare a pass over n tokens, once for all layers; int64 [n] both, on the device."""
        ...

    def rotate_and_store(self, layer: int, qkv: torch.Tensor, placed: Placed) -> torch.Tensor:
        """Rotate q and k of [n, (heads + 2 kv_heads) * head_dim]; K and V go to their slots.

        Returns q: [n, heads, head_dim], scaled by 1 / sqrt(head_dim).
        """
        ...

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of [n, 2 * inner]: [n, inner]."""
        ...


class TorchOps:
    """Each step an operation of torch."""

    def __init__(self, config: LlamaConfig, cache: KvCache, rotary: RotaryTable) -> None:
        self._cache, self._rotary = cache, rotary
        self._heads, self._head_dim = config.heads, config.head_dim
        self._q_and_k = (config.heads + config.kv_heads) * config.head_dim

    def place(self, positions: torch.Tensor, slots: torch.Tensor) -> Placed:
        """Look up the rotation of int64 [n] positions."""
        return Placed(positions, slots, self._rotary.at(positions))

    def rotate_and_store(self, layer: int, qkv: torch.Tensor, placed: Placed) -> torch.Tensor:
        """Return q, [n, heads, head_dim], of [n, (heads + 2 kv_heads) * head_dim]."""
        assert placed.rotation is not None
        qk = qkv[:, : self._q_and_k].view(qkv.shape[0], -1, self._head_dim)
        qk = self._rotary.rotate(qk, *placed.rotation)
        keys = qk[:, self._heads :].flatten(1)
        self._cache.key_slots[layer].index_copy_(0, placed.slots, keys)
        self._cache.value_slots[layer].index_copy_(0, placed.slots, qkv[:, self._q_and_k :])
        return qk[:, : self._heads]

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up of [n, 2 * inner]: [n, inner]."""
        gate, up = gate_up.chunk(2, dim=1)
        return functional.silu(gate).mul_(up)
