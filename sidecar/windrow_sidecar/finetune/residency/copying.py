"""How weights travel from files into memory: on a thread, in pieces, at a limited rate.

The thread reads without the interpreter's lock, so that layers compute meanwhile.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from windrow_sidecar.finetune.residency.source import OpenFiles, Stored

# Small enough that a copy which is not wanted any more stops soon, and that the rate is even.
PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a transfer: from a file to its place in memory."""

    stored: Stored
    target: Tensor  # its values in the model's type, contiguous


class RateLimit:
    """A bucket of bytes: what may move now, and how long to wait for the rest.

    Args:
        bytes_per_s: None: no limit.
    """

    def __init__(self, bytes_per_s: float | None) -> None:
        self._rate, self._free_at = bytes_per_s, 0.0

    def delay_s(self, n_bytes: int, now_s: float) -> float:
        """Take `n_bytes` out; return how long the mover has to wait before it moves them."""
        if self._rate is None:
            return 0.0
        begin = max(now_s, self._free_at)
        self._free_at = begin + n_bytes / self._rate
        return begin - now_s


@dataclass(slots=True)
class Transfer:
    """A layer on its way."""

    parts: Sequence[Part]
    done: threading.Event = field(default_factory=threading.Event)
    unwanted: bool = False
    error: Exception | None = None
    seconds: float = 0.0  # that the copy took, waiting for its rate left out

    def wait(self) -> None:
        """Until it is there.

        Raises:
            OSError: a file could not be read.
        """
        self.done.wait()
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        """Stop it, and return once nothing of it moves any more."""
        self.unwanted = True
        self.done.wait()


class Copier:
    """Moves transfers one after the other, first come, first served."""

    def __init__(
        self,
        limit: RateLimit | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._limit, self._clock, self._pause = limit or RateLimit(None), clock, pause
        self._queue: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._files = OpenFiles()
        self._thread = threading.Thread(target=self._serve, name="frozen-layers", daemon=True)
        self._thread.start()

    def start(self, parts: Sequence[Part]) -> Transfer:
        """Queue a transfer."""
        transfer = Transfer(parts)
        self._queue.put(transfer)
        return transfer

    def close(self) -> None:
        """End the thread; what is queued is moved before."""
        self._queue.put(None)
        self._thread.join()
        self._files.close()

    def _serve(self) -> None:
        while (transfer := self._queue.get()) is not None:
            try:
                for part in transfer.parts:
                    self._move(transfer, part)
            except OSError as error:
                transfer.error = error
            transfer.done.set()

    def _move(self, transfer: Transfer, part: Part) -> None:
        stored, flat = part.stored, part.target.view(-1)
        same = stored.dtype == flat.dtype
        step = PIECE_BYTES // stored.dtype.itemsize
        for begin in range(0, flat.numel(), step):
            if transfer.unwanted:
                return
            target = flat[begin : begin + step]
            n_bytes = target.numel() * stored.dtype.itemsize
            if (delay := self._limit.delay_s(n_bytes, self._clock())) > 0:
                self._pause(delay)
            begun = self._clock()
            piece = target.view(torch.uint8) if same else torch.empty(n_bytes, dtype=torch.uint8)
            self._files.read_into(piece, stored, begin * stored.dtype.itemsize)
            if not same:
                target.copy_(piece.view(stored.dtype))
            transfer.seconds += self._clock() - begun
