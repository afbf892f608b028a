"""Boundary activations between two layers, and the autograd graphs that wait for backward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from windrow_sidecar.finetune.model.key_values import KeyValues, Prefix
from windrow_sidecar.finetune.model.layer_calls import LayerCall
from windrow_sidecar.finetune.offload.job_state import copies_on_host
from windrow_sidecar.finetune.tasklets import TokenWindow


class Boundaries(Protocol):
    """Memory that holds the boundary activations of one group."""

    def expect(self, micro_batches: int, tokens: int) -> None:
        """The next group begins: so many micro-batches, of at most so many padded tokens each."""

    def place(self, hidden: Tensor) -> Tensor:
        """Return a tensor without graph with the values of `hidden`, [rows, tokens, hidden]."""

    def room(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return memory for [rows, tokens, hidden], of `like`'s dtype, to be filled later."""

    def clear(self) -> None:
        """Forget everything that was placed."""


class TorchBoundaries:
    """Boundary activations in torch's own memory; whole ones are kept without a copy."""

    def expect(self, micro_batches: int, tokens: int) -> None:
        """Do nothing: nothing is laid out ahead."""
        del micro_batches, tokens

    def place(self, hidden: Tensor) -> Tensor:
        """Return `hidden`, [rows, tokens, hidden], detached: the same memory."""
        return hidden.detach()

    def room(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return new memory for [rows, tokens, hidden] on `like`'s device, not initialised."""
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    def clear(self) -> None:
        """Do nothing: nothing is kept here."""


@dataclass(frozen=True, slots=True)
class Graph:
    """The autograd graph of one layer for one window: its leaf and its output."""

    window: TokenWindow
    leaf: Tensor
    edge: GradientEdge | None  # None: nothing in it learns
    units: int = 0  # of the device that its forward ran on


@dataclass(frozen=True, slots=True)
class Forgotten:
    """A window of which only the layer's input is kept; its forward runs again before backward."""

    window: TokenWindow


@dataclass(frozen=True, slots=True)
class Replayed:
    """A window of all tokens whose layer ran by graphs, which hold what its backward reads."""

    window: TokenWindow


@dataclass(slots=True, weakref_slot=True, eq=False)
class Activations:
    """The activations of one micro-batch between its forward and its backward.

    Attributes:
        ids: [rows, width], int64.
        calls: of each layer.
        inputs: [rows, width, hidden] that layer l reads; the last is the output of the last layer.
        prefix: what precedes the first token, where the adapter is a prefix.
        graphs: of each layer, the windows that have run and not been run back, left to right.
        key_values: of each layer that runs in windows.
        gradient: [rows, width, hidden]: at each token, with respect to the output of the layer that
            has not run back yet.
        whole: all tokens of a row.
    """

    ids: Tensor
    calls: tuple[LayerCall, ...]
    inputs: list[Tensor | None]
    prefix: Prefix | None = None
    graphs: list[list[Graph | Forgotten | Replayed]] = field(default_factory=list)
    key_values: list[KeyValues | None] = field(default_factory=list)
    gradient: Tensor | None = None
    whole: TokenWindow = field(init=False)

    def __post_init__(self) -> None:
        """Make once what each layer asks for."""
        self.whole = TokenWindow(0, self.ids.shape[1])

    def forget_graphs(self) -> None:
        """Keep layers' inputs only; nothing is copied."""
        self.graphs = [[Forgotten(graph.window) for graph in layer] for layer in self.graphs]

    def move_inputs(self) -> None:
        """Move layers' inputs to host memory of their own; returns when they are there."""
        self.inputs = copies_on_host(self.inputs)
