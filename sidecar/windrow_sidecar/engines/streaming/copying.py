"""Copy weights from files into memory on a thread, in pieces, at a limited rate.

On the host the thread reads them into their places, without the interpreter's lock, so that layers
compute meanwhile. On a GPU it queues copies from pinned host memory on a stream of their own: they
begin behind the last user of their place, and a user of a layer has the device wait for it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from windrow_sidecar.compute.device import ComputeDevice, Mark
from windrow_sidecar.compute.host_device import HostDevice, available_bytes
from windrow_sidecar.engines.streaming.tensor_files import OpenFiles, Stored

# Small enough that a copy which is not wanted any more stops soon, and that the rate is even.
PIECE_BYTES = 4 << 20
# On a GPU 1.2 ms at 55 GB/s, so that queueing a piece (some 30 us) costs little.
PIECE_BYTES_ON_GPU = 64 << 20
# Who waits for its rate looks so often whether it is still wanted: decode may want the memory.
LOOK_AGAIN_S = 0.01
# Of the host's free memory: what pinned copies may take.
PINNED_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a transfer: from a file to its place in memory."""

    stored: Stored
    target: Tensor  # its values in the model's type, contiguous


class RateLimit:
    """A token bucket over bytes: how many may move now, and how long to wait for the rest.

    Args:
        bytes_per_s: None: no limit.
    """

    def __init__(self, bytes_per_s: float | None) -> None:
        self._rate, self._free_at = bytes_per_s, 0.0

    @property
    def bytes_per_s(self) -> float | None:
        """The rate; None: no limit."""
        return self._rate

    def delay_s(self, n_bytes: int, now_s: float) -> float:
        """Take `n_bytes` out; return how long the mover has to wait before it moves them."""
        if self._rate is None:
            return 0.0
        begin = max(now_s, self._free_at)
        self._free_at = begin + n_bytes / self._rate
        return begin - now_s


@dataclass(slots=True)
class Transfer:
    """The copy of one layer, which may be waited for or cancelled."""

    parts: Sequence[Part]
    done: threading.Event = field(default_factory=threading.Event)
    after: Mark | None = None  # behind which its place is free
    arrived: Mark | None = None  # behind its last piece; set when `done` is
    unwanted: bool = False
    error: Exception | None = None

    def wait(self) -> None:
        """Wait until all of it is queued; on the host it is there then.

        Raises:
            OSError: a file could not be read.
            RuntimeError: the device pins or copies nothing.
        """
        self.done.wait()
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        """Stop it, and return once nothing of it moves any more."""
        self.unwanted = True
        self.done.wait()
        if self.arrived is not None:
            self.arrived.wait()


@dataclass(frozen=True, slots=True)
class _Queued:
    """A piece whose copy to a GPU has been queued."""

    begun: Mark
    ended: Mark
    n_bytes: int


