"""Linear layers of one input, with their adapters, as few products: forward, and backward by hand.

Weights that lie one after the other in memory, as decode's engines pack them, are one matrix; the
adapters' A matrices always are. Products are in the base's type, with packed copies of the adapter
in that type which are made once per step; gradients are in the type of the adapter's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# Computes the product of x [tokens, in] with the only part's weight together with rows of others:
# [tokens, out], new memory. None: there are none, and nothing was computed.
Joining = Callable[[Tensor], "Tensor | None"]

# Rows of a weight whose norms are computed at a time (DoRA): a few MB more, not a second weight.
_NORM_ROWS = 1024


@dataclass(slots=True, eq=False)
class Projection:
    """One of the linear layers.

    Attributes:
        weight: of the base, [out, in].
        bias: of the base, [out], or None.
        a: LoRA's A, [rank, in]; None: it has no adapter.
        b: LoRA's B, [out, rank].
        scale: by which their product counts.
        magnitude: of DoRA, [out], or None.
    """

    weight: nn.Parameter
    bias: Tensor | None
    a: nn.Parameter | None = None
    b: nn.Parameter | None = None
    scale: float = 1.0
    magnitude: nn.Parameter | None = None

    @property
    def learns(self) -> tuple[nn.Parameter, ...]:
        """Parameters that get a gradient."""
        return tuple(p for p in (self.a, self.b, self.magnitude) if p is not None)


@dataclass(slots=True, eq=False)
class _Part:
    """A matrix of one product: some of the projections, one below the other.

    `rows` and `columns`: of each projection, its outputs in the part and its place in `u`.
    """

    projections: tuple[Projection, ...]
    rows: tuple[slice, ...]
    columns: tuple[slice, ...]
    weight: Tensor
    own: dict[str, Tensor]  # b [out, rank], scale_of_row [out], norm [out], bias [out]

    @property
    def outputs(self) -> int:
        return int(self.rows[-1].stop)

    @property
    def of_u(self) -> slice:
        return slice(self.columns[0].start, self.columns[-1].stop)

    @property
    def is_adapted(self) -> bool:
        return bool(self.of_u.stop > self.of_u.start)

    @property
    def is_decomposed(self) -> bool:
        return any(p.magnitude is not None for p in self.projections)


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


class PackedLinears:
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
        self.projections = tuple(projections)
        self._name, self._tensors = name, tensors
        self._learns = tuple(parameter for p in self.projections for parameter in p.learns)
        self._pack_b: Callable[[], None] | None = None
        self.joining: Joining | None = None
        self._seen: tuple[int, ...] = ()
        self._parts: tuple[_Part, ...] = ()
        # Rooms in the packed copies and what goes there; None: not looked up since they were laid
        # out.
        self._copies: list[tuple[Tensor, nn.Parameter]] | None = None
        self._a: Tensor | None = None
        self._nothing: Tensor | None = None  # the sum of a product that adds to nothing
        scales = {p.scale for p in self.projections if p.a is not None}
        self._scale = scales.pop() if len(scales) == 1 else 1.0
        self._scales: Tensor | None = None  # of each column of u, where they differ
        self._differ = bool(scales)
        self._places: Tensor | None = None

    @property
    def pack_b(self) -> Callable[[], None] | None:
        """Function that writes `b` in one launch; None: each parameter is copied to its place."""
        return self._pack_b

    @pack_b.setter
    def pack_b(self, pack: Callable[[], None] | None) -> None:
        self._pack_b, self._copies = pack, None

    @property
    def parts(self) -> int:
        """Products that the base's weights take."""
        return len(self._parts)

    @property
    def learns(self) -> tuple[nn.Parameter, ...]:
        """Parameters that get a gradient."""
        return self._learns

    @property
    def inputs(self) -> int:
        """Units of the input."""
        return int(self.projections[0].weight.shape[1])

    @property
    def outputs(self) -> int:
        """Units of all outputs."""
        return sum(p.weight.shape[0] for p in self.projections)

    @property
    def ranks(self) -> int:
        """Ranks of all adapters: columns of `Made.u`."""
        return sum(p.a.shape[0] for p in self.projections if p.a is not None)

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

    def look(self) -> tuple[int, ...]:
        """Return what changes when the adapter or the place of a weight does."""
        seen = [projection.weight.data_ptr() for projection in self.projections]
        for parameter in self._learns:
            seen += (parameter.data_ptr(), parameter._version)
        return tuple(seen)

    @property
    def is_stale(self) -> bool:
        """True where the packed copies are not those of the adapter and the weights as they are."""
        return self.look() != self._seen

    def copies_alone(self, seen: tuple[int, ...]) -> bool:
        """Return whether only the adapter differs from what `look` saw, and weights are not read.

        Args:
            seen: by `look` now.
        """
        places = len(self.projections)
        decomposed = any(part.is_decomposed for part in self._parts)
        return bool(self._parts) and seen[:places] == self._seen[:places] and not decomposed

    def refresh(self) -> None:
        """Make the packed copies, if the adapter or the place of a weight has changed."""
        refresh((self,))

    def release(self) -> None:
        """Forget the packed copies."""
        self._seen, self._parts, self._copies = (), (), None
        self._a = self._nothing = self._scales = self._places = None
        for name in [name for name in self._tensors if name.startswith(f"{self._name}.")]:
            del self._tensors[name]

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
                for projection, rows, columns in _adapted(part):
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
            for projection, _, columns in _adapted(part):
                assert projection.a is not None
                _add(projection.a, _wide(v[:, columns].t(), x, projection.a.dtype))
        return None if d_x is None else d_x.addmm_(v, self._a)

    # Of a group that `refused_alone` has nothing against, in steps for kernels that join them.

    @property
    def scale(self) -> float:
        """Factor of u and v."""
        return self._scale

    @property
    def a(self) -> Tensor:
        """All A matrices, [ranks, in], one below the other; packed copies."""
        assert self._a is not None
        return self._a

    @property
    def b(self) -> Tensor:
        """All B matrices, [out, ranks]: each in its projection's rows and its adapter's columns."""
        return self._parts[0].own["b"]

    @property
    def weight(self) -> Tensor:
        """The base's weights, [out, in]."""
        return self._parts[0].weight

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
            for projection, rows, columns in _adapted(part):
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
        for projection, rows, columns in _adapted(self._parts[0]):
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

    def _up(self, part: _Part, u: Tensor) -> tuple[Tensor, Tensor]:
        of_part = u if len(self._parts) == 1 else u[:, part.of_u]
        return of_part, part.own["b"].t()

    def _of_magnitudes(self, part: _Part, d: Tensor, before: Tensor) -> None:
        for projection, rows in zip(part.projections, part.rows, strict=True):
            if projection.magnitude is None:
                continue
            wide = projection.magnitude.dtype
            total = (d[:, rows].to(wide) * before[:, rows].to(wide)).sum(0)
            _add(projection.magnitude, total / part.own["norm"][rows])

    def _to_copy(self) -> list[tuple[Tensor, nn.Parameter]]:
        """Return what the adapter's parameters are copied to, and the parameters; lay out first."""
        if not self._parts or any(
            not _holds(part.weight, part.projections) for part in self._parts
        ):
            self.release()
            self._lay_out()
        if self._copies is None:
            self._copies = self._places_of_copies()
        return self._copies

    def _places_of_copies(self) -> list[tuple[Tensor, nn.Parameter]]:
        found: list[tuple[Tensor, nn.Parameter]] = []
        for part in self._parts:
            for projection, rows, columns in _adapted(part):
                assert projection.a is not None
                assert projection.b is not None
                in_part = slice(columns.start - part.of_u.start, columns.stop - part.of_u.start)
                found.append((self.a[columns], projection.a))
                if self.pack_b is None or len(part.projections) == 1:
                    found.append((part.own["b"][rows, in_part], projection.b))
        return found

    def _finish(self) -> None:
        if self.pack_b is not None and len(self._parts[0].projections) > 1:
            self.pack_b()
        for part in self._parts:
            if not part.is_decomposed:
                continue
            for projection, rows in zip(part.projections, part.rows, strict=True):
                if projection.magnitude is not None:
                    norm = part.own["norm"][rows]
                    _norms(projection, norm)
                    part.own["scale_of_row"][rows].copy_(projection.magnitude / norm)

    def _lay_out(self) -> None:
        """Take memory for the packed copies, and find weights that lie one after the other."""
        weights = [projection.weight for projection in self.projections]
        joined = one_matrix(weights)
        groups = [self.projections] if joined is not None else [(p,) for p in self.projections]
        at, like, parts = 0, weights[0], []
        for n, group in enumerate(groups):
            rows, columns, out = [], [], 0
            for projection in group:
                rank = 0 if projection.a is None else projection.a.shape[0]
                rows.append(slice(out, out + projection.weight.shape[0]))
                columns.append(slice(at, at + rank))
                at, out = at + rank, out + projection.weight.shape[0]
            weight = group[0].weight.detach() if joined is None else joined
            part = _Part(tuple(group), tuple(rows), tuple(columns), weight, {})
            self._own(part, n, like)
            parts.append(part)
        self._parts = tuple(parts)
        if at:
            self._a = like.new_zeros(at, like.shape[1])
            self._nothing = like.new_zeros(())
            self._enter("a", self._a)
            self._enter("nothing", self._nothing)
            if self._differ:
                scales = [p.scale for p in self.projections if p.a is not None]
                ranks = [p.a.shape[0] for p in self.projections if p.a is not None]
                of_each = torch.tensor(scales).repeat_interleave(torch.tensor(ranks))
                self._scales = of_each.to(like)
                self._enter("scales", self._scales)

    def _own(self, part: _Part, n: int, like: Tensor) -> None:
        if len(part.projections) > 1:
            self._enter(f"weight.{n}", part.weight)
        if part.is_adapted:
            rank = part.of_u.stop - part.of_u.start
            part.own["b"] = like.new_zeros(part.outputs, rank)
        if part.is_decomposed:
            wide = next(p.magnitude for p in part.projections if p.magnitude is not None)
            part.own["norm"] = wide.detach().new_ones(part.outputs)
            part.own["scale_of_row"] = like.new_ones(part.outputs)
        if any(projection.bias is not None for projection in part.projections):
            part.own["bias"] = torch.cat(
                [
                    like.new_zeros(p.weight.shape[0]) if p.bias is None else p.bias.detach()
                    for p in part.projections
                ]
            )
        for name, tensor in part.own.items():
            self._enter(f"{name}.{n}", tensor)

    def _enter(self, name: str, tensor: Tensor) -> None:
        self._tensors[f"{self._name}.{name}"] = tensor


