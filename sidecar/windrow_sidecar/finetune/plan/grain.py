"""How large the tasklets of a group are, so that what is in flight stays within its bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from windrow_sidecar.finetune.plan.estimates import Estimates
from windrow_sidecar.finetune.tasklets import MicroBatch, Tasklet
from windrow_sidecar.qos.view import Phase

# Of the bound on what is in flight: estimates are means, and the slowest of a hundred tasklets
# takes about a third more.
TARGET = 0.7
# Padded tokens of a tasklet before anything has been measured: short on any device.
FIRST_TOKENS = 32
# Fewer mostly pay for the call: a layer of a small model takes 1 ms for no tokens at all. Beside
# decode on two cores, windows of 24 to 34 tokens kept within 5.5 ms and made 1,200 tokens a second,
# one row of 200 at a time 2,373 (0.64 of the device alone), three rows 2,688 to 2,933 (0.68 to
# 0.77), four rows 2,983 (0.74). So the bound gives way to this, and a layer that is longer is held
# up between its modules (`suspension`).
LEAST_TOKENS = 896


class Grain(Protocol):
    """How an order is cut into tasklets."""

    def cut(self, phase: Phase, micro: MicroBatch) -> int:
        """Return of how many tokens of each row a tasklet takes, at least one (see `orders`)."""

    def fits(self, tasklet: Tasklet) -> bool:
        """Whether a tasklet that spans several layers is not too large."""


class WholeRows:
    """One layer, all tokens: nobody waits for the device, or windows cannot be."""

    def cut(self, phase: Phase, micro: MicroBatch) -> int:
        """Return the whole width."""
        del phase
        return micro.width

    def fits(self, tasklet: Tasklet) -> bool:
        """No: a tasklet is a layer."""
        del tasklet
        return False


@dataclass(frozen=True, slots=True)
class Windows:
    """A fixed number of tokens of each row."""

    tokens: int

    def cut(self, phase: Phase, micro: MicroBatch) -> int:
        """Return it."""
        del phase, micro
        return self.tokens

    def fits(self, tasklet: Tasklet) -> bool:
        """No: a tasklet is a layer."""
        del tasklet
        return False


@dataclass(frozen=True, slots=True)
class Paced:
    """As large as stays within a bound: a window of a layer, or several layers.

    Attributes:
        estimates: of this slot.
        bound_us: on what is in flight.
        units: that are granted now.
        windows: whether rows may be cut.
        most_tokens: of a window, as the policy asks; 0: it does not.
    """

    estimates: Estimates
    bound_us: int
    units: int
    windows: bool = True
    most_tokens: int = 0

    def tokens(self, phase: Phase) -> int:
        """Padded tokens of one layer, over all rows; a window runs forward and back."""
        worst = Phase.LOSS if phase is Phase.LOSS else Phase.BACKWARD
        known = self.estimates.tokens_within(worst, TARGET * self.bound_us)
        if not known and worst is Phase.BACKWARD:
            # A backward takes about twice as long: the gradient of the input, and of the adapter.
            known = self.estimates.tokens_within(Phase.FORWARD, TARGET / 2 * self.bound_us)
        known = max(LEAST_TOKENS, known) if known else FIRST_TOKENS
        return min(known, self.most_tokens) if self.most_tokens else known

    def cut(self, phase: Phase, micro: MicroBatch) -> int:
        """Return the share of each row; even windows, since a short last one costs a whole call."""
        if not self.windows and phase is not Phase.LOSS:
            return micro.width
        most = max(1, self.tokens(phase) // micro.lines)
        return -(-micro.width // -(-micro.width // most))

    def fits(self, tasklet: Tasklet) -> bool:
        """Whether it is known to take no longer than a tasklet should."""
        units = self.estimates.useful_units(tasklet, self.units)
        return 0 < self.estimates.estimate_us(tasklet, units) <= TARGET * self.bound_us
