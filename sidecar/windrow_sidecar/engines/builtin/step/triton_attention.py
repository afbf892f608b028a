"""Decode attention of a whole batch over a page table, by one kernel that reads K and V once."""

from __future__ import annotations

import torch
import triton

from windrow_sidecar.engines.builtin.kv.kvcache import KvCache
from windrow_sidecar.engines.builtin.llama.config import LlamaConfig
from windrow_sidecar.engines.builtin.step import triton_kernels

_BLOCK_TOKENS = 64
# A matrix product of Triton has 16 rows at least. For an 8B Llama (4 query heads a KV head) three
# quarters of it are padding, which costs nothing: the tensor cores wait for memory anyway.
_LEAST_ROWS = 16
# Parts of the whole batch for each SM: enough that the last round of programs is a small share.
_PROGRAMS_PER_SM = 8
_MOST_SPLITS = 32


def splits_for(programs: int, units: int) -> int:
    """Return how many parts to cut a context into, for so many (request, KV head) pairs and SMs."""
    wanted = triton.cdiv(_PROGRAMS_PER_SM * units, programs)
    return max(1, min(_MOST_SPLITS, int(triton.next_power_of_2(wanted))))


class TritonPagedAttention:
    """See `paged_attention.PagedAttention`.

    Args:
        config: of the model.
        cache: whose pages are read.
        units: SMs of the device.
    """

    def __init__(self, config: LlamaConfig, cache: KvCache, *, units: int) -> None:
        self._config, self._cache, self._units = config, cache, units

    def columns(self, n_pages: int) -> int:
        """See `PagedAttention`: always as wide as it gets, for what is not read costs nothing."""
        del n_pages
        return self._cache.pages_for(self._cache.max_tokens)

    def __call__(
        self, layer: int, q: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        """Attend as `PagedAttention` says: [b, heads, head_dim] becomes [b, heads * head_dim]."""
        config, cache = self._config, self._cache
        batch, heads, head_dim = q.shape
        splits = splits_for(batch * config.kv_heads, self._units)
        keys, values = cache.key_slots[layer], cache.value_slots[layer]
        partial = q.new_empty(batch, heads, splits, head_dim, dtype=torch.float32)
        weight = q.new_empty(batch, heads, splits, dtype=torch.float32)
        out = q.new_empty(batch, heads, head_dim)
        head_columns = triton.next_power_of_2(head_dim)
        triton_kernels.attend_split[(batch, config.kv_heads, splits)](
            q,
            keys,
            values,
            lengths,
            table,
            partial,
            weight,
            q.stride(0),
            q.stride(1),
            keys.stride(0),
            lengths.stride(0),
            table.stride(0),
            splits,
            GROUP=config.q_per_kv,
            GROUP_ROWS=max(_LEAST_ROWS, triton.next_power_of_2(config.q_per_kv)),
            HEAD=head_dim,
            HEAD_COLUMNS=max(_LEAST_ROWS, head_columns),
            PAGE=cache.page_size,
            BLOCK=_BLOCK_TOKENS,
            num_warps=4,
            num_stages=3,
        )
        triton_kernels.join_splits[(batch * heads,)](
            partial,
            weight,
            out,
            splits,
            SPLITS=splits,
            HEAD=head_dim,
            HEAD_COLUMNS=head_columns,
            num_warps=2,
        )
        return out.flatten(1)