def refresh(groups: Sequence[PackedLinears], others: Sequence[PackedLinears] = ()) -> None:
    """Make the packed copies of all groups whose adapter or weights' place has changed.

    In one call for all of them: a GPU takes up to 64 tensors a launch.

    Args:
        groups: of the layer that runs next, whose weights are there.
        others: of other layers, whose weights may not be: of these only copies that need none.
    """
    now = [(group, seen) for group in groups if (seen := group.look()) != group._seen]
    now += [
        (group, seen)
        for group in others
        if (seen := group.look()) != group._seen and group.copies_alone(seen)
    ]
    with torch.no_grad():
        copies = [pair for group, _ in now for pair in group._to_copy()]
        if copies:
            rooms, sources = zip(*copies, strict=True)
            torch._foreach_copy_(list(rooms), list(sources))
        for group, seen in now:
            group._finish()
            group._seen = seen


def one_matrix(weights: Sequence[Tensor]) -> Tensor | None:
    """Return weights, [out, in] each, as one matrix over their memory; None: they lie apart.

    One weight alone is None as well.
    """
    first = weights[0]
    if len(weights) < 2:
        return None
    end = first.storage_offset()
    for weight in weights:
        if (
            not weight.is_contiguous()
            or (weight.dtype, weight.device) != (first.dtype, first.device)
            or weight.shape[1:] != first.shape[1:]
            or weight.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or weight.storage_offset() != end
        ):
            return None
        end += weight.numel()
    rows = sum(weight.shape[0] for weight in weights)
    return first.detach().as_strided((rows, first.shape[1]), (first.shape[1], 1))


def _holds(weight: Tensor, projections: Sequence[Projection]) -> bool:
    return weight.data_ptr() == projections[0].weight.data_ptr()


def _adapted(part: _Part) -> list[tuple[Projection, slice, slice]]:
    found = zip(part.projections, part.rows, part.columns, strict=True)
    return [(p, rows, columns) for p, rows, columns in found if p.a is not None]


def _norms(projection: Projection, into: Tensor) -> None:
    """Write the norm of each row of the adapted weight into `into`, [out], as peft computes it."""
    a, b = projection.a, projection.b
    assert a is not None
    assert b is not None
    for begin in range(0, len(into), _NORM_ROWS):
        rows = slice(begin, begin + _NORM_ROWS)
        weight = projection.weight[rows].to(a.dtype) + projection.scale * (b[rows] @ a)
        into[rows] = torch.linalg.norm(weight, dim=1)


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
