"""Predict the peak memory of a training step, before its group is formed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Bytes that a training step takes, by part. Bytes a token unless the name says otherwise.

    Attributes:
        layers: of the model.
        graph: of one layer, measured on the longest row.
        graphs: how many live at the same time, from the last forward to the first backward: those
            of all layers, or the one that a backward remakes.
        boundary: of the activation between two layers, where it is in the worker's own memory.
        key_values: of one layer's cache of keys and values, where rows may run in windows. All
            layers' live as their graphs do, and no budget makes them fewer.
        key_value_sums: of their gradients in fp32, of the one layer that runs back.
        ends: of what is there once, independent of who holds boundaries: what the first layer
            reads, and the gradient on its way down.
        state_bytes: in all, of gradients, their sums and the optimizer's moments.
    """

    layers: int
    graph: float
    graphs: int
    boundary: float = 0.0
    key_values: float = 0.0
    key_value_sums: float = 0.0
    ends: float = 0.0
    state_bytes: int = 0

    def parts(self, tokens: int) -> dict[str, int]:
        """Return the bytes by part that a group of so many padded tokens takes at its peak."""
        return {
            "graphs": int(self.graphs * tokens * self.graph),
            "boundaries": int(tokens * (self.layers * self.boundary + self.ends)),
            "key_values": int(tokens * self.layers * self.key_values),
            "key_value_sums": int(tokens * self.key_value_sums),
            "state": self.state_bytes,
        }

    def peak_bytes(self, tokens: int) -> int:
        """Their sum, at the turn from forward to backward."""
        return sum(self.parts(tokens).values())

    def least_bytes(self, tokens: int) -> int:
        """The same where graphs are given up but one layer's, which its backward remakes."""
        return self._beside_graphs(tokens) + int(tokens * self.graph)

    def most_tokens(self, room_bytes: int, *, whole: bool = False) -> int:
        """Padded tokens of the largest group that fits with the least that must be kept.

        `whole`: no graph is given up.
        """
        graphs = self.graphs if whole else 1
        a_token = graphs * self.graph + self._beside_graphs_of_a_token
        return int(max(0, room_bytes - self.state_bytes) / a_token) if a_token else 1 << 40

    def within(self, tokens: int, room_bytes: int) -> float | None:
        """Return what one layer may keep of each token of such a group; None: all, it fits.

        One layer's graph is always whole, since a backward may remake its own; 0 where that leaves
        nothing for the others.
        """
        if self.peak_bytes(tokens) <= room_bytes:
            return None
        graphs = room_bytes - self._beside_graphs(tokens)
        return max(0.0, graphs / tokens - self.graph) / self.layers

    def _beside_graphs(self, tokens: int) -> int:
        return self.state_bytes + int(tokens * self._beside_graphs_of_a_token)

    @property
    def _beside_graphs_of_a_token(self) -> float:
        of_layers = self.layers * (self.boundary + self.key_values)
        return of_layers + self.key_value_sums + self.ends
