"""A whole finetune job over a random Llama of a few thousand parameters: runs in a second."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from windrow.crd import parse_job_spec
from windrow_sidecar.finetune.adapters import add_adapter, trainable
from windrow_sidecar.finetune.data import BatchPlan, Example, split
from windrow_sidecar.finetune.layerwise import Boundaries, DecoderStack, TorchBoundaries
from windrow_sidecar.finetune.loss import Head
from windrow_sidecar.finetune.optimizer import AdapterOptimizer
from windrow_sidecar.finetune.schedule import Schedule
from windrow_sidecar.finetune.stream import MicroLimits, TaskletStream

VOCABULARY, HIDDEN, LAYERS, ROWS = 64, 16, 2, 10


@dataclass(slots=True)
class TinyJob:
    """Adapter and tasklets."""

    model: Any
    stream: TaskletStream


def tiny_job(
    *, steps: int = 4, max_tokens: int = 24, boundaries: Boundaries | None = None
) -> TinyJob:
    """Make the job; equal arguments give bit-equal jobs. It has dropout and held-out rows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    spec = parse_job_spec(
        {
            "model": {"name": "tiny"},
            "dataset": {"source": "/rows.jsonl"},
            "adapter": {"lora": {"rank": 2, "alpha": 4, "dropout": 0.1}},
            "training": {"maxSteps": steps, "batchSize": 3, "learningRate": "1e-2"},
            "output": {"destination": "/out"},
        }
    )
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
        base = LlamaForCausalLM(config).requires_grad_(requires_grad=False)
    tuned = add_adapter(base, spec)
    stack = DecoderStack(base)
    rows = split(_rows(), eval_fraction=0.2, seed=1)
    stream = TaskletStream(
        tuned,
        stack,
        Head(stack.norm, stack.head, stack.config),
        AdapterOptimizer(trainable(tuned), Schedule("cosine", 1e-2, steps, 0.0)),
        rows,
        BatchPlan(len(rows.train), 3, 1),
        total_steps=steps,
        boundaries=boundaries or TorchBoundaries(),
        limits=lambda: MicroLimits(max_tokens),
        seed=1,
    )
    return TinyJob(tuned, stream)


def adapter_of(job: TinyJob) -> dict[str, Tensor]:
    """Return a copy of the adapter's parameters."""
    return {name: p.detach().clone() for name, p in trainable(job.model).items()}


def _rows() -> list[Example]:
    draw = torch.Generator().manual_seed(3)
    examples = []
    for i in range(ROWS):
        n = int(torch.randint(4, 16, (), generator=draw))
        ids = tuple(torch.randint(3, VOCABULARY, (n,), generator=draw).tolist())
        examples.append(Example(ids, (-100, *ids[1:]), f"rows:{i}"))
    return examples
