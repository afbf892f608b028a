"""How long a tasklet will take: what it took before, by phase and compute level."""

from __future__ import annotations

from windrow_sidecar.finetune.tasklets import Tasklet
from windrow_sidecar.qos.view import LEVELS_MAX, Phase

# Weight of the newest measurement: settles within about ten tasklets, which is two layers' worth.
FRESH = 0.2


class Estimates:
    """Exponentially weighted microseconds a padded token (a step, for the optimizer)."""

    def __init__(self) -> None:
        self._us: dict[tuple[Phase, int], float] = {}

    def learn(self, tasklet: Tasklet, units: int, elapsed_us: float) -> None:
        """Take one measurement into account."""
        sample = elapsed_us / _size(tasklet)
        known = self._us.get((tasklet.phase, units))
        self._us[tasklet.phase, units] = (
            sample if known is None else known + FRESH * (sample - known)
        )

    def estimate_us(self, tasklet: Tasklet, units: int) -> int:
        """Microseconds on so many units; 0: never measured there."""
        return round(self._us.get((tasklet.phase, units), 0.0) * _size(tasklet))

    def by_level(self, tasklet: Tasklet) -> tuple[int, ...]:
        """`estimate_us` for 1, 2, ... units, as an offer holds them."""
        size, us, phase = _size(tasklet), self._us, tasklet.phase
        return tuple(round(us.get((phase, n), 0.0) * size) for n in range(1, LEVELS_MAX + 1))

    def tokens_within(self, bound_us: int, units: int) -> int:
        """Padded tokens whose longest tasklet, a backward, takes at most `bound_us`; 0: unknown."""
        per_token = self._us.get((Phase.BACKWARD, units), 0.0)
        return int(bound_us / per_token) if per_token else 0


def _size(tasklet: Tasklet) -> int:
    return tasklet.tokens if tasklet.micro else 1