class Copier:
    """Run transfers one after the other on a thread, in the order in which they were started.

    Args:
        limit: of the rate.
        device: to whose memory they go (default: the host).
        pinned_bytes: what copies in pinned host memory may take (default: half of what is free).
    """

    def __init__(
        self,
        limit: RateLimit | None = None,
        *,
        device: ComputeDevice | None = None,
        pinned_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._limit, self._clock, self._pause = limit or RateLimit(None), clock, pause
        self._device = device or HostDevice()
        self._copies = self._device.copies()
        self._queue: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._files = OpenFiles()
        if pinned_bytes is None:
            pinned_bytes = int(PINNED_SHARE * available_bytes())
        self._staging = Staging(self._device, pinned_bytes, self._files)
        self.seconds = 0.0  # that copies took, waiting for their rate left out
        self._copied_bytes = 0  # in that time
        self._thread = threading.Thread(target=self._serve, name="frozen-layers", daemon=True)
        self._thread.start()

    @property
    def bytes_per_s(self) -> float:
        """Speed of copies so far, or a lower one if that may be; 0: there were none."""
        measured = self._copied_bytes / self.seconds if self.seconds else 0.0
        limit = self._limit.bytes_per_s
        return measured if limit is None else min(measured, limit)

    def start(self, parts: Sequence[Part]) -> Transfer:
        """Queue a transfer, behind everything that this thread has had computed so far."""
        transfer = Transfer(parts, after=self._device.mark())
        self._queue.put(transfer)
        return transfer

    def hold_back(self, transfer: Transfer) -> None:
        """Let what this thread computes from now on wait for it, on the device."""
        if transfer.arrived is not None:
            self._copies.hold_back(transfer.arrived)

    def close(self) -> None:
        """End the thread; what is queued is moved before."""
        self._queue.put(None)
        self._thread.join()
        self._files.close()

    def _serve(self) -> None:
        while (transfer := self._queue.get()) is not None:
            self._move(transfer)
            del transfer  # it holds the layer's memory, which may go while nothing is queued

    def _move(self, transfer: Transfer) -> None:
        try:
            if transfer.after is not None:
                self._copies.after(transfer.after)
            try:
                for part in transfer.parts:
                    (self._queue_part if self._device.queues else self._read_part)(transfer, part)
            finally:
                transfer.arrived = self._copies.mark()
        except (OSError, RuntimeError) as error:  # of a file; of CUDA, as torch raises them
            transfer.error = error
        finally:
            transfer.done.set()

    def _read_part(self, transfer: Transfer, part: Part) -> None:
        """Straight into its place."""
        stored, flat = part.stored, part.target.view(-1)
        same = stored.dtype == flat.dtype
        step = PIECE_BYTES // stored.dtype.itemsize
        for begin in range(0, flat.numel(), step):
            target = flat[begin : begin + step]
            n_bytes = target.numel() * stored.dtype.itemsize
            if not self._keep_to_rate(n_bytes, transfer):
                return
            begun = self._clock()
            piece = target.view(torch.uint8) if same else torch.empty(n_bytes, dtype=torch.uint8)
            self._files.read_into(piece, stored, begin * stored.dtype.itemsize)
            if not same:
                target.copy_(piece.view(stored.dtype))
            self.seconds += self._clock() - begun
            self._copied_bytes += n_bytes

    def _queue_part(self, transfer: Transfer, part: Part) -> None:
        """Queue a part from a host copy behind the one before; at most two are under way."""
        flat = part.target.view(-1)
        step = PIECE_BYTES_ON_GPU // flat.dtype.itemsize
        before: _Queued | None = None
        for begin in range(0, flat.numel(), step):
            target = flat[begin : begin + step]
            piece = StagedPiece(part.stored, begin, target.numel(), flat.dtype)
            if not self._keep_to_rate(piece.n_bytes, transfer):
                break
            host = self._staging.bytes_of(piece, PIECE_BYTES_ON_GPU)
            begun = self._copies.mark()
            self._copies.start(target.view(torch.uint8), host)
            ended = self._copies.mark()
            self._staging.used_until(piece, ended)
            self._account(before)
            before = _Queued(begun, ended, piece.n_bytes)
        self._account(before)

    def _account(self, piece: _Queued | None) -> None:
        """Wait for a piece and note how long it took."""
        if piece is not None:
            self.seconds += (piece.ended.at_ns() - piece.begun.at_ns()) / 1e9
            self._copied_bytes += piece.n_bytes

    def _keep_to_rate(self, n_bytes: int, transfer: Transfer) -> bool:
        """Wait until so much may move, while it is wanted; returns whether it still is."""
        delay_s = self._limit.delay_s(n_bytes, self._clock())
        while delay_s > 0 and not transfer.unwanted:
            self._pause(min(delay_s, LOOK_AGAIN_S))
            delay_s -= LOOK_AGAIN_S
        return not transfer.unwanted


@dataclass(frozen=True, slots=True)
class StagedPiece:
    """Part of a stored tensor: `n` elements from `begin` on, in the type of its place."""

    stored: Stored
    begin: int
    n: int
    dtype: torch.dtype

    @property
    def n_bytes(self) -> int:
        """Bytes in the type that is asked for."""
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
        """Bytes of copies that need not be read again."""
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
