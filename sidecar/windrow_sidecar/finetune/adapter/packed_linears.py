"""Linear layers of one input, with their adapters, as few products: forward, and backward by hand.

Products are in the base's type, with packed copies of the adapter in that type (`packed_copies`);
gradients are in the type of the adapter's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from windrow_sidecar.finetune.adapter.packed_copies import (
    PackedCopies,
    PackedPart,
    Projection,
    adapted_of,
)

# Computes the product of x [tokens, in] with the only part's weight together with rows of others:
# [tokens, out], new memory. None: there are none, and nothing was computed.
Joining = Callable[[Tensor], "Tensor | None"]


@dataclass(frozen=True, slots=True)
class Made:
    """Tensors that a forward of linear layers leaves for its backward, besides the input.

    Attributes:
        u: the input times all A matrices, scaled, [tokens, ranks]; None: nothing is adapted.
        before: of each part with DoRA, its product before magnitudes, [tokens, out].
    """

    u: Tensor | None
    before: tuple[Tensor | None, ...]

    def flat(self) -> tuple[Tensor | None, ...]:
        """Return its tensors, [tokens, units] each, in an order that `Made.of` takes."""
        return (self.u, *self.before)

    @staticmethod
    def of(tensors: Sequence[Tensor | None]) -> Made:
        """Return it from what `flat` returned, [tokens, units] each."""
        return Made(tensors[0], tuple(tensors[1:]))


class PackedLinears(PackedCopies):
    """Linear layers that read the same input.

    Args:
        name: of the group among those of a layer.
        projections: in the order in which their outputs are wanted.
        tensors: its own memory is entered here, by names that begin with `name`.

    Attributes:
        joining: computes the product where others need the same weight; None: nobody does.
    """

    def __init__(
        self, name: str, projections: Sequence[Projection], tensors: dict[str, Tensor]
    ) -> None:
        super().__init__(name, projections, tensors)
        self.joining: Joining | None = None
        self._places: Tensor | None = None

    def release(self) -> None:
        """Forget the packed copies."""
        super().release()
        self._places = None

    @property
    def refused_alone(self) -> str:
        """Reason why the group is not one product with plain adapters of one scale; "" if it is."""
        if len(self._parts) != 1:
            return "is not one matrix"
        if self._parts[0].is_decomposed:
            return "has magnitudes"
        if not self.ranks:
            return "has no adapter"
        if self._differ:
            return "has adapters of several scales"
        if len({parameter.dtype for parameter in self.learns}) != 1:
            return "has adapters of several types"
        return ""

    def forward(
        self, x: Tensor, *, adapted: bool, residual: Tensor | None = None
    ) -> tuple[list[Tensor], Made]:
        """Return the outputs of each part, [tokens, out], and what `backward` needs.

        Args:
            x: [tokens, in].
            adapted: False: as the base computes.
            residual: [tokens, out], added to the output of the only part.
        """
        u = self._down(x) if adapted and self._a is not None else None
        outputs, before = [], []
        for part in self._parts:
            kept = None
            joined = self._joined(x)
            if u is not None and part.is_decomposed:
                product = functional.linear(x, part.weight) if joined is None else joined
                y = torch.addmm(product, *self._up(part, u))
                kept = y
                y = y * part.own["scale_of_row"]
                if "bias" in part.own:
                    y = y + part.own["bias"]
                if residual is not None:
                    y = residual + y
            else:
                bias = part.own.get("bias")
                if joined is not None:
                    y = joined if bias is None else joined + bias
                    y = y if residual is None else residual + y
                elif residual is None:
                    y = functional.linear(x, part.weight, bias)
                else:
                    y = torch.addmm(residual, x, part.weight.t())
                    y = y if bias is None else y + bias
                if u is not None and part.is_adapted:
                    y = torch.addmm(y, *self._up(part, u))
            outputs.append(y)
            before.append(kept)
        return outputs, Made(u, tuple(before))

    def by_projection(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs, [tokens, out], of each projection: views of the parts'."""
        return [
            output if len(part.rows) == 1 else output[:, rows]
            for part, output in zip(self._parts, outputs, strict=True)
            for rows in part.rows
        ]

    def room(self, like: Tensor) -> list[Tensor]:
        """Return new memory for the gradient of each part, [tokens, out]."""
        return [like.new_empty(like.shape[0], part.outputs) for part in self._parts]

    def backward(
        self, gradients: Sequence[Tensor], x: Tensor | None, made: Made, *, wants_input: bool
    ) -> Tensor | None:
        """Add the adapter's gradients to its parameters; return that of the input, [tokens, in].

        Args:
            gradients: of the outputs of each part, [tokens, out].
            x: the input of forward; may be None where nothing is adapted.
            made: what forward left.
            wants_input: False: return None.
        """
        d_x: Tensor | None = None
        v: Tensor | None = None
        u = made.u
        if u is not None:
            v = torch.empty_like(u)
        for part, d_out, before in zip(self._parts, gradients, made.before, strict=True):
            d = d_out
            if before is not None:
                self._of_magnitudes(part, d, before)
                d = d * part.own["scale_of_row"]
            if u is not None and v is not None and part.is_adapted:
                assert self._nothing is not None
                torch.addmm(
                    *(self._nothing, d, part.own["b"]),
                    beta=0,
                    alpha=self._scale,
                    out=v[:, part.of_u],
                )
                for projection, rows, columns in adapted_of(part):
                    assert projection.b is not None
                    _add(projection.b, _wide(d[:, rows].t(), u[:, columns], projection.b.dtype))
            if wants_input:
                d_x = d @ part.weight if d_x is None else d_x.addmm_(d, part.weight)
        if v is None:
            return d_x
        if self._scales is not None:
            v.mul_(self._scales)
        assert x is not None
        assert self._a is not None
        for part in self._parts:
            for projection, _, columns in adapted_of(part):
                assert projection.a is not None
                _add(projection.a, _wide(v[:, columns].t(), x, projection.a.dtype))
        return None if d_x is None else d_x.addmm_(v, self._a)

    # Of a group that `refused_alone` has nothing against, in steps for kernels that join them.

    def down(self, x: Tensor) -> Tensor:
        """Return `Made.u`, [tokens, ranks], of an input, [tokens, in]."""
        return self._down(x)

    def product(self, x: Tensor) -> Tensor:
        """Return the base's output, [tokens, out], in new memory, of an input, [tokens, in]."""
        part, joined = self._parts[0], self._joined(x)
        bias = part.own.get("bias")
        if joined is None:
            return functional.linear(x, part.weight, bias)
        return joined if bias is None else joined + bias

    def lift(self, d: Tensor) -> Tensor:
        """Return the scaled gradient at all ranks, [tokens, ranks], of the output's gradient."""
        assert self._nothing is not None
        return torch.addmm(self._nothing, d, self.b, beta=0, alpha=self._scale)

    @property
    def places(self) -> Tensor:
        """Places of B's gradients in the memory of all (`in_a_row`): int32 [3, out].

        Of each output the place of its rank 0, and from which rank of all to which it has some.
        """
        if self._places is None:
            found = torch.zeros(3, self.outputs, dtype=torch.int32)
            part, at = self._parts[0], self.ranks * self.inputs
            for projection, rows, columns in adapted_of(part):
                assert projection.b is not None
                rank = columns.stop - columns.start
                out = torch.arange(rows.stop - rows.start, dtype=torch.int32)
                found[0, rows] = at + out * rank - columns.start
                found[1, rows], found[2, rows] = columns.start, columns.stop
                at += projection.b.numel()
            self._places = found.to(part.weight.device)
        return self._places

    @property
    def in_a_row(self) -> tuple[nn.Parameter, ...]:
        """Parameters in the order of their gradients in one memory: each A, then each B."""
        adapted = [(p.a, p.b) for p in self.projections if p.a is not None and p.b is not None]
        return tuple(a for a, _ in adapted) + tuple(b for _, b in adapted)

    def add_gradients(self, x: Tensor, v: Tensor, d: Tensor, u: Tensor) -> None:
        """Add the gradients of all A and B.

        Args:
            x: the input, [tokens, in].
            v: the gradient at all ranks (`lift`), [tokens, ranks].
            d: that of the output, [tokens, out].
            u: the input at all ranks (`down`), [tokens, ranks].
        """
        for projection, rows, columns in adapted_of(self._parts[0]):
            assert projection.a is not None
            assert projection.b is not None
            _add(projection.a, _wide(v[:, columns].t(), x, projection.a.dtype))
            _add(projection.b, _wide(d[:, rows].t(), u[:, columns], projection.b.dtype))

    def _joined(self, x: Tensor) -> Tensor | None:
        # What a recording runs with (`recompute.recording`) is not a tensor that could be computed.
        if self.joining is None or len(self._parts) != 1 or type(x) is not Tensor:
            return None
        return self.joining(x)

    def _down(self, x: Tensor) -> Tensor:
        assert self._a is not None
        assert self._nothing is not None
        u = torch.addmm(self._nothing, x, self._a.t(), beta=0, alpha=self._scale)
        return u if self._scales is None else u * self._scales

    def _up(self, part: PackedPart, u: Tensor) -> tuple[Tensor, Tensor]:
        of_part = u if len(self._parts) == 1 else u[:, part.of_u]
        return of_part, part.own["b"].t()

    def _of_magnitudes(self, part: PackedPart, d: Tensor, before: Tensor) -> None:
        for projection, rows in zip(part.projections, part.rows, strict=True):
            if projection.magnitude is None:
                continue
            wide = projection.magnitude.dtype
            total = (d[:, rows].to(wide) * before[:, rows].to(wide)).sum(0)
            _add(projection.magnitude, total / part.own["norm"][rows])


def _wide(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a product in a wider type than its factors have, and of sums in that type."""
    if left.dtype == dtype:
        return left @ right
    if left.is_cuda:
        mm: Any = torch.mm
        made: Tensor = mm(left, right, out_dtype=dtype)
        return made
    return left.to(dtype) @ right.to(dtype)


def _add(parameter: nn.Parameter, gradient: Tensor) -> None:
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
