"""Tokens that a job trains on, their order, and those kept aside for evaluation.

A step's rows follow from (seed, step) alone, so the position in the data is the step's number and
a resumed job reads what the interrupted one would have read.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from windrow.conditions import Reason
from windrow.errors import UserError

IGNORED = -100
PAIR = 2  # examples of a row of preferences: the chosen answer, then the rejected one


@dataclass(frozen=True, slots=True)
class Example:
    """One tokenized row. `labels[i]` is `ids[i]`, or -100 where the loss does not look."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]
    where: str

    @property
    def length(self) -> int:
        """Tokens."""
        return len(self.ids)

    @property
    def targets(self) -> int:
        """Tokens that are predicted: labels after the first position."""
        return sum(label != IGNORED for label in self.labels[1:])


@dataclass(frozen=True, slots=True)
class DataSplit:
    """Rows to train on and rows that are held out.

    Attributes:
        skipped: rows that were wrong and are in neither.
        cut: rows that were longer than may be, and have lost their end.
        notes: what else a user has to know of the dataset, in sentences, those two included.
        digest: of the tokens and labels of all rows in their order; "" where nobody took it.
        unlike_before: in which way an earlier version made other tokens of these rows; "": it made
            the same.
        together: so many neighbouring examples are one row: 2 where a row is a pair of answers.
    """

    train: Sequence[Example]
    held_out: Sequence[Example]
    skipped: int = 0
    cut: int = 0
    notes: tuple[str, ...] = ()
    digest: str = ""
    unlike_before: str = ""
    together: int = 1

    @property
    def train_rows(self) -> int:
        """Rows to train on."""
        return len(self.train) // self.together

    @property
    def held_out_rows(self) -> int:
        """Rows that are held out."""
        return len(self.held_out) // self.together


def examples_of(rows: Iterable[int], together: int) -> tuple[int, ...]:
    """Return the numbers of the examples of rows, each of which has so many."""
    return tuple(row * together + i for row in rows for i in range(together))


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Order of the rows: `rows` of them, `batch` a step, shuffled again in each epoch."""

    rows: int
    batch: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """The last batch of an epoch may be smaller than the others."""
        return -(-self.rows // self.batch)

    def total_steps(self, *, epochs: int | None, max_steps: int | None) -> int:
        """Steps of a job that names one of the two."""
        return max_steps if max_steps is not None else (epochs or 1) * self.steps_per_epoch

    def rows_of(self, step: int) -> tuple[int, ...]:
        """Row numbers of step `step` (the first is 0)."""
        epoch, index = divmod(step, self.steps_per_epoch)
        order = _order(self.rows, self.seed, epoch)
        return tuple(order[index * self.batch : (index + 1) * self.batch])


@lru_cache(maxsize=2)
def _order(rows: int, seed: int, epoch: int) -> array[int]:
    """Return the row numbers, shuffled; 4 bytes each, since sets may be large."""
    order = array("i", range(rows))
    random.Random(f"order:{seed}:{epoch}").shuffle(order)
    return order


def held_out_rows(rows: int, *, eval_fraction: float, seed: int) -> frozenset[int]:
    """Draw `eval_fraction` of the row numbers (at least one where it is above 0), by the seed.

    Raises:
        UserError: too few rows to hold one out.
    """
    n_held = max(1, round(rows * eval_fraction)) if eval_fraction > 0 else 0
    if n_held >= rows:
        raise UserError(
            f"{rows} row(s) are too few to hold out {n_held}",
            field="spec.dataset.evalFraction",
            remedy="Add rows, or set it to 0.",
            reason=Reason.DATASET_EMPTY,
        )
    return frozenset(random.Random(f"split:{seed}").sample(range(rows), n_held))


def weighted(rows: Sequence[int], weight: float, *, seed: int, part: int) -> Sequence[int]:
    """Return row numbers as often as a weight says; of a fraction, those that the seed draws.

    At least one. `part`: number of their source.
    """
    whole, rest = divmod(weight, 1.0)
    drawn = round(rest * len(rows))
    if not whole:
        drawn = max(1, drawn)
    chosen = random.Random(f"mixture:{seed}:{part}").sample(rows, min(drawn, len(rows)))
    return [*list(rows) * int(whole), *sorted(chosen)]


def split(examples: Sequence[Example], *, eval_fraction: float, seed: int) -> DataSplit:
    """Divide examples that are all in memory; see `held_out_rows`."""
    held = held_out_rows(len(examples), eval_fraction=eval_fraction, seed=seed)
    return DataSplit(
        train=tuple(e for i, e in enumerate(examples) if i not in held),
        held_out=tuple(e for i, e in enumerate(examples) if i in held),
    )


def lengths_of(examples: Sequence[Example]) -> Sequence[int]:
    """Return the tokens of each row; rows on disk are not read for it."""
    known: Sequence[int] | None = getattr(examples, "lengths", None)
    return known if known is not None else [e.length for e in examples]
