"""Decode with one attention per request: what suits cores, where a launch costs next to nothing.

A padded batch does not pay there: one context of 4,000 tokens among ones of 500 would make all of
them cost as much. A GPU wants one launch for all (`static_step.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from windrow_sidecar.engines.builtin.kv.kvcache import SequenceKv
from windrow_sidecar.engines.builtin.llama.model import Attention, LlamaModel
from windrow_sidecar.engines.builtin.llama.riding import RidingPass
from windrow_sidecar.engines.builtin.scheduler import EngineRequest
from windrow_sidecar.engines.builtin.step.sampling import sample


class GatheredDecode:
    """See `decoder.Decoder`."""

    def __init__(self, model: LlamaModel) -> None:
        self._model, self._cache = model, model.cache
        config = model.config
        shape = (0, config.kv_heads, config.q_per_kv, config.head_dim)
        self._attended = torch.empty(shape, device=model.device, dtype=model.dtype)

    def step(self, batch: Sequence[EngineRequest]) -> list[int]:
        """See `Decoder`."""
        return sample(self.logits(batch), batch)

    def logits(self, batch: Sequence[EngineRequest]) -> torch.Tensor:
        """Do a step as `Decoder` says: logits [b, vocab], new memory."""
        hidden = self._model.forward(*self._inputs(batch))
        return self._model.logits(hidden)

    def ride(self, batch: Sequence[EngineRequest]) -> RidingPass:
        """Begin the same step as a pass whose products others may join; see `finish`."""
        return RidingPass(self._model, *self._inputs(batch), self._model.ops)

    def finish(self, riding: RidingPass, batch: Sequence[EngineRequest]) -> list[int]:
        """Run what is left of a pass that `ride` began; the step's tokens, as `step` returns."""
        return sample(self._model.logits(riding.finish()), batch)

    def again(self, batch: Sequence[EngineRequest]) -> list[int]:
        """Compute a step once more that `ride` began and nobody finished."""
        for request in batch:
            request.kv.n_tokens -= 1
        return self.step(batch)

    def _inputs(
        self, batch: Sequence[EngineRequest]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Attention]:
        """Return tokens, positions and slots, int64 [b] each, and the attention of a step."""
        model, cache = self._model, self._cache
        kvs = [request.kv for request in batch]
        positions = [kv.n_tokens for kv in kvs]
        slots = [cache.slot_row(kv, kv.n_tokens) for kv in kvs]
        for kv in kvs:
            kv.n_tokens += 1
        return (
            model.integers([request.tokens[-1] for request in batch]),
            model.integers(positions),
            model.integers(slots),
            self._attention(kvs),
        )

    def _attention(self, kvs: Sequence[SequenceKv]) -> Attention:
        """One query per request over all of its tokens, request by request."""
        cache, config = self._cache, self._model.config
        if self._attended.shape[0] < len(kvs):
            self._attended = self._attended.new_empty(len(kvs), *self._attended.shape[1:])
        attended = self._attended[: len(kvs)]
        plan = []
        for row, kv in enumerate(kvs):
            key_rows, keys, value_rows, values = cache.gathered(kv.n_tokens)
            plan.append(
                (
                    cache.rows_of(kv, kv.n_tokens),
                    key_rows,
                    keys.permute(1, 2, 0),
                    value_rows,
                    values.transpose(0, 1),
                    attended[row],
                )
            )
        grouped = (len(kvs), config.kv_heads, config.q_per_kv, config.head_dim)

        def attend(layer: int, q: torch.Tensor) -> torch.Tensor:
            key_pages, value_pages = cache.key_pages[layer], cache.value_pages[layer]
            queries = q.reshape(grouped).unbind()
            for query, (index, key_rows, keys, value_rows, values, out) in zip(
                queries, plan, strict=True
            ):
                torch.index_select(key_pages, 0, index, out=key_rows)
                weights = torch.softmax(torch.bmm(query, keys), -1)
                torch.index_select(value_pages, 0, index, out=value_rows)
                torch.bmm(weights, values, out=out)
            return attended.flatten(1)

        return attend
