"""What a step is told, at addresses that never change: one row a request, one copy a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from windrow_sidecar.engines.builtin.kv.kvcache import KvCache, SequenceKv
from windrow_sidecar.engines.builtin.scheduler import EngineRequest

_TOKEN, _POSITION, _SLOT, _LENGTH, _TABLE = 0, 1, 2, 3, 4


class InputRows(NamedTuple):
    """Views of the first rows on the device; int64. A pass over them may be captured."""

    tokens: torch.Tensor  # [b]
    positions: torch.Tensor  # [b]
    slots: torch.Tensor  # [b]
    lengths: torch.Tensor  # [b]
    table: torch.Tensor  # [b, columns]


class StaticInputs:
    """Buffers on both sides for up to `max_batch` requests.

    On the host they are pinned where the device is a GPU, so that the copy waits for nothing. They
    are written again only after the step's tokens were read back, hence after the copy is over.
    """

    def __init__(self, cache: KvCache, *, max_batch: int) -> None:
        self._cache = cache
        shape = (max_batch, _TABLE + cache.pages_for(cache.max_tokens))
        on_gpu = cache.device.type == "cuda"
        host = torch.zeros(shape, dtype=torch.int64, pin_memory=on_gpu)
        host[:, _LENGTH] = 1  # until a request comes, rows may be computed to warm up
        self._staged = host
        self._host = host.numpy()
        self._device = host.to(cache.device) if on_gpu else host
        # Whose pages stand in a row, and how many of them: most steps change none.
        self._shown: list[tuple[SequenceKv | None, int]] = [(None, 0)] * max_batch

    def rows(self, batch: int, columns: int) -> InputRows:
        """Views for a pass of that shape."""
        device = self._device[:batch]
        return InputRows(
            device[:, _TOKEN],
            device[:, _POSITION],
            device[:, _SLOT],
            device[:, _LENGTH],
            device[:, _TABLE : _TABLE + columns],
        )

    def write(self, batch: Sequence[EngineRequest], bucket: int) -> int:
        """Fill the first `bucket` rows and start their copy; returns the pages of the longest.

        Rows that no request fills repeat the one with the shortest context: what they write into
        its slot is what it writes itself, and they cost little.
        """
        cache = self._cache
        shortest = min(range(len(batch)), key=lambda i: batch[i].kv.n_tokens)
        filled = [*batch, *[batch[shortest]] * (bucket - len(batch))]
        most_pages = 0
        for row, request in enumerate(filled):
            kv = request.kv
            n_tokens = kv.n_tokens
            slot = cache.slot_row(kv, n_tokens)
            self._host[row, :_TABLE] = (request.tokens[-1], n_tokens, slot, n_tokens + 1)
            self._show_pages(row, kv)
            most_pages = max(most_pages, cache.pages_for(n_tokens + 1))
        if self._device is not self._staged:
            self._device[:bucket].copy_(self._staged[:bucket], non_blocking=True)
        return most_pages

    def _show_pages(self, row: int, kv: SequenceKv) -> None:
        n_pages = len(kv.pages)
        shown_kv, shown_pages = self._shown[row]
        if shown_kv is kv and shown_pages == n_pages:
            return
        self._shown[row] = (kv, n_pages)
        table = self._host[row, _TABLE:]
        shown = min(n_pages, len(table))
        table[:shown] = kv.row_index[:shown].numpy()
        # Wherever a padded table is read: at a page of its own, never at one that was given up.
        table[shown:] = table[0]
