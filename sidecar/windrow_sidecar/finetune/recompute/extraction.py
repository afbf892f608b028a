"""Extract the values that a plan keeps from the tensors that autograd saves.

Autograd saves more than it names: a fp32 copy of a bf16 tensor holds just that tensor, a chunk's
storage holds the whole. So each saved tensor represents every value from which it was made by
widening casts and views; and a ReLU's result represents its signs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from windrow_sidecar.finetune.recompute.layer_graph import LayerGraph, OpKind

_WIDENED = {
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float64),
    (torch.float16, torch.float64),
    (torch.float32, torch.float64),
}


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Storage, offset, shape and strides of a tensor; equal layouts in one run are one tensor."""

    storage: int
    offset: int  # elements
    size: tuple[int, ...]
    stride: tuple[int, ...]  # 0 for extents of 1, where kernels differ
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorLayout:
        """Return the layout of a tensor [...]; its values are not read."""
        size = tuple(tensor.shape)
        stride = tuple(0 if n == 1 else s for n, s in zip(size, tensor.stride(), strict=True))
        storage = tensor.untyped_storage()._cdata
        return cls(storage, int(tensor.storage_offset()), size, stride, tensor.dtype)

    def fits(self, tensor: Tensor) -> bool:
        """Return whether a tensor [...] of another run is laid out alike, in whatever storage."""
        return (
            self.dtype == tensor.dtype
            and self.size == tuple(tensor.shape)
            and all(
                n == 1 or mine == theirs
                for n, mine, theirs in zip(self.size, self.stride, tensor.stride(), strict=True)
            )
        )

    @property
    def elements(self) -> int:
        """Number of elements."""
        return torch.Size(self.size).numel()


@dataclass(frozen=True, slots=True)
class As:
    """Step: view the tensor in another shape of its storage, `shift` elements further."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    shift: int

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return [*size], a view of the storage of `tensor` [...]."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.shift)


@dataclass(frozen=True, slots=True)
class DowncastTensor:
    """Step: cast the tensor to a smaller dtype that holds its values exactly."""

    dtype: torch.dtype

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return `tensor` [...] cast: new memory, or itself where it has the dtype."""
        return tensor.to(self.dtype)


@dataclass(frozen=True, slots=True)
class SignBits:
    """Step: keep one bit an element, whether it is above zero."""

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return uint8 [elements / 8, rounded up]."""
        above = (tensor.reshape(-1) > 0).to(torch.uint8)
        above = torch.nn.functional.pad(above, (0, -above.numel() % 8)).view(-1, 8)
        return (above * _bit_weights(tensor.device)).sum(1, dtype=torch.uint8)


def unsigned(bits: Tensor, layout: TensorLayout) -> Tensor:
    """Return 1 where `SignBits` found an element above zero and 0 elsewhere.

    `bits`: uint8 [elements / 8, rounded up]; the result is new memory, [*layout.size].
    """
    above = (bits.unsqueeze(1) & _bit_weights(bits.device)).ne(0).view(-1)[: layout.elements]
    return above.to(layout.dtype).view(layout.size)


def _bit_weights(device: torch.device) -> Tensor:
    """Return 1, 2, 4, ... 128, made on the device: a copy from the host would wait for it."""
    return 1 << torch.arange(8, dtype=torch.uint8, device=device)


@dataclass(frozen=True, slots=True)
class Extractor:
    """Way to get a value from the tensor at `position` among those that autograd saves."""

    position: int
    steps: tuple[As | DowncastTensor | SignBits, ...]

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the value of a saved tensor [...]: its memory, unless a step needs its own."""
        for step in self.steps:
            tensor = step(tensor)
        return tensor


def extractors_of(
    graph: LayerGraph,
    layouts: Sequence[TensorLayout],
    sign_of: Mapping[int, int],
    saved: Sequence[TensorLayout],
) -> dict[int, Extractor]:
    """Return how to extract each value, from the earliest saved tensor that gives it.

    Args:
        graph: of the layer.
        layouts: of its values.
        sign_of: values that are signs, with the position of the tensor whose signs they are.
        saved: layouts of the saved tensors, by position.
    """
    known = {layout: value for value, layout in enumerate(layouts) if value not in sign_of}
    producers = graph.producers()
    takes: dict[int, Extractor] = {}
    for position, layout in enumerate(saved):
        value = known[layout]
        steps: tuple[As | DowncastTensor | SignBits, ...] = ()
        while value not in takes and not graph.values[value].there:
            takes[value] = Extractor(position, steps)
            behind = _behind(graph, layouts, value, producers.get(value), steps)
            if behind is None:
                break
            value, steps = behind
    for value, position in sign_of.items():
        takes[value] = Extractor(position, (SignBits(),))
    return takes


def _behind(
    graph: LayerGraph,
    layouts: Sequence[TensorLayout],
    value: int,
    producer: int | None,
    steps: tuple[As | DowncastTensor | SignBits, ...],
) -> tuple[int, tuple[As | DowncastTensor | SignBits, ...]] | None:
    """Return the value that `value` was made of, and the steps that extract it, if possible."""
    if producer is None or len(graph.ops[producer].inputs) != 1:
        return None
    op, made = graph.ops[producer], layouts[value]
    origin = op.inputs[0]
    layout = layouts[origin]
    if op.kind is OpKind.VIEW and layout.storage == made.storage and layout.dtype == made.dtype:
        whole = layout.elements == made.elements
        if whole or not any(isinstance(step, DowncastTensor) for step in steps):
            return origin, (*steps, As(layout.size, layout.stride, layout.offset - made.offset))
    if op.name.startswith("aten._to_copy") and (layout.dtype, made.dtype) in _WIDENED:
        same = layout.size == made.size and layout.stride == made.stride
        return (origin, (*steps, DowncastTensor(layout.dtype))) if same else None
    return None
