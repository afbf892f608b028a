"""What a job runs next, and the running of it: base evaluation, steps, final evaluation.

One tasklet at a time, in the only legal order; between any two of them it can wait, be dropped back
to the last committed micro-batch, or be checkpointed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor, nn

from windrow_sidecar.finetune.checkpoint import Position
from windrow_sidecar.finetune.data import IGNORED, BatchPlan, Example, Split
from windrow_sidecar.finetune.layerwise import (
    Activations,
    Boundaries,
    DecoderStack,
    TorchBoundaries,
)
from windrow_sidecar.finetune.loss import Head
from windrow_sidecar.finetune.optimizer import AdapterOptimizer, NotFinite, StepFacts
from windrow_sidecar.finetune.tasklets import (
    MicroBatch,
    Tasklet,
    by_length,
    next_micro_batch,
    optimizer_tasklet,
    tasklets_of,
)
from windrow_sidecar.qos.view import Phase

_SEED_BITS = (1 << 63) - 1


class Stage(Enum):
    """Parts of a job's life."""

    BASE_EVALUATION = "base"
    TRAINING = "training"
    TUNED_EVALUATION = "tuned"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class MicroLimits:
    """How large the next micro-batch may be; it has one row at least."""

    max_tokens: int
    max_rows: int = 0  # 0: no bound


@dataclass(frozen=True, slots=True)
class StepDone:
    """An optimizer step has ended; `position.step` of them are done."""

    position: Position
    facts: StepFacts


@dataclass(frozen=True, slots=True)
class EvaluationDone:
    """Mean loss per label on the held-out rows."""

    stage: Stage
    loss: float


Outcome = StepDone | EvaluationDone


