"""Measure what four small jobs over one base cost, joined and in turns, beside one job alone.

A Llama of four layers (hidden 512, vocabulary 4,096, fp32) with weights from a seed, on one core;
adapters of rank 16 on every linear layer. One job alone has as many rows in a step as the four have
together, so a tasklet of it is as large as a joint one. Arms:

- *alone*: one job;
- *in turns*: four jobs, each with a quarter of the rows; the next micro-batch is that of the job
  that has had the fewest tokens, as a worker's jobs took turns before they could be joined;
- *joined*: the same four, their rows in the same micro-batches.

A round runs all arms for as many tokens, one after the other, and the next round the other way
round. Figures are real tokens for each second of the process's CPU time: it has one thread, and
what else the machine does then counts little. Each figure has the ratio to the job alone of its own
round. The optimizer takes four times as many steps for four jobs, and that is counted.

Example: python -m benchmarks.joint_jobs --json /tmp/joint-jobs.json
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.harness import Baseline, Result, arguments, environment, middle, write
from windrow.crd import FinetuneJobSpec, parse_job_spec
from windrow_sidecar.finetune.adapter.adapters import Adapter, add_adapter, trainable
from windrow_sidecar.finetune.data.split import BatchPlan, DataSplit, Example
from windrow_sidecar.finetune.engine.joint_stream import JointStream, Member
from windrow_sidecar.finetune.engine.micro_batch_group import ModelParts
from windrow_sidecar.finetune.engine.stages import StepDone
from windrow_sidecar.finetune.engine.stream import TaskletStream
from windrow_sidecar.finetune.job.job_handle import JobShare
from windrow_sidecar.finetune.job.multiplexer import next_turn
from windrow_sidecar.finetune.model.boundaries import TorchBoundaries
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.model.loading import BaseModel
from windrow_sidecar.finetune.model.loss import Head
from windrow_sidecar.finetune.model.shallow_clone import shallow_clone
from windrow_sidecar.finetune.tasklets import MicroLimits
from windrow_sidecar.finetune.training.optimizer import AdapterOptimizer, Schedule

JOBS, RANK, GOAL = 4, 16, 0.9
HIDDEN, LAYERS, VOCABULARY = 512, 4, 4096
# Rows of a job's step, and tokens of a row.
STEPS_OF = ((1, 32), (1, 64), (4, 128))
ROUNDS, STEPS = 5, 3
NO_LIMIT = MicroLimits(1 << 20)


@dataclass
class Arm:
    """Streams that train, and how one tasklet of them is run.

    Attributes:
        run: runs the next tasklet; returns the steps that ended with it.
        norms: gradient norms of all steps.
    """

    run: Callable[[], list[StepDone]]
    norms: list[float]

    def rate(self, steps: int, tokens: int) -> float:
        """Run so many steps of so many tokens; return real tokens a second of CPU time."""
        began, done = time.process_time(), 0
        while done < steps:
            ended = self.run()
            self.norms += [step.facts.gradient_norm for step in ended]
            done += len(ended)
        return steps * tokens / (time.process_time() - began)


def main() -> None:
    """Measure; print and write the figures."""
    parser = arguments(__doc__)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])
    env = environment()
    rounds, steps = (2, 1) if options.quick else (ROUNDS, STEPS)
    results: list[Result] = []
    for rows, tokens in STEPS_OF:
        results += _measure(rows, tokens, rounds, steps)
    write("joint-jobs", results, env, options.json)


def _measure(rows: int, tokens: int, rounds: int, steps: int) -> list[Result]:
    base = BaseModel(_model(), None, None, shared=False)
    arms = {
        "one job alone": (_alone(base, JOBS * rows, tokens), steps, JOBS * rows * tokens),
        "four jobs in turns": (_in_turns(base, rows, tokens), JOBS * steps, rows * tokens),
        "four jobs joined": (_joined(base, rows, tokens), JOBS * steps, rows * tokens),
    }
    for arm, n_steps, n_tokens in arms.values():
        arm.rate(n_steps, n_tokens)  # moments and caches are there afterwards
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for n in range(rounds):
        for name in arms if n % 2 == 0 else reversed(arms):
            arm, n_steps, n_tokens = arms[name]
            rates[name].append(arm.rate(n_steps, n_tokens))
    alone, turns, joined = rates.values()
    what = f"four jobs of {rows} x {tokens} tokens a step"
    found = []
    for name, of in rates.items():
        value, spread = middle(of)
        beside = Baseline("one job alone", middle(alone)[0])
        found.append(
            Result(f"{name}, {what}", value, "tokens/s", "higher", spread=spread, baseline=beside)
        )
    of_turns = [a / b for a, b in zip(turns, alone, strict=True)]
    of_joined = [a / b for a, b in zip(joined, alone, strict=True)]
    beside = Baseline("in turns", middle(of_turns)[0])
    value, spread = middle(of_joined)
    found.append(
        Result(f"joined over alone, {what}", value, "ratio", "higher", GOAL, spread, beside)
    )
    norms = [norm for arm, *_ in arms.values() for norm in arm.norms]
    if not all(math.isfinite(norm) and norm > 0.0 for norm in norms):
        raise SystemExit(f"{what}: a gradient norm is 0 or no number")
    found.append(Result(f"smallest gradient norm, {what}", min(norms), "norm", "higher"))
    return found


def _model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
    )
    torch.manual_seed(11)
    model: nn.Module = LlamaForCausalLM(config).requires_grad_(requires_grad=False)
    return model


def _spec(seed: int) -> FinetuneJobSpec:
    return parse_job_spec(
        {
            "model": {"name": "random"},
            "dataset": {"source": "/rows.jsonl"},
            "adapter": {"lora": {"rank": RANK, "alpha": 32, "targetModules": "all-linear"}},
            "training": {"maxSteps": 1, "learningRate": "1e-4", "seed": seed},
            "output": {"destination": "/out"},
        }
    )


def _stream(base: BaseModel, rows: int, tokens: int, seed: int) -> TaskletStream:
    model = shallow_clone(base).model
    tuned, stack = add_adapter(model, _spec(seed)), DecoderStack(model)
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (4 * rows, tokens), generator=draw).tolist()
    examples = tuple(Example(tuple(row), tuple(row), f"row {n}") for n, row in enumerate(ids))
    return TaskletStream(
        ModelParts(stack, Head(stack), Adapter(tuned)),
        AdapterOptimizer(trainable(tuned), Schedule("constant", 1e-4, 1 << 40, 0.0)),
        DataSplit(examples, ()),
        BatchPlan(len(examples), rows, seed),
        total_steps=1 << 40,
        boundaries=TorchBoundaries(),
        limits=lambda: NO_LIMIT,
        seed=seed,
    )


def _run(stream: TaskletStream) -> list[StepDone]:
    tasklet = stream.peek()
    assert tasklet is not None  # steps without an end
    done = stream.run(tasklet)
    return [done] if isinstance(done, StepDone) else []


def _alone(base: BaseModel, rows: int, tokens: int) -> Arm:
    stream = _stream(base, rows, tokens, seed=1)
    return Arm(lambda: _run(stream), [])


def _in_turns(base: BaseModel, rows: int, tokens: int) -> Arm:
    streams = [_stream(base, rows, tokens, seed) for seed in range(1, JOBS + 1)]
    now = streams[0]

    def run() -> list[StepDone]:
        nonlocal now
        if now.between_micro_batches and not now.before_optimizer:
            now = streams[next_turn([JobShare(one.tokens_seen) for one in streams]) or 0]
        return _run(now)

    return Arm(run, [])


def _joined(base: BaseModel, rows: int, tokens: int) -> Arm:
    joint = JointStream(
        DecoderStack(shallow_clone(base).model),
        boundaries=TorchBoundaries(),
        limits=lambda: NO_LIMIT,
    )
    for seed in range(1, JOBS + 1):
        joint.join(_member(_stream(base, rows, tokens, seed), f"job {seed}"))

    def run() -> list[StepDone]:
        tasklet = joint.peek()
        assert tasklet is not None  # steps without an end
        happened = [one.what for one in joint.run(tasklet)]
        return [what for what in happened if isinstance(what, StepDone)]

    return Arm(run, [])


def _member(stream: TaskletStream, name: str) -> Member:
    return Member(name, stream, had=lambda: float(stream.tokens_seen))


if __name__ == "__main__":
    main()
