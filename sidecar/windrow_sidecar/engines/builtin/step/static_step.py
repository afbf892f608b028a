"""Decode as one pass over static buffers, for the next larger of a few batch sizes.

On a GPU every size is a CUDA graph, captured at start-up: a step is a copy of a few kilobytes, one
launch, and the chosen tokens back. On the host the very same pass runs without a graph.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from windrow_sidecar.engines.builtin.kv.kvcache import KvCache, SequenceKv
from windrow_sidecar.engines.builtin.llama.layer_ops import LayerOps
from windrow_sidecar.engines.builtin.llama.model import LlamaModel
from windrow_sidecar.engines.builtin.scheduler import EngineRequest
from windrow_sidecar.engines.builtin.step.paged_attention import PagedAttention
from windrow_sidecar.engines.builtin.step.sampling import draws_of, redraw
from windrow_sidecar.engines.confined import GraphShares

_log = logging.getLogger(__name__)

# A GEMM's tile has 8 rows at least: between multiples of 8 nothing is gained.
_SMALL = (1, 2, 4)
_STEP = 8
# The first pass of a shape loads kernels and picks GEMM algorithms: not to be done in a capture.
_WARM_UPS = 2
# Columns of a row of the inputs.
_TOKEN, _POSITION, _SLOT, _LENGTH, _TABLE = 0, 1, 2, 3, 4


class StaticDecode:
    """See `decoder.Decoder`.

    Args:
        model: whose device decides whether graphs are used.
        attention: of the whole batch.
        ops: of the layers.
        max_running: the largest batch.
        shares: of decode's, for each of which there are graphs of their own; None: every SM.

    Attributes:
        captures: what the graphs took; None on the host.
    """

    def __init__(
        self,
        model: LlamaModel,
        attention: PagedAttention,
        ops: LayerOps,
        *,
        max_running: int,
        shares: GraphShares | None = None,
    ) -> None:
        self._model, self._attention, self._ops = model, attention, ops
        self.buckets = batch_buckets(max_running)
        largest = self.buckets[-1]
        self._inputs = StaticInputs(model.cache, max_batch=largest)
        device = model.device
        self._logits = torch.empty(largest, model.config.vocab, device=device, dtype=model.dtype)
        self._ids = torch.empty(largest, device=device, dtype=torch.int64)
        self._runner: GraphRunner | None = None
        self.captures: Captures | None = None
        if device.type == "cuda":
            columns = attention.columns(model.cache.pages_for(model.cache.max_tokens))
            self._runner = GraphRunner(lambda bucket: self._compute(bucket, columns), shares)
            self.captures = self._runner.capture(self.buckets)
            self._read_back = torch.empty(largest, dtype=torch.int64, pin_memory=True)

    def step(self, batch: Sequence[EngineRequest]) -> list[int]:
        """See `Decoder`. Waits for the device once, for the tokens."""
        n = len(batch)
        draws = draws_of(batch, self._model.device)
        self._run(batch)
        chosen = redraw(self._ids[:n], self._logits[:n], draws)
        if self._runner is not None:
            read_back = self._read_back[:n]
            read_back.copy_(chosen, non_blocking=True)
            torch.cuda.current_stream().synchronize()
            chosen = read_back
        tokens: list[int] = chosen.tolist()
        return tokens

    def logits(self, batch: Sequence[EngineRequest]) -> torch.Tensor:
        """Do a step as `Decoder` says: logits [b, vocab], a view that the next step overwrites."""
        self._run(batch)
        return self._logits[: len(batch)]

    def _run(self, batch: Sequence[EngineRequest]) -> None:
        bucket = bucket_of(self.buckets, len(batch))
        most_pages = self._inputs.write(batch, bucket)
        for request in batch:
            request.kv.n_tokens += 1
        if self._runner is None:
            self._compute(bucket, self._attention.columns(most_pages))
        else:
            self._runner.replay(bucket)

    def _compute(self, bucket: int, columns: int) -> None:
        """The pass: reads the inputs' rows, writes logits and the greedy choice."""
        rows = self._inputs.rows(bucket, columns)

        def attend(layer: int, q: torch.Tensor) -> torch.Tensor:
            return self._attention(layer, q, rows.lengths, rows.table)

        hidden = self._model.forward(rows.tokens, rows.positions, rows.slots, attend, self._ops)
        logits = self._logits[:bucket]
        logits.copy_(self._model.logits(hidden))
        self._ids[:bucket] = logits.argmax(-1)


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


def batch_buckets(max_batch: int) -> tuple[int, ...]:
    """1, 2, 4, then multiples of 8, the last one holding `max_batch`. 64 requests: 11 buckets."""
    top = -(-max_batch // _STEP) * _STEP
    return (
        *(n for n in _SMALL if n < max_batch),
        *(range(_STEP, top + 1, _STEP) if max_batch > _SMALL[-1] else (max_batch,)),
    )


def bucket_of(buckets: Sequence[int], batch: int) -> int:
    """The smallest bucket that holds the batch. Raises ValueError for one that none holds."""
    at = bisect_left(buckets, batch)
    if at == len(buckets):
        raise ValueError(f"a batch of {batch} is larger than the largest bucket, {buckets[-1]}")
    return buckets[at]


@dataclass(frozen=True, slots=True)
class Captures:
    """Memory and time that capturing the graphs took at start-up."""

    graphs: int
    seconds: float
    n_bytes: int  # of device memory, warm-ups' workspaces included


class GraphRunner:
    """Captures `compute(bucket)` and replays it. On the current device; one thread.

    Args:
        compute: launches the pass; makes no decision on the host that a replay would have to make
            again, and waits for nothing.
        shares: of the SMs; a graph runs on the share on whose stream it was captured. None: one set
            of graphs is for every SM.
    """

    def __init__(self, compute: Callable[[int], None], shares: GraphShares | None = None) -> None:
        self._compute, self._shares = compute, shares
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}  # by share and bucket
        self._pool: Any = None

    @torch.inference_mode()
    def capture(self, buckets: Sequence[int]) -> Captures:
        """Make a graph for each bucket, the largest first: the others fit into its memory.

        With shares, for each of them, the whole device's first.
        """
        began_s = time.monotonic()
        free_before = torch.cuda.mem_get_info()[0]
        if self._shares is None:
            self._capture_on(torch.cuda.Stream(), buckets, 0)  # type: ignore[no-untyped-call]
        else:
            for units in reversed(self._shares.levels()):
                with self._shares.capturing(units) as stream:
                    self._capture_on(stream, buckets, units)
        torch.cuda.synchronize()
        made = Captures(
            graphs=len(self._graphs),
            seconds=time.monotonic() - began_s,
            n_bytes=free_before - torch.cuda.mem_get_info()[0],
        )
        _log.info(
            "captured %d graphs in %.1f s, %.0f MiB",
            made.graphs,
            made.seconds,
            made.n_bytes / 2**20,
        )
        return made

    def _capture_on(self, side: torch.cuda.Stream, buckets: Sequence[int], units: int) -> None:
        for bucket in sorted(buckets, reverse=True):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(_WARM_UPS):
                    self._compute(bucket)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Other threads may take memory meanwhile: with `global` that would end the capture.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=side, capture_error_mode="thread_local"
            ):
                self._compute(bucket)
            self._pool = self._pool or graph.pool()  # one graph runs at a time, of all shares
            self._graphs[units, bucket] = graph

    def replay(self, bucket: int) -> None:
        """Launch a captured pass, of the share in use, on the current stream."""
        units = 0 if self._shares is None else self._shares.units
        self._graphs[units, bucket].replay()
