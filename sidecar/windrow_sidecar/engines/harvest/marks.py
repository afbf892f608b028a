"""Write what harvesting did to the event log: policies, workers, pauses, chunks, the breaker."""

from __future__ import annotations

from windrow.eventlog import EventLog, MarkEvent
from windrow_sidecar.qos.terms import HarvestTerms
from windrow_sidecar.qos.view import Action, Grant, View


class HarvestMarks:
    """The marks of one device. Nothing is written where there is no log."""

    def __init__(self, log: EventLog | None) -> None:
        self._log = log
        self._paused_ns = 0  # since when the worker is paused; 0: it is not, or only starves
        self._breaker = ""

    def add(self, now_ns: int, what: str, detail: str) -> None:
        """Write one mark."""
        if self._log:
            self._log.append(MarkEvent(now_ns, what, detail))

    def policy(self, now_ns: int, terms: HarvestTerms | None) -> None:
        """Another policy holds from now on; None: no policy does."""
        detail = "none"
        if terms:
            detail = f"{terms.name}: {terms.policy}, {terms.mode}, {terms.objective_us} us"
        self.add(now_ns, "policy", detail)

    def action(self, now_ns: int, grant: Grant, view: View, why: str) -> None:
        """The action of the grant has changed: a pause or its end.

        A worker that starves for a moment is no event.
        """
        if grant.action == Action.PAUSE and why != "starving":
            self._paused_ns = now_ns
            detail = f"{why}: batch {view.batch}, {view.context_tokens} context tokens"
            self.add(now_ns, "pause", detail)
        elif grant.action != Action.PAUSE and self._paused_ns:
            self.add(now_ns, "resume", f"after {(now_ns - self._paused_ns) / 1e6:.0f} ms")
            self._paused_ns = 0

    def breaker(self, now_ns: int, reason: str) -> None:
        """Write the breaker's reason where it has changed; "": it tries the worker again."""
        if reason != self._breaker:
            self._breaker = reason
            self.add(now_ns, "breaker" if reason else "breaker-trial", reason)
