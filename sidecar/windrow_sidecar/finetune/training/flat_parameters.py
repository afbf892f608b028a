"""Lay parameters of one type out in one memory, so that an optimizer's step is a few launches.

The parameters stay the same objects; their values become views. Each begins at a multiple of 64
elements, as if it had memory of its own, so products over it run as fast; what is between two of
them is zero and stays so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

_ALIGNED = 64


class FlatParameters:
    """Parameters of one type on one device.

    Args:
        parameters: their values move to the one memory.
        alone: the only one of them stays as it is, for an optimizer that looks at shapes.

    Attributes:
        members: the parameters.
        whole: all values, [elements]; that parameter itself where it is alone.
        is_alone: whether it is.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, alone: bool = False) -> None:
        self.members = list(parameters)
        self.is_alone = alone
        # Shapes of members and of what is between two of them, in the order of their places.
        self._pieces: list[Tensor] = []
        self._of_member: list[int] = []
        self._elements = 0
        for parameter in self.members:
            self._of_member.append(len(self._pieces))
            self._pieces.append(parameter.new_empty(parameter.shape, device="meta"))
            if between := -parameter.numel() % _ALIGNED:
                self._pieces.append(parameter.new_empty(between, device="meta"))
            self._elements += parameter.numel() + between
        if alone:
            (self.whole,) = self.members
            return
        room = self.zeros(self.members[0].dtype)
        torch._foreach_copy_(self.views(room), [p.detach() for p in self.members])
        self.whole = nn.Parameter(room)
        self._show()

    def zeros(self, dtype: torch.dtype) -> Tensor:
        """Return new memory of the shape of `whole`, [elements], of zeros."""
        if self.is_alone:
            return torch.zeros_like(self.whole, dtype=dtype)
        return torch.zeros(self._elements, dtype=dtype, device=self.members[0].device)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the part of each member, [...] in its shape, of what has the shape of `whole`."""
        if self.is_alone:
            return [flat]
        # In one call: each step asks for them, and a layer has fourteen.
        found: list[Tensor] = list(torch._C._nn.unflatten_dense_tensors(flat, self._pieces))
        return [
            found[n] if found[n].numel() else found[n].view(self._pieces[n].shape)
            for n in self._of_member
        ]

    def of_members(self, held: Tensor) -> list[Tensor]:
        """Return what an optimizer holds for `whole` for each member: a part of it, or all.

        Args:
            held: [elements], as `whole`, or of another shape, such as a count of steps, []; of that
                each gets a copy.

        Returns:
            one tensor for each member: [...] in its shape, or of the shape of `held`.
        """
        if self.is_alone:
            return [held]
        if held.shape != self.whole.shape:
            # Each has its own: a file of tensors refuses those that share memory.
            return list(held.expand(len(self.members), *held.shape).clone().unbind())
        return self.views(held)

    def joined(self, parts: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return one copy on `device` of what `of_members` has returned: [elements], or [].

        Args:
            parts: wherever they are, [...] each.
            device: of the copy.

        Raises:
            RuntimeError: the parts are of other parameters.
        """
        first = parts[0]
        if self.is_alone:
            return first.to(device, copy=True)
        if all(part.shape == p.shape for part, p in zip(parts, self.members, strict=True)):
            flat = self.zeros(first.dtype)
            for view, part in zip(self.views(flat), parts, strict=True):
                view.copy_(part)
            return flat
        if any(part.shape != first.shape or not part.equal(first) for part in parts):
            raise RuntimeError("an optimizer's state differs between parameters of one step")
        return first.to(device, copy=True)

    def move(self, to: Callable[[Tensor], Tensor]) -> None:
        """Let the values be where `to` puts them, [elements]."""
        self.whole.data = to(self.whole.data)
        self._show()

    def _show(self) -> None:
        if self.is_alone:
            return
        for parameter, view in zip(self.members, self.views(self.whole.data), strict=True):
            parameter.data = view


def laid_out(parameters: Sequence[nn.Parameter], *, alone: bool) -> list[FlatParameters]:
    """Return parameters by type and device, each kind in one memory.

    Args:
        parameters: in their order, which those of one kind keep.
        alone: whether each keeps memory of its own.
    """
    if alone:
        return [FlatParameters([parameter], alone=True) for parameter in parameters]
    kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    return [FlatParameters(members) for members in kinds.values()]
