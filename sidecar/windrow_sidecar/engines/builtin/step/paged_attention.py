"""Decode attention of a whole batch over a page table, in torch's own terms.

`triton_attention.py` does the same without copying K and V first; one contract suite holds both.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from windrow_sidecar.engines.builtin.kv.kvcache import KvCache
from windrow_sidecar.engines.builtin.llama.config import LlamaConfig


class PagedAttention(Protocol):
    """One query per request over the pages of its own. May be captured in a graph."""

    def columns(self, n_pages: int) -> int:
        """Return the width of the page table that it wants for at most `n_pages`: not less."""
        ...

    def __call__(
        self, layer: int, q: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        """Attend: q [b, heads, head_dim], scaled; returns [b, heads * head_dim].

        lengths [b]: tokens of each request, this step's included; table [b, columns]: rows of its
        pages in order (int64 both). Entries beyond a request's length are never read.
        """
        ...


class TorchPagedAttention:
    """Gathers every page of the table into one padded batch, then torch's attention with a mask.

    Moves K and V three times and pays for the longest request in every row: the reference, for
    cores and for where there is no Triton.

    Args:
        config: of the model.
        cache: whose pages are read.
        fixed: a graph is made of it: every table is as wide as the longest context allows. Else
            four widths an octave, so that few shapes occur.
    """

    def __init__(self, config: LlamaConfig, cache: KvCache, *, fixed: bool) -> None:
        self._config, self._cache, self._fixed = config, cache, fixed
        self._most = cache.pages_for(cache.max_tokens)
        self._gathered: tuple[torch.Tensor, torch.Tensor] | None = None

    def columns(self, n_pages: int) -> int:
        """See `PagedAttention`."""
        if self._fixed:
            return self._most
        step = max(1, (1 << (n_pages - 1).bit_length()) // 8)
        return min(self._most, -(-n_pages // step) * step)

    def __call__(
        self, layer: int, q: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        """Attend as `PagedAttention` says: [b, heads, head_dim] becomes [b, heads * head_dim]."""
        config, cache = self._config, self._cache
        batch, columns = table.shape
        keys, values = self._room(batch * columns)
        rows = table.reshape(-1)
        torch.index_select(cache.key_pages[layer], 0, rows, out=keys)
        torch.index_select(cache.value_pages[layer], 0, rows, out=values)
        by_request = (batch, columns * cache.page_size, config.kv_heads, config.head_dim)
        keys, values = keys.view(by_request), values.view(by_request)
        beyond = torch.arange(by_request[1], device=q.device) >= lengths[:, None]
        # Slots that no token was written to hold what the worker left there: 0 * NaN would be NaN.
        keys.masked_fill_(beyond[:, :, None, None], 0.0)
        values.masked_fill_(beyond[:, :, None, None], 0.0)
        attended = functional.scaled_dot_product_attention(
            q[:, :, None],
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=~beyond[:, None, None],
            scale=1.0,  # already in q
            enable_gqa=True,
        )
        return attended.flatten(1)

    def _room(self, n_pages: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for so many gathered pages; the same for all layers, and kept."""
        if self._gathered is None or self._gathered[0].shape[0] < n_pages:
            shape = (n_pages, self._cache.page_size, self._cache.places.width)
            like = self._cache.key_slots[0]
            self._gathered = (like.new_empty(shape), like.new_empty(shape))
        keys, values = self._gathered
        return keys[:n_pages], values[:n_pages]
