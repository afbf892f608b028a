"""Compute with weights that are codes: linear layers and experts of a frozen base.

A forward makes the weight's numbers in one buffer that all layers share, and so does the backward,
which needs the transposed product: no numbers are kept between the two. For autograd, and for what
records a layer, the whole is one operation whose inputs are the codes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from windrow_sidecar.engines.streaming.tensor_files import Stored, read
from windrow_sidecar.engines.weight_files import unusable
from windrow_sidecar.engines.weight_formats import PLAIN_REMEDY, Coded, Coding
from windrow_sidecar.finetune.model.codecs import CODECS

# Linear layers of an expert, as checkpoints name them, by the tensor of the model that they go to.
_OF_EXPERTS = {
    "gate_up_proj": (("gate_proj", "w1"), ("up_proj", "w3")),
    "down_proj": (("down_proj", "w2"),),
}
_EXPERT = re.compile(r"^(?P<experts>.*\.experts)\.(?P<number>\d+)\.(?P<part>\w+)\.weight$")
# Codecs whose parts are rows of the weight, so that weights can be stacked by rows; and the parts
# that hold one number for a whole weight.
_BY_ROWS = ("fp8", "mxfp4", "nvfp4-factor", "nvfp4-divisor", "int8", "int4")
_OF_ALL_ROWS = ("factor", "divisor")
# Codecs of a transposed weight: rows are the last dimension of their parts. As SGLang fuses gate
# and up, the groups of columns (`order`) are those of both.
_BY_COLUMNS = ("gptq", "gptq-ordered", "awq")
_OF_COLUMNS = ("order",)
# Of one weight at a time; for each device and type, as large as the largest weight so far.
_buffers: dict[tuple[torch.device, torch.dtype], Tensor] = {}


class CodedTensor(Coded[Tensor]):
    """A weight that is codes, in memory: parts are [...] each, [experts, ...] where it has them."""

    __slots__ = ()

    @property
    def n_bytes(self) -> int:
        """Bytes of its parts."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def model_shape(self) -> tuple[int, ...]:
        """Shape of the model's parameter."""
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
    return CodedTensor(coding.codec, coding.shape, coding.group, parts, coding.is_transposed)


def stack_experts(weights: Mapping[str, CodedTensor], where: str) -> dict[str, CodedTensor]:
    """Put the linear layers of a mixture's experts together, as transformers has them.

    Args:
        weights: by name; those that belong to no expert stay as they are.
        where: they are from, for errors.

    Raises:
        UserError: an expert or a part of one is missing, or they cannot lie in one tensor.
    """
    found: dict[str, CodedTensor] = {}
    experts: dict[str, dict[int, dict[str, CodedTensor]]] = {}
    for name, weight in weights.items():
        match = _EXPERT.match(name)
        if match is None:
            found[name] = weight
        else:
            of = experts.setdefault(match["experts"], {}).setdefault(int(match["number"]), {})
            of[match["part"]] = weight
    for prefix, numbered in experts.items():
        for target, parts in _OF_EXPERTS.items():
            rows = [
                [_part_of(numbered, n, names, f"{where}: {prefix}.{n}") for names in parts]
                for n in range(max(numbered) + 1)
            ]
            found[f"{prefix}.{target}"] = _stacked(rows, f"{where}: {prefix}.{target}")
    return found


def _part_of(
    numbered: Mapping[int, Mapping[str, CodedTensor]], n: int, names: Sequence[str], where: str
) -> CodedTensor:
    of = numbered.get(n, {})
    part = next((of[name] for name in names if name in of), None)
    if part is None:
        raise unusable(f"{where} has no {' or '.join(names)} that is codes", PLAIN_REMEDY)
    return part


