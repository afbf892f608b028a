"""How many frozen layers a job beside decode holds: what is granted, and what there is room for."""

from __future__ import annotations

from collections.abc import Callable

from windrow_sidecar.finetune.residency.frozen import FrozenLayers
from windrow_sidecar.finetune.residency.schedule import LEAST_LAYERS, layers_granted


class Residents:
    """Layers that take turns in a slot.

    Args:
        frozen: them; as many as may be held now are never exceeded.
        granted: how many decode grants; 0: as many as fit.
    """

    def __init__(self, frozen: FrozenLayers, granted: Callable[[], int]) -> None:
        self._frozen, self._granted = frozen, granted
        self._most = frozen.capacity

    @property
    def layers(self) -> int:
        """How many are in memory, or on their way there."""
        return len(self._frozen.resident)

    @property
    def missing_bytes(self) -> int:
        """What the fewest layers that can take turns lack of memory."""
        return max(0, LEAST_LAYERS - self._frozen.slots) * self._frozen.slot_bytes

    def follow(self, room_bytes: int | None = None) -> None:
        """Hold as many as are granted; to be called between tasklets.

        `room_bytes`: what further layers may take, where they lie in lent memory.
        """
        most = self._most
        if room_bytes is not None:
            most = min(most, self._frozen.slots + room_bytes // self._frozen.slot_bytes)
        wanted = layers_granted(self._granted(), most)
        if wanted != self._frozen.capacity:
            self._frozen.resize(wanted)

    def shrink(self) -> None:
        """Let the memory of one layer go, of that which is needed last; its file has it."""
        self._frozen.resize(max(0, self._frozen.slots - 1))
