"""What one layer's forward computes and what its backward will ask for: plain data, no tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What it takes to run an operation a second time."""

    VIEW = "view"  # nothing: the same bytes under another shape
    CHEAP = "cheap"  # elementwise work, reductions, copies: bound by memory bandwidth
    GEMM = "gemm"  # matrix products and attention: what a forward consists of
    NEVER = "never"  # it would give another result, or its inputs are gone


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor. `n_bytes`: of its own elements, also where it is a view of something larger."""

    n_bytes: int
    there: bool = False  # whatever is decided: a weight, the layer's input, an argument
    can_be_kept: bool = False  # autograd hands it to us, or something from which it follows


@dataclass(frozen=True, slots=True)
class Op:
    """One operation. Inputs and outputs are indexes of values."""

    name: str
    kind: Kind
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    flops: int = 0
    moved_bytes: int = 0  # read and written


@dataclass(frozen=True, slots=True)
class LayerGraph:
    """A layer's forward.

    `needs[i]` is the value that the i-th tensor is which autograd saves. Operations stand in the
    order in which they ran, each value is made by one of them at most.
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    needs: tuple[int, ...]

    def producers(self) -> dict[int, int]:
        """Which operation makes a value."""
        return {value: i for i, op in enumerate(self.ops) for value in op.outputs}

    def replayed(self, kept: Iterable[int]) -> frozenset[int]:
        """Operations that must run again when just `kept` is kept, as indexes.

        Raises:
            ValueError: something that is needed then cannot be had.
        """
        held, producers = set(kept), self.producers()
        wanted, again = list(self.needs), set[int]()
        while wanted:
            value = wanted.pop()
            if value in held or self.values[value].there:
                continue
            op = producers.get(value)
            if op is None or self.ops[op].kind is Kind.NEVER:
                raise ValueError(f"value {value} is neither kept nor can it be computed again")
            if op not in again:
                again.add(op)
                wanted.extend(self.ops[op].inputs)
        return frozenset(again)
