"""Times of a job's evaluations, its early stop, and the packing of rows."""

from __future__ import annotations

from dataclasses import dataclass

from windrow.crd import TrainingSpec


@dataclass(frozen=True, slots=True)
class Judged:
    """The results of the evaluations so far; part of a job's position."""

    step: int = 0  # of the last one
    best_loss: float | None = None
    since_best: int = 0  # evaluations
    best_step: int = 0  # that it was of

    @property
    def is_best(self) -> bool:
        """True where the last one was the best."""
        return self.best_loss is not None and self.since_best == 0


@dataclass(frozen=True, slots=True)
class EvaluationPolicy:
    """Policy on when to evaluate and to stop early, and how rows form micro-batches.

    Attributes:
        packed: rows of a micro-batch stand one after the other.
        keeps_packing: whether a job that resumes is packed or not as it began, whatever `packed`
            says: its spec says nothing of it.
        max_rows: of a micro-batch; 0: no bound.
        eval_every: steps between two evaluations; 0: none but the first and the last.
        patience: evaluations in a row without a better loss that end the job; 0: it never ends
            early.
        min_delta: by how much a better loss is lower.
    """

    packed: bool = False
    keeps_packing: bool = False
    max_rows: int = 0
    eval_every: int = 0
    patience: int = 0
    min_delta: float = 0.0

    @classmethod
    def of(cls, spec: TrainingSpec, *, packed: bool) -> EvaluationPolicy:
        """Read it from the spec; `packed`: whether rows are, where the spec leaves it open."""
        stop = spec.early_stop
        return cls(
            packed=packed if spec.packing is None else spec.packing,
            keeps_packing=spec.packing is None,
            max_rows=spec.micro_batch_size or 0,
            eval_every=spec.eval_every_steps or 0,
            patience=stop.patience if stop else 0,
            min_delta=stop.min_delta if stop else 0.0,
        )

    def judges(self, step: int, *, of: int) -> bool:
        """Return whether there is an evaluation once `step` steps are done, of `of`.

        Where the best adapter is kept, the last one is judged as well.
        """
        if not self.eval_every or not step > 0:
            return False
        if step == of:
            return self.patience > 0
        return step % self.eval_every == 0

    def judge(self, before: Judged, step: int, loss: float) -> Judged:
        """Note an evaluation."""
        if before.best_loss is None or loss < before.best_loss - self.min_delta:
            return Judged(step, loss, 0, step)
        return Judged(step, before.best_loss, before.since_best + 1, before.best_step)

    def ends(self, judged: Judged) -> bool:
        """Return whether the job ends before its last step."""
        return 0 < self.patience <= judged.since_best

    def told(self, judged: Judged, step: int, *, of: int) -> str:
        """Say how a training of `of` steps has ended after `step` of them."""
        length = f"{step} steps" if step <= of else f"{step} steps, of {of} that are asked for now"
        if not self.patience:
            return length
        best = f"the adapter is that of step {judged.best_step}"
        if step >= of:
            return f"{length}; {best}"
        evaluations = "evaluation" if judged.since_best == 1 else "evaluations"
        why = f"no better loss for {judged.since_best} {evaluations}"
        return f"{step} of {of} steps: {why}; {best}"
