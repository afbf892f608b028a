"""How much of a token one layer may keep, so that a group fits before it is formed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Appetite:
    """What training would keep without a budget.

    Attributes:
        layers: whose graphs live at the same time, from the last forward to the first backward.
        bytes_per_token: of one layer, measured on the longest row.
    """

    layers: int
    bytes_per_token: float

    def peak_bytes(self, tokens: int) -> int:
        """Of a group of so many padded tokens, at the turn from forward to backward."""
        return int(self.layers * tokens * self.bytes_per_token)

    def within(self, tokens: int, room_bytes: int) -> float | None:
        """Return what one layer may keep of each token of such a group; None: all, it fits.

        One layer's graph is always whole, since a backward may make its own anew; 0 where that
        leaves nothing for the others.
        """
        if self.peak_bytes(tokens) <= room_bytes:
            return None
        return max(0.0, room_bytes / tokens - self.bytes_per_token) / self.layers
