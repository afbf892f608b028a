"""Measure what a decode step and a forward gain in one pass over one after the other, on a core.

A model of two layers, in fp32, once of the shape of Llama-3.2-1B (a layer's weights are 243 MB, far
more than the caches) and once of the shape of windrow-tiny (2 MB, in the caches). Decode is the
built-in engine's own step over `b` requests with 256 tokens of context each; the forward is the
finetune engine's own packed layers with LoRA of rank 16 on every product, over one row of `n`
tokens, keeping what its backward needs.

- *in turns*: the step, then the forward;
- *in one pass*: the step rides along in the forward's products (`--finetune fused`).

A round plays both forms one after the other, and the backward, which is the same in both. The
second figure of a shape counts it: in one pass over in turns, of a step with a forward and its
backward. Everything runs on one thread and is measured in seconds of CPU: what else the machine
does is not counted, but for what it takes of the memory's rate.

Example: python -m benchmarks.in_engine --json /tmp/in-engine.json
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.dlpack import from_dlpack
from transformers import LlamaConfig as TransformersConfig
from transformers import LlamaForCausalLM

from benchmarks.harness import Baseline, Result, arguments, environment, middle, write
from windrow.crd import parse_job_spec
from windrow_sidecar._core import Arena, Geometry
from windrow_sidecar.engines.builtin.kv.kvcache import KvCache, SequenceKv
from windrow_sidecar.engines.builtin.kv.kvplaces import KvPlaces
from windrow_sidecar.engines.builtin.llama.config import LlamaConfig
from windrow_sidecar.engines.builtin.llama.model import LlamaModel
from windrow_sidecar.engines.builtin.llama.riding import Product
from windrow_sidecar.engines.builtin.llama.weights import Layout, fill_random, plan_layout, view
from windrow_sidecar.engines.builtin.scheduler import EngineRequest
from windrow_sidecar.engines.builtin.step.gathered import GatheredDecode
from windrow_sidecar.engines.builtin.web.messages import Submit
from windrow_sidecar.finetune.adapter.adapters import ADAPTER, add_adapter, trainable
from windrow_sidecar.finetune.adapter.layer_programs import use_program
from windrow_sidecar.finetune.in_engine.joined_products import RiderSeat, join_products
from windrow_sidecar.finetune.model.boundaries import Activations, TorchBoundaries
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack

BATCHES, ROWS = (1, 8, 32), (16, 64, 256)
LAYERS, CONTEXT, PAGE, SLOTS, VOCABULARY = 2, 256, 16, 64, 512
ROUNDS = 5
GOAL_OF_THE_SUM = 0.9


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer; `bound`: by what a decode step of it is limited."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    in_caches: bool


SHAPES = (
    Shape("Llama-3.2-1B", 2048, 8192, 32, 8, 64, in_caches=False),
    Shape("windrow-tiny", 256, 512, 8, 4, 32, in_caches=True),
)


@dataclass(frozen=True)
class Times:
    """Seconds of CPU of one round."""

    step: float
    forward: float
    backward: float
    one_pass: float

    @property
    def of_the_sum(self) -> float:
        """Return one pass over step and forward."""
        return self.one_pass / (self.step + self.forward)

    @property
    def with_backward(self) -> float:
        """Return the same with the backward on both sides."""
        return (self.one_pass + self.backward) / (self.step + self.forward + self.backward)


class Bench:
    """Decode and finetune layers over one model's weights.

    Args:
        shape: of its layers.
    """

    def __init__(self, shape: Shape) -> None:
        config = LlamaConfig(
            vocab=VOCABULARY,
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            layers=LAYERS,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            norm_eps=1e-5,
            rope_theta=500000.0,
            rope_scaling=None,
            max_positions=4096,
            tied_embeddings=True,
            eos_token_ids=(),
        )
        layout = plan_layout(config)
        storage = torch.zeros(layout.n_bytes, dtype=torch.uint8)
        fill_random(layout, storage, 7)
        chunks = max(BATCHES) * (CONTEXT + PAGE) // SLOTS + 1
        self._arena = Arena.create(
            Geometry(
                layers=LAYERS,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                dtype_bytes=4,
                block_bytes=SLOTS * config.kv_width * 4,
                chunks=chunks,
                layout="per-layer",
            ),
            reserved_chunks=0,
            driver="host",
        )
        kv = from_dlpack(self._arena.tensor(0, self._arena.geometry.arena_bytes))
        self._cache = KvCache(
            kv.view(torch.float32),
            config,
            KvPlaces.of(self._arena),
            page_size=PAGE,
            max_tokens=CONTEXT + PAGE,
        )
        self._pages = list(range(chunks * SLOTS // PAGE))
        random.Random(3).shuffle(self._pages)
        self.model = LlamaModel(config, layout, storage, self._cache)
        self._decoder = GatheredDecode(self.model)
        self._requests = [self._request(n) for n in range(max(BATCHES))]
        self._seat = RiderSeat()
        self._stack = self._finetune(shape, layout, storage)

    def round(self, batch: int, rows: int) -> Times:
        """Play both forms once."""
        requests = self._requests[:batch]
        step = statistics.median(_once(lambda: self._step(requests)) for _ in range(3))
        at = self._begin(rows)
        forward = _once(lambda: self._forward(at))
        joined = self._begin(rows)
        one_pass = _once(lambda: self._together(joined, requests))
        backward = _once(lambda: self._backward(joined))
        return Times(step, forward, backward, one_pass)

    def distance(self, batch: int, rows: int) -> float:
        """Return how far logits in one pass are from the step's own, of their largest."""
        requests = self._requests[:batch]
        alone = self._step(requests)
        fused = self._together(self._begin(rows), requests)
        return float((fused - alone).abs().max() / alone.abs().max())

    def close(self) -> None:
        """Let go of the memory."""
        arena = self._arena
        del self.model, self._decoder, self._cache, self._stack, self._requests
        arena.close()

    def _request(self, number: int) -> EngineRequest:
        kv = SequenceKv()
        pages = self._cache.pages_for(CONTEXT + 1)
        self._cache.extend(kv, [self._pages.pop() for _ in range(pages)])
        self._cache.fill(kv, CONTEXT)
        prompt = (5,) * (CONTEXT + 1)
        submit = Submit(number, "", prompt, 1, 0.0, 1.0, 0, frozenset(), False, 0)
        return EngineRequest(submit, list(prompt), kv)

    def _finetune(self, shape: Shape, layout: Layout, storage: torch.Tensor) -> DecoderStack:
        config = TransformersConfig(
            vocab_size=VOCABULARY,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=LAYERS,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            max_position_embeddings=4096,
        )
        base = LlamaForCausalLM(config).requires_grad_(requires_grad=False)
        for name, parameter in base.named_parameters():
            if name in layout.parameters:
                parameter.data = view(layout, storage, name)
        spec = parse_job_spec(
            {
                "model": {"name": "made"},
                "dataset": {"source": "/rows.jsonl"},
                "adapter": {"lora": {"rank": 16, "alpha": 32, "targetModules": "all-linear"}},
                "training": {"maxSteps": 1, "batchSize": 1, "learningRate": "1e-4"},
                "output": {"destination": "/out"},
            }
        )
        tuned = add_adapter(base, spec)
        self._learns = list(trainable(tuned).values())
        stack = DecoderStack(base)
        why = use_program(stack, "packed", adapter=ADAPTER)
        layers = self.model.layers
        shapes = [
            dict(zip(Product, (of.qkv, of.out, of.gate_up, of.down), strict=True)) for of in layers
        ]
        why = why or join_products(
            stack, lambda layer, product: shapes[layer][product].shape, self._seat
        )
        if why:
            raise SystemExit(why)
        return stack

    def _step(self, requests: list[EngineRequest]) -> torch.Tensor:
        with torch.inference_mode():
            logits = self._decoder.logits(requests)
        for request in requests:
            request.kv.n_tokens -= 1
        return logits

    def _begin(self, rows: int) -> Activations:
        for parameter in self._learns:
            parameter.grad = None
        return self._stack.begin(torch.arange(rows)[None] % VOCABULARY)

    def _forward(self, at: Activations) -> None:
        for layer in range(LAYERS):
            self._stack.forward(at, layer, at.whole, TorchBoundaries(), learn=True)

    def _backward(self, at: Activations) -> None:
        made = at.inputs[-1]
        assert made is not None
        at.gradient = torch.ones_like(made)
        for layer in reversed(range(LAYERS)):
            self._stack.backward(at, layer, at.whole)

    def _together(self, at: Activations, requests: list[EngineRequest]) -> torch.Tensor:
        with torch.inference_mode():
            self._seat.riding = riding = self._decoder.ride(requests)
        self._forward(at)
        self._seat.riding = None
        with torch.inference_mode():
            logits = self.model.logits(riding.finish())
        for request in requests:
            request.kv.n_tokens -= 1
        return logits


