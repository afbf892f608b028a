"""How many frozen layers a job beside decode holds; on a GPU, what lent memory has room for."""

from __future__ import annotations

from windrow_sidecar.finetune.offload.frozen_layers import FrozenLayers
from windrow_sidecar.finetune.offload.schedule import LEAST_LAYERS


class Residents:
    """Layers that take turns in memory that decode lends.

    Args:
        frozen: them.
    """

    def __init__(self, frozen: FrozenLayers) -> None:
        self._frozen = frozen

    @property
    def layers(self) -> int:
        """How many are in memory, or on their way there."""
        return len(self._frozen.resident)

    @property
    def missing_bytes(self) -> int:
        """What the fewest layers that can take turns lack of memory."""
        return max(0, LEAST_LAYERS - self._frozen.slots) * self._frozen.slot_bytes

    @property
    def wanted_bytes(self) -> int:
        """What all layers would take besides."""
        return (self._frozen.depth - self._frozen.slots) * self._frozen.slot_bytes

    def follow(self, room_bytes: int) -> None:
        """Hold as many as there is room for, two at least; to be called between tasklets.

        `room_bytes`: what further layers may take.
        """
        room = self._frozen.slots + room_bytes // self._frozen.slot_bytes
        wanted = max(LEAST_LAYERS, min(room, self._frozen.depth))
        if wanted != self._frozen.capacity:
            self._frozen.resize(wanted)

    def shrink(self) -> None:
        """Let the memory of one layer go, of that which is needed last; its file has it."""
        self._frozen.resize(max(0, self._frozen.slots - 1))
