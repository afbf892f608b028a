"""What a step of training takes at its peak, so that a group fits before it is formed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Appetite:
    """What training would keep without a budget.

    Attributes:
        layers: whose graphs live at the same time, from the last forward to the first backward.
        bytes_per_token: of one layer's graph, measured on the longest row.
        boundary_bytes_per_token: of the activation between two layers, where it lies in the
            worker's own memory.
        state_bytes: of gradients, their sums and the optimizer's moments.
    """

    layers: int
    bytes_per_token: float
    boundary_bytes_per_token: float = 0.0
    state_bytes: int = 0

    def peak_bytes(self, tokens: int) -> int:
        """Of a group of so many padded tokens, at the turn from forward to backward."""
        return self._beside_graphs(tokens) + int(self.layers * tokens * self.bytes_per_token)

    def least_bytes(self, tokens: int) -> int:
        """The same where graphs are given up but one layer's, which its backward makes anew."""
        return self._beside_graphs(tokens) + int(tokens * self.bytes_per_token)

    def most_tokens(self, room_bytes: int) -> int:
        """Padded tokens of the largest group that fits with the least that must be kept."""
        a_token = self.bytes_per_token + (self.layers + 1) * self.boundary_bytes_per_token
        return int(max(0, room_bytes - self.state_bytes) / a_token) if a_token else 1 << 40

    def within(self, tokens: int, room_bytes: int) -> float | None:
        """Return what one layer may keep of each token of such a group; None: all, it fits.

        One layer's graph is always whole, since a backward may make its own anew; 0 where that
        leaves nothing for the others.
        """
        if self.peak_bytes(tokens) <= room_bytes:
            return None
        graphs = room_bytes - self._beside_graphs(tokens)
        return max(0.0, graphs / tokens - self.bytes_per_token) / self.layers

    def _beside_graphs(self, tokens: int) -> int:
        boundaries = (self.layers + 1) * tokens * self.boundary_bytes_per_token
        return self.state_bytes + int(boundaries)
