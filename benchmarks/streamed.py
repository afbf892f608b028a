"""Measure one pass over streamed layers that carries decode and a finetune batch (FineInfer).

A Llama of 16 layers in fp32 of which memory holds a part. Layers that are absent are read from the
checkpoint's safetensors at a declared rate, the stand-in for the link between host and device: the
file itself is in the page cache, which would make it free. Decode is the built-in engine's step
over 8 requests with 128 tokens of context each. Finetuning is the engine's own packed layers with
LoRA of rank 16 on every product: a batch of 4 samples of 64 tokens, in micro-batches of one, which
pass each layer together.

- *one pass*: the forward carries the step's tokens, then the backward (`--weights-budget` with
  `--finetune fused`);
- *in turns*: in one engine, over the same layers, the step, then the forward and the backward
  (`--finetune in-engine`);
- *two processes*: decode and the worker stream for themselves, each with half of the layers that
  memory holds and half of the rate. Each is measured alone, so neither takes the other's core;
- *two processes, most memory for the worker*: decode has the least that it can run with, two
  layers, and the worker all others.

All do the same work an iteration: a batch forward and backward, and at least one token for every
request. Everything runs on one thread, with the reading on a second.

The bound of an iteration is the bytes that it reads by the rate. Where all forms reach it, what
one pass gains is the bytes: with L layers of which K are in memory, one pass reads 2 (L - K) of
them, in turns 3 (L - K), and the worker of two processes 2 (L - K/2) at half the rate.

Example: python -m benchmarks.streamed --json /tmp/streamed.json
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.dlpack import from_dlpack
from transformers import LlamaConfig as TransformersConfig
from transformers import LlamaForCausalLM

from benchmarks.harness import Baseline, Better, Result, arguments, environment, middle, write
from windrow.crd import parse_job_spec
from windrow_sidecar._core import Arena, Geometry
from windrow_sidecar.engines.builtin.kv.kvcache import KvCache, SequenceKv
from windrow_sidecar.engines.builtin.kv.kvplaces import KvPlaces
from windrow_sidecar.engines.builtin.llama.config import read_config
from windrow_sidecar.engines.builtin.llama.model import LlamaModel
from windrow_sidecar.engines.builtin.llama.riding import Product
from windrow_sidecar.engines.builtin.llama.weights import plan_streamed_layout
from windrow_sidecar.engines.builtin.scheduler import EngineRequest
from windrow_sidecar.engines.builtin.step.gathered import GatheredDecode
from windrow_sidecar.engines.builtin.streamed import stream_weights
from windrow_sidecar.engines.builtin.web.messages import Submit
from windrow_sidecar.finetune.adapter.adapters import ADAPTER, add_adapter, trainable
from windrow_sidecar.finetune.adapter.layer_programs import use_program
from windrow_sidecar.finetune.in_engine.joined_products import RiderSeat, join_products
from windrow_sidecar.finetune.model.boundaries import Activations, TorchBoundaries
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.model.loading import ExportedWeights
from windrow_sidecar.finetune.model.overlay import build_over

LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 16, 512, 1408, 8, 2, 64
VOCABULARY, REQUESTS, CONTEXT, PAGE, SLOTS = 512, 8, 128, 16, 64
SAMPLES, TOKENS = 4, 64
IN_MEMORY = (6, 8, 12)
LEAST_OF_DECODE = 2
BYTES_PER_S = 32 << 20
ROUNDS = 3
GOAL_TIMES_APART = 3.0


class Engine:
    """Decode and finetune layers over one model's streamed weights.

    Args:
        folder: of the checkpoint.
        capacity: layers that memory holds.
        bytes_per_s: that layers come at.
    """

    def __init__(self, folder: Path, capacity: int, bytes_per_s: float) -> None:
        self._config = config = read_config(folder)
        _, spans = plan_streamed_layout(config, torch.float32)
        budget = spans[0].begin + capacity * (spans[0].end - spans[0].begin)
        self._weights = stream_weights(
            folder,
            config,
            torch.float32,
            "made",
            budget_bytes=budget,
            bytes_per_s=bytes_per_s,
        )
        self.layers, self._rate = self._weights.layers, bytes_per_s
        chunks = REQUESTS * (CONTEXT + PAGE) // SLOTS + 1
        self._arena = Arena.create(
            Geometry(
                layers=LAYERS,
                kv_heads=KV_HEADS,
                head_dim=HEAD_DIM,
                dtype_bytes=4,
                block_bytes=SLOTS * config.kv_width * 4,
                chunks=chunks,
                layout="per-layer",
            ),
            reserved_chunks=0,
            driver="host",
        )
        kv = from_dlpack(self._arena.tensor(0, self._arena.geometry.arena_bytes))
        cache = KvCache(
            kv.view(torch.float32),
            config,
            KvPlaces.of(self._arena),
            page_size=PAGE,
            max_tokens=CONTEXT + PAGE,
        )
        self._model = LlamaModel(
            config, self._weights.layout, self._weights.pages.storage, cache, self.layers.step
        )
        self._decoder = GatheredDecode(self._model)
        pages = iter(range(chunks * SLOTS // PAGE))
        self._requests = []
        for number in range(REQUESTS):
            held = SequenceKv()
            needed = cache.pages_for(CONTEXT + 1)
            cache.extend(held, [next(pages) for _ in range(needed)])
            cache.fill(held, CONTEXT)
            prompt = (5 + number,) * (CONTEXT + 1)
            submit = Submit(number, "", prompt, 1, 0.0, 1.0, 0, frozenset(), False, 0)
            self._requests.append(EngineRequest(submit, list(prompt), held))
        self._seat = RiderSeat()
        self._stack = self._finetune(folder)

    def close(self) -> None:
        """End the reading."""
        self.layers.close()

    def one_pass(self) -> torch.Tensor:
        """Run an iteration that carries the step; return the step's logits, [requests, vocab]."""
        with torch.inference_mode():
            self._seat.riding = riding = self._decoder.ride(self._requests)
        batch = self._forward()
        self._seat.riding = None
        assert riding.joined == LAYERS * len(Product)
        with torch.inference_mode():
            logits = self._model.logits(riding.finish())
        for request in self._requests:
            request.kv.n_tokens -= 1
        self._backward(batch)
        return logits

    def in_turns(self) -> torch.Tensor:
        """Run the step, then the iteration; return the step's logits, [requests, vocab]."""
        logits = self.step()
        self.iteration()
        return logits

    def step(self) -> torch.Tensor:
        """Run a step of decode; return its logits, [requests, vocab]."""
        with torch.inference_mode():
            logits = self._decoder.logits(self._requests)
        for request in self._requests:
            request.kv.n_tokens -= 1
        return logits

    def iteration(self) -> None:
        """Run a batch forward and backward."""
        self._backward(self._forward())

    def timed(self, call: Callable[[], object]) -> Timed:
        """Run it; return its time and the time that its reads take at the rate."""
        before, began = self.layers.moved.n_bytes, time.monotonic()
        call()
        took = time.monotonic() - began
        return Timed(took, (self.layers.moved.n_bytes - before) / self._rate)

    def _finetune(self, folder: Path) -> DecoderStack:
        exported = ExportedWeights(
            self._weights.layout.manifest("made"), self._weights.pages.storage
        )
        config = TransformersConfig.from_pretrained(folder)
        base = build_over(exported.tensors(), config, torch.float32).requires_grad_(
            requires_grad=False
        )
        spec = parse_job_spec(
            {
                "model": {"name": "made"},
                "dataset": {"source": "/rows.jsonl"},
                "adapter": {"lora": {"rank": 16, "alpha": 32, "targetModules": "all-linear"}},
                "training": {"maxSteps": 1, "batchSize": SAMPLES, "learningRate": "1e-4"},
                "output": {"destination": "/out"},
            }
        )
        tuned = add_adapter(base, spec, self.layers)
        self._learns = list(trainable(tuned).values())
        stack = DecoderStack(base, self.layers)
        shapes = [
            dict(zip(Product, (of.qkv, of.out, of.gate_up, of.down), strict=True))
            for of in self._model.layers
        ]
        why = use_program(stack, "packed", adapter=ADAPTER) or join_products(
            stack, lambda layer, product: shapes[layer][product].shape, self._seat
        )
        if why:
            raise SystemExit(why)
        return stack

    def _forward(self) -> list[Activations]:
        for parameter in self._learns:
            parameter.grad = None
        rows = torch.arange(TOKENS)[None] % VOCABULARY
        batch = [self._stack.begin(rows + n) for n in range(SAMPLES)]
        for layer in range(LAYERS):
            for at in batch:
                self._stack.forward(at, layer, at.whole, TorchBoundaries(), learn=True)
        return batch

    def _backward(self, batch: list[Activations]) -> None:
        for at in batch:
            made = at.inputs[-1]
            assert made is not None
            at.gradient = torch.ones_like(made)
        for layer in reversed(range(LAYERS)):
            for at in batch:
                self._stack.backward(at, layer, at.whole)


