"""Upper bound on a GPU's finetuning rate beside decode: eta's bounds by roofline.

Pure arithmetic over what a step reads and how fast the device copies. Two ways to share:

- in time: the worker has the whole GPU, but only while no step runs. A step takes t0 of every
  objective's S, so eta <= 1 - t0 / S.
- in space: decode keeps as few SMs as it needs to meet S, the worker's share is the rest of them
  (its tasklets are bound by arithmetic, so its rate goes with its SMs).
"""

from __future__ import annotations

from dataclasses import dataclass

# Of the copy bandwidth, what a decode step's GEMMs and attention reach.
REACHED = 0.8
# Of the SMs, how many draw all of the bandwidth; fewer draw in proportion.
SATURATING = 0.5
# Launches, norms, sampling: what a step takes beside its reading.
OVERHEAD_MS = 0.6


@dataclass(frozen=True)
class Roofline:
    """Inputs of a device and a model.

    Attributes:
        copy_gb_s: bandwidth of a copy within the device's memory, reads and writes, in GB/s.
        units: SMs.
        unit_granularity: a share is a multiple of so many.
        weight_bytes: that every step reads.
        kv_token_bytes: K and V of one token, all layers.
    """

    copy_gb_s: float
    units: int
    unit_granularity: int
    weight_bytes: int
    kv_token_bytes: int

    def step_ms(self, batch: int, context: int, units: int | None = None) -> float:
        """A decode step of `batch` requests with `context` tokens each, on so many SMs (all)."""
        n_bytes = self.weight_bytes + batch * context * self.kv_token_bytes
        share = min(1.0, (units or self.units) / (SATURATING * self.units))
        return n_bytes / (REACHED * share * self.copy_gb_s * 1e6) + OVERHEAD_MS

    def temporal(self, batch: int, context: int, objective_ms: float) -> float:
        """Bound on eta when the two run in turn; 0 where a step alone is longer."""
        return max(0.0, 1.0 - self.step_ms(batch, context) / objective_ms)

    def spatial(self, batch: int, context: int, objective_ms: float) -> float:
        """Bound on eta when both run at once, on disjoint SMs; 0 where decode needs all."""
        for units in range(self.unit_granularity, self.units, self.unit_granularity):
            if self.step_ms(batch, context, units) <= objective_ms:
                return (self.units - units) / self.units
        return 0.0
