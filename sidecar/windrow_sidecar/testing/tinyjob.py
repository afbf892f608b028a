"""A whole finetune job over a random Llama of a few thousand parameters: runs in a second."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from windrow.crd import parse_job_spec
from windrow_sidecar.finetune.adapter.adapters import Adapter, add_adapter, trainable
from windrow_sidecar.finetune.data.split import BatchPlan, Example, split
from windrow_sidecar.finetune.engine.micro_batch_group import ModelParts
from windrow_sidecar.finetune.engine.packing import LineSizes
from windrow_sidecar.finetune.engine.sizing import TaskletSizing, WholeRows
from windrow_sidecar.finetune.engine.stream import TaskletStream
from windrow_sidecar.finetune.model.around import AroundLayer
from windrow_sidecar.finetune.model.boundaries import Boundaries, TorchBoundaries
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.model.loss import Head
from windrow_sidecar.finetune.recompute.activation_budget import ActivationBudget, JobMemory
from windrow_sidecar.finetune.recompute.checkpointed_layers import PlannedLayers
from windrow_sidecar.finetune.tasklets import MicroLimits
from windrow_sidecar.finetune.training.evaluation import EvaluationPolicy
from windrow_sidecar.finetune.training.optimizer import AdapterOptimizer, Schedule

WHOLE = WholeRows()
VOCABULARY, HIDDEN, LAYERS, ROWS = 64, 16, 2, 10


@dataclass(slots=True)
class TinyJob:
    """Adapter and tasklets."""

    model: Any
    stream: TaskletStream


def tiny_job(
    *,
    steps: int = 4,
    max_tokens: int = 24,
    micro_batches: int = 1,
    sizing: TaskletSizing = WHOLE,
    boundaries: Boundaries | None = None,
    evaluation_policy: EvaluationPolicy | None = None,
    base: nn.Module | None = None,
    around_layer: AroundLayer | None = None,
    adapter: Mapping[str, Any] | None = None,
    seed: int = 1,
    units: Callable[[], int] = lambda: 0,
    keep_for: Callable[[int], None] = lambda tokens: None,
    line_sizes: LineSizes | None = None,
) -> TinyJob:
    """Make the job; equal arguments give bit-equal jobs. It has dropout and held-out rows."""
    spec = parse_job_spec(
        {
            "model": {"name": "tiny"},
            "dataset": {"source": "/rows.jsonl"},
            "adapter": adapter or {"lora": {"rank": 2, "alpha": 4, "dropout": 0.1}},
            "training": {"maxSteps": steps, "batchSize": 3, "learningRate": "1e-2", "seed": seed},
            "output": {"destination": "/out"},
        }
    )
    base = tiny_llama() if base is None else base
    tuned = add_adapter(base, spec)
    stack = DecoderStack(base, around_layer, units)
    rows = split(_rows(), eval_fraction=0.2, seed=1)
    stream = TaskletStream(
        ModelParts(stack, Head(stack), Adapter(tuned)),
        AdapterOptimizer(trainable(tuned), Schedule("cosine", 1e-2, steps, 0.0)),
        rows,
        BatchPlan(len(rows.train), 3, seed),
        total_steps=steps,
        boundaries=boundaries or TorchBoundaries(),
        limits=lambda: MicroLimits(max_tokens, micro_batches=micro_batches),
        sizing=lambda: sizing,
        seed=seed,
        evaluation_policy=evaluation_policy,
        keep_for=keep_for,
        line_sizes=line_sizes,
    )
    return TinyJob(tuned, stream)


def activation_budget_of(job: TinyJob, free_bytes: Callable[[], int]) -> ActivationBudget:
    """Return what such a job's groups take besides boundaries, of memory with so much free."""
    stack = DecoderStack(job.model.get_base_model())
    needs = JobMemory(longest=15, adapter_bytes=1000, own_boundaries=False)
    return ActivationBudget(
        stack, PlannedLayers(stack.layers), needs, least=False, free_bytes=free_bytes
    )


def tiny_llama() -> nn.Module:
    """Return the same frozen model each time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        made: nn.Module = LlamaForCausalLM(config).requires_grad_(requires_grad=False)
    return made


def adapter_of(job: TinyJob) -> dict[str, Tensor]:
    """Return a copy of the adapter's parameters, [...] each."""
    return {name: p.detach().clone() for name, p in trainable(job.model).items()}


def bit_equal(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """Return whether both hold the same tensors [...] under the same names."""
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in theirs)


def advance(stream: TaskletStream, n: int) -> None:
    """Run so many tasklets, or as many as are left."""
    for _ in range(n):
        if (tasklet := stream.peek()) is not None:
            stream.run(tasklet)


def finish(job: TinyJob) -> None:
    """Run what is left of a job."""
    while (tasklet := job.stream.peek()) is not None:
        job.stream.run(tasklet)


def _rows() -> list[Example]:
    draw = torch.Generator().manual_seed(3)
    examples = []
    for i in range(ROWS):
        n = int(torch.randint(4, 16, (), generator=draw))
        ids = tuple(torch.randint(3, VOCABULARY, (n,), generator=draw).tolist())
        examples.append(Example(ids, (-100, *ids[1:]), f"rows:{i}"))
    return examples


class SpoilingHome:
    """A home (see `job_state.Home`) whose memory others write to once a tensor has left it.

    Attributes:
        moved: tensors that have left it so far.
        away: those that are not back yet.
    """

    def __init__(self) -> None:
        self.moved, self.away = 0, 0

    def out(self, tensor: Tensor) -> Tensor:
        """Return a copy of `tensor` [...], and spoil what was left."""
        kept = tensor.clone()
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
        self.moved, self.away = self.moved + 1, self.away + 1
        return kept

    def back(self, tensor: Tensor) -> Tensor:
        """Return `tensor` [...] in memory of its own."""
        self.away -= 1
        return tensor.clone()

    def settle(self) -> None:
        """Do nothing: everything is done at once."""