class TaskletStream:
    """The tasklets of one job.

    Args:
        model: with its adapter (peft).
        stack, head: the model's parts.
        optimizer: over the adapter's parameters.
        rows, plan: what to train on, in which order.
        total_steps: of the job.
        boundaries: where activations between layers live.
        limits: asked before each micro-batch.
        seed: of dropout. Each (step, micro-batch, layer) has a random state of its own, so that a
            micro-batch that runs again drops the same units.
    """

    def __init__(
        self,
        model: nn.Module,
        stack: DecoderStack,
        head: Head,
        optimizer: AdapterOptimizer,
        rows: Split,
        plan: BatchPlan,
        *,
        total_steps: int,
        boundaries: Boundaries,
        limits: Callable[[], MicroLimits],
        seed: int,
    ) -> None:
        self._model, self._stack, self._head, self._optimizer = model, stack, head, optimizer
        self._split, self._plan, self._total_steps = rows, plan, total_steps
        self._boundaries, self._limits, self._seed = boundaries, limits, seed
        self._dropout = any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules())
        self._position = Position(step=0)
        self._queue: deque[Tasklet] = deque()
        self._at: Activations | None = None
        self._labels: Tensor | None = None
        self._todo: tuple[int, ...] = ()
        self._micro_loss = 0.0
        self._evaluated = (0.0, 0)  # loss sum, labels
        self._enter(self._first_stage())

    @property
    def position(self) -> Position:
        """Up to the last committed micro-batch."""
        return self._position

    @property
    def stage(self) -> Stage:
        """Which part of the job comes next."""
        return self._stage

    @property
    def total_steps(self) -> int:
        """Of the job."""
        return self._total_steps

    @property
    def depth(self) -> int:
        """Layers of the model."""
        return self._stack.depth

    @property
    def between_micro_batches(self) -> bool:
        """Whether nothing is on its way that `drop` would lose."""
        return self._at is None

    def peek(self) -> Tasklet | None:
        """Return the tasklet to run next; None: the job has finished."""
        if not self._queue and self._stage is not Stage.FINISHED:
            self._plan_more()
        return self._queue[0] if self._queue else None

    def run(self, tasklet: Tasklet) -> Outcome | None:
        """Run what `peek` returned; tells when it was the last of a step or of an evaluation.

        Raises:
            NotFinite: loss or gradient is NaN or infinite.
        """
        if not self._queue or self._queue[0] is not tasklet:
            raise ValueError(f"{tasklet} is not next")
        outcome = self._RUN[tasklet.phase](self, tasklet)
        self._queue.popleft()
        return outcome

    def drop(self) -> None:
        """Give up the micro-batch on its way, its memory included; its rows run again later."""
        if self._at is not None:
            self._todo = self._micro.rows + self._todo
        self._queue.clear()
        self._at = self._labels = None
        self._optimizer.discard()
        self._boundaries.clear()

    def replan(self) -> None:
        """Form the next micro-batch anew: limits have changed. What has begun goes on."""
        if self._at is None and self._queue and self._queue[0].micro is not None:
            self._todo = self._micro.rows + self._todo
            self._queue.clear()

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds besides `position`."""
        return self._optimizer.tensors()

    def restore(self, position: Position, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        self._optimizer.load(tensors)
        self._position = position
        self._queue.clear()
        self._at = None
        self._enter(self._first_stage())

    def _first_stage(self) -> Stage:
        if self._split.held_out and self._position.base_eval_loss is None:
            return Stage.BASE_EVALUATION
        return self._training_or_after()

    def _training_or_after(self) -> Stage:
        if self._position.step < self._total_steps:
            return Stage.TRAINING
        return Stage.TUNED_EVALUATION if self._split.held_out else Stage.FINISHED

    def _enter(self, stage: Stage) -> None:
        self._stage = stage
        if stage is Stage.BASE_EVALUATION:
            self._model.disable_adapter_layers()  # type: ignore[operator]
        else:
            self._model.enable_adapter_layers()  # type: ignore[operator]
        self._model.train(stage is Stage.TRAINING)
        if stage is Stage.TRAINING:
            self._examples: Sequence[Example] = self._split.train
            self._begin_step()
        else:
            self._examples = self._split.held_out
            self._evaluated = (0.0, 0)
        self._lengths = [e.length for e in self._examples]
        if stage is not Stage.TRAINING:
            self._todo = by_length(range(len(self._examples)), self._lengths)

    def _begin_step(self) -> None:
        rows = self._plan.rows_of(self._position.step)
        lengths = [e.length for e in self._split.train]
        done = set(self._position.committed_rows)
        self._todo = tuple(row for row in by_length(rows, lengths) if row not in done)
        self._labels_in_batch = sum(self._split.train[row].targets for row in rows)

    def _plan_more(self) -> None:
        step = self._position.step
        if not self._todo:
            self._queue.append(optimizer_tasklet(step))
            return
        limits = self._limits()
        self._micro: MicroBatch = next_micro_batch(
            step,
            self._todo,
            self._lengths,
            max_tokens=limits.max_tokens,
            max_rows=limits.max_rows,
            evaluation=self._stage is not Stage.TRAINING,
        )
        self._todo = self._todo[len(self._micro.rows) :]
        self._queue.extend(tasklets_of(self._micro, self._stack.depth))

    def _forward(self, tasklet: Tasklet) -> None:
        if self._at is None:
            ids, self._labels = _padded([self._examples[row] for row in self._micro.rows])
            self._at = self._stack.begin(ids)
        learn = not self._micro.evaluation
        if learn and self._dropout:
            key = (self._seed, tasklet.step, self._micro.rows[0], tasklet.layer)
            torch.manual_seed(hash(key) & _SEED_BITS)
        # An evaluation holds one boundary at a time: no reason to borrow memory for it.
        store = self._boundaries if learn else _PLAIN
        self._stack.forward(self._at, tasklet.layer, store, learn=learn)

    def _loss(self, tasklet: Tasklet) -> Outcome | None:
        at, labels = self._at, self._labels
        assert at is not None
        assert labels is not None
        hidden = at.inputs[-1]
        assert hidden is not None
        if self._micro.evaluation:
            return self._add_evaluation(float(self._head.loss(hidden, labels)))
        total, at.gradient = self._head.loss_and_gradient(
            hidden, labels, labels_in_batch=self._labels_in_batch
        )
        self._micro_loss = float(total)
        if not math.isfinite(self._micro_loss):
            where = ", ".join(self._examples[row].where for row in self._micro.rows[:3])
            raise NotFinite(f"the loss of step {tasklet.step + 1} is not finite (rows {where})")
        return None

    def _add_evaluation(self, loss: float) -> Outcome | None:
        labels = sum(self._examples[row].targets for row in self._micro.rows)
        self._evaluated = (self._evaluated[0] + loss, self._evaluated[1] + labels)
        self._at = None
        if self._todo:
            return None
        done = EvaluationDone(self._stage, self._evaluated[0] / self._evaluated[1])
        if self._stage is Stage.BASE_EVALUATION:
            self._position = replace(self._position, base_eval_loss=done.loss)
            self._enter(self._training_or_after())
        else:
            self._enter(Stage.FINISHED)
        return done

    def _backward(self, tasklet: Tasklet) -> None:
        assert self._at is not None
        self._stack.backward(self._at, tasklet.layer)
        if tasklet.layer > 0:
            return
        self._optimizer.commit()
        self._boundaries.clear()
        self._at = self._labels = None
        self._position = replace(
            self._position,
            committed_rows=self._position.committed_rows + self._micro.rows,
            loss_sum=self._position.loss_sum + self._micro_loss,
        )

    def _step(self, tasklet: Tasklet) -> Outcome:
        facts = self._optimizer.step(tasklet.step)
        at = self._position
        self._position = Position(
            step=at.step + 1,
            tokens_done=at.tokens_done + sum(self._lengths[row] for row in at.committed_rows),
            loss=at.loss_sum / self._labels_in_batch,
            base_eval_loss=at.base_eval_loss,
        )
        if self._position.step < self._total_steps:
            self._begin_step()
        else:
            self._enter(self._training_or_after())
        return StepDone(self._position, facts)

    _RUN = {  # noqa: RUF012 - a table of methods
        Phase.FORWARD: _forward,
        Phase.LOSS: _loss,
        Phase.BACKWARD: _backward,
        Phase.OPTIMIZER: _step,
    }


_PLAIN = TorchBoundaries()


def _padded(examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """Return ids and labels, [rows, width] int64, padded on the right without labels."""
    width = max(e.length for e in examples)
    ids = torch.zeros(len(examples), width, dtype=torch.int64)
    labels = torch.full((len(examples), width), IGNORED, dtype=torch.int64)
    for i, example in enumerate(examples):
        ids[i, : example.length] = torch.tensor(example.ids)
        labels[i, : example.length] = torch.tensor(example.labels)
    return ids, labels
