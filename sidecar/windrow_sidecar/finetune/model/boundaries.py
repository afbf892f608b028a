"""What a micro-batch leaves behind between two layers: boundary activations and graphs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from windrow_sidecar.finetune.model.key_values import KeyValues, Prefix
from windrow_sidecar.finetune.model.layer_calls import LayerCall
from windrow_sidecar.finetune.tasklets import TokenWindow


class Boundaries(Protocol):
    """Memory for boundary activations."""

    def expect(self, micro_batches: int, tokens: int) -> None:
        """The next group begins: so many micro-batches, of at most so many padded tokens each."""

    def place(self, hidden: Tensor) -> Tensor:
        """Return a tensor outside of any graph with the values of `hidden`."""

    def room(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return memory of `like`'s type that is filled window by window."""

    def clear(self) -> None:
        """Forget everything that was placed."""


class TorchBoundaries:
    """Boundaries in torch's own memory; what is whole is not copied."""

    def expect(self, micro_batches: int, tokens: int) -> None:
        """Nothing is laid out ahead."""
        del micro_batches, tokens

    def place(self, hidden: Tensor) -> Tensor:
        """Return `hidden`, detached."""
        return hidden.detach()

    def room(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return new memory."""
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    def clear(self) -> None:
        """Nothing is kept here."""


@dataclass(frozen=True, slots=True)
class Graph:
    """What one layer left behind for one window: where backward begins and ends."""

    window: TokenWindow
    leaf: Tensor
    edge: GradientEdge | None  # None: nothing in it learns
    units: int = 0  # of the device that its forward ran on


@dataclass(frozen=True, slots=True)
class Forgotten:
    """A window of which only the layer's input is kept: it runs forward again before backward."""

    window: TokenWindow


@dataclass(slots=True)
class Activations:
    """A micro-batch on its way.

    Attributes:
        ids: [rows, width], int64.
        calls: of each layer.
        inputs: [rows, width, hidden] that layer l reads; the last is the output of the last layer.
        prefix: what stands before the first token, where the adapter is a prefix.
        graphs: of each layer, the windows that have run and not been run back, left to right.
        key_values: of each layer that runs in windows.
        gradient: [rows, width, hidden]: at each token, with respect to the output of the layer that
            has not run back yet.
    """

    ids: Tensor
    calls: tuple[LayerCall, ...]
    inputs: list[Tensor | None]
    prefix: Prefix | None = None
    graphs: list[list[Graph | Forgotten]] = field(default_factory=list)
    key_values: list[KeyValues | None] = field(default_factory=list)
    gradient: Tensor | None = None

    @property
    def whole(self) -> TokenWindow:
        """All tokens of a row."""
        return TokenWindow(0, self.ids.shape[1])

    def forget_graphs(self) -> None:
        """Keep layers' inputs only, on the host, in memory of their own."""
        self.graphs = [[Forgotten(graph.window) for graph in layer] for layer in self.graphs]
        self.inputs = [None if x is None else x.detach().to("cpu", copy=True) for x in self.inputs]
