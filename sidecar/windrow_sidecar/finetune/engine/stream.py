"""Produce and run the tasklets of a job: base evaluation, optimizer steps, final evaluation.

One tasklet at a time, in the only legal order; between any two of them it can wait, be dropped back
to the last committed micro-batch, or be checkpointed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from windrow_sidecar.finetune.data.split import BatchPlan, DataSplit
from windrow_sidecar.finetune.engine.group_progress import GroupProgress
from windrow_sidecar.finetune.engine.grouping import RowGrouping
from windrow_sidecar.finetune.engine.micro_batch_group import (
    MicroBatchGroup,
    ModelParts,
    PairsToCompare,
    RowsOfJob,
)
from windrow_sidecar.finetune.engine.orders import Lookahead, Order, layer_major, listing
from windrow_sidecar.finetune.engine.packing import LineSizes
from windrow_sidecar.finetune.engine.sizing import TaskletSizing, WholeRows
from windrow_sidecar.finetune.engine.stages import JobStage, JobStages, Outcome
from windrow_sidecar.finetune.model.boundaries import Boundaries, TorchBoundaries
from windrow_sidecar.finetune.model.whole import check_numbers
from windrow_sidecar.finetune.offload.job_state import Home
from windrow_sidecar.finetune.tasklets import (
    MicroBatch,
    MicroLimits,
    Tasklet,
    optimizer_tasklet,
)
from windrow_sidecar.finetune.training.checkpoint import Position
from windrow_sidecar.finetune.training.evaluation import EvaluationPolicy
from windrow_sidecar.finetune.training.optimizer import AdapterOptimizer, NotFinite
from windrow_sidecar.finetune.training.preference import PreferenceLoss, References
from windrow_sidecar.finetune.training.snapshot import TensorSnapshot
from windrow_sidecar.qos.view import Phase


class TaskletStream:
    """The tasklets of one job.

    Args:
        parts: the model's, with its adapter.
        optimizer: over the adapter's parameters.
        rows, plan: what to train on, in which order.
        total_steps: of the job.
        boundaries: where activations between layers live.
        limits: asked before each group of micro-batches.
        sizing: asked before each tasklet.
        seed: of dropout.
        order: of the tasklets of a group.
        evaluation_policy: how rows stand together, and when the adapter is judged.
        line_sizes: of packed micro-batches; None: one line, as wide as its rows.
        keep_for: called with the padded tokens of each group to be trained on, before it begins.
        preference: the loss of pairs, where each two neighbouring examples are one.

    Attributes:
        parts: the model's.
    """

    def __init__(
        self,
        parts: ModelParts,
        optimizer: AdapterOptimizer,
        rows: DataSplit,
        plan: BatchPlan,
        *,
        total_steps: int,
        boundaries: Boundaries,
        limits: Callable[[], MicroLimits],
        seed: int,
        sizing: Callable[[], TaskletSizing] = WholeRows,
        order: Order = layer_major,
        evaluation_policy: EvaluationPolicy | None = None,
        line_sizes: LineSizes | None = None,
        keep_for: Callable[[int], None] = lambda tokens: None,
        preference: PreferenceLoss | None = None,
    ) -> None:
        self.parts, self._optimizer, self._keep_for = parts, optimizer, keep_for
        self._boundaries, self._seed = boundaries, seed
        self._sizing, self._order = sizing, order
        policy = evaluation_policy or EvaluationPolicy()
        self._rows = RowGrouping(
            limits,
            most_rows=policy.max_rows * rows.together,
            packed=policy.packed,
            line_sizes=line_sizes,
            together=rows.together,
        )
        self._preference, self._references = preference, None
        if preference is not None:
            self._references = References(len(rows.train), len(rows.held_out))
        self._stages = JobStages(
            *(parts.adapter, optimizer, rows, plan),
            total_steps=total_steps,
            rows=self._rows,
            policy=policy,
            references=self._references,
        )
        self._tokens_seen = self._away_bytes = 0
        self._batch_group: MicroBatchGroup | None = None

    @property
    def position(self) -> Position:
        """Position after the last committed micro-batch."""
        return self._stages.position

    @property
    def packed(self) -> bool:
        """True where rows stand one after the other in lines."""
        return self._rows.packed

    @property
    def learns(self) -> dict[str, nn.Parameter]:
        """The parameters that the job trains, by name; [...] each."""
        return self._optimizer.parameters

    @property
    def stage(self) -> JobStage:
        """Part of the job that comes next."""
        return self._stages.stage

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole job."""
        return self._stages.total_steps

    @property
    def told(self) -> str:
        """Text on how far training came, and of which step the adapter is."""
        return self._stages.told

    @property
    def tokens_seen(self) -> int:
        """Real tokens that have come to their loss in this process, evaluations included."""
        return self._tokens_seen

    @property
    def device(self) -> torch.device:
        """Device on which the adapter is now."""
        return self._optimizer.device

    @property
    def away_bytes(self) -> int:
        """Bytes that `offload` has moved to the host, and `bring_back` would bring; 0: none."""
        return self._away_bytes

    @property
    def graph_bytes(self) -> int:
        """Bytes of lent memory that CUDA graphs have, less what the driver takes for them."""
        if (graphs := self.parts.stack.graphs) is None:
            return 0
        return graphs.backed_bytes - max(graphs.driver_bytes, graphs.expected_bytes)

    @property
    def between_micro_batches(self) -> bool:
        """True where nothing is on its way that `drop` would lose."""
        return self._batch_group is None or self._batch_group.progress.untouched

    @property
    def group_to_begin(self) -> tuple[MicroBatch, ...]:
        """The group to be trained on next; empty: there is none, or it has begun.

        An evaluation keeps nothing for a backward, so its groups do not count.
        """
        batch_group = self._batch_group
        if batch_group is None or not (self._stages.trains and batch_group.progress.untouched):
            return ()
        return batch_group.group

    @property
    def tokens_to_begin(self) -> int:
        """Padded tokens of that group."""
        return sum(micro.padded_tokens for micro in self.group_to_begin)

    @property
    def before_optimizer(self) -> bool:
        """True where the optimizer's step is next, which changes everything that it owns."""
        return self._stages.trains and self._batch_group is None and self._rows.is_empty

    def peek(self) -> Tasklet | None:
        """Return the tasklet to run next, as large as `sizing` wants it; None: the job is done."""
        if self.stage is JobStage.FINISHED:
            return None
        if self._batch_group is None:
            if self._rows.is_empty:
                return optimizer_tasklet(self.position.step)
            self._batch_group = self._form()
            self._lookahead = Lookahead(self._order, self._batch_group.progress)
        return self._lookahead.peek(self._sizing())

    def plan(self) -> Iterator[Tasklet]:
        """Yield what is left of the step or evaluation, as it would run if nothing changed."""
        if self.stage is JobStage.FINISHED:
            return
        sizing = self._sizing()
        if self._batch_group is not None:
            yield from listing(self._order, self._batch_group.progress, sizing)
        for group in self._rows.coming():
            yield from listing(self._order, GroupProgress(group, self.parts.stack.depth), sizing)
        if self._stages.trains:
            yield optimizer_tasklet(self.position.step)

    def run(self, tasklet: Tasklet) -> Outcome | None:
        """Run what `peek` returned, or any other tasklet of its group that may run.

        Returns:
            what ended with it, if anything did: a step, an evaluation.

        Raises:
            NotFinite: loss or gradient is NaN or infinite.
            UserError: that comes of the base model's weights.
            ValueError: it may not run now.
        """
        if self._batch_group is None:
            if not self._rows.is_empty or tasklet.phase is not Phase.OPTIMIZER:
                raise ValueError(f"{tasklet} is not next")
            return self._stages.step(tasklet.step)
        self._batch_group.run(tasklet)
        self._lookahead.ran(tasklet)
        if tasklet.phase is Phase.LOSS:
            self._tokens_seen += tasklet.real_tokens
        done = self._batch_group.progress.done
        # A device that queues its work is waited for once a group: when the last of it is queued.
        if done or (tasklet.phase is Phase.LOSS and self._batch_group.loss_is_here):
            self.check_loss(self._batch_group.rows, self._batch_group.loss)
        if not done:
            return None
        through, self._batch_group = self._batch_group, None
        # Of the base alone: reading them waits for the device.
        scores = {} if self._stages.compares else through.log_probabilities()
        return self._stages.commit(through.rows, through.loss, scores)

    def check_loss(self, rows: Sequence[int], loss: float) -> None:
        """Refuse a loss, the sum over some rows, that is no number.

        Raises:
            NotFinite: names the rows.
            UserError: that comes of the base model's weights.
        """
        if math.isfinite(loss):
            return
        check_numbers(self.parts.stack.model)
        step = self.position.step
        where = ", ".join(self._rows.examples[row].where for row in rows[:3])
        when = f"step {step + 1}" if self._stages.trains else f"an evaluation at step {step}"
        raise NotFinite(f"the loss of {when} is not finite (rows {where})")

    def lengths_to_train(self) -> tuple[int, ...]:
        """Return the tokens of the step's rows that no group has taken, in the order of `lend`.

        Empty where the stream runs something else next, or has a group on its way.
        """
        if not self._stages.trains or not self.between_micro_batches:
            return ()
        self.replan()
        return tuple(self._rows.lengths[row] for row in self._rows.left)

    @property
    def most_rows(self) -> int:
        """Rows that a micro-batch may have by the job's spec; 0: no such bound."""
        return self._rows.most_rows

    def lend(self, rows: int) -> RowsOfJob:
        """Hand over the first rows of `lengths_to_train`, to pass beside rows of other jobs.

        They come back by `commit` or `take_back`; until then the stream runs nothing itself.
        """
        taken, at = self._rows.take_first(rows), self.position.step
        return RowsOfJob(
            MicroBatch(at, taken, tuple(self._rows.lengths[row] for row in taken)),
            tuple(self._rows.examples[row] for row in taken),
            labels_in_batch=self._stages.labels_in_batch,
            seed=self._seed,
        )

    def saw(self, tokens: int) -> None:
        """Count real tokens of rows that were handed over and have come to their loss."""
        self._tokens_seen += tokens

    def commit(self, lent: RowsOfJob, loss: float) -> None:
        """Take rows as done; their gradients are in `.grad`. `loss`: the sum over their labels."""
        self._stages.commit(lent.micro.rows, loss)

    def take_back(self, lent: RowsOfJob) -> None:
        """Run rows again later: what they left in `.grad` is forgotten."""
        self._rows.put_back(lent.micro.rows)
        self._optimizer.discard()

    def forget_gradients(self) -> None:
        """Forget what rows that were taken back have left in `.grad` since."""
        self._optimizer.discard()

    def break_off(self, tasklet: Tasklet) -> None:
        """Forget a tasklet that was given up in its middle.

        It runs again. Of a backward of windows, or behind a prefix, the whole group does.
        """
        batch_group = self._batch_group
        if batch_group is None:
            return
        if tasklet.phase is Phase.BACKWARD and not batch_group.can_repeat(tasklet):
            self.drop()
        else:
            self._lookahead.forget()  # of several layers some may have run

    def drop(self) -> None:
        """Give up the group on its way, its memory included; its rows run again later."""
        self.replan(force=True)
        self._optimizer.discard()

    def forget(self) -> None:
        """Free what the group on its way can compute again, without a copy: its layers' graphs."""
        if self._batch_group is not None and self._batch_group.can_spill:
            self._batch_group.forget()
        elif self._batch_group is None and self.parts.stack.graphs is not None:
            self.parts.stack.graphs.leave()

    def spill(self, room_bytes: int) -> None:
        """Leave nothing of the group on its way in device memory; it goes on from the host.

        Dropped instead where that takes more than `room_bytes` of host memory, or cannot be.
        """
        batch_group = self._batch_group
        if batch_group is None or batch_group.progress.untouched:
            self.replan()
        elif batch_group.can_spill and batch_group.spill_bytes <= room_bytes:
            batch_group.spill()
        else:
            self.drop()

    def offload(self, home: Home, room_bytes: int) -> None:
        """Move what changes with training to the host (see `offload.job_state`, `spill`).

        Of a group on its way, keys and values of windows and one gradient stay where they are.
        Twice is once.
        """
        if self._away_bytes:
            return
        self.spill(room_bytes)
        if self.parts.stack.graphs is not None:
            self.parts.stack.graphs.drop()  # gradients have a place in them
        moved: list[int] = []

        def out(tensor: Tensor) -> Tensor:
            moved.append(tensor.nbytes)
            return home.out(tensor)

        self._optimizer.move(out)
        home.settle()
        self._away_bytes = sum(moved)

    def bring_back(self, home: Home) -> None:
        """Take back what `offload` has moved; between the two nothing may run."""
        if self._away_bytes:
            self._optimizer.move(home.back)
            home.settle()
            self._away_bytes = 0

    def move_buffers(self, *, to_host: bool) -> None:
        """Leave nothing on the device but the base's parameters, or come back; see `offload`.

        The group on its way is given up; its rows run again later.
        """
        if to_host:
            self.drop()
        self.parts.stack.move_buffers(to_host=to_host)

    def replan(self, *, force: bool = False) -> None:
        """Form the next group again after limits changed. A begun group goes on, unless forced."""
        if self._batch_group is not None and (force or self._batch_group.progress.untouched):
            self._rows.put_back(self._batch_group.rows)
            self._batch_group = None
            # Also of one that has not begun: its first tasklet may have been given up half-way.
            self._boundaries.clear()

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint holds besides `position`: see `AdapterOptimizer.tensors`.

        Each [...] in its own shape, not copied: the next optimizer step changes them.
        """
        return self._optimizer.tensors() | self._kept()

    def snapshot(self) -> TensorSnapshot:
        """The same, to be copied while the stream goes on."""
        return self._optimizer.snapshot(self._kept())

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of what a checkpoint holds."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def adapted(self, tuned: Any) -> Any:  # noqa: ANN401 - peft is untyped
        """Return peft's model with all of the adapter; `tuned`: the one that trains."""
        return tuned

    def _kept(self) -> dict[str, Tensor]:
        return self._references.tensors() if self._references is not None else {}

    def restore(self, position: Position, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint: `tensors` [...] are what the method returned; copied.

        Raises:
            KeyError, RuntimeError: they belong to another adapter.
        """
        self._optimizer.load(tensors)
        if self._references is not None:
            self._references.load(tensors)
        self._batch_group = None
        self._stages.restore(position)

    def _form(self) -> MicroBatchGroup:
        trains, group = self._stages.trains, self._rows.take()
        if trains:
            self._keep_for(sum(micro.padded_tokens for micro in group))
        return MicroBatchGroup(
            self.parts,
            group,
            self._rows.examples,
            # An evaluation keeps nothing for backward: no reason to borrow memory for it.
            self._boundaries if trains else TorchBoundaries(),
            labels_in_batch=self._stages.labels_in_batch if trains else 0,
            seed=self._seed,
            longest=self._rows.longest,
            pairs=self._pairs(),
        )

    def _pairs(self) -> PairsToCompare | None:
        if self._preference is None or self._references is None:
            return None
        references = partial(self._references.of, self._stages.part)
        return PairsToCompare(self._preference, references if self._stages.compares else None)
