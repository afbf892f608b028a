"""Keys and values of all requests, as tensors over the arena.

The arena is a row of blocks of `slots_per_block` token slots; a chunk is 2 x layers of them: K and
V of layer 0, K and V of layer 1, and so on. Seen as pages, the K page of chunk c, layer l is row
`(c * 2L + 2l) * pages_per_block + page_in_block`; V is one block further. A view that starts at a
layer's first row lets one index (the row of layer 0's K) serve every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from windrow_sidecar.engines.builtin.config import LlamaConfig

_FIRST_ROWS = 64  # of a request's row index: 1,024 tokens at the usual page size


@dataclass(slots=True)
class SequenceKv:
    """The KV of one request: its pages in order, and how many tokens of it are computed."""

    pages: list[int] = field(default_factory=list)
    n_tokens: int = 0
    row_index: torch.Tensor = field(
        default_factory=lambda: torch.empty(_FIRST_ROWS, dtype=torch.int64)
    )


class KvCache:
    """Page and slot views of the arena for every layer.

    Args:
        storage: fp32, the whole arena, flat.
        config: of the model.
        slots_per_block: tokens that a block holds (`Geometry.slots_per_chunk`).
        page_size: tokens of a page; divides `slots_per_block`.
        max_tokens: the longest context that a request may have.
    """

    def __init__(
        self,
        storage: torch.Tensor,
        config: LlamaConfig,
        *,
        slots_per_block: int,
        page_size: int,
        max_tokens: int,
    ) -> None:
        self.page_size = page_size
        self.pages_per_chunk = slots_per_block // page_size
        self._blocks_per_chunk = 2 * config.layers
        width = config.kv_heads * config.head_dim
        rows = storage.view(-1, page_size * width)
        slots = storage.view(-1, width)
        blocks = range(self._blocks_per_chunk)
        by_page = [rows[i * self.pages_per_chunk :] for i in blocks]
        by_slot = [slots[i * slots_per_block :] for i in blocks]
        self.key_pages, self.value_pages = by_page[::2], by_page[1::2]
        self.key_slots, self.value_slots = by_slot[::2], by_slot[1::2]
        # One request's K and V of one layer are gathered here and used at once, while they are in
        # the core's cache (0.5 MB each at 1,024 tokens of the demo model).
        pages = -(-max_tokens // page_size)
        self.gathered_keys = torch.empty(pages, page_size * width)
        self.gathered_values = torch.empty(pages, page_size * width)
        self._shape = (-1, config.kv_heads, config.head_dim)
        self._rows = rows
        self._template = self._make_template(rows.shape[1])

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

    def fill(self, kv: SequenceKv, n_tokens: int) -> None:
        """Write a KV for the first `n_tokens`, where a prefill instance would send the real one.

        What it says is a fixed page of small random numbers, repeated: the cost and the timing of
        decode do not depend on the contents.
        """
        n_pages = self.pages_for(n_tokens)
        block = torch.arange(self._blocks_per_chunk) * self.pages_per_chunk
        index = kv.row_index[:n_pages, None] + block
        self._rows.index_put_((index,), self._template)
        kv.n_tokens = n_tokens

    def gathered(self, n_pages: int, n_tokens: int) -> tuple[torch.Tensor, ...]:
        """Return (key rows to gather into, keys, value rows to gather into, values).

        Rows: [n_pages, page floats]; keys and values: [n_tokens, kv_heads, head_dim] over the same
        bytes.
        """
        keys, values = self.gathered_keys[:n_pages], self.gathered_values[:n_pages]
        return (
            keys,
            keys.view(self._shape)[:n_tokens],
            values,
            values.view(self._shape)[:n_tokens],
        )

    def _row(self, page: int) -> int:
        chunk, inside = divmod(page, self.pages_per_chunk)
        return chunk * self._blocks_per_chunk * self.pages_per_chunk + inside

    def _make_template(self, page_floats: int) -> torch.Tensor:
        noise = torch.Generator().manual_seed(0)
        return torch.randn(self._blocks_per_chunk, page_floats, generator=noise) * 0.02
