"""The built-in engine's model over an arena of its own, without scheduler, loop or server."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.dlpack import from_dlpack

from windrow_sidecar._core import Arena, Geometry
from windrow_sidecar.engines.builtin.kv.kvcache import KvCache, SequenceKv
from windrow_sidecar.engines.builtin.kv.kvplaces import KvPlaces
from windrow_sidecar.engines.builtin.llama.config import read_config
from windrow_sidecar.engines.builtin.llama.model import LlamaModel
from windrow_sidecar.engines.builtin.llama.weights import load_weights, plan_layout
from windrow_sidecar.engines.builtin.scheduler import EngineRequest
from windrow_sidecar.engines.builtin.step.decoder import Decoder
from windrow_sidecar.engines.builtin.step.gathered import GatheredDecode
from windrow_sidecar.engines.builtin.web.messages import Submit

SLOTS = 64  # tokens of a chunk


class DecodeBench:
    """Hands out pages in a scattered order.

    All KV is NaN until it is written: a slot that is read before shows at once.

    Args:
        folder: a checkpoint.
        layout: of the arena.
        driver: of the arena; its memory is where torch computes.
        page_size: tokens.
    """

    def __init__(
        self,
        folder: Path,
        *,
        layout: str = "per-layer",
        driver: str = "host",
        page_size: int = 16,
        chunks: int = 24,
    ) -> None:
        self.config = config = read_config(folder)
        weights = plan_layout(config)
        storage = torch.zeros(weights.n_bytes, dtype=torch.uint8)
        load_weights(folder, weights, storage)
        self.arena = Arena.create(
            Geometry(
                layers=config.layers,
                kv_heads=config.kv_heads,
                head_dim=config.head_dim,
                dtype_bytes=4,
                block_bytes=SLOTS * config.kv_width * 4,
                chunks=chunks,
                layout=layout,
            ),
            reserved_chunks=0,
            driver=driver,
        )
        kv = from_dlpack(self.arena.tensor(0, self.arena.geometry.arena_bytes)).view(torch.float32)
        kv.fill_(float("nan"))
        self.cache = KvCache(
            kv, config, KvPlaces.of(self.arena), page_size=page_size, max_tokens=1024
        )
        self.model = LlamaModel(config, weights, storage, self.cache)
        self.decoder: Decoder = GatheredDecode(self.model)
        self._pages = list(range(chunks * SLOTS // page_size))
        random.Random(3).shuffle(self._pages)

    def sequence(self, n_tokens: int) -> SequenceKv:
        """The KV of a request with pages for so many tokens."""
        kv = SequenceKv()
        self.cache.extend(kv, [self._pages.pop() for _ in range(self.cache.pages_for(n_tokens))])
        return kv

    def give_back(self, kv: SequenceKv) -> None:
        """A request has left; its pages are handed out again, soonest of all."""
        self._pages += kv.pages

    def request(self, tokens: Sequence[int], kv: SequenceKv, **sampling: float) -> EngineRequest:
        """Return a request that goes on behind `tokens`; `kv` has all but the last of them."""
        settings = {"temperature": 0.0, "top_p": 1.0, "seed": 0} | sampling
        submit = Submit(
            id=0,
            name="bench",
            prompt=tuple(tokens),
            max_tokens=1,
            temperature=settings["temperature"],
            top_p=settings["top_p"],
            seed=int(settings["seed"]),
            stop_token_ids=frozenset(),
            kv_arrives=False,
            arrived_ns=0,
        )
        generator = torch.Generator().manual_seed(submit.seed) if submit.temperature else None
        return EngineRequest(submit, list(tokens), kv, generator=generator)

    def decode(self, tokens: Sequence[int], kvs: Sequence[SequenceKv]) -> torch.Tensor:
        """Append one token to each request; logits [b, vocab] of what follows."""
        batch = [self.request([token], kv) for token, kv in zip(tokens, kvs, strict=True)]
        return self.decoder.logits(batch).clone()

    def close(self) -> None:
        """Give the arena back; nothing of this object may be used any more."""
        arena = self.arena
        del self.cache, self.model, self.decoder
        gc.collect()  # graphs and interpreted kernels leave cycles behind
        arena.close()
