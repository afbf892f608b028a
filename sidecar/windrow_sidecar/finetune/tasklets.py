"""Tasklets: the pieces of a training step, between which a worker can stop.

Decode's policy sees work only as tasklets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from windrow_sidecar.qos.view import Phase

PHASE_WORDS = {
    Phase.FORWARD: "fwd",
    Phase.LOSS: "loss",
    Phase.BACKWARD: "bwd",
    Phase.OPTIMIZER: "opt",
}


@dataclass(frozen=True, slots=True)
class TokenWindow:
    """Tokens [begin, end) of each row of a micro-batch."""

    begin: int
    end: int

    @property
    def tokens(self) -> int:
        """Tokens of each row."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class PackedLines:
    """Rows that are packed: they stand one after the other in lines of one width.

    Attributes:
        lengths: tokens of the rows of each line, in their order; padding follows them.
        width: tokens of a line, padding included.
    """

    lengths: tuple[tuple[int, ...], ...]
    width: int

    @property
    def filled(self) -> tuple[int, ...]:
        """Tokens of the rows of each line."""
        return tuple(sum(line) for line in self.lengths)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows that pass through the layers together.

    One below the other, padded on the right to the longest; or one after the other in lines, where
    `packed` says how; `rows` are then those of the first line, of the second, and so on.
    """

    step: int
    rows: tuple[int, ...]
    lengths: tuple[int, ...]  # tokens of each row
    evaluation: bool = False
    packed: PackedLines | None = None

    def __hash__(self) -> int:
        """Hash what tells micro-batches apart: a tasklet looks one up thirty times."""
        return hash((self.step, self.rows))

    @property
    def lines(self) -> int:
        """PackedLines of its tensors."""
        return len(self.packed.lengths) if self.packed else len(self.rows)

    @property
    def width(self) -> int:
        """Tokens of each line, padding included."""
        return self.packed.width if self.packed else max(self.lengths)

    @property
    def tokens(self) -> int:
        """Real tokens."""
        return sum(self.lengths)

    @property
    def padded_tokens(self) -> int:
        """Tokens that the layers compute on."""
        return self.lines * self.width

    @property
    def whole(self) -> TokenWindow:
        """All tokens of the rows."""
        return TokenWindow(0, self.width)


@dataclass(frozen=True, slots=True)
class Tasklet:
    """One phase on layers [layer, layer_end) for a window of a micro-batch's tokens.

    Forward goes up through the layers and backward down; the loss has none (`layer` is the number
    of layers), and the optimizer's step has no micro-batch either.

    Attributes:
        tokens: that each layer computes on, padding included.
        parts: into how many tasklets it could be cut without cutting a layer.
    """

    step: int
    phase: Phase
    layer: int
    layer_end: int
    window: TokenWindow
    micro: MicroBatch | None
    tokens: int = field(init=False, compare=False, repr=False)
    parts: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Count once what gate and estimates ask for again and again."""
        tokens = self.micro.lines * self.window.tokens if self.micro else 0
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "parts", max(1, self.layer_end - self.layer))

    @property
    def real_tokens(self) -> int:
        """Tokens of the rows."""
        if self.micro is None:
            return 0
        begin, end = self.window.begin, self.window.end
        lines = self.micro.packed.filled if self.micro.packed else self.micro.lengths
        return sum(max(0, min(length, end) - begin) for length in lines)

    @property
    def is_window(self) -> bool:
        """True where it runs on a part of its rows only."""
        window, micro = self.window, self.micro
        return micro is not None and (window.begin > 0 or window.end != micro.width)

    @property
    def layers(self) -> range:
        """Layers in the order in which they run; of a loss, the number of all of them."""
        if self.parts == 1:
            return range(self.layer, self.layer + 1)
        if self.phase is Phase.BACKWARD:
            return range(self.layer_end - 1, self.layer - 1, -1)
        return range(self.layer, self.layer_end)

    def each_layer(self) -> tuple[Tasklet, ...]:
        """Return those tasklets, in the order in which they run."""
        if self.parts == 1:
            return (self,)
        return tuple(self._on(layer, layer + 1) for layer in self.layers)

    def with_further(self, layers: int) -> Tasklet:
        """Return this tasklet and the same on so many layers behind its last, as one."""
        if self.phase is Phase.BACKWARD:
            return self._on(self.layer - layers, self.layer_end)
        return self._on(self.layer, self.layer_end + layers)

    def joined(self, following: Tasklet) -> Tasklet | None:
        """Return this tasklet and the next as one, where only the layer differs."""
        phase = self.phase
        if phase is Phase.FORWARD:
            begin, end, is_next = self.layer, following.layer_end, following.layer == self.layer_end
        elif phase is Phase.BACKWARD:
            begin, end, is_next = following.layer, self.layer_end, following.layer_end == self.layer
        else:
            return None
        if (
            not is_next
            or following.phase is not phase
            or following.micro is not self.micro
            or following.window != self.window
        ):
            return None
        return self._on(begin, end)

    def _on(self, layer: int, layer_end: int) -> Tasklet:
        # `replace` of dataclasses takes three times as long.
        return Tasklet(self.step, self.phase, layer, layer_end, self.window, self.micro)


def optimizer_tasklet(step: int) -> Tasklet:
    """Return the tasklet that ends a step."""
    return Tasklet(step, Phase.OPTIMIZER, 0, 0, TokenWindow(0, 0), None)


def by_length(rows: Sequence[int], lengths: Sequence[int], together: int = 1) -> tuple[int, ...]:
    """Order rows so that neighbours pad each other little: longest first, then by number.

    `together`: so many neighbours of `rows` stay as they are, and go by their longest.
    """
    if together == 1:
        return tuple(sorted(rows, key=lambda row: (-lengths[row], row)))
    sets = [tuple(rows[i : i + together]) for i in range(0, len(rows), together)]
    sets.sort(key=lambda rows: (-max(lengths[row] for row in rows), rows))
    return tuple(row for rows in sets for row in rows)


def next_micro_batch(
    step: int,
    rows: Sequence[int],
    lengths: Sequence[int],
    *,
    max_tokens: int,
    max_rows: int = 0,
    evaluation: bool = False,
    packed: bool = False,
    together: int = 1,
) -> MicroBatch:
    """Take the next micro-batch from the front of `rows` (ordered by `by_length`, not empty).

    As many rows as fit into `max_tokens` with their padding and into `max_rows` (0: no bound), but
    at least one; of rows that stay `together`, at least so many, and a multiple of it.
    """
    count = max_tokens // max(lengths[row] for row in rows[:together])
    if packed:  # in one line, without padding
        count = sum(total <= max_tokens for total in accumulate(lengths[row] for row in rows))
    count = min(count, max_rows or count)
    count = max(together, count - count % together)
    taken = tuple(rows[:count])
    found = tuple(lengths[row] for row in taken)
    line = PackedLines((found,), sum(found)) if packed else None
    return MicroBatch(step, taken, found, evaluation, line)


@dataclass(frozen=True, slots=True)
class MicroLimits:
    """Size limits of the next group of micro-batches; it has one row at least."""

    max_tokens: int  # of each micro-batch
    micro_batches: int = 1  # that visit a layer together
