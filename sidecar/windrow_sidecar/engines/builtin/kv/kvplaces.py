"""Compute where pages of KV lie in an arena, in either layout and on any driver.

K and V of a layer are a column each: 2l and 2l + 1. The K page of a token is in the same row of
every column, so one index (the row) serves all layers. Rows follow each other by a page's slots;
from chunk to chunk there may be a jump, hence a row per page that is not simply the page's number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from windrow.errors import InvariantBroken
from windrow_sidecar._core import Arena


@dataclass(frozen=True, slots=True)
class KvPlaces:
    """Strides in elements; a row holds one page of one column."""

    chunks: int
    slots_per_chunk: int  # tokens
    columns: int  # 2 * layers
    width: int  # elements of a token's K
    chunk_stride: int
    slot_stride: int
    column_stride: int

    @classmethod
    def of(cls, arena: Arena) -> KvPlaces:
        """Return the places of an arena of this process, as decode has it mapped.

        Raises:
            InvariantBroken: its columns are not evenly spaced from the arena's start.
        """
        g = arena.geometry
        views = [arena.kv_view(i // 2, value=bool(i % 2)) for i in range(2 * g.layers)]
        offsets = [offset // g.dtype_bytes for offset, _, _ in views]
        stride = offsets[1]
        if offsets != [i * stride for i in range(len(offsets))]:
            raise InvariantBroken("the arena's K and V are not evenly spaced: no engine can use it")
        _, chunk_stride, slot_stride = views[0]
        return cls(
            chunks=g.chunks,
            slots_per_chunk=g.slots_per_chunk,
            columns=2 * g.layers,
            width=g.kv_heads * g.head_dim,
            chunk_stride=chunk_stride // g.dtype_bytes,
            slot_stride=slot_stride // g.dtype_bytes,
            column_stride=stride,
        )

    def row(self, page: int, page_size: int) -> int:
        """The row of a page in each column."""
        pages_per_chunk = self.slots_per_chunk // page_size
        chunk, inside = divmod(page, pages_per_chunk)
        return chunk * (self.chunk_stride // (page_size * self.slot_stride)) + inside

    def pages(self, storage: torch.Tensor, page_size: int) -> torch.Tensor:
        """All pages over `storage` (flat, the whole arena): [rows, columns, page_size, width].

        Where chunks lie apart, rows between two chunks' pages belong to other columns.
        """
        rows = self.row(self.chunks * (self.slots_per_chunk // page_size) - 1, page_size) + 1
        return storage.as_strided(
            (rows, self.columns, page_size, self.width),
            (page_size * self.slot_stride, self.column_stride, self.slot_stride, 1),
        )

    def slots(self, storage: torch.Tensor, column: int) -> torch.Tensor:
        """All token slots of a column over `storage`: [rows * page_size, width]."""
        first = storage[column * self.column_stride :]
        reach = (self.chunks - 1) * self.chunk_stride + self.slots_per_chunk * self.slot_stride
        return first.as_strided((reach // self.slot_stride, self.width), (self.slot_stride, 1))
