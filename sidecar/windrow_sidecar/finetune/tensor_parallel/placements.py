"""Choose where the matrices of an adapter are, behind a weight that is cut over ranks.

`y = W x + s B A x` with `A: r x in` and `B: out x r`. A frozen `W` is cut by rows of `out`
(column-parallel: `x` is whole on each rank, and so is needed no sum) or by columns of `in`
(row-parallel: each rank has its part of `x`, and the base sums the ranks' outputs anyway). This is
FlexLLM's dependent parallelisation (Miao et al. 2024, arXiv:2402.18789): each placement of A and B
is enumerated with the bytes that one rank sends in forward and backward. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import product


class WeightCut(Enum):
    """The way in which a base weight is cut."""

    COLUMN = "column-parallel"  # q, k, v, gate, up: by rows of `out`
    ROW = "row-parallel"  # o, down: by columns of `in`


class Held(Enum):
    """Share of a matrix of the adapter that a rank has."""

    WHOLE = "whole"
    IN = "columns of in"  # of A
    OUT = "rows of out"  # of B
    RANK = "its part of the adapter's rank"  # rows of A, columns of B


@dataclass(frozen=True, slots=True)
class AdapterPlacement:
    """Shares of A and of B that each rank has."""

    a: Held
    b: Held


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of one adapted weight and of one optimizer step.

    Attributes:
        tokens: of a step.
        rank: of the adapter, r.
        inputs, outputs: of the weight that is not cut.
        ranks: N.
        element_bytes: of activations and of gradients.
    """

    tokens: int
    rank: int
    inputs: int
    outputs: int
    ranks: int
    element_bytes: int = 2


@dataclass(frozen=True, slots=True)
class SentBytes:
    """Bytes that a rank sends for an adapted weight in a step, beyond what the base sends anyway.

    Attributes:
        activation_bytes: in messages of each micro-batch and layer.
        gradient_bytes: of matrices that are whole on several ranks, in one message a step.
    """

    activation_bytes: float
    gradient_bytes: float

    @property
    def total_bytes(self) -> float:
        """Both."""
        return self.activation_bytes + self.gradient_bytes


CHOSEN = {
    WeightCut.COLUMN: AdapterPlacement(Held.WHOLE, Held.OUT),
    WeightCut.ROW: AdapterPlacement(Held.IN, Held.WHOLE),
}


def placements() -> Iterator[AdapterPlacement]:
    """Yield every way to place A and B."""
    for a, b in product((Held.WHOLE, Held.IN, Held.RANK), (Held.WHOLE, Held.OUT, Held.RANK)):
        yield AdapterPlacement(a, b)


def traffic(base: WeightCut, at: AdapterPlacement, sizes: Sizes) -> SentBytes:
    """Return what a placement sends.

    A ring's all-gather or reduce-scatter of a tensor sends `(N - 1) / N` of its bytes, an
    all-reduce twice that (Patarasu and Yuan 2009).
    """
    once = (sizes.ranks - 1) / sizes.ranks * sizes.element_bytes
    of_x, of_u = once * sizes.tokens * sizes.inputs, once * sizes.tokens * sizes.rank
    of_y = once * sizes.tokens * sizes.outputs
    sent = 0.0
    # u = A x, [tokens, r]: whole on each rank, cut by r, or a sum that is still to be taken.
    made = {Held.WHOLE: "whole", Held.RANK: "cut", Held.IN: "partial"}[at.a]
    if base is WeightCut.ROW and at.a is not Held.IN:
        sent += 2 * of_x  # x is gathered, its gradient is summed and cut again
    # With the gradient of all of y and a whole B each rank knows all of the gradient of u.
    knows_all = base is WeightCut.ROW and at.b is Held.WHOLE
    wanted = "cut" if at.b is Held.RANK else "whole"
    if base is WeightCut.ROW and at.b is Held.WHOLE and made == "partial":
        wanted = "partial"  # B of a part of the sum is a part of y, which the base sums
    if made != wanted:
        sent += {
            ("partial", "whole"): 2 * of_u if knows_all else 4 * of_u,
            ("partial", "cut"): 2 * of_u,
            ("cut", "whole"): of_u if knows_all else 2 * of_u,
            ("whole", "cut"): 0.0,
        }[made, wanted]
    if base is WeightCut.COLUMN and at.b is Held.RANK:
        sent += 2 * of_y  # a sum of which each rank needs its rows; their gradients are gathered
    gradients = 0.0
    if at.a is Held.WHOLE and not knows_all:
        gradients += 2 * once * sizes.rank * sizes.inputs
    if at.b is Held.WHOLE and (base is WeightCut.COLUMN or wanted == "partial"):
        gradients += 2 * once * sizes.rank * sizes.outputs
    return SentBytes(sent, gradients)
