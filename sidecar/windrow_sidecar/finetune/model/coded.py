"""Compute with weights that are codes: linear layers and experts of a frozen base.

A forward makes the weight's numbers in one buffer that all layers share, and so does the backward,
which needs the transposed product: no numbers are kept between the two. For autograd, and for what
records a layer, the whole is one operation whose inputs are the codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from windrow_sidecar.engines.weight_files import unusable
from windrow_sidecar.engines.weight_formats import PLAIN_REMEDY, Coding
from windrow_sidecar.finetune.model.codecs import CODECS
from windrow_sidecar.finetune.offload.tensor_files import Stored, read

# Of one weight at a time; for each device and type, as large as the largest weight so far.
_buffers: dict[tuple[torch.device, torch.dtype], Tensor] = {}


@dataclass(frozen=True, slots=True)
class CodedTensor:
    """A weight that is codes.

    Attributes:
        codec: its name in `CODECS`.
        shape: of the weight: [out, in], or [experts, out, in].
        group: rows and columns that share a scale.
        parts: as the codec names them, [...] each; of experts, with these as first dimension.
        is_transposed: whether the model has the last two dimensions the other way round.
    """

    codec: str
    shape: tuple[int, ...]
    group: tuple[int, int]
    parts: Mapping[str, Tensor]
    is_transposed: bool = False

    @property
    def n_bytes(self) -> int:
        """Of its parts."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def model_shape(self) -> tuple[int, ...]:
        """Of the parameter that it stands for."""
        *first, rows, columns = self.shape
        return (*first, columns, rows) if self.is_transposed else self.shape


def read_coded(coding: Coding, stored: Mapping[str, Stored]) -> CodedTensor:
    """Return a weight's parts from its files, on the host.

    Raises:
        OSError: a file cannot be read.
    """
    parts = {part: read(stored[name]) for part, name in coding.parts.items()}
    # Bytes: no library takes them for numbers, which it might cast or train.
    parts["codes"] = parts["codes"].view(torch.uint8)
    return CodedTensor(coding.codec, coding.shape, coding.group, parts)


