"""One packed layer over memory that stays: what a capture records, and each launch repeats."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from windrow_sidecar.compute.captures import Launch
from windrow_sidecar.finetune.adapter.packed_layer import PackedLayer
from windrow_sidecar.finetune.model.layer_calls import LayerCall


class LayerPass:
    """The forward and the backward of one packed layer, each to be captured.

    Args:
        program: of the layer.
        call: its arguments besides the hidden states; tensors in it stay where they are.
        reads: the layer's input, [rows, tokens, hidden].
        makes: gets its output, of the same shape.
        gradient: of the output before `backward`, of the input afterwards; of the same shape.
        wants_input: False: nothing below the layer learns.
    """

    def __init__(
        self,
        program: PackedLayer,
        call: LayerCall,
        reads: Tensor,
        makes: Tensor,
        gradient: Tensor,
        *,
        wants_input: bool,
    ) -> None:
        self._program, self._call = program, call
        self._reads, self._makes, self._gradient = reads, makes, gradient
        self._wants_input = wants_input
        self._learns: list[Tensor] = [p for group in program.groups for p in group.learns]
        self._leaf = self._made = reads
        # Parameters are leaves that other streams have used, for which a capture cannot wait.
        self._anchor = torch.empty((), dtype=reads.dtype, device=reads.device, requires_grad=True)

    def forward(self) -> None:
        """Run the layer; `program.point` is called between attention and MLP."""
        self._leaf = self._reads.data.requires_grad_(self._wants_input)
        call, program = self._call, self._program
        of_others = program.anchor
        program.anchor = self._anchor
        try:
            with torch.enable_grad():
                self._made = program(self._leaf, *call.args, **call.kwargs)
        finally:
            program.anchor = of_others
        self._makes.data.copy_(self._made.detach())

    def backward(self, room: Tensor, *, keeps: bool) -> None:
        """Run it back; `program.point` is called between MLP and attention, and behind attention.

        Args:
            room: gets the gradients of all parameters, one after the other: [elements].
            keeps: whether it may be run back once more.
        """
        before = [parameter.grad for parameter in self._learns]
        self._leaf.grad = None
        for parameter in self._learns:
            parameter.grad = None
        try:
            torch.autograd.backward((self._made,), (self._gradient.data,), retain_graph=keeps)
            found = [p.grad for p in self._learns if p.grad is not None]
        finally:
            for parameter, gradient in zip(self._learns, before, strict=True):
                parameter.grad = gradient
        views = torch._C._nn.unflatten_dense_tensors(room, self._learns)
        torch._foreach_copy_(views, found)
        if self._leaf.grad is not None:
            self._gradient.data.copy_(self._leaf.grad)


@contextmanager
def split_by(program: PackedLayer, split: Launch) -> Iterator[None]:
    """Call `split` at the first point of a pass, and nothing at later ones."""
    before, points = program.point, [split]
    program.point = lambda: points.pop()() if points else None
    try:
        yield
    finally:
        program.point = before