def _stacked(experts: Sequence[Sequence[CodedTensor]], where: str) -> CodedTensor:
    """Return one tensor of experts, the parts of each below each other."""
    first = experts[0][0]
    high, wide = first.group
    heights = [part.shape[0] for part in experts[0]]
    if first.codec in _BY_COLUMNS:
        return _stacked_by_columns(experts, where)
    by_row = first.parts["scales"].dim() < 2 or first.parts["scales"].numel() == 1
    if first.codec not in _BY_ROWS:
        raise unusable(f"{where}: experts in {first.codec} have no codec here", PLAIN_REMEDY)
    if not by_row and any(height % high for height in heights[:-1]):
        raise unusable(
            f"{where}: blocks of {high} rows do not divide the {heights[0]} of an expert",
            PLAIN_REMEDY,
        )
    of_all: dict[str, list[Tensor]] = {part: [] for part in first.parts}
    for of in experts:
        _check_alike(of, experts[0], where)
        for name, stacks in of_all.items():
            parts = [part.parts[name] for part in of]
            if name in _OF_ALL_ROWS or (by_row and name == "scales"):
                parts = [
                    part.reshape(-1, 1).expand(height, 1)
                    for part, height in zip(parts, heights, strict=True)
                ]
            stacks.append(torch.cat(parts))
    return CodedTensor(
        first.codec,
        (len(experts), sum(heights), first.shape[1]),
        (1, first.shape[1]) if by_row else (high, wide),
        {name: torch.stack(stacks) for name, stacks in of_all.items()},
    )


def _stacked_by_columns(experts: Sequence[Sequence[CodedTensor]], where: str) -> CodedTensor:
    """Return the same of weights that are stored the other way round."""
    first = experts[0][0]
    stacks: dict[str, list[Tensor]] = {name: [] for name in first.parts}
    for of in experts:
        _check_alike(of, experts[0], where)
        for name, stack in stacks.items():
            parts = [part.parts[name] for part in of]
            if name not in _OF_COLUMNS:
                stack.append(torch.cat(parts, -1))
                continue
            if not all(torch.equal(part, parts[0]) for part in parts):
                raise unusable(
                    f"{where}: the columns of an expert's weights are in groups of different "
                    "orders, and have one in a tensor of both",
                    PLAIN_REMEDY,
                )
            stack.append(parts[0])
    shape = (len(experts), sum(part.shape[0] for part in experts[0]), first.shape[1])
    whole = {name: torch.stack(stack) for name, stack in stacks.items()}
    return CodedTensor(first.codec, shape, first.group, whole)


def _check_alike(expert: Sequence[CodedTensor], first: Sequence[CodedTensor], where: str) -> None:
    if [(p.codec, p.shape, p.group) for p in expert] != [
        (p.codec, p.shape, p.group) for p in first
    ]:
        raise unusable(f"{where}: experts differ in shape or in how they are stored")


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
    def elements(self) -> int:
        """Count of the numbers that its codes hold."""
        return self.in_features * self.out_features

    def numbers(self) -> Iterator[Tensor]:
        """Yield the weight, [out, in], in the shared buffer."""
        yield decoded(self.parts, self.codec, self.layout, self._dtype)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The numbers that the codes stand for, [out, in]: new memory at each call."""
        return decoded(self.parts, self.codec, self.layout, self._dtype).clone()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's name
        """Return the layer's output, [..., out], for [..., in]."""
        found: Tensor = coded_linear(input, self.parts, self.codec, self.layout, self.bias)
        return found


