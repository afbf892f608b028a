"""Decode of the built-in engine without its loop: requests in the middle of their answers."""

from __future__ import annotations

import gc

import torch
from torch.utils.dlpack import from_dlpack

from windrow_sidecar._core import Arena, Geometry
from windrow_sidecar.engines.builtin.kv.kvcache import KvCache, SequenceKv
from windrow_sidecar.engines.builtin.kv.kvplaces import KvPlaces
from windrow_sidecar.engines.builtin.llama.config import read_config
from windrow_sidecar.engines.builtin.llama.model import LlamaModel
from windrow_sidecar.engines.builtin.llama.weights import (
    load_weights,
    plan_layout,
    plan_streamed_layout,
)
from windrow_sidecar.engines.builtin.scheduler import EngineRequest
from windrow_sidecar.engines.builtin.step.gathered import GatheredDecode
from windrow_sidecar.engines.builtin.streamed import stream_weights
from windrow_sidecar.engines.builtin.web.messages import Submit

CONTEXTS = (3, 17, 40, 64)  # tokens of each request; one ends with its page


class Decode:
    """Hold requests of the built-in engine in the middle of their answers.

    Args:
        folder: of a checkpoint.
        dtype: of weights and KV.
        capacity: layers that memory holds; 0: all of them, without streaming.
    """

    def __init__(self, folder, dtype, capacity=0):
        self.config = config = read_config(folder)
        self.streamed, holds = None, None
        if capacity:
            _, spans = plan_streamed_layout(config, dtype)
            budget = spans[0].begin + capacity * (spans[0].end - spans[0].begin)
            self.streamed = stream_weights(folder, config, dtype, "made", budget_bytes=budget)
            layout, storage = self.streamed.layout, self.streamed.pages.storage
            holds = self.streamed.layers.step
        else:
            layout = plan_layout(config, dtype)
            storage = torch.zeros(layout.n_bytes, dtype=torch.uint8)
            load_weights(folder, layout, storage)
        size = dtype.itemsize
        self.arena = Arena.create(
            Geometry(
                layers=config.layers,
                kv_heads=config.kv_heads,
                head_dim=config.head_dim,
                dtype_bytes=size,
                block_bytes=64 * config.kv_width * size,
                chunks=8,
                layout="per-layer",
            ),
            reserved_chunks=0,
            driver="host",
        )
        kv = from_dlpack(self.arena.tensor(0, self.arena.geometry.arena_bytes)).view(dtype)
        self.cache = KvCache(kv, config, KvPlaces.of(self.arena), page_size=16, max_tokens=128)
        self.model = LlamaModel(config, layout, storage, self.cache, holds)
        self.decoder = GatheredDecode(self.model)
        self.batch, pages = [], iter(range(32))
        for n, tokens in enumerate(CONTEXTS):
            held = SequenceKv()
            self.cache.extend(held, [next(pages) for _ in range(self.cache.pages_for(tokens + 1))])
            prompt = torch.arange(tokens + 1).mul(7).add(n).remainder(256).tolist()
            with torch.inference_mode():
                self.model.prefill(prompt[:-1], held)
            submit = Submit(n, "", tuple(prompt), 1, 0.0, 1.0, 0, frozenset(), False, 0)
            self.batch.append(EngineRequest(submit, prompt, held))

    def apart(self):
        """Return the logits of the step alone; the requests are as before."""
        with torch.inference_mode():
            logits = self.decoder.logits(self.batch).clone()
        for request in self.batch:
            request.kv.n_tokens -= 1
        return logits

    def shape_of(self, layer, product):
        of = self.model.layers[layer]
        return (of.qkv, of.out, of.gate_up, of.down)[product].shape

    def close(self):
        arena = self.arena
        if self.streamed is not None:
            self.streamed.layers.close()
        del self.cache, self.model, self.decoder, self.batch
        gc.collect()
        arena.close()
