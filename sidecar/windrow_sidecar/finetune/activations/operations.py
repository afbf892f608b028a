"""What an operation of torch costs, and whether it can run again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from windrow_sidecar.finetune.activations.graph import Kind


def is_mutable(func: Any) -> bool:  # noqa: ANN401 - an OpOverload
    """Whether it writes into an argument."""
    return bool(func._schema.is_mutable)


def kind_of(func: Any, used: Sequence[Tensor], made: Sequence[Tensor]) -> Kind:  # noqa: ANN401
    """What it takes to run it again; views are also what shares its storage with an argument."""
    if func.overloadpacket in flop_registry or "attention" in str(func):
        return Kind.GEMM
    if is_mutable(func):
        return Kind.CHEAP
    if func.is_view:  # of a weight: its stand-in has a storage of its own
        return Kind.VIEW
    storages = {tensor.untyped_storage()._cdata for tensor in used}
    shared = all(tensor.untyped_storage()._cdata in storages for tensor in made)
    return Kind.VIEW if shared and used else Kind.CHEAP


def flops_of(
    func: Any,  # noqa: ANN401
    kind: Kind,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,  # noqa: ANN401
) -> int:
    """Floating-point operations: torch's own count for products, one an element for the rest."""
    if kind is Kind.VIEW:
        return 0
    if func.overloadpacket in flop_registry:
        return int(flop_registry[func.overloadpacket](*args, **kwargs, out_val=result))
    if kind is Kind.GEMM:
        return _attention_flops(*args[:3])
    first = result[0] if isinstance(result, tuple | list) else result
    return int(first.numel())


def moved_bytes_of(kind: Kind, used: Sequence[Tensor], made: Sequence[Tensor]) -> int:
    """Bytes that are read and written."""
    if kind is Kind.VIEW:
        return 0
    return sum(own_bytes(tensor) for tensor in (*used, *made))


def own_bytes(tensor: Tensor) -> int:
    """Bytes of the elements; an expanded tensor has no more than its storage."""
    return min(tensor.numel() * tensor.dtype.itemsize, tensor.untyped_storage().nbytes())


def _attention_flops(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Two products; query: [..., tokens, dim]. A causal mask is not taken off, as in torch."""
    rows = query.numel() // query.shape[-1]
    return 2 * rows * key.shape[-2] * (query.shape[-1] + value.shape[-1])
