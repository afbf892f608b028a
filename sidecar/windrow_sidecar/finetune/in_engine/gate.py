"""Let a tasklet run in decode's own process: under its grant, and only with the turn."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

from windrow_sidecar._core import Page
from windrow_sidecar.compute.device import ComputeDevice
from windrow_sidecar.compute.partition import Partition
from windrow_sidecar.engines.turns import Turns
from windrow_sidecar.finetune.colocated.allowance import Allowance
from windrow_sidecar.finetune.colocated.grants import WAIT_S, GrantGate, OfferFacts
from windrow_sidecar.finetune.engine.sizing import Estimates
from windrow_sidecar.finetune.in_engine.joined_products import RiderSeat
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.tasklets import Tasklet
from windrow_sidecar.qos.view import Grant, Phase

log = logging.getLogger(__name__)

# An engine has the collector switched off. What tasklets leave in cycles is young: a collection of
# the youngest generation takes some 100 us.
_TASKLETS_PER_COLLECTION = 64


class TurnAllowance(Allowance):
    """Allowance of a grant with the turn; nothing without it.

    A gap ends later by what decode has done of its step within it.

    Args:
        turns: of the engine's process.
        least_units, in_parts: see `Allowance`.
    """

    def __init__(self, turns: Turns, *, least_units: int, in_parts: bool) -> None:
        super().__init__(least_units=least_units, in_parts=in_parts)
        self._turns = turns

    def allows(
        self,
        estimate_us: int,
        *,
        decode_silent_ns: int,
        now_ns: int,
        part_us: int | None = None,
        ahead_us: int = 0,
    ) -> bool:
        """Return whether a tasklet of that estimate may begin."""
        return self._turns.held and super().allows(
            estimate_us,
            decode_silent_ns=decode_silent_ns,
            now_ns=self._at(now_ns),
            part_us=part_us,
            ahead_us=ahead_us,
        )

    def allows_more(self, *, decode_silent_ns: int, now_ns: int) -> bool:
        """Return whether what waits in its middle may run on."""
        return self._turns.held and super().allows_more(
            decode_silent_ns=decode_silent_ns, now_ns=self._at(now_ns)
        )

    def is_over(self, now_ns: int) -> bool:
        """Return whether the gap has ended."""
        return super().is_over(self._at(now_ns))

    def _at(self, now_ns: int) -> int:
        ride = self._turns.ride
        return now_ns - ride.done_ns if ride is not None else now_ns


class InEngineGate(GrantGate):
    """A `GrantGate` whose waiting gives decode its thread back.

    Every place where a worker's process would sleep or be stopped by decode is one where this
    thread returns the turn: between tasklets, and between the modules of a layer.

    Args:
        turns: of the engine's process.
        seat: where a step that rides along with the turn is shown to the layers.
        joins: has a job's layers look there; returns why they cannot. None: nothing is to ride.
        page, partition, estimates, facts, decode_lives, device, whole: see `GrantGate`.
        streamed: whether memory holds some of the layers only.
    """

    def __init__(
        self,
        turns: Turns,
        seat: RiderSeat,
        joins: Callable[[DecoderStack, RiderSeat], str] | None,
        page: Page,
        partition: Partition,
        estimates: Estimates,
        facts: Callable[[], OfferFacts],
        *,
        decode_lives: Callable[[], bool],
        device: ComputeDevice | None = None,
        whole: bool = False,
        streamed: bool = False,
    ) -> None:
        super().__init__(
            *(page, partition, estimates, facts),
            decode_lives=decode_lives,
            device=device,
            whole=whole,
        )
        self._turns, self._seat, self._joins = turns, seat, joins
        self._allowance = TurnAllowance(
            turns, least_units=partition.levels()[0], in_parts=self._in_parts
        )
        self._can_ride, self._joined_before = False, 0
        self._streamed = streamed
        self._has_shared = False  # said once
        self._windowed: tuple[Grant, int, Grant] | None = None
        self._past_forward = False  # in a turn of an iteration: its forward is over

    def opened(self, stack: DecoderStack) -> None:
        """A job's layers are there: let steps ride along with them, where they can."""
        if self._joins is None:
            return
        if why := self._joins(stack, self._seat):
            log.warning("no decode step rides along with this job: %s", why)
        else:
            log.info("decode steps ride along with this job's forward passes")
            self._can_ride = True

    def latest(self) -> Grant:
        """Read the page; return the newest grant, with the window that decode's step has room for.

        The same object until either changes: plans are kept by it.
        """
        grant, tokens = super().latest(), self._turns.window_tokens
        if not tokens:
            return grant
        if self._windowed is None or self._windowed[:2] != (grant, tokens):
            self._windowed = (grant, tokens, grant._replace(window_tokens=tokens))
        return self._windowed[2]

    def launch(self, tasklet: Tasklet) -> bool:
        """Claim the right to run `tasklet` now (see `GrantGate`)."""
        if self._turns.by_iteration and self._past_forward and tasklet.phase is Phase.FORWARD:
            return False  # of the next iteration, which is to carry decode's next step
        claimed = super().launch(tasklet)
        if claimed:
            riding = self._seat.riding
            self._joined_before = riding.joined if riding is not None else 0
        return claimed

    def revoked(self) -> bool:
        """Return whether the running tasklet may not go on; also where the turn is over."""
        if self._running is None:
            return False
        return super().revoked() or not self._turns.held or self._has_carried

    @property
    def _has_carried(self) -> bool:
        """True where decode's step is through and its tokens may leave, in a turn of its own."""
        riding = self._seat.riding
        return self._turns.by_iteration and riding is not None and riding.done >= 1.0

    def landed(self, tasklet: Tasklet) -> None:
        """All of a tasklet has run."""
        riding = self._seat.riding
        if riding is not None and riding.joined > self._joined_before and self._running:
            self._running.grew = True  # says nothing of what such a tasklet takes alone
            if not self._has_shared:
                self._has_shared = True
                log.info("a decode step has shared its products with a forward of this job")
        super().landed(tasklet)
        self._past_forward = self._past_forward or tasklet.phase is not Phase.FORWARD
        if self._launched % _TASKLETS_PER_COLLECTION == 0:
            gc.collect(0)

    def quiet(self, tasklet: Tasklet | None) -> None:
        """Say that nothing runs. With no tasklet to come, what follows is not decode's wait."""
        super().quiet(tasklet)
        forward = tasklet is not None and tasklet.phase is Phase.FORWARD
        if self._streamed and tasklet is not None:
            # A step that begins in the middle would read the layers below once more.
            forward = forward and tasklet.layer == 0 and self._running is None
        self._turns.wants_ride = forward and self._can_ride
        if tasklet is None:
            self._seat.riding = None
            self._turns.give_back()

    def wait(self, timeout_s: float = WAIT_S) -> None:
        """Return the turn; wait for the next one, or until it is time to say that we live."""
        if self._came_unseen and self._turns.held:
            self._came_unseen = False  # a grant has come meanwhile, under which we may go on
            self._beat()
            return
        self._seat.riding, self._past_forward = None, False
        if self._turns.rest(timeout_s):
            if (ride := self._turns.ride) is not None:
                self._seat.riding = ride.step
            if self._active:
                # Decode's thread has set its own number of threads, which some libraries share.
                self._partition.activate(self._active)
        self._beat()
