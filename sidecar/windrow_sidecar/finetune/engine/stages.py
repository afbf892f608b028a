"""Decide which rows a job runs next: base evaluation, optimizer steps, evaluations, the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from windrow_sidecar.finetune.adapter.adapters import Adapter
from windrow_sidecar.finetune.data.split import PAIR, BatchPlan, DataSplit, Example, examples_of
from windrow_sidecar.finetune.engine.grouping import RowGrouping
from windrow_sidecar.finetune.training.checkpoint import Position
from windrow_sidecar.finetune.training.evaluation import EvaluationPolicy
from windrow_sidecar.finetune.training.optimizer import AdapterOptimizer, StepMetrics
from windrow_sidecar.finetune.training.preference import References


class JobStage(Enum):
    """The stage that a job is in."""

    BASE_EVALUATION = "base"
    REFERENCE = "reference"  # the base's log-probabilities of the answers that come next
    TRAINING = "training"
    HELD_OUT_EVALUATION = "held-out"  # between two steps
    TUNED_EVALUATION = "tuned"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class StepDone:
    """An optimizer step has ended; `position.step` of them are done."""

    position: Position
    facts: StepMetrics


@dataclass(frozen=True, slots=True)
class EvaluationDone:
    """Mean loss per label, or pair, on the held-out rows."""

    stage: JobStage
    loss: float


Outcome = StepDone | EvaluationDone


class JobStages:
    """The stages of one job, one after the other, and what finished rows have brought it to.

    Args:
        adapter: switched off for the base's evaluation.
        optimizer: keeps the best adapter, where the policy wants it back.
        split, plan: what to train on, in which order.
        total_steps: of the job.
        rows: those of the stage are put here.
        policy: when the adapter is judged, and when that ends the job.
        references: of the answers, where rows are pairs of them; None: they are learnt.

    Attributes:
        total_steps: of the job.
        rows: of the stage, those that no group has taken yet.
        stage: which part of the job comes next.
        position: up to the last committed group.
        labels_in_batch: of the step's rows, done ones included; pairs, where rows are compared.
    """

    def __init__(
        self,
        adapter: Adapter,
        optimizer: AdapterOptimizer,
        split: DataSplit,
        plan: BatchPlan,
        *,
        total_steps: int,
        rows: RowGrouping,
        policy: EvaluationPolicy,
        references: References | None = None,
    ) -> None:
        self._adapter, self._optimizer = adapter, optimizer
        self._split, self._plan, self._policy = split, plan, policy
        self._references = references
        self.total_steps, self.rows = total_steps, rows
        self.labels_in_batch = 0
        self._evaluated = (0.0, 0)  # loss sum, labels
        self.restore(Position(step=0))

    @property
    def trains(self) -> bool:
        """True where the rows are trained on; else they are evaluated, and nothing is kept."""
        return self.stage is JobStage.TRAINING

    @property
    def part(self) -> str:
        """Part of the rows that the stage's row numbers count, as `References` names it."""
        return "train" if self.rows.examples is self._split.train else "held_out"

    @property
    def compares(self) -> bool:
        """True where the adapter is on, so that its answers can be compared with the base's."""
        return self.stage not in (JobStage.BASE_EVALUATION, JobStage.REFERENCE)

    @property
    def told(self) -> str:
        """Text on how far training came, and of which step the adapter is."""
        return self._policy.told(self.position.judged, self.position.step, of=self.total_steps)

    def restore(self, position: Position) -> None:
        """Go on from a position, packed as before where the job leaves that open."""
        if self._policy.keeps_packing and position.packed is not None:
            self.rows.packed = position.packed
        self.position = position = replace(position, packed=self.rows.packed)
        if self._split.held_out and position.base_eval_loss is None:
            self._enter(JobStage.BASE_EVALUATION)
        else:
            self._enter(self._training_or_after())

    def commit(
        self, rows: Sequence[int], loss: float, scores: Mapping[int, float] | None = None
    ) -> EvaluationDone | None:
        """Note that a group is through.

        Args:
            rows: of the group.
            loss: the sum over its labels or pairs.
            scores: the base's log-probabilities of the rows, where it ran on pairs.
        """
        at = self.position
        if self._references is not None and scores and not self.compares:
            self._references.note(self.part, scores)
        if self.stage is JobStage.REFERENCE:
            if self.rows.is_empty:
                self._enter(self._training_or_after())
            return None
        if self.trains:
            self._optimizer.commit()
            committed = (*at.committed_rows, *rows)
            self.position = replace(at, committed_rows=committed, loss_sum=at.loss_sum + loss)
            return None
        labels = self._weight(self.rows.examples, rows)
        self._evaluated = (self._evaluated[0] + loss, self._evaluated[1] + labels)
        return self._end_evaluation() if self.rows.is_empty else None

    def step(self, number: int) -> StepDone:
        """Take the optimizer's step, once all of its rows are committed.

        Raises:
            NotFinite: a gradient is NaN or infinite.
        """
        facts = self._optimizer.step(number)
        at = self.position
        self.position = Position(
            step=at.step + 1,
            tokens_done=at.tokens_done + sum(self.rows.lengths[row] for row in at.committed_rows),
            loss=at.loss_sum / self.labels_in_batch,
            base_eval_loss=at.base_eval_loss,
            judged=at.judged,
            packed=at.packed,
        )
        stage = self._training_or_after()
        if stage is JobStage.TRAINING and not self._unknown(stage):
            self._begin_step()
        else:
            self._enter(stage)
        return StepDone(self.position, facts)

    def _training_or_after(self) -> JobStage:
        at, judged = self.position.step, self.position.judged
        due = judged.step < at and self._policy.judges(at, of=self.total_steps)
        if due and self._split.held_out:
            return JobStage.HELD_OUT_EVALUATION
        if at < self.total_steps and not self._policy.ends(judged):
            return JobStage.TRAINING
        return JobStage.TUNED_EVALUATION if self._split.held_out else JobStage.FINISHED

    def _enter(self, stage: JobStage) -> None:
        unknown = self._unknown(stage)
        self.stage = JobStage.REFERENCE if unknown else stage
        if unknown:
            self._adapter.switch(on=False, training=False)
            of = self._split.train if stage is JobStage.TRAINING else self._split.held_out
            self.rows.begin(self.position.step, of, unknown, evaluation=True)
            return
        if stage is JobStage.TUNED_EVALUATION and self._policy.patience:
            self._optimizer.return_to_best()
        self._adapter.switch(on=stage is not JobStage.BASE_EVALUATION, training=self.trains)
        if self.trains:
            self._begin_step()
            return
        held_out = self._split.held_out
        self._evaluated = (0.0, 0)
        self.rows.begin(self.position.step, held_out, range(len(held_out)), evaluation=True)

    def _unknown(self, stage: JobStage) -> tuple[int, ...]:
        """Return examples of a stage whose reference has to be computed before it."""
        if self._references is None or stage in (JobStage.BASE_EVALUATION, JobStage.FINISHED):
            return ()
        if stage is JobStage.TRAINING:
            return self._references.unknown("train", self._examples_of_step())
        return self._references.unknown("held_out", range(len(self._split.held_out)))

    def _examples_of_step(self) -> tuple[int, ...]:
        return examples_of(self._plan.rows_of(self.position.step), self._split.together)

    def _weight(self, examples: Sequence[Example], rows: Sequence[int]) -> int:
        """Return by what the loss of some rows is divided: their labels, or pairs."""
        if self._references is not None:
            return len(rows) // PAIR
        return sum(examples[row].targets for row in rows)

    def _begin_step(self) -> None:
        at, rows = self.position, self._examples_of_step()
        self.rows.begin(at.step, self._split.train, rows, done=set(at.committed_rows))
        self.labels_in_batch = self._weight(self._split.train, rows)

    def _end_evaluation(self) -> EvaluationDone:
        done = EvaluationDone(self.stage, self._evaluated[0] / self._evaluated[1])
        if self.stage is JobStage.TUNED_EVALUATION:
            self._enter(JobStage.FINISHED)
            return done
        if self.stage is JobStage.BASE_EVALUATION:
            self.position = replace(self.position, base_eval_loss=done.loss)
        else:
            self._judge(done.loss)
        self._enter(self._training_or_after())
        return done

    def _judge(self, loss: float) -> None:
        at = self.position
        judged = self._policy.judge(at.judged, at.step, loss)
        if judged.is_best and self._policy.patience:
            self._optimizer.keep_best()
        self.position = replace(at, judged=judged)