@dataclass(frozen=True)
class Timed:
    """Seconds of something, and the seconds that its reads take at the declared rate."""

    took: float
    reading: float

    @property
    def samples_per_min(self) -> float:
        """Samples a minute, where it was an iteration."""
        return SAMPLES * 60 / self.took


@dataclass(frozen=True)
class Round:
    """Every form once; of two processes the worker's iteration and decode's step."""

    one_pass: Timed
    in_turns: Timed
    half: Timed
    half_step: Timed
    most: Timed
    most_step: Timed
    resident: Timed


def _checkpoint(folder: Path) -> None:
    torch.manual_seed(7)
    config = TransformersConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def _measure(folder: Path, in_memory: int, rounds: int) -> tuple[list[Round], float]:
    """Return the rounds, and how far a carried step's logits are from those of the step alone."""
    with ExitStack() as closing:

        def engine(capacity: int, bytes_per_s: float = BYTES_PER_S) -> Engine:
            made = Engine(folder, capacity, bytes_per_s)
            closing.callback(made.close)
            return made

        together = engine(in_memory)
        half = engine(in_memory // 2, BYTES_PER_S / 2)
        half_step = engine(in_memory // 2, BYTES_PER_S / 2)
        most = engine(in_memory - LEAST_OF_DECODE, BYTES_PER_S / 2)
        most_step = engine(LEAST_OF_DECODE, BYTES_PER_S / 2)
        resident = engine(LAYERS, 1e12)
        carried, alone = together.one_pass(), together.step()
        apart = float((carried - alone).abs().max() / alone.abs().max())
        assert torch.equal(carried.argmax(-1), alone.argmax(-1)), "greedy answers differ"
        found = []
        for _ in range(1 + rounds):  # the first one brings each form's layers into their places
            found.append(
                Round(
                    together.timed(together.one_pass),
                    together.timed(together.in_turns),
                    half.timed(half.iteration),
                    half_step.timed(half_step.step),
                    most.timed(most.iteration),
                    most_step.timed(most_step.step),
                    resident.timed(resident.one_pass),
                )
            )
            together.one_pass()  # what a round leaves in memory is what a pass leaves
        return found[1:], apart


def _figures(in_memory: int, rounds: list[Round]) -> list[Result]:
    where = f"{in_memory} of {LAYERS} layers in memory"

    def ratio(of: Callable[[Round], Timed], name: str, goal: float | None) -> Result:
        times = [of(each).took / each.one_pass.took for each in rounds]
        value, spread = middle(times)
        apart, _ = middle([of(each).samples_per_min for each in rounds])
        return Result(
            f"{where}: samples a minute in one pass, over {name}",
            round(value, 2),
            "x",
            "higher",
            goal=goal,
            spread=round(spread, 3),
            baseline=Baseline(f"{name}, samples a minute", round(apart, 1)),
        )

    def value(name: str, unit: str, better: Better, of: Callable[[Round], float]) -> Result:
        found, spread = middle([of(each) for each in rounds])
        return Result(f"{where}: {name}", round(found, 3), unit, better, spread=round(spread, 3))

    absent = LAYERS - in_memory
    apart = 2 * (LAYERS - in_memory / 2) / absent
    return [
        value("one pass", "samples/min", "higher", lambda r: r.one_pass.samples_per_min),
        value(
            "one pass, all layers in memory",
            "samples/min",
            "higher",
            lambda r: r.resident.samples_per_min,
        ),
        ratio(lambda r: r.half, "two processes, half of memory and rate each", GOAL_TIMES_APART),
        Result(
            f"{where}: the same by the bytes alone, 2 (L - K/2) / (L - K)",
            round(apart, 2),
            "x",
            "higher",
        ),
        ratio(lambda r: r.most, "two processes, most memory for the worker", None),
        ratio(lambda r: r.in_turns, "in turns in one engine", None),
        value(
            "one pass: part of its time that reading bounds",
            "",
            "higher",
            lambda r: r.one_pass.reading / r.one_pass.took,
        ),
        value("time between tokens, one pass", "s", "lower", lambda r: r.one_pass.took),
        value("time between tokens, in turns", "s", "lower", lambda r: r.in_turns.took),
        value(
            "time between tokens, two processes, half each",
            "s",
            "lower",
            lambda r: r.half_step.took,
        ),
        value(
            "time between tokens, two processes, most memory for the worker",
            "s",
            "lower",
            lambda r: r.most_step.took,
        ),
    ]


def main() -> None:
    """Measure; print and write the figures."""
    options = arguments(__doc__).parse_args()
    env = environment()
    env["bytes_per_s"] = BYTES_PER_S
    env["reads"] = (
        "from the page cache, at the declared rate: 32 MiB/s for all that is in one device"
    )
    torch.set_num_threads(1)
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="windrow-streamed-") as made:
        folder = Path(made)
        _checkpoint(folder)
        for in_memory in IN_MEMORY[1:2] if options.quick else IN_MEMORY:
            rounds, apart = _measure(folder, in_memory, 1 if options.quick else ROUNDS)
            results += _figures(in_memory, rounds)
            results.append(
                Result(
                    f"{in_memory} of {LAYERS} layers in memory: logits of a carried step from the "
                    "step's, of the largest",
                    apart,
                    "",
                    "lower",
                )
            )
    env["load_average_after"] = environment()["load_average_before"]
    write("streamed", results, env, options.json)


if __name__ == "__main__":
    main()
