"""What a step of finetuning consists of, and in which order its parts may run.

Decode's policy sees work only as tasklets: pieces short enough to stop between two of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from windrow_sidecar.qos.view import Phase

PHASE_WORDS = {
    Phase.FORWARD: "fwd",
    Phase.LOSS: "loss",
    Phase.BACKWARD: "bwd",
    Phase.OPTIMIZER: "opt",
}


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows that pass through the layers together, padded on the right to `width` tokens."""

    step: int
    rows: tuple[int, ...]
    width: int
    tokens: int  # real ones
    evaluation: bool = False

    @property
    def padded_tokens(self) -> int:
        """What the layers compute on."""
        return len(self.rows) * self.width


@dataclass(frozen=True, slots=True)
class Tasklet:
    """One phase of one layer for one micro-batch; the optimizer step has no micro-batch."""

    step: int
    phase: Phase
    layer: int
    micro: MicroBatch | None

    @property
    def tokens(self) -> int:
        """Tokens that the layer computes on, padding included."""
        return self.micro.padded_tokens if self.micro else 0

    @property
    def real_tokens(self) -> int:
        """Tokens of the rows."""
        return self.micro.tokens if self.micro else 0


def tasklets_of(micro: MicroBatch, layers: int) -> Iterator[Tasklet]:
    """Yield the tasklets of a micro-batch: up through the layers, the loss, and down again.

    An evaluation goes up only.
    """
    for layer in range(layers):
        yield Tasklet(micro.step, Phase.FORWARD, layer, micro)
    yield Tasklet(micro.step, Phase.LOSS, layers, micro)
    if not micro.evaluation:
        for layer in reversed(range(layers)):
            yield Tasklet(micro.step, Phase.BACKWARD, layer, micro)


def optimizer_tasklet(step: int) -> Tasklet:
    """Return the tasklet that ends a step."""
    return Tasklet(step, Phase.OPTIMIZER, 0, None)


def by_length(rows: Sequence[int], lengths: Sequence[int]) -> tuple[int, ...]:
    """Order rows so that neighbours pad each other little: longest first, then by number."""
    return tuple(sorted(rows, key=lambda row: (-lengths[row], row)))


def next_micro_batch(
    step: int,
    rows: Sequence[int],
    lengths: Sequence[int],
    *,
    max_tokens: int,
    max_rows: int = 0,
    evaluation: bool = False,
) -> MicroBatch:
    """Take the next micro-batch from the front of `rows` (ordered by `by_length`, not empty).

    As many rows as fit into `max_tokens` with their padding and into `max_rows` (0: no bound), but
    at least one.
    """
    width = lengths[rows[0]]
    count = max(1, max_tokens // width)
    if max_rows:
        count = min(count, max_rows)
    taken = tuple(rows[:count])
    tokens = sum(lengths[row] for row in taken)
    return MicroBatch(step, taken, width, tokens, evaluation)
