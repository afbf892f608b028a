"""Keep the latency profile that a scheduler's steps are decided by: check it, learn it, hand it on.

Everything runs on the scheduler's thread, between two steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from json import dumps
from typing import Any

from windrow.errors import UserError
from windrow_sidecar.engines.harvest import EngineAgentLink, HarvestHook
from windrow_sidecar.engines.harvest.link import Profile
from windrow_sidecar.engines.profile import Subject, document, several_batches, sizes_on_every_share
from windrow_sidecar.engines.sglang.learning import FullShareEstimate, ReusedProfile, SoloLearner
from windrow_sidecar.qos.levels import Partitioning
from windrow_sidecar.qos.solo import BATCH_FLOOR

_log = logging.getLogger(__name__)

# Steps of batch sizes that the first profile does not know which decode may take alone to learn
# them: on each of nine shares, one block of twelve in four (see `SoloLearner`), and some to spare.
_UNKNOWN_STEPS = 600
# So many steps of the known size in a row, and the unknown ones count as gone.
_KNOWN_AGAIN = 48


class LiveProfile:
    """The profile of one scheduler, from decode's own steps.

    One that another start has left is compared with the first steps. Where they do not bear it
    out, or there is none, one is learned. The first to be learned may know batches of a single size
    and says nothing of others: when these come, they are learned before a worker runs beside them.

    While decode runs, a profile is out of force for as long as it might be wrong about the steps;
    while decode idles, it is in force.

    Args:
        inner: the hook that decides by it.
        link: reports it to the agent.
        subject: what it is about.
        splits: of the device.
        keep: leaves it for the next start.
        reused: the one of another start, which `inner` has; None: there is none.
    """

    def __init__(
        self,
        inner: HarvestHook,
        link: EngineAgentLink,
        subject: Subject,
        splits: Partitioning,
        *,
        keep: Callable[[Mapping[str, Any]], None],
        reused: ReusedProfile | None = None,
    ) -> None:
        self._inner, self._link, self._keep = inner, link, keep
        self._subject, self._splits, self._reused = subject, splits, reused
        self._learner = SoloLearner(splits)
        self._full_share = FullShareEstimate(splits)
        self._estimated = False  # whether decisions rest on that
        self._checked = False  # whether they rest on another start's, which steps bear out
        self._learnt = False  # whether they rest on steps of each share
        self._held: Mapping[str, Any] | None = None  # out of force while decode runs
        self._only_size = 0  # of the batches that it knows; -1: none; 0: it knows several
        self._unknown_left, self._since_unknown = _UNKNOWN_STEPS, _KNOWN_AGAIN

    @property
    def asks_for(self) -> int:
        """Units on which decode's next step should run while it is alone; 0: whichever it has."""
        terms = self._inner.controller.terms
        learns = self._reused is None and terms is not None and terms.mode == "harvest"
        return self._learner.units if learns else 0

    def before_batch(self, requests: int) -> None:
        """Harvest by a profile that was measured here and knows such a step, and by no other.

        `requests`: that get a token of a step; 0: of a pass over prompts.
        """
        if self._estimated and not self._observes():
            self._estimated = False
            self._inner.set_profile(None)
        if self._reused is not None or self._is_unknown(requests):
            if self._inner.profile is not None:
                self._held = self._inner.profile
                self._inner.set_profile(None)
        elif self._held is not None:
            self.idle()

    def idle(self) -> None:
        """Put a profile that is held back in force: no step is at stake."""
        held, self._held = self._held, None
        if held is not None:
            self._inner.set_profile(held)

    def alone(self, units: int, batch: int, context_tokens: int, latency_us: int) -> None:
        """Learn from a step of at least one request without a worker, on so many units."""
        if self._reused is not None:
            self._check(self._reused, units, batch, context_tokens, latency_us)
        elif self._checked:
            pass  # the predictor follows each step
        elif not self._observes():
            self._learn(units, batch, context_tokens, latency_us)
        elif not self._learnt:  # what was measured says more than an estimate
            self._estimate(units, batch, context_tokens, latency_us)

    def _is_unknown(self, requests: int) -> bool:
        """Return whether steps of now are of sizes that the learned profile knows nothing of.

        Not for ever: a size that comes and goes too fast to be learned is left to the predictor.
        """
        if not self._only_size or not self._unknown_left:
            return False
        if requests and max(requests, BATCH_FLOOR) != self._only_size:
            self._unknown_left, self._since_unknown = self._unknown_left - 1, 0
        elif requests:
            self._since_unknown += 1
        return self._since_unknown < _KNOWN_AGAIN

    def _check(
        self,
        reused: ReusedProfile,
        units: int,
        batch: int,
        context_tokens: int,
        latency_us: int,
    ) -> None:
        if units != self._splits.units:
            return  # the worker's units are not back yet
        if not reused.add(batch, context_tokens, latency_us):
            return
        self._reused = self._held = None
        try:
            reused.check()
        except UserError as error:
            _log.warning("windrow: the latency profile that was found is not used: %s", error)
            return
        self._checked = True
        self._inner.set_profile(reused.profile)
        self._link.set_profile(Profile(self._subject.key, dumps(reused.profile)))
        _log.info("windrow: the latency profile that was found is used: decode's steps agree")

    def _learn(self, units: int, batch: int, context_tokens: int, latency_us: int) -> None:
        self._learner.add(units, batch, context_tokens, latency_us)
        samples = self._learner.news()
        if samples is None:
            return
        try:
            self._inner.set_profile(document(self._subject, samples, taken_at=datetime.now(UTC)))
        except UserError:
            _log.exception("the steps seen so far make no latency profile")
            return
        self._estimated, self._learnt, self._held = False, True, None
        _log.info("latency profile from %d kinds of steps", len(samples))
        if not several_batches(samples):
            # Enough for this load, and wrong for another pod's.
            self._only_size = min(sizes_on_every_share(samples), default=-1)
            return
        self._only_size = 0
        profile = self._inner.profile  # with what was measured beside workers
        if profile is not None:
            self._link.set_profile(Profile(self._subject.key, dumps(profile)))
            self._keep(profile)

    def _observes(self) -> bool:
        terms = self._inner.controller.terms
        return terms is not None and terms.mode == "observe"

    def _estimate(self, units: int, batch: int, context_tokens: int, latency_us: int) -> None:
        """Say what harvesting would give by the load that is seen: observing moves no share."""
        if units != self._splits.units:
            return
        self._full_share.add(batch, context_tokens, latency_us)
        samples = self._full_share.news()
        if samples is None:
            return
        estimate = document(self._subject, samples, taken_at=datetime.now(UTC))
        try:
            self._inner.set_profile(estimate, estimated=True)
            self._estimated = True
        except UserError:
            _log.debug("the steps seen so far make no estimate", exc_info=True)
