"""Backward of a window's attention: a few heads at a time, as far as heads are strangers."""

from __future__ import annotations

import pytest
import torch

from windrow_sidecar.finetune.model import window_attention as attention
from windrow_sidecar.finetune.model.window_attention import _pieces

HEADS, KV_HEADS, TOKENS, SIZE = 8, 4, 6, 16
QUERY = torch.zeros(1, HEADS, 2, SIZE)
KEY = torch.zeros(1, KV_HEADS, TOKENS, SIZE)
EXPANDED = HEADS * TOKENS * SIZE * 4


@pytest.mark.parametrize(("n_bytes", "at_once"), [(1, 1), (EXPANDED // 2, 2), (EXPANDED, 4)])
def test_pieces_hold_each_head_once_beside_the_keys_that_it_looks_at(monkeypatch, n_bytes, at_once):
    monkeypatch.setattr(attention, "PIECE_BYTES", n_bytes)
    pieces = list(_pieces(QUERY, KEY, by_heads=True))
    assert [kv.stop - kv.start for _, kv in pieces] == [at_once] * (KV_HEADS // at_once)
    assert [head for heads, _ in pieces for head in range(HEADS)[heads]] == list(range(HEADS))
    for heads, kv in pieces:
        assert {head * KV_HEADS // HEADS for head in range(HEADS)[heads]} == {*range(KV_HEADS)[kv]}


def test_heads_that_an_option_tells_apart_stay_together(monkeypatch):
    monkeypatch.setattr(attention, "PIECE_BYTES", 1)
    assert list(_pieces(QUERY, KEY, by_heads=False)) == [(slice(0, HEADS), slice(0, KV_HEADS))]
