"""The same training twice: by our tasklets, and the ordinary way by peft and torch."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from windrow.crd import FinetuneJobSpec, parse_job_spec
from windrow_sidecar.finetune.adapter.adapters import Adapter, add_adapter, trainable
from windrow_sidecar.finetune.data.split import IGNORED, BatchPlan, DataSplit, Example
from windrow_sidecar.finetune.engine.micro_batch_group import ModelParts
from windrow_sidecar.finetune.engine.orders import Order, layer_major
from windrow_sidecar.finetune.engine.sizing import TaskletSizing, WholeRows
from windrow_sidecar.finetune.engine.stream import TaskletStream
from windrow_sidecar.finetune.model.around import AroundLayer
from windrow_sidecar.finetune.model.boundaries import TorchBoundaries
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.model.embedding import by_token
from windrow_sidecar.finetune.model.loss import Head
from windrow_sidecar.finetune.model.token_dropout import DropoutKeys, TokenDropout
from windrow_sidecar.finetune.offload.frozen_layers import FrozenLayers
from windrow_sidecar.finetune.tasklets import MicroLimits, TokenWindow
from windrow_sidecar.finetune.training.evaluation import EvaluationPolicy
from windrow_sidecar.finetune.training.optimizer import AdapterOptimizer, Schedule
from windrow_sidecar.qos.view import Phase

STEPS, BATCH, SEED, RATE = 5, 5, 17, 1e-2


@dataclass(frozen=True, slots=True)
class Cut:
    """How the work of ours is cut."""

    sizing: TaskletSizing = WholeRows()  # noqa: RUF009 - has no state
    order: Order = layer_major
    max_tokens: int = 4096
    micro_batches: int = 1
    around_layer: AroundLayer | None = None
    packed: bool = False


def small_spec(adapter: Mapping[str, Any] | None = None) -> FinetuneJobSpec:
    """Return the spec of a few steps; `adapter` as in a manifest."""
    return parse_job_spec(
        {
            "model": {"name": "random"},
            "dataset": {"source": "/rows.jsonl"},
            "adapter": adapter or {"lora": {"rank": 4, "alpha": 8}},
            "training": {"maxSteps": STEPS, "batchSize": BATCH, "learningRate": str(RATE)},
            "output": {"destination": "/out"},
        }
    )


def small_rows(n: int = 12) -> tuple[Example, ...]:
    """Return rows of 5 to 40 tokens; the loss leaves out the first third of each."""
    draw = torch.Generator().manual_seed(3)
    rows = []
    for i in range(n):
        length = int(torch.randint(5, 40, (), generator=draw))
        ids = tuple(torch.randint(3, 96, (length,), generator=draw).tolist())
        prompt = length // 3
        rows.append(Example(ids, (IGNORED,) * prompt + ids[prompt:], f"rows:{i}"))
    return tuple(rows)


def tuned_model(
    model: nn.Module,
    spec: FinetuneJobSpec,
    frozen: FrozenLayers | None = None,
) -> Any:  # noqa: ANN401 - peft is untyped
    """Add the adapter, away from its start: a `lora_B` of zeros would hide the gradients of A."""
    tuned = add_adapter(model, spec, frozen)
    draw = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in trainable(tuned).values():
            noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float32)
            parameter.add_(0.05 * noise.to(parameter.dtype))
    return tuned


def stream_of(
    tuned: Any,  # noqa: ANN401
    rows: tuple[Example, ...],
    cut: Cut,
    held_out: tuple[Example, ...] = (),
) -> TaskletStream:
    """Return our engine over a tuned model, as a job has it."""
    stack = DecoderStack(tuned.get_base_model(), cut.around_layer)
    return TaskletStream(
        ModelParts(stack, Head(stack), Adapter(tuned)),
        AdapterOptimizer(trainable(tuned), Schedule("cosine", RATE, STEPS, 0.0)),
        DataSplit(rows, held_out),
        BatchPlan(len(rows), BATCH, SEED),
        total_steps=STEPS,
        boundaries=TorchBoundaries(),
        limits=lambda: MicroLimits(cut.max_tokens, micro_batches=cut.micro_batches),
        sizing=lambda: cut.sizing,
        order=cut.order,
        seed=SEED,
        evaluation_policy=EvaluationPolicy(packed=cut.packed),
    )


def our_gradients(tuned: Any, rows: tuple[Example, ...], cut: Cut) -> dict[str, Tensor]:  # noqa: ANN401
    """Return the gradients of the first batch, by parameter."""
    stream = stream_of(tuned, rows, cut)
    while (tasklet := stream.peek()) is not None and tasklet.phase is not Phase.OPTIMIZER:
        stream.run(tasklet)
    return {
        name.removeprefix("sum/"): tensor.clone()
        for name, tensor in stream.tensors().items()
        if name.startswith("sum/")
    }


def pefts_gradients(tuned: Any, rows: tuple[Example, ...]) -> dict[str, Tensor]:  # noqa: ANN401
    """Return the gradients of the first batch the ordinary way: one padded batch with its mask."""
    tuned = copy.deepcopy(tuned).train()
    PeftLoop(tuned, rows).backward(0)
    return {name: p.grad for name, p in trainable(tuned).items() if p.grad is not None}


class PeftLoop:
    """The ordinary way: padded batch with mask, the model's own loss, torch's AdamW.

    Dropout drops the units that ours drops, or nothing could be compared.

    Attributes:
        parameters: what is trained.
    """

    def __init__(self, tuned: Any, rows: tuple[Example, ...]) -> None:  # noqa: ANN401
        self._tuned, self._rows = tuned, rows
        self._plan = BatchPlan(len(rows), BATCH, SEED)
        self.parameters = list(trainable(tuned).values())
        self._keys = DropoutKeys()
        dropouts = [m for m in tuned.modules() if isinstance(m, nn.ModuleDict)]
        places = [(d, n) for d in dropouts for n, m in d.items() if isinstance(m, nn.Dropout)]
        for index, (parent, name) in enumerate(places):
            p = parent[name].p
            parent[name] = TokenDropout(float(p), self._keys, index)  # type: ignore[arg-type]

    def train(self) -> None:
        """Take all steps."""
        from transformers import get_scheduler

        adamw = torch.optim.AdamW(self.parameters, lr=RATE, weight_decay=0.0)
        schedule = get_scheduler("cosine", adamw, 0, STEPS)
        self._tuned.train()
        for step in range(STEPS):
            adamw.zero_grad()
            self.backward(step)
            nn.utils.clip_grad_norm_(self.parameters, 1.0)
            adamw.step()
            schedule.step()

    def backward(self, step: int) -> float:
        """Compute the gradients of a step; returns its loss."""
        numbers = self._plan.rows_of(step)
        batch = [self._rows[i] for i in numbers]
        width = max(row.length for row in batch)
        self._keys.at(SEED, step, numbers, TokenWindow(0, width))
        pads = [width - row.length for row in batch]
        pairs = list(zip(batch, pads, strict=True))
        at = self.parameters[0].device
        ones_and_zeros = [[1] * r.length + [0] * n for r, n in pairs]
        with by_token(self._keys):
            loss: Tensor = self._tuned(
                input_ids=torch.tensor([r.ids + (0,) * n for r, n in pairs], device=at),
                attention_mask=torch.tensor(ones_and_zeros, device=at),
                labels=torch.tensor([r.labels + (IGNORED,) * n for r, n in pairs], device=at),
                use_cache=False,
            ).loss
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())


@dataclass(frozen=True, slots=True)
class Apart:
    """How far tensors are from what they should be, in L2."""

    of_norm: float  # all together, against the norm of all together
    of_tensor: float  # the worst one, against its own norm


def apart(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> Apart:
    """Compare by name.

    A tensor whose norm is below 1e-5 of all of them counts against that: its values are rounding
    errors themselves (the bias of a key, which the softmax cancels).
    """
    if ours.keys() != theirs.keys():
        raise KeyError(sorted(ours.keys() ^ theirs.keys()))
    norm = math.sqrt(sum(float(t.double().square().sum()) for t in theirs.values()))
    off = {name: float((ours[name].double() - theirs[name].double()).norm()) for name in theirs}
    floor = 1e-5 * norm
    worst = max(off[name] / max(floor, float(theirs[name].double().norm())) for name in off)
    return Apart(math.sqrt(sum(value**2 for value in off.values())) / norm, worst)
