"""Decode's side of the shared page: it writes views and grants, and reads the worker's offers.

One object for each record. All belong to decode's thread, except where they say otherwise.
"""

from __future__ import annotations

from windrow_sidecar._core import Page
from windrow_sidecar.engines.harvest.marks import HarvestMarks
from windrow_sidecar.engines.harvest.settings import HarvestSettings
from windrow_sidecar.engines.hook import StepInput
from windrow_sidecar.qos.policies.base import is_for_one_step
from windrow_sidecar.qos.view import Grant, Offer, View

_NOBODY = Offer()
_WORKER = 1  # a writer of the page


class ViewWriter:
    """Publishes decode's state at the start of a step.

    Attributes:
        newest: the view that was published last.
        waiting_since_ns: since when the engine's queue has not been empty; 0: it is empty.
    """

    def __init__(self, page: Page) -> None:
        self._page = page
        self.newest = View()
        self.waiting_since_ns = 0

    def publish(
        self,
        facts: StepInput | None,
        now_ns: int,
        free_chunks: int,
        *,
        objective_us: int,
        held_until_ns: int,
    ) -> View:
        """Publish the view of a step and return it.

        Args:
            facts: of the step; None: the engine runs nothing.
            now_ns: when that is so.
            free_chunks: as the arena counts them.
            objective_us: of the policy in force; 0: none.
            held_until_ns: the end of the time for which the last grant holds requests back.
        """
        if facts is None:
            self.waiting_since_ns = 0
            step, start_ns, batch = self.newest.step, now_ns, 0
            context_tokens = waiting = admitted_tokens = slack_us = waited_us = 0
        else:
            # A step that computes a prompt is work even when nobody gets a token: not idle. Nor is
            # one for which no request finds room; where requests are held back, nothing runs.
            held = facts.start_ns < held_until_ns
            least = 0 if held and not facts.prefill_tokens else 1
            step, start_ns, batch = facts.step, facts.start_ns, facts.batch or least
            context_tokens, waiting = facts.context_tokens, facts.waiting
            admitted_tokens = facts.admitted_tokens + facts.prefill_tokens
            slack_us = facts.slack_us
            # How long the queue has not been empty: at least as long as its oldest request waits.
            self.waiting_since_ns = (self.waiting_since_ns or start_ns) if waiting else 0
            waited_us = (start_ns - self.waiting_since_ns) // 1000 if waiting else 0
        # In the order of `View`: with keywords it takes three times as long, before every step.
        self.newest = view = View(
            step,
            start_ns,
            batch,
            context_tokens,
            waiting,
            admitted_tokens,
            free_chunks,
            objective_us,
            slack_us,
            waited_us,
        )
        self._page.publish_view(view)
        return view


class OfferReader:
    """Reads the worker's offer; a worker that is dead, fenced or silent offers nothing.

    Attributes:
        live_epoch: the job epoch of the only worker that lives; 0: none does; None: nobody has
            said. Another thread may set it; it takes effect at the next decision.
        present: whether the last offer came from a worker that lives.
        tokens_done: by the newest offer of such a worker.
    """

    def __init__(self, page: Page, settings: HarvestSettings, marks: HarvestMarks) -> None:
        self._page, self._stale_ns, self._marks = page, settings.worker_stale_ns, marks
        self.live_epoch: int | None = None
        self.present = False
        self.tokens_done = 0

    def read(self, now_ns: int) -> Offer:
        """Return the newest offer."""
        live = self.live_epoch
        offer = Offer._make(self._page.read_offer())
        present = (
            offer.job_epoch > 0
            and live in (None, offer.job_epoch)
            and self._page.heartbeat_age_ns(_WORKER) < self._stale_ns
        )
        if present != self.present:
            self.present = present
            what = "worker-attached" if present else "worker-gone"
            self._marks.add(now_ns, what, f"epoch {offer.job_epoch}")
        if not present:
            return _NOBODY
        self.tokens_done = offer.tokens_done
        return offer


class GrantWriter:
    """Publishes grants that change, or that the worker has not heard for a while.

    Attributes:
        newest: the grant that holds, published or not.
    """

    def __init__(self, page: Page, decode_units: int, settings: HarvestSettings) -> None:
        self._page, self._regrant_ns = page, settings.regrant_ns
        self.newest = Grant(decode_units=decode_units, pause_epoch=page.pause_epoch)
        self._published_ns = 0

    def put(self, new: Grant, now_ns: int) -> bool:
        """Let a grant hold; returns whether it says otherwise than before what the worker does."""
        old = self.newest
        self.newest = new
        changed = (
            new.finetune_units != old.finetune_units
            or new.action != old.action
            or new.pause_epoch != old.pause_epoch
            or new.chunks != old.chunks
            or new.decode_units != old.decode_units
            or is_for_one_step(new)
            or is_for_one_step(old)
        )
        if changed or now_ns - self._published_ns >= self._regrant_ns:
            self._published_ns = now_ns
            self._page.publish_grant(new)
        return new.action != old.action

    def pause(self) -> None:
        """Publish a pause for every worker."""
        self.newest = Grant(pause_epoch=self.newest.pause_epoch + 1)
        self._page.publish_grant(self.newest)