def _once(call: Callable[[], object]) -> float:
    """Return the seconds of CPU that a call takes; of one thread, which computes all of it."""
    began = time.thread_time()
    call()
    return time.thread_time() - began


def main() -> None:
    """Measure; print and write the figures."""
    options = arguments(__doc__).parse_args()
    env = environment()
    torch.set_num_threads(1)
    rounds = 2 if options.quick else ROUNDS
    results: list[Result] = []
    for shape in SHAPES:
        bench = Bench(shape)
        for batch in BATCHES:
            for rows in ROWS:
                # The first one warms up.
                times = [bench.round(batch, rows) for _ in range(1 + rounds)][1:]
                where = f"{shape.name}, {batch} requests, {rows} finetune tokens"
                results += _figures(where, times, has_goal=not shape.in_caches)
        results.append(
            Result(
                f"{shape.name}: logits in one pass from the step's, of the largest",
                bench.distance(8, 64),
                "",
                "lower",
            )
        )
        bench.close()
    env["load_average_after"] = environment()["load_average_before"]
    write("in-engine", results, env, options.json)


def _figures(where: str, times: list[Times], *, has_goal: bool) -> list[Result]:
    of_sum, spread = middle([each.of_the_sum for each in times])
    whole, whole_spread = middle([each.with_backward for each in times])
    in_turns, _ = middle([(each.step + each.forward) * 1e3 for each in times])
    alone, _ = middle([each.step / (each.step + each.forward) for each in times])
    return [
        Result(
            f"{where}: one pass over in turns",
            round(of_sum, 3),
            "",
            "lower",
            goal=GOAL_OF_THE_SUM if has_goal else None,
            spread=round(spread, 3),
            baseline=Baseline("in turns, ms of CPU", round(in_turns, 3)),
        ),
        Result(
            f"{where}: the same with the backward",
            round(whole, 3),
            "",
            "lower",
            spread=round(whole_spread, 3),
        ),
        Result(f"{where}: the step alone, of in turns", round(alone, 3), "", "higher"),
    ]


if __name__ == "__main__":
    main()