def decoded(
    parts: Sequence[Tensor], codec: str, layout: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Return a weight's numbers, [rows, columns], in the shared buffer: gone with the next call.

    Args:
        parts: of the codec.
        codec: its name.
        layout: rows, columns, and the rows and columns that share a scale.
        dtype: of the numbers.
    """
    rows, columns, high, wide = layout
    key = parts[0].device, dtype
    buffer = _buffers.get(key)
    if buffer is None or buffer.numel() < rows * columns:
        _buffers.pop(key, None)
        buffer = _buffers[key] = torch.empty(rows * columns, dtype=dtype, device=key[0])
    out = buffer[: rows * columns].view(rows, columns)
    CODECS[codec].decode(parts, out, (high, wide))
    return out


def buffer_bytes() -> int:
    """Return what the shared buffers take."""
    return sum(buffer.nbytes for buffer in _buffers.values())


@torch.library.custom_op("windrow::coded_linear", mutates_args=())
def coded_linear(
    x: Tensor, parts: Sequence[Tensor], codec: str, layout: Sequence[int], bias: Tensor | None
) -> Tensor:
    """Return `x` [..., columns] times the weight's transpose, plus `bias`: [..., rows]."""
    return nn.functional.linear(x, decoded(parts, codec, layout, x.dtype), bias)


@torch.library.custom_op("windrow::coded_linear_input", mutates_args=())
def _coded_linear_input(
    d_out: Tensor, parts: Sequence[Tensor], codec: str, layout: Sequence[int]
) -> Tensor:
    """Return the gradient of `coded_linear`'s input, [..., columns], from its output's."""
    return d_out @ decoded(parts, codec, layout, d_out.dtype)


@coded_linear.register_fake
def _(
    x: Tensor, parts: Sequence[Tensor], codec: str, layout: Sequence[int], bias: Tensor | None
) -> Tensor:
    del parts, codec, bias
    return x.new_empty((*x.shape[:-1], layout[0]))


@_coded_linear_input.register_fake
def _(d_out: Tensor, parts: Sequence[Tensor], codec: str, layout: Sequence[int]) -> Tensor:
    del parts, codec
    return d_out.new_empty((*d_out.shape[:-1], layout[1]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ANN401
    del output
    _, parts, ctx.codec, ctx.layout, _ = inputs
    ctx.save_for_backward(*parts)


def _backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:  # noqa: ANN401
    d_x = d_bias = None
    parts = list(ctx.saved_tensors)
    if ctx.needs_input_grad[0]:
        d_x = _coded_linear_input(d_out, parts, ctx.codec, ctx.layout)
    if ctx.needs_input_grad[4]:
        d_bias = d_out.sum(tuple(range(d_out.dim() - 1)))
    return d_x, [None] * len(parts), None, None, d_bias


coded_linear.register_autograd(_backward, setup_context=_keep)


def _flops(*args: Any, out_val: Any = None, **_: Any) -> int:  # noqa: ANN401 - torch's registry
    del out_val
    tensor, layout = args[0], args[3]
    return int(2 * tensor.numel() // tensor.shape[-1] * layout[0] * layout[1])


register_flop_formula(torch.ops.windrow.coded_linear, get_raw=True)(_flops)
register_flop_formula(torch.ops.windrow.coded_linear_input, get_raw=True)(_flops)


class CodedLinear(nn.Linear):
    """A frozen linear layer whose weight is codes; peft adapts it like any other.

    Attributes:
        codec: its name.
        layout: rows and columns of the weight, and those that share a scale.
    """

    def __init__(self, coded: CodedTensor, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)  # nn.Linear would make a weight
        self.out_features, self.in_features = coded.model_shape
        self.codec, self.layout = coded.codec, (*coded.shape, *coded.group)
        self._dtype = dtype
        self._parts = tuple(f"weight_{part}" for part in CODECS[coded.codec].parts)
        for part in CODECS[coded.codec].parts:
            self.register_buffer(f"weight_{part}", coded.parts[part], persistent=False)
        self.register_parameter("bias", bias)

    @property
    def parts(self) -> list[Tensor]:
        """The codec's parts, [...] each, as it orders them."""
        return [getattr(self, name) for name in self._parts]

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The numbers that the codes stand for, [out, in]: new memory at each call."""
        return decoded(self.parts, self.codec, self.layout, self._dtype).clone()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's name
        """Return the layer's output, [..., out], for [..., in]."""
        found: Tensor = coded_linear(input, self.parts, self.codec, self.layout, self.bias)
        return found


def weight_elements(module: nn.Module, *, of_products: bool = False) -> int:
    """Return how many numbers a module's weights are, those that codes stand for included.

    `of_products`: of matrices alone.
    """
    plain = (p for p in module.parameters() if p.dim() > 1 or not of_products)
    coded = (m for m in module.modules() if isinstance(m, CodedLinear))
    return sum(p.numel() for p in plain) + sum(m.in_features * m.out_features for m in coded)


def install(model: nn.Module, coded: Mapping[str, CodedTensor], dtype: torch.dtype) -> None:
    """Put layers over codes where the model has layers over numbers.

    Args:
        model: built over stand-ins for these weights.
        coded: by the name of the parameter.
        dtype: that the model computes in.

    Raises:
        UserError: a parameter belongs to a module that cannot be computed with over codes.
    """
    for name, tensor in coded.items():
        path, _, last = name.rpartition(".")
        parent, _, child = path.rpartition(".")
        module = model.get_submodule(path)
        if type(module) is not nn.Linear or last != "weight":
            raise unusable(
                f"{name} is stored as {tensor.codec} codes, and belongs to a "
                f"{type(module).__name__}, which is no linear layer",
                PLAIN_REMEDY,
            )
        layer = CodedLinear(tensor, module.bias, dtype)
        layer.train(module.training)
        setattr(model.get_submodule(parent), child, layer)