class CodedExperts(nn.Module):
    """The frozen experts of a mixture over codes; each computes with its tokens in turn.

    Args:
        experts: transformers' module for them, whose gate and biases are used.
        coded: `gate_up_proj` and `down_proj`, [experts, out, in].
        dtype: that the model computes in.
    """

    def __init__(
        self, experts: nn.Module, coded: Mapping[str, CodedTensor], dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.num_experts, *_ = coded["gate_up_proj"].shape
        self._dtype = dtype
        self._layouts: dict[str, tuple[int, ...]] = {}
        self._codecs: dict[str, str] = {}
        for name, tensor in coded.items():
            self._codecs[name] = tensor.codec
            self._layouts[name] = (*tensor.shape[1:], *tensor.group)
            for part in CODECS[tensor.codec].parts:
                self.register_buffer(f"{name}_{part}", tensor.parts[part], persistent=False)
        for name, bias in experts.named_parameters(recurse=False):
            if name not in coded:
                self.register_parameter(name, bias)
        # The model's own gate, which reads these; not bound to the module that gives way.
        self._gate = type(experts)._apply_gate  # type: ignore[attr-defined]
        for name, value in vars(experts).items():
            if not name.startswith("_"):
                setattr(self, name, value)
        for name, child in experts.named_children():
            setattr(self, name, child)

    @property
    def codec(self) -> str:
        """The name of their codec."""
        return self._codecs["gate_up_proj"]

    @property
    def elements(self) -> int:
        """Count of the numbers that their codes hold."""
        return sum(self.num_experts * rows * cols for rows, cols, *_ in self._layouts.values())

    def numbers(self) -> Iterator[Tensor]:
        """Yield each weight of each expert, [out, in], in the shared buffer."""
        for name, layout in self._layouts.items():
            for expert in range(self.num_experts):
                yield decoded(self._parts_of(name, expert), self._codecs[name], layout, self._dtype)

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return what the chosen experts make of each token, [tokens, hidden].

        Args:
            hidden: [tokens, hidden].
            chosen: the experts of each token, int64 [tokens, k].
            weights: what each of them counts, [tokens, k].
        """
        out = torch.zeros_like(hidden)
        for expert in sorted(set(chosen.flatten().tolist())):
            if expert >= self.num_experts:
                continue
            token, place = torch.where(chosen == expert)
            made = self._product("gate_up_proj", expert, hidden[token])
            made = self._product("down_proj", expert, self._gate(self, made))
            made = made * weights[token, place, None]
            out.index_add_(0, token, made.to(out.dtype))
        return out

    def _product(self, name: str, expert: int, x: Tensor) -> Tensor:
        bias = getattr(self, f"{name}_bias", None)
        found: Tensor = coded_linear(
            x,
            self._parts_of(name, expert),
            self._codecs[name],
            self._layouts[name],
            None if bias is None else bias[expert],
        )
        return found

    def _parts_of(self, name: str, expert: int) -> list[Tensor]:
        parts = CODECS[self._codecs[name]].parts
        return [getattr(self, f"{name}_{part}")[expert] for part in parts]


def weight_elements(module: nn.Module, *, of_products: bool = False) -> int:
    """Return how many numbers a module's weights are, those that codes stand for included.

    `of_products`: of matrices alone.
    """
    plain = (p for p in module.parameters() if p.dim() > 1 or not of_products)
    coded = (m for m in module.modules() if isinstance(m, CodedLinear | CodedExperts))
    return sum(p.numel() for p in plain) + sum(m.elements for m in coded)


def install(model: nn.Module, coded: Mapping[str, CodedTensor], dtype: torch.dtype) -> None:
    """Put layers over codes where the model has layers over numbers.

    Args:
        model: built over stand-ins for these weights.
        coded: by the name of the parameter.
        dtype: that the model computes in.

    Raises:
        UserError: a parameter belongs to a module that cannot be computed with over codes.
    """
    experts: dict[str, dict[str, CodedTensor]] = {}
    for name, tensor in coded.items():
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        if last in _OF_EXPERTS and hasattr(module, "_apply_gate"):
            experts.setdefault(path, {})[last] = tensor
            continue
        if type(module) is not nn.Linear or last != "weight":
            raise unusable(
                f"{name} is stored as {tensor.codec} codes, and belongs to a "
                f"{type(module).__name__}, which is not a linear layer",
                PLAIN_REMEDY,
            )
        _put(model, path, CodedLinear(tensor, module.bias, dtype))
    for path, tensors in experts.items():
        if missing := sorted(_OF_EXPERTS.keys() - tensors.keys()):
            raise unusable(
                f"{path} holds codes, and its {missing[0]} does not: an unknown layout of experts",
                PLAIN_REMEDY,
            )
        _put(model, path, CodedExperts(model.get_submodule(path), tensors, dtype))


def _put(model: nn.Module, path: str, layer: nn.Module) -> None:
    parent, _, child = path.rpartition(".")
    layer.train(model.get_submodule(path).training)
    setattr(model.get_submodule(parent), child, layer)
