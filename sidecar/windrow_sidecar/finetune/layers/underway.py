"""What a micro-batch leaves behind on its way through the layers: activations and graphs."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import GradientEdge

from windrow_sidecar.finetune.tasklets import Window
from windrow_sidecar.finetune.windows.calls import LayerCall
from windrow_sidecar.finetune.windows.keyvalues import KeyValues
from windrow_sidecar.finetune.windows.prefix import Prefix


@dataclass(frozen=True, slots=True)
class Graph:
    """What one layer left behind for one window: where backward begins and ends."""

    window: Window
    leaf: Tensor
    edge: GradientEdge | None  # None: nothing in it learns
    units: int = 0  # of the device that its forward ran on


@dataclass(frozen=True, slots=True)
class Forgotten:
    """A window of which only the layer's input is kept: it runs forward again before backward."""

    window: Window


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
    def whole(self) -> Window:
        """All tokens of a row."""
        return Window(0, self.ids.shape[1])

    def forget_graphs(self) -> None:
        """Keep layers' inputs only, on the host, in memory of their own."""
        self.graphs = [[Forgotten(graph.window) for graph in layer] for layer in self.graphs]
        self.inputs = [None if x is None else x.detach().to("cpu", copy=True) for x in self.inputs]
