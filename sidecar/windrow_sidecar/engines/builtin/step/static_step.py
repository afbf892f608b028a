"""Decode as one pass over static buffers, for the next larger of a few batch sizes.

On a GPU every size is a CUDA graph, captured at start-up: a step is a copy of a few kilobytes, one
launch, and the chosen tokens back. On the host the very same pass runs without a graph.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from windrow_sidecar.engines.builtin.llama.layer_ops import LayerOps
from windrow_sidecar.engines.builtin.llama.model import LlamaModel
from windrow_sidecar.engines.builtin.scheduler import EngineRequest
from windrow_sidecar.engines.builtin.step.buckets import batch_buckets, bucket_of
from windrow_sidecar.engines.builtin.step.graphs import Captures, GraphRunner
from windrow_sidecar.engines.builtin.step.paged_attention import PagedAttention
from windrow_sidecar.engines.builtin.step.sampling import draws_of, redraw
from windrow_sidecar.engines.builtin.step.static_inputs import StaticInputs

_log = logging.getLogger(__name__)


class StaticDecode:
    """See `decoder.Decoder`.

    Args:
        model: whose device decides whether graphs are used.
        attention: of the whole batch.
        ops: of the layers.
        max_running: the largest batch.

    Attributes:
        captures: what the graphs took; None on the host.
    """

    def __init__(
        self, model: LlamaModel, attention: PagedAttention, ops: LayerOps, *, max_running: int
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
            self._runner = GraphRunner(lambda bucket: self._compute(bucket, columns))
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
