"""Packed copies of the adapters of linear layers of one input: where they are, and when made.

Weights that follow each other in memory, as decode's engines pack them, are one matrix; A matrices
always are. Copies are in the base's type, and are made once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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
class PackedPart:
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
        """Units of its output."""
        return int(self.rows[-1].stop)

    @property
    def of_u(self) -> slice:
        """Columns of `u` for its projections."""
        return slice(self.columns[0].start, self.columns[-1].stop)

    @property
    def is_adapted(self) -> bool:
        """True where one of its projections has an adapter."""
        return bool(self.of_u.stop > self.of_u.start)

    @property
    def is_decomposed(self) -> bool:
        """True where one of them has magnitudes (DoRA)."""
        return any(p.magnitude is not None for p in self.projections)


class PackedCopies:
    """Packed copies of the adapters of linear layers that read the same input.

    Args:
        name: of the group among those of a layer.
        projections: in the order in which their outputs are wanted.
        tensors: its own memory is entered here, by names that begin with `name`.
    """

    def __init__(
        self, name: str, projections: Sequence[Projection], tensors: dict[str, Tensor]
    ) -> None:
        self.projections = tuple(projections)
        self._name, self._tensors = name, tensors
        self._learns = tuple(parameter for p in self.projections for parameter in p.learns)
        self._pack_b: Callable[[], None] | None = None
        self._seen: tuple[int, ...] = ()
        self._parts: tuple[PackedPart, ...] = ()
        # Rooms in the packed copies and what goes there; None: not looked up since they were laid
        # out.
        self._copies: list[tuple[Tensor, nn.Parameter]] | None = None
        self._a: Tensor | None = None
        self._nothing: Tensor | None = None  # the sum of a product that adds to nothing
        scales = {p.scale for p in self.projections if p.a is not None}
        self._scale = scales.pop() if len(scales) == 1 else 1.0
        self._scales: Tensor | None = None  # of each column of u, where they differ
        self._differ = bool(scales)

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
        self._a = self._nothing = self._scales = None
        for name in [name for name in self._tensors if name.startswith(f"{self._name}.")]:
            del self._tensors[name]

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
            for projection, rows, columns in adapted_of(part):
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
            part = PackedPart(tuple(group), tuple(rows), tuple(columns), weight, {})
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

    def _own(self, part: PackedPart, n: int, like: Tensor) -> None:
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


def refresh(groups: Sequence[PackedCopies], others: Sequence[PackedCopies] = ()) -> None:
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


def adapted_of(part: PackedPart) -> list[tuple[Projection, slice, slice]]:
    """Return the projections of a part that have an adapter: rows and columns of each."""
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
