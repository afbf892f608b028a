"""Track which slots fail the jobs that they get, and for how long they get none.

One job that fails says little about the slot. Jobs of several owners that fail there, one after the
other and without one that got further in between, say that it is the slot: a device that errs, a
volume that is not mounted. It then rests, longer each time, and says so. What is known is in
the slot's status, so that another leader goes on from it; jobs appear there by their UIDs, since a
reader of a slot need not know what other tenants call their jobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from windrow.conditions import timestamp

# Failures of so many owners, or of so many jobs of one owner, make a slot rest.
_OWNERS: Final = 2
_JOBS: Final = 3
_REMEMBERED: Final = timedelta(hours=1)
_FIRST_REST, _LONGEST_REST = timedelta(minutes=10), timedelta(hours=2)


@dataclass(frozen=True, slots=True)
class _Failure:
    namespace: str
    at: datetime


@dataclass
class _Record:
    failures: dict[str, _Failure] = field(default_factory=dict)  # by the job's UID
    rests: int = 0  # in a row
    until: datetime | None = None
    why: str = ""


class SlotHealth:
    """Failures on a slot."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def failed(self, slot: str, namespace: str, uid: str, now: datetime) -> None:
        """Note that a placement of a job ended on `slot` and got no further."""
        record = self._records.setdefault(slot, _Record())
        recent = {u: f for u, f in record.failures.items() if now - f.at < _REMEMBERED}
        record.failures = {**recent, uid: _Failure(namespace, now)}
        owners = {failure.namespace for failure in record.failures.values()}
        if len(owners) < _OWNERS and len(record.failures) < _JOBS:
            return
        record.until = now + min(_FIRST_REST * 2**record.rests, _LONGEST_REST)
        record.rests += 1
        of = f" of {len(owners)} namespaces" if owners - {namespace} else ""
        record.why = f"workers of {len(record.failures)} jobs{of} failed on it"
        record.failures = {}

    def worked(self, slot: str) -> None:
        """Note that a placement on `slot` got further: earlier failures do not count."""
        self._records.pop(slot, None)

    def resting(self, slot: str, now: datetime) -> str:
        """Return until when `slot` takes no job and why, in words; empty: it takes jobs."""
        record = self._records.get(slot)
        if record is None or record.until is None or now >= record.until:
            return ""
        return f"until {timestamp(record.until)}: {record.why}"

    def failed_jobs(self, slot: str) -> frozenset[str]:
        """Return UIDs of the jobs that failed on `slot` lately: another slot is tried first."""
        record = self._records.get(slot)
        return frozenset(record.failures) if record else frozenset()

    def known(self) -> list[str]:
        """Return the slots of which something is known."""
        return list(self._records)

    def forget(self, slot: str) -> None:
        """Drop what is known of a slot that is gone."""
        self._records.pop(slot, None)

    def status_of(self, slot: str) -> dict[str, Any] | None:
        """Return what a slot's status says of it; None: nothing."""
        record = self._records.get(slot)
        if record is None:
            return None
        failures = [
            {"jobUid": uid, "namespace": failure.namespace, "time": timestamp(failure.at)}
            for uid, failure in record.failures.items()
        ]
        rest = {"rests": record.rests, "restReason": record.why} if record.rests else {}
        until = {"restsUntil": timestamp(record.until)} if record.until else {}
        return {**rest, **until, **({"failures": failures} if failures else {})}

    def take_up(self, slot: str, status: Mapping[str, Any] | None) -> None:
        """Go on from what an earlier leader wrote into a slot's status."""
        if not status:
            return
        until = status.get("restsUntil")
        self._records[slot] = _Record(
            failures={
                entry["jobUid"]: _Failure(entry["namespace"], datetime.fromisoformat(entry["time"]))
                for entry in status.get("failures") or ()
            },
            rests=int(status.get("rests") or 0),
            until=datetime.fromisoformat(until) if until else None,
            why=str(status.get("restReason") or ""),
        )
