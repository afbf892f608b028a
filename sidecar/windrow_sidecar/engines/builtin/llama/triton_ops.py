"""The operations between the matrix products of a layer, as one Triton launch each."""

from __future__ import annotations

import math

import torch
import triton

from windrow_sidecar.engines.builtin.kv.kvcache import KvCache
from windrow_sidecar.engines.builtin.llama.config import LlamaConfig
from windrow_sidecar.engines.builtin.llama.layer_ops import Placed
from windrow_sidecar.engines.builtin.llama.rope import RotaryTable
from windrow_sidecar.engines.builtin.step import triton_kernels

_GATE_BLOCK = 1024


class TritonOps:
    """See `layer_ops.LayerOps`: 2 launches where torch's own terms need 9 or 10."""

    def __init__(self, config: LlamaConfig, cache: KvCache, rotary: RotaryTable) -> None:
        self._config, self._cache, self._rotary = config, cache, rotary

    def place(self, positions: torch.Tensor, slots: torch.Tensor) -> Placed:
        """Keep int64 [n] positions and slots; the kernel looks the rotation up."""
        return Placed(positions, slots)

    def rotate_and_store(self, layer: int, qkv: torch.Tensor, placed: Placed) -> torch.Tensor:
        """Return q, [n, heads, head_dim], of [n, (heads + 2 kv_heads) * head_dim]."""
        config, rotary = self._config, self._rotary
        n, half = qkv.shape[0], config.head_dim // 2
        keys, values = self._cache.key_slots[layer], self._cache.value_slots[layer]
        q = qkv.new_empty(n, config.heads, config.head_dim)
        triton_kernels.rotate_and_store[(n, config.heads + 2 * config.kv_heads)](
            qkv,
            rotary.cos,
            rotary.sin,
            placed.positions,
            placed.slots,
            q,
            keys,
            values,
            qkv.stride(0),
            placed.positions.stride(0),
            placed.slots.stride(0),
            keys.stride(0),
            1.0 / math.sqrt(config.head_dim),
            HEADS=config.heads,
            KV_HEADS=config.kv_heads,
            HALF=half,
            HALF_COLUMNS=triton.next_power_of_2(half),
            num_warps=1,
        )
        return q

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up of [n, 2 * inner]: [n, inner]."""
        n, inner = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(n, inner)
        blocks = triton.cdiv(inner, _GATE_BLOCK)
        triton_kernels.gate[(n, blocks)](gate_up, out, inner, BLOCK=_GATE_BLOCK, num_warps=4)
        return out
