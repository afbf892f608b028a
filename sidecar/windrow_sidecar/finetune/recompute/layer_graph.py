"""The operations of one layer's forward and the tensors its backward needs: plain data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry


class OpKind(Enum):
    """Kind of an operation: whether and how it can run a second time."""

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
    kind: OpKind
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
        """Return the operation that makes each value."""
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
            if op is None or self.ops[op].kind is OpKind.NEVER:
                raise ValueError(f"value {value} is neither kept nor can it be computed again")
            if op not in again:
                again.add(op)
                wanted.extend(self.ops[op].inputs)
        return frozenset(again)


def is_mutable(func: Any) -> bool:  # noqa: ANN401 - an OpOverload
    """Return whether an operation writes into one of its arguments."""
    return bool(func._schema.is_mutable)


def kind_of(func: Any, used: Sequence[Tensor], made: Sequence[Tensor]) -> OpKind:  # noqa: ANN401
    """Return the kind of an operation; what shares its storage with an argument is a view.

    `used` and `made`: arguments and results, [...] each; their values are not read.
    """
    if func.overloadpacket in flop_registry or _is_attention(func):
        return OpKind.GEMM
    if is_mutable(func):
        return OpKind.CHEAP
    if func.is_view:  # of a weight: its stand-in has a storage of its own
        return OpKind.VIEW
    storages = {tensor.untyped_storage()._cdata for tensor in used}
    shared = all(tensor.untyped_storage()._cdata in storages for tensor in made)
    return OpKind.VIEW if shared and used else OpKind.CHEAP


def flops_of(
    func: Any,  # noqa: ANN401
    kind: OpKind,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,  # noqa: ANN401
) -> int:
    """Return floating-point operations: torch's count for products, else one an element."""
    if kind is OpKind.VIEW:
        return 0
    if _is_attention(func):
        return _attention_flops(*args[:3])
    if kind is OpKind.GEMM:
        return int(flop_registry[func.overloadpacket](*args, **kwargs, out_val=result))
    first = result[0] if isinstance(result, tuple | list) else result
    return int(first.numel())


def moved_bytes_of(kind: OpKind, used: Sequence[Tensor], made: Sequence[Tensor]) -> int:
    """Return the bytes that an operation reads and writes; `used` and `made` are [...] each."""
    if kind is OpKind.VIEW:
        return 0
    return sum(own_bytes(tensor) for tensor in (*used, *made))


def own_bytes(tensor: Tensor) -> int:
    """Return the bytes of the elements of a tensor [...], at most those of its storage."""
    return min(tensor.numel() * tensor.dtype.itemsize, tensor.untyped_storage().nbytes())


def _is_attention(func: Any) -> bool:  # noqa: ANN401
    return "attention" in str(func)


def _attention_flops(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Return the operations of two products; query: [..., tokens, dim]. Masks do not count.

    Heads of keys and values may be fewer than those of queries: torch 2.11 refuses to count those,
    though a GPU's kernels take them as they are.
    """
    rows = query.numel() // query.shape[-1]
    return 2 * rows * key.shape[-2] * (query.shape[-1] + value.shape[-1])
