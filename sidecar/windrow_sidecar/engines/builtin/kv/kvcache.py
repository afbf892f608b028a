"""Keys and values of all requests, as tensors over the arena."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from windrow_sidecar.engines.builtin.kv.kvplaces import KvPlaces
from windrow_sidecar.engines.builtin.llama.config import LlamaConfig

_FIRST_ROWS = 64  # of a request's row index: 1,024 tokens at the usual page size


@dataclass(slots=True)
class SequenceKv:
    """The KV of one request: its pages in order, and how many tokens of it are computed."""

    pages: list[int] = field(default_factory=list)
    n_tokens: int = 0
    # Rows of those pages, on the host; the first `len(pages)` count.
    row_index: torch.Tensor = field(
        default_factory=lambda: torch.empty(_FIRST_ROWS, dtype=torch.int64)
    )


class KvCache:
    """Page and slot views of the arena for every layer.

    Args:
        storage: the whole arena, flat, in the type that KV is stored in; on any device.
        config: of the model.
        places: where pages lie in it.
        page_size: tokens of a page; divides the slots of a chunk.
        max_tokens: the longest context that a request may have.
        heads: (begin, end, all): which of the model's key-value heads a rank has; None: all.
    """

    def __init__(
        self,
        storage: torch.Tensor,
        config: LlamaConfig,
        places: KvPlaces,
        *,
        page_size: int,
        max_tokens: int,
        heads: tuple[int, int, int] | None = None,
    ) -> None:
        self.page_size, self.max_tokens, self.places = page_size, max_tokens, places
        self.pages_per_chunk = places.slots_per_chunk // page_size
        self.device, self.dtype = storage.device, storage.dtype
        self._pages = places.pages(storage, page_size)
        # By layer: [rows, page_size, width] and [rows * page_size, width].
        self.key_pages, self.value_pages = (
            [self._pages[:, column] for column in range(first, places.columns, 2)]
            for first in (0, 1)
        )
        self.key_slots, self.value_slots = (
            [places.slots(storage, column) for column in range(first, places.columns, 2)]
            for first in (0, 1)
        )
        # One request's K and V of one layer are gathered here and used at once, while they are in
        # the core's cache (0.5 MB each at 1,024 tokens of the demo model).
        room = (self.pages_for(max_tokens), page_size, places.width)
        self.gathered_keys = storage.new_empty(room)
        self.gathered_values = storage.new_empty(room)
        self._shape = (-1, config.kv_heads, config.head_dim)
        self._template = self._make_template(config.head_dim, heads)

    def extend(self, kv: SequenceKv, pages: Sequence[int]) -> None:
        """Append pages to a request."""
        begin, end = len(kv.pages), len(kv.pages) + len(pages)
        if end > kv.row_index.shape[0]:
            grown = torch.empty(max(end, 2 * kv.row_index.shape[0]), dtype=torch.int64)
            grown[:begin] = kv.row_index[:begin]
            kv.row_index = grown
        kv.row_index[begin:end] = torch.tensor([self._row(page) for page in pages])
        kv.pages.extend(pages)

    def slot_row(self, kv: SequenceKv, position: int) -> int:
        """Return a token's row in `key_slots[l]` and `value_slots[l]`, the same for every l."""
        page, offset = divmod(position, self.page_size)
        return self._row(kv.pages[page]) * self.page_size + offset

    def pages_for(self, n_tokens: int) -> int:
        """Return how many pages hold so many tokens."""
        return -(-n_tokens // self.page_size)

    def rows_of(self, kv: SequenceKv, n_tokens: int) -> torch.Tensor:
        """Return the rows of the pages that hold the first `n_tokens`: int64 [pages].

        On the cache's device; on the host a view of what `kv` holds.
        """
        return kv.row_index[: self.pages_for(n_tokens)].to(self.device)

    def fill(self, kv: SequenceKv, n_tokens: int) -> None:
        """Write a KV for the first `n_tokens`, where a prefill instance would send the real one.

        What it says is a fixed page of small random numbers, repeated: the cost and the timing of
        decode do not depend on the contents.
        """
        self._pages.index_put_((self.rows_of(kv, n_tokens),), self._template)
        kv.n_tokens = n_tokens

    def gathered(self, n_tokens: int) -> tuple[torch.Tensor, ...]:
        """Return (key pages to gather into, keys, value pages to gather into, values).

        Pages: [n_pages, page_size, width]; keys and values: [n_tokens, kv_heads, head_dim] over the
        same bytes.
        """
        n_pages = self.pages_for(n_tokens)
        keys, values = self.gathered_keys[:n_pages], self.gathered_values[:n_pages]
        return (
            keys,
            keys.view(self._shape)[:n_tokens],
            values,
            values.view(self._shape)[:n_tokens],
        )

    def _row(self, page: int) -> int:
        return self.places.row(page, self.page_size)

    def _make_template(self, head_dim: int, heads: tuple[int, int, int] | None) -> torch.Tensor:
        """Return noise, [columns, page_size, width]; a rank has its heads of the whole model's."""
        noise = torch.Generator().manual_seed(0)
        begin, end, all_heads = heads or (0, self.places.width // head_dim, 0)
        shape = (self.places.columns, self.page_size, (all_heads or end) * head_dim)
        drawn = torch.randn(shape, generator=noise)[..., begin * head_dim : end * head_dim]
        return (drawn * 0.02).to(self.device, self.dtype)
