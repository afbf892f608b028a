"""Pinned host copies of frozen layers, from which layers are copied to a GPU.

A layer is read from its file once; where host memory does not hold all of them, what finds no room
passes through two buffers each time it is wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from windrow_sidecar.compute.device import ComputeDevice, Mark
from windrow_sidecar.finetune.offload.tensor_files import OpenFiles, Stored


@dataclass(frozen=True, slots=True)
class StagedPiece:
    """Part of a stored tensor: `n` elements from `begin` on, in the type of its place."""

    stored: Stored
    begin: int
    n: int
    dtype: torch.dtype

    @property
    def n_bytes(self) -> int:
        """In the type that is asked for."""
        return self.n * self.dtype.itemsize


class Staging:
    """Provide pieces of layers in pinned host memory. One thread.

    Args:
        device: that they are copied to.
        room_bytes: of host memory that kept copies may take.
        files: what is not kept is read from.
    """

    def __init__(self, device: ComputeDevice, room_bytes: int, files: OpenFiles) -> None:
        self._device, self._room, self._files = device, room_bytes, files
        self._kept: dict[StagedPiece, Tensor] = {}
        self._buffers: list[Tensor] = []
        self._in_use: list[Mark | None] = [None, None]
        self._next = 0

    @property
    def kept_bytes(self) -> int:
        """Of copies that need not be read again."""
        return sum(kept.nbytes for kept in self._kept.values())

    def bytes_of(self, piece: StagedPiece, largest: int) -> Tensor:
        """Return a piece: uint8 [piece.n_bytes], this object's memory.

        `used_until` says when a buffer may be filled again.

        Args:
            piece: what is wanted.
            largest: bytes of the largest piece there is.

        Raises:
            OSError: it cannot be read.
        """
        if (kept := self._kept.get(piece)) is not None:
            return kept
        if (taken := self._device.host_copy_bytes(piece.n_bytes)) <= self._room:
            self._room -= taken
            made = self._kept[piece] = self._device.host_copy(piece.n_bytes)
            self._read(made, piece)
            return made
        while len(self._buffers) < len(self._in_use):
            self._buffers.append(self._device.host_copy(largest))
        self._next = (self._next + 1) % len(self._buffers)
        if (mark := self._in_use[self._next]) is not None:
            mark.wait()
            self._in_use[self._next] = None
        room = self._buffers[self._next][: piece.n_bytes]
        self._read(room, piece)
        return room

    def used_until(self, piece: StagedPiece, mark: Mark) -> None:
        """The copy of that piece, the last that was handed out, is done when `mark` is reached."""
        if piece not in self._kept:
            self._in_use[self._next] = mark

    def _read(self, room: Tensor, piece: StagedPiece) -> None:
        stored, size = piece.stored, piece.stored.dtype.itemsize
        if stored.dtype == piece.dtype:
            self._files.read_into(room, stored, piece.begin * size)
            return
        raw = torch.empty(piece.n * size, dtype=torch.uint8)
        self._files.read_into(raw, stored, piece.begin * size)
        room.view(piece.dtype).copy_(raw.view(stored.dtype))
