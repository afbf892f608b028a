"""The same training twice: by our tasklets, and the ordinary way by peft and torch."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from windrow.crd import FinetuneJobSpec, parse_job_spec
from windrow_sidecar.compute.captures import GraphCaptures
from windrow_sidecar.compute.host_device import HostDevice
from windrow_sidecar.finetune.adapter.adapters import ADAPTER, Adapter, add_adapter, trainable
from windrow_sidecar.finetune.adapter.compiled_layer import Shape, use_compiled
from windrow_sidecar.finetune.adapter.layer_programs import use_graphs, use_program
from windrow_sidecar.finetune.data.split import IGNORED, BatchPlan, DataSplit, Example
from windrow_sidecar.finetune.engine.micro_batch_group import ModelParts
from windrow_sidecar.finetune.engine.orders import Order, layer_major
from windrow_sidecar.finetune.engine.packing import LineSizes
from windrow_sidecar.finetune.engine.sharded_stream import ShardedStream
from windrow_sidecar.finetune.engine.sizing import TaskletSizing, WholeRows
from windrow_sidecar.finetune.engine.stages import StepDone
from windrow_sidecar.finetune.engine.stream import TaskletStream
from windrow_sidecar.finetune.model.around import AroundLayer
from windrow_sidecar.finetune.model.boundaries import TorchBoundaries
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.model.embedding import by_token
from windrow_sidecar.finetune.model.layer_program import ProgramName
from windrow_sidecar.finetune.model.loss import Head
from windrow_sidecar.finetune.model.token_dropout import DropoutKeys, TokenDropout
from windrow_sidecar.finetune.offload.frozen_layers import FrozenLayers
from windrow_sidecar.finetune.tasklets import MicroLimits, TokenWindow
from windrow_sidecar.finetune.tensor_parallel.adapter import AdapterParts
from windrow_sidecar.finetune.tensor_parallel.sharding import Sharding
from windrow_sidecar.finetune.training.evaluation import EvaluationPolicy
from windrow_sidecar.finetune.training.optimizer import AdapterOptimizer, Schedule
from windrow_sidecar.qos.view import Phase
from windrow_sidecar.testing.replays import HostReplays
from windrow_sidecar.testing.rounding import in_type_of

STEPS, BATCH, SEED, RATE = 5, 5, 17, 1e-2


@dataclass(frozen=True, slots=True)
class Recipe:
    """Numbers that a job trains with, besides its rows and its adapter."""

    steps: int = STEPS
    batch: int = BATCH
    seed: int = SEED
    rate: float = RATE
    most_rows: int = 0  # of a micro-batch of ours


@dataclass(frozen=True, slots=True)
class Cut:
    """Way in which our work is cut."""

    sizing: TaskletSizing = WholeRows()  # noqa: RUF009 - has no state
    order: Order = layer_major
    max_tokens: int = 4096
    micro_batches: int = 1
    around_layer: AroundLayer | None = None
    packed: bool = False
    line_sizes: LineSizes | None = None
    program: ProgramName = "eager"
    captures: GraphCaptures | None = None
    shapes: tuple[Shape, ...] = ()  # that layers are compiled for


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
    wide = all(p.dtype == torch.float64 for p in model.parameters())
    tuned = add_adapter(model, spec, frozen)
    if wide:  # peft makes prefixes in fp32 whatever the base is in
        tuned.double()
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
    recipe: Recipe = Recipe(),
    sharded: tuple[Sharding, AdapterParts] | None = None,
) -> TaskletStream:
    """Return our engine over a tuned model, as a job has it; `sharded`: of one rank of several."""
    stack = DecoderStack(tuned.get_base_model(), cut.around_layer)
    if why := use_program(stack, cut.program, adapter=ADAPTER, repacks=True):
        raise ValueError(why)
    if cut.program == "graphs":
        device = HostDevice()
        if why := use_graphs(stack, cut.captures or HostReplays(), mark=device.mark):
            raise ValueError(why)
    head = Head(stack) if sharded is None else Head(stack, sharded[0].cross_entropy)
    parts = ModelParts(stack, head, Adapter(tuned))
    if sharded is not None:
        sharded[1].align_dropouts()
    if cut.program == "compiled" and (why := use_compiled(stack, cut.shapes)):
        raise ValueError(why)
    shared = None if sharded is None else sharded[1]
    kind: Any = TaskletStream if shared is None else partial(ShardedStream, shared)
    schedule = Schedule("cosine", recipe.rate, recipe.steps, 0.0)
    stream: TaskletStream = kind(
        parts,
        AdapterOptimizer(trainable(tuned), schedule, shared=shared),
        DataSplit(rows, held_out),
        BatchPlan(len(rows), recipe.batch, recipe.seed),
        total_steps=recipe.steps,
        boundaries=TorchBoundaries(),
        limits=lambda: MicroLimits(cut.max_tokens, micro_batches=cut.micro_batches),
        sizing=lambda: cut.sizing,
        order=cut.order,
        seed=recipe.seed,
        evaluation_policy=EvaluationPolicy(packed=cut.packed, max_rows=recipe.most_rows),
        line_sizes=cut.line_sizes,
    )
    return stream


def our_gradients(tuned: Any, rows: tuple[Example, ...], cut: Cut) -> dict[str, Tensor]:  # noqa: ANN401
    """Return the gradients of the first batch, by parameter: copies, [...] in its shape."""
    with in_type_of(tuned):
        stream = stream_of(tuned, rows, cut)
        while (tasklet := stream.peek()) is not None and tasklet.phase is not Phase.OPTIMIZER:
            stream.run(tasklet)
        return summed_gradients(stream)


def summed_gradients(stream: TaskletStream) -> dict[str, Tensor]:
    """Return the gradients that a stream has summed, by parameter: copies, [...] in its shape."""
    return {
        name.removeprefix("sum/"): tensor.clone()
        for name, tensor in stream.tensors().items()
        if name.startswith("sum/")
    }


def pefts_gradients(
    tuned: Any,  # noqa: ANN401
    rows: tuple[Example, ...],
    padding: int = 0,
    recipe: Recipe = Recipe(),
) -> dict[str, Tensor]:
    """Return the gradients of the first batch the ordinary way: one padded batch with its mask.

    By parameter, [...] in its shape.
    """
    tuned = copy.deepcopy(tuned).train()
    with in_type_of(tuned):
        PeftLoop(tuned, rows, padding, recipe).backward(0)
    return {name: p.grad for name, p in trainable(tuned).items() if p.grad is not None}


# Of each kind (weights, both moments, losses, gradient norms) its tensors by name.
Training = dict[str, dict[str, Tensor]]


def our_training(tuned: Any, rows: tuple[Example, ...], cut: Cut) -> Training:  # noqa: ANN401
    """Train all steps; return what they leave behind and what they say."""
    with in_type_of(tuned):
        stream, steps = stream_of(tuned, rows, cut), []
        while (tasklet := stream.peek()) is not None:
            if isinstance(done := stream.run(tasklet), StepDone):
                steps.append(done)
    return what_is_learnt(stream, steps)


def what_is_learnt(stream: TaskletStream, steps: Sequence[StepDone]) -> Training:
    """Return what a stream that has ended leaves behind, and what its steps said."""
    return training_of(stream.tensors(), steps)


def training_of(tensors: Mapping[str, Tensor], steps: Sequence[StepDone]) -> Training:
    """Return what a training left behind, and what its steps said.

    Args:
        tensors: as `AdapterOptimizer.tensors` names them, [...] each.
        steps: of it.
    """
    held: Training = {"parameter": {}, "exp_avg": {}, "exp_avg_sq": {}}
    for entry, tensor in tensors.items():
        kind, _, name = entry.removeprefix("state/").partition("/")
        held.setdefault(kind, {})[name] = tensor.clone()
    said = [(float(done.position.loss or 0.0), done.facts.gradient_norm) for done in steps]
    return held | _said(said)


def pefts_training(
    tuned: Any,  # noqa: ANN401
    rows: tuple[Example, ...],
    padding: int = 0,
    recipe: Recipe = Recipe(),
) -> Training:
    """Train all steps of a copy the ordinary way; return the same as `our_training`."""
    tuned = copy.deepcopy(tuned)
    with in_type_of(tuned):
        loop = PeftLoop(tuned, rows, padding, recipe)
        steps = loop.train()
    held: Training = {"parameter": {n: p.detach() for n, p in trainable(tuned).items()}}
    for name, parameter in trainable(tuned).items():
        for kind, value in loop.adamw.state[parameter].items():
            held.setdefault(kind, {})[name] = value
    return held | _said(steps)


def _said(steps: Sequence[tuple[float, float]]) -> Training:
    losses, norms = (torch.tensor(of, dtype=torch.float64) for of in zip(*steps, strict=True))
    return {"loss": {"of each step": losses}, "gradient norm": {"of each step": norms}}


class PeftLoop:
    """The ordinary way: padded batch with mask, the model's own loss, torch's AdamW.

    Dropout drops the units that ours drops, or nothing could be compared.

    Args:
        padding: tokens that each batch is padded by, beyond its longest row.
        recipe: what it trains with.

    Attributes:
        parameters: what is trained.
        adamw: its optimizer.
    """

    def __init__(
        self,
        tuned: Any,  # noqa: ANN401
        rows: tuple[Example, ...],
        padding: int = 0,
        recipe: Recipe = Recipe(),
    ) -> None:
        self._tuned, self._rows, self._padding, self._recipe = tuned, rows, padding, recipe
        self._plan = BatchPlan(len(rows), recipe.batch, recipe.seed)
        self.parameters = list(trainable(tuned).values())
        self.adamw = torch.optim.AdamW(self.parameters, lr=recipe.rate, weight_decay=0.0)
        self._keys = DropoutKeys()
        dropouts = [m for m in tuned.modules() if isinstance(m, nn.ModuleDict)]
        places = [(d, n) for d in dropouts for n, m in d.items() if isinstance(m, nn.Dropout)]
        for index, (parent, name) in enumerate(places):
            p = parent[name].p
            parent[name] = TokenDropout(float(p), self._keys, index)  # type: ignore[arg-type]

    def train(self) -> list[tuple[float, float]]:
        """Take all steps; returns (loss, norm of the gradient before clipping) of each."""
        from transformers import get_scheduler

        schedule = get_scheduler("cosine", self.adamw, 0, self._recipe.steps)
        self._tuned.train()
        said = []
        for step in range(self._recipe.steps):
            self.adamw.zero_grad()
            loss = self.backward(step)
            norm = nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.adamw.step()
            schedule.step()
            said.append((loss, float(norm)))
        return said

    def backward(self, step: int) -> float:
        """Compute the gradients of a step; returns its loss."""
        numbers = self._plan.rows_of(step)
        batch = [self._rows[i] for i in numbers]
        width = max(row.length for row in batch) + self._padding
        self._keys.at(self._recipe.seed, step, numbers, TokenWindow(0, width))
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
