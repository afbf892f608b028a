"""Pack the rows of a step into lines of few widths, so that shapes repeat from step to step.

A program that is compiled or captured for a shape needs that shape again. So a job has four sizes
of micro-batches at most, each half of the next: the largest are several lines of the job's length,
the small ones one shorter line. Rows fill a line longest first; what is left of it is padding.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from windrow_sidecar.finetune.tasklets import MicroBatch, PackedLines, next_micro_batch

# Sizes of a job's micro-batches: the shapes that graphs are captured for (see `LayerGraphs`).
MOST_SIZES = 4
# Tokens of a line at most, unless a row is longer: attention computes each token of a line against
# all tokens before it, those of other rows included.
LINE_TOKENS = 2048
# Widths are multiples of so many tokens, which kernels' tiles divide or nearly do.
_MULTIPLE = 8
# Rows that fill less of a size pass in smaller ones: a further micro-batch costs its calls.
_WORTH_FILLING = 0.75
# A step has more tokens than the mean in about half of all cases.
_ABOVE_MEAN = 1.1


@dataclass(frozen=True)
class LineSizes:
    """Sizes of the micro-batches of one job.

    Attributes:
        line: tokens of its longest line.
        most: padded tokens of the largest size.
    """

    line: int
    most: int

    @classmethod
    def of(
        cls, lengths: Sequence[int], *, longest: int, max_length: int, batch: int, most: int
    ) -> LineSizes:
        """Return those of a job.

        Args:
            lengths: tokens of its rows.
            longest: tokens of the longest row, or of the rows that stay together.
            max_length: of a row, as the job's spec says.
            batch: rows of a step.
            most: tokens of a micro-batch, where nobody waits for the device.
        """
        line = _rounded_up(max(longest, min(max_length, LINE_TOKENS)))
        wanted = min(most, _ABOVE_MEAN * batch * sum(lengths) / len(lengths))
        wanted = max(wanted, longest)
        size = line
        while size < wanted and 2 * size <= most:
            size *= 2
        while size >= 2 * _MULTIPLE and size // 2 >= wanted:
            size = _rounded_up(size // 2)
        return cls(line, size)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Padded tokens of micro-batches, ascending; four at most."""
        found = [self.most]
        while len(found) < MOST_SIZES and found[-1] >= 2 * _MULTIPLE:
            half = found[-1] // 2
            # A number of whole lines, or one line.
            found.append(half if half % self.line == 0 else _rounded_up(min(half, self.line)))
        return tuple(sorted(set(found)))

    def shape(self, size: int) -> tuple[int, int]:
        """Return (lines, tokens of a line) of a size."""
        lines = max(1, size // self.line)
        return lines, size // lines

    def micro_batch(
        self,
        step: int,
        rows: Sequence[int],
        lengths: Sequence[int],
        *,
        max_tokens: int,
        max_rows: int = 0,
        evaluation: bool = False,
        together: int = 1,
    ) -> MicroBatch:
        """Take the next micro-batch from anywhere among `rows` (ordered by `by_length`, not empty).

        Its size is one of `sizes` and within `max_tokens`. Where the first rows do not fit into any
        such size, it is one line without padding: memory comes first.

        Args:
            step: that they are of.
            rows: their numbers.
            lengths: tokens by number.
            max_tokens: of the micro-batch, padding included.
            max_rows: of it; 0: no bound.
            evaluation: whether nothing is learnt.
            together: so many neighbours of `rows` are in one line.
        """
        # Those that stay together are ordered by their longest, and here by what they take.
        sets = [tuple(rows[i : i + together]) for i in range(0, len(rows), together)]
        sizes = [sum(lengths[row] for row in of) for of in sets]
        if together > 1:
            order = sorted(range(len(sets)), key=lambda n: -sizes[n])
            sets, sizes = [sets[n] for n in order], [sizes[n] for n in order]
        most = max(1, max_rows // together) if max_rows else len(sets)
        size = self._size_for(sum(sizes[:most]), sizes[0], max_tokens)
        if size is None:
            return next_micro_batch(
                *(step, rows, lengths),
                max_tokens=max_tokens,
                max_rows=max_rows,
                evaluation=evaluation,
                packed=True,
                together=together,
            )
        count, width = self.shape(size)
        filled = _filled([-size for size in sizes], count, width, most)
        lines = [[row for n in line for row in sets[n]] for line in filled]
        taken = tuple(row for line in lines for row in line)
        found = tuple(tuple(lengths[row] for row in line) for line in lines)
        return MicroBatch(
            step,
            taken,
            tuple(lengths[row] for row in taken),
            evaluation,
            PackedLines(found, width),
        )

    def _size_for(self, tokens: int, longest: int, max_tokens: int) -> int | None:
        """Return the size for so many tokens in all; None: not even the longest row fits into one.

        Args:
            tokens: of all rows that may pass.
            longest: of one row, or of those that stay together.
            max_tokens: of the micro-batch.
        """
        able = [
            size for size in self.sizes if size <= max_tokens and self.shape(size)[1] >= longest
        ]
        if not able:
            return None
        above = next((size for size in able if size >= tokens), able[-1])
        below = max((size for size in able if size <= tokens), default=above)
        return above if tokens >= _WORTH_FILLING * above else below


def _filled(shorter: Sequence[int], lines: int, width: int, most: int) -> list[list[int]]:
    """Return which sets stand in each line: the longest that fits comes next.

    Args:
        shorter: minus the tokens of each set, ascending: the longest is first.
        lines: that there are.
        width: of a line.
        most: sets in all.
    """
    left, keys = list(range(len(shorter))), list(shorter)
    found: list[list[int]] = []
    for _ in range(lines):
        line: list[int] = []
        room = width
        while left and most:
            at = bisect_left(keys, -room)
            if at == len(keys):
                break
            line.append(left.pop(at))
            room += keys.pop(at)
            most -= 1
        found.append(line)
    return found


def _rounded_up(tokens: int) -> int:
    return -(-tokens // _MULTIPLE) * _MULTIPLE
