"""Move units between the sides: the worker shrinks at once, decode grows once it is quiet.

Two teams of threads on one core are worse than either alone, so decode keeps its narrow share until
the worker has said that nothing of an older grant runs any more, or is known to be gone.
"""

from __future__ import annotations

from windrow_sidecar.qos.view import Action, Offer


class Handover:
    """The units in force on both sides.

    Args:
        units: of the device.
        pause_epoch: of the grant that the page shows: the count goes on, or a worker that has seen
            it would count as one that has seen every pause to come.
    """

    def __init__(self, units: int, pause_epoch: int = 0) -> None:
        self.decode_units = units
        self.finetune_units = 0
        self.pause_epoch = pause_epoch

    def grant(
        self, action: int, finetune_units: int, decode_units: int, offer: Offer, present: bool
    ) -> None:
        """Put a decision in force as far as the worker's state allows.

        Taking units from the worker raises the pause epoch, which it checks before each launch.
        `present`: a worker is attached and its heart beats.
        """
        if finetune_units < self.finetune_units:
            self.pause_epoch += 1
        self.finetune_units = finetune_units
        if decode_units > self.decode_units and present and not self._is_quiet(action, offer):
            return
        self.decode_units = decode_units

    def _is_quiet(self, action: int, offer: Offer) -> bool:
        """Return whether nothing runs that was launched under an older grant.

        Under GO, what is in flight was launched after the worker saw this epoch, thus within the
        units that it grants; a pause is over only when nothing is in flight at all.
        """
        if offer.pause_epoch_seen < self.pause_epoch:
            return False
        return action == Action.GO or offer.in_flight_us == 0
