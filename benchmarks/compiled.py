"""Measure training on cores with layers that are compiled, beside the same layers run eagerly.

A Llama of four layers (hidden 512, vocabulary 4,096, fp32) with weights from a seed and an adapter
of rank 16 on every linear layer; a step is 16 rows of 64 tokens, packed into one micro-batch of
four lines of 256 tokens. Denormals are flushed, as in a worker. Arms:

- *eager*: the model's own modules;
- *compiled*: the same layers by AOTAutograd and Inductor (`WINDROW_LAYER_PROGRAM=compiled`).

A round runs both for as many steps, and the next round the other way round. Figures are real tokens
a second, by the clock and by the process's CPU time, and the ratio of each round. What the products
of a layer alone take, forward and back, is measured beside: nothing that is compiled can take less,
for both arms call the same library for them.

Example: python -m benchmarks.compiled --json /tmp/compiled.json
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.harness import Baseline, Result, arguments, environment, middle, write
from windrow_sidecar.finetune.adapter.adapters import Adapter, trainable
from windrow_sidecar.finetune.adapter.compiled_layer import Shape, use_compiled
from windrow_sidecar.finetune.data.split import BatchPlan, DataSplit, Example
from windrow_sidecar.finetune.engine.micro_batch_group import ModelParts
from windrow_sidecar.finetune.engine.packing import LineSizes
from windrow_sidecar.finetune.engine.stages import StepDone
from windrow_sidecar.finetune.engine.stream import TaskletStream
from windrow_sidecar.finetune.model.boundaries import TorchBoundaries
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.model.loss import Head
from windrow_sidecar.finetune.tasklets import MicroLimits
from windrow_sidecar.finetune.training.evaluation import EvaluationPolicy
from windrow_sidecar.finetune.training.optimizer import AdapterOptimizer, Schedule
from windrow_sidecar.testing.equality import small_spec, tuned_model

HIDDEN, INNER, LAYERS, VOCABULARY, RANK = 512, 1408, 4, 4096, 16
ROWS, TOKENS, WIDTH = 16, 64, 256
LINES = ROWS * TOKENS // WIDTH
ROUNDS, STEPS, GOAL = 15, 2, 1.15


@dataclass
class Arm:
    """A stream that trains.

    Attributes:
        stream: of its tasklets.
        losses: of its steps.
    """

    stream: TaskletStream
    losses: list[float]

    def run(self, steps: int) -> tuple[float, float]:
        """Run so many steps; return real tokens a second, by the clock and by CPU time."""
        began, began_cpu, done = time.perf_counter(), time.process_time(), 0
        while done < steps:
            tasklet = self.stream.peek()
            assert tasklet is not None
            if isinstance(ended := self.stream.run(tasklet), StepDone):
                self.losses.append(ended.position.loss or 0.0)
                done += 1
        tokens = steps * ROWS * TOKENS
        return tokens / (time.perf_counter() - began), tokens / (time.process_time() - began_cpu)


def main() -> None:
    """Measure; print and write the figures."""
    parser = arguments(__doc__)
    parser.add_argument("--cores", type=int, default=2, help="to compute on")
    options = parser.parse_args()
    torch.set_num_threads(options.cores)
    torch.set_flush_denormal(True)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-options.cores :])
    began = time.process_time(), sum(os.times()[2:4])
    eager, compiled = _arm(is_compiled=False), _arm(is_compiled=True)
    spent_s = time.process_time() - began[0] + sum(os.times()[2:4]) - began[1]
    arms = {"eager": eager, "compiled": compiled}
    for arm in arms.values():
        arm.run(1)  # moments and caches are there afterwards
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    products = []
    for n in range(3 if options.quick else ROUNDS):
        for name in arms if n % 2 == 0 else reversed(arms):
            rates[name].append(arms[name].run(STEPS))
        products.append(_products())
    apart = max(abs(a - b) for a, b in zip(eager.losses, compiled.losses, strict=True))
    facts = environment() | {
        "cores": options.cores,
        "model": f"{LAYERS} layers, hidden {HIDDEN}, MLP {INNER}, vocabulary {VOCABULARY}, fp32",
        "step": f"{ROWS} rows of {TOKENS} tokens in {LINES} lines of {WIDTH}",
        "losses_apart_at_most": apart,
        "losses": [eager.losses[0], eager.losses[-1]],
        "compiling_cpu_s": round(spent_s, 1),
    }
    write("compiled", _results(rates, products), facts, options.json)


def _results(rates: dict[str, list[tuple[float, float]]], products: list[float]) -> list[Result]:
    found = []
    for at, by in enumerate(("by the clock", "by CPU time")):
        of = {name: [both[at] for both in pairs] for name, pairs in rates.items()}
        beside = Baseline("eager", middle(of["eager"])[0])
        for name, values in of.items():
            value, spread = middle(values)
            found.append(Result(f"{name}, {by}", value, "tokens/s", "higher", None, spread, beside))
        ratios = [a / b for a, b in zip(of["compiled"], of["eager"], strict=True)]
        value, spread = middle(ratios)
        goal = GOAL if at == 0 else None
        name = f"compiled against eager, {by}"
        found.append(Result(name, value, "x", "higher", goal, spread, beside))
    step_s = ROWS * TOKENS / middle([by_cpu for _, by_cpu in rates["eager"]])[0]
    share = middle([LAYERS * of_layer_s / step_s for of_layer_s in products])
    name = "products of all layers, of a step's CPU time when it runs eagerly"
    found.append(Result(name, share[0], "x", "lower", None, share[1]))
    return found


def _arm(*, is_compiled: bool) -> Arm:
    spec = small_spec({"lora": {"rank": RANK, "alpha": 2 * RANK, "targetModules": "all-linear"}})
    tuned = tuned_model(_model(), spec)
    stack = DecoderStack(tuned.get_base_model())
    parts = ModelParts(stack, Head(stack), Adapter(tuned))
    shape = Shape(LINES, WIDTH, packed=True)
    if is_compiled and (why := use_compiled(stack, [shape])):
        raise SystemExit(why)
    steps = 1 << 20
    stream = TaskletStream(
        parts,
        AdapterOptimizer(trainable(tuned), Schedule("constant", 1e-4, steps, 0.0)),
        DataSplit(_rows(), ()),
        BatchPlan(ROWS, ROWS, 17),
        total_steps=steps,
        boundaries=TorchBoundaries(),
        limits=lambda: MicroLimits(ROWS * TOKENS),
        seed=17,
        evaluation_policy=EvaluationPolicy(packed=True),
        line_sizes=LineSizes(WIDTH, ROWS * TOKENS),
    )
    return Arm(stream, [])


def _products() -> float:
    """Return the seconds of CPU time that a layer's products take, forward and back, without LoRA.

    Forward each weight once, back once more for the gradient of the input.
    """
    kv = HIDDEN // 2
    pairs = [(HIDDEN, HIDDEN)] * 2 + [(HIDDEN, kv)] * 2 + [(HIDDEN, INNER)] * 2 + [(INNER, HIDDEN)]
    tokens = ROWS * TOKENS
    made = [(torch.randn(tokens, a), torch.randn(b, a), torch.randn(tokens, b)) for a, b in pairs]
    began = time.process_time()
    for x, weight, gradient in made:
        torch.mm(x, weight.t())
        torch.mm(gradient, weight)
    return time.process_time() - began


def _rows() -> tuple[Example, ...]:
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (ROWS, TOKENS), generator=draw).tolist()
    return tuple(Example(tuple(row), tuple(row), f"rows:{n}") for n, row in enumerate(ids))


def _model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
    )
    made: nn.Module = LlamaForCausalLM(config).requires_grad_(requires_grad=False)
    return made


if __name__ == "__main__":
    main()
