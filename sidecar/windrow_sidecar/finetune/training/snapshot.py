"""Snapshot tensors for a checkpoint, copying each one only before it changes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from windrow_sidecar.compute.queued import behind

# Two threads share the work in pieces. Of smaller ones they wait for each other more than they copy
# (twice as long in all at single tensors of 0.5 MB), of larger ones for the last of the other.
PIECE_BYTES = 8 << 20

Piece = list[tuple[str, Tensor]]


class Spare:
    """Host memory that snapshots reuse for their copies.

    Fresh memory costs a page fault for each 4 KiB that is first written, which takes longer than
    the copy itself.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def take(self) -> dict[str, Tensor]:
        """Return what is there, [...] each by name; nobody else gets it before `put_back`."""
        kept, self._kept = self._kept, {}
        return kept

    def put_back(self, tensors: dict[str, Tensor]) -> None:
        """Keep these, [...] each on the host, for the next snapshot."""
        self._kept = tensors


class TensorSnapshot:
    """The values that tensors have at one moment, on the host.

    A thread copies them while training goes on; a caller that is about to change some of them calls
    `copy` before, and takes part where copies are missing. Between two optimizer steps only sums of
    gradients change, so that a step waits only where it is shorter than the copy.

    Args:
        tensors: by `kind/name`.
        spare: memory of copies that are no longer needed.
    """

    def __init__(self, tensors: Mapping[str, Tensor], spare: Spare | None = None) -> None:
        self._spare = spare or Spare()
        self._room = self._spare.take()
        self._behind = behind(tensors.values())
        self._left: dict[str, list[Piece]] = {}
        for name, tensor in tensors.items():
            _add(self._left.setdefault(name.partition("/")[0], []), name, tensor)
        self._copied: dict[str, Tensor] = {}
        self._under_way: Counter[str] = Counter()
        self._changed = threading.Condition()

    def take(self) -> dict[str, Tensor]:
        """Return the copies of all, [...] each on the host; they are good until `release`."""
        self.copy(tuple(self._left))
        return self._copied

    def copy(self, kinds: Collection[str]) -> None:
        """Return when those kinds are copied, by any thread; then they may change."""
        while (claimed := self._claim(kinds)) is not None:
            self._copy(*claimed)
        with self._changed:
            self._changed.wait_for(lambda: not any(self._under_way[kind] for kind in kinds))

    def release(self) -> None:
        """The copies have been used: the next snapshot may lie where they are."""
        self._spare.put_back(self._copied)

    def _claim(self, kinds: Collection[str]) -> tuple[str, Piece] | None:
        with self._changed:
            for kind in kinds:
                if left := self._left.get(kind):
                    self._under_way[kind] += 1
                    return kind, left.pop()
        return None

    def _copy(self, kind: str, piece: Piece) -> None:
        copied: dict[str, Tensor] = {}
        try:
            self._behind()
            rooms = [_room_for(tensor, self._room.get(name)) for name, tensor in piece]
            torch._foreach_copy_(rooms, [tensor.detach() for _, tensor in piece])
            copied = {name: room for (name, _), room in zip(piece, rooms, strict=True)}
        finally:
            with self._changed:
                if not copied:  # the next one who asks learns why, instead of waiting for ever
                    self._left[kind].append(piece)
                self._copied |= copied
                self._under_way[kind] -= 1
                self._changed.notify_all()


def _add(pieces: list[Piece], name: str, tensor: Tensor) -> None:
    """Add a tensor to the last piece, or begin another one where that is large enough."""
    if not pieces or sum(t.nbytes for _, t in pieces[-1]) >= PIECE_BYTES:
        pieces.append([])
    pieces[-1].append((name, tensor))


def _room_for(tensor: Tensor, kept: Tensor | None) -> Tensor:
    """Return host memory of that shape; pinned for a GPU, whose link is faster then."""
    if kept is not None and (kept.shape, kept.dtype) == (tensor.shape, tensor.dtype):
        return kept
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
