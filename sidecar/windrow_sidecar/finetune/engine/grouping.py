"""Form groups of micro-batches from the rows of a step or evaluation that have not run yet."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from windrow_sidecar.finetune.data.split import Example, lengths_of
from windrow_sidecar.finetune.engine.packing import LineSizes
from windrow_sidecar.finetune.tasklets import MicroBatch, MicroLimits, by_length, next_micro_batch


class RowGrouping:
    """Rows of one step or evaluation, from which groups are taken, longest rows first.

    Args:
        limits: of the next group, asked whenever one is formed.
        most_rows: of a micro-batch, by the job's spec; 0: no such bound.
        packed: the rows of a micro-batch stand one after the other, in lines.
        line_sizes: of packed micro-batches; None: one line, as wide as its rows.
        together: so many neighbouring rows are in one micro-batch.

    Attributes:
        examples: that the row numbers count.
        lengths: tokens of each example.
        longest: tokens of the longest row of the step or evaluation, done ones included.
        packed: as above; what is formed from now on is packed or not.
    """

    def __init__(
        self,
        limits: Callable[[], MicroLimits],
        *,
        most_rows: int = 0,
        packed: bool = False,
        line_sizes: LineSizes | None = None,
        together: int = 1,
    ) -> None:
        self._limits, self._most_rows, self.packed = limits, most_rows, packed
        self._line_sizes, self._together = line_sizes, together
        self.examples: Sequence[Example] = ()
        self.lengths: Sequence[int] = ()
        self.longest = 0
        self._step, self._evaluation = 0, False
        self._left: tuple[int, ...] = ()
        self._places: dict[int, int] = {}  # of rows in their order
        self._lengths: dict[int, Sequence[int]] = {}  # by the identity of the examples

    @property
    def is_empty(self) -> bool:
        """True where every row belongs to a group that has been taken."""
        return not self._left

    def begin(
        self,
        step: int,
        examples: Sequence[Example],
        rows: Iterable[int],
        *,
        done: Collection[int] = (),
        evaluation: bool = False,
    ) -> None:
        """Begin a step or an evaluation over `rows`, of which those in `done` have run already."""
        if id(examples) not in self._lengths:  # they live as long as the job
            self._lengths[id(examples)] = lengths_of(examples)
        self.examples, self.lengths = examples, self._lengths[id(examples)]
        rows = tuple(rows)
        self._step, self._evaluation = step, evaluation
        self.longest = max((self.lengths[row] for row in rows), default=0)
        ordered = by_length(rows, self.lengths, self._together)
        self._places = {row: place for place, row in enumerate(ordered)}
        self._left = tuple(row for row in ordered if row not in done)

    @property
    def left(self) -> tuple[int, ...]:
        """Rows that no group has taken yet, in the order in which groups take them."""
        return self._left

    @property
    def most_rows(self) -> int:
        """Rows that a micro-batch may have by the job's spec; 0: no such bound."""
        return self._most_rows

    def take_first(self, rows: int) -> tuple[int, ...]:
        """Take so many rows off the front, for a micro-batch that has rows of other jobs too."""
        taken, self._left = self._left[:rows], self._left[rows:]
        return taken

    def take(self) -> list[MicroBatch]:
        """Take the next group off the rows."""
        group, self._left = self._next(self._left)
        return group

    def put_back(self, rows: tuple[int, ...]) -> None:
        """Put the rows of the group that was taken last where they were."""
        self._left = tuple(sorted(rows + self._left, key=self._places.__getitem__))

    def coming(self) -> Iterator[list[MicroBatch]]:
        """Yield the groups that `take` would return, if limits stayed as they are."""
        left = self._left
        while left:
            group, left = self._next(left)
            yield group

    def _next(self, left: tuple[int, ...]) -> tuple[list[MicroBatch], tuple[int, ...]]:
        limits = self._limits()
        group: list[MicroBatch] = []
        while left and len(group) < max(1, limits.micro_batches):
            micro = self._form(left, limits.max_tokens)
            taken = set(micro.rows)
            left = tuple(row for row in left if row not in taken)
            group.append(micro)
        return group, left

    def _form(self, left: tuple[int, ...], max_tokens: int) -> MicroBatch:
        if self.packed and self._line_sizes is not None:
            return self._line_sizes.micro_batch(
                *(self._step, left, self.lengths),
                max_tokens=max_tokens,
                max_rows=self._most_rows,
                evaluation=self._evaluation,
                together=self._together,
            )
        return next_micro_batch(
            *(self._step, left, self.lengths),
            max_tokens=max_tokens,
            max_rows=self._most_rows,
            evaluation=self._evaluation,
            packed=self.packed,
            together=self._together,
        )
