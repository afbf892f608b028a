"""The arguments that a model passes to its layers, and their slices for token windows.

Position tables, position ids and masks have a length in tokens, which part of them depends on the
architecture. Nobody lists it: two recorded calls of different width differ in just those
dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from windrow_sidecar.finetune.tasklets import TokenWindow

Path = tuple[str | int, ...]
# Dimensions that count tokens: one, or two in a mask (who looks, what is looked at).
TokenDims = dict[Path, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class LayerCall:
    """The arguments of one layer besides the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class UnknownMask(Exception):
    """Argument whose token dimension is unknown, so that it cannot be sliced."""


def token_dims(narrow: LayerCall, wide: LayerCall) -> TokenDims:
    """Find the token dimensions of a layer's arguments from two calls of different width."""
    wider = dict(_tensors((), (wide.args, wide.kwargs)))
    dims: TokenDims = {}
    for path, tensor in _tensors((), (narrow.args, narrow.kwargs)):
        other = wider[path]
        found = tuple(d for d in range(tensor.dim()) if tensor.shape[d] != other.shape[d])
        dims[path] = found
    return dims


def part_of(call: LayerCall, window: TokenWindow, dims: TokenDims, *, before: int) -> LayerCall:
    """Return the arguments for the tokens of a window; `before`: keys ahead of the first token.

    Raises:
        UnknownMask: a tensor that the probes had not, and that does not look like a mask.
    """

    def cut(path: Path, tensor: Tensor) -> Tensor:
        # Some masks exist from a certain width on only: sliding windows, packed rows.
        found = dims.get(path, _mask_dims(tensor))
        if len(found) > 2 or found is _NOT_A_MASK:
            raise UnknownMask(f"{'.'.join(map(str, path))} {tuple(tensor.shape)}")
        if found:
            tensor = tensor.narrow(found[0], window.begin, window.tokens)
        if len(found) == 2:
            tensor = tensor.narrow(found[1], 0, before + window.end)
        return tensor

    args, kwargs = _mapped((), (call.args, call.kwargs), cut)
    return LayerCall(args, kwargs)


_NOT_A_MASK = (-1,)


def _mask_dims(tensor: Tensor) -> tuple[int, ...]:
    return (2, 3) if tensor.dim() == 4 else _NOT_A_MASK


def _tensors(path: Path, value: Any) -> Iterator[tuple[Path, Tensor]]:  # noqa: ANN401
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _tensors((*path, key), inner)
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from _tensors((*path, i), inner)


def _mapped(path: Path, value: Any, change: Callable[[Path, Tensor], Tensor]) -> Any:  # noqa: ANN401
    if isinstance(value, Tensor):
        return change(path, value)
    if isinstance(value, dict):
        return {key: _mapped((*path, key), inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped((*path, i), inner, change) for i, inner in enumerate(value))
    return value
