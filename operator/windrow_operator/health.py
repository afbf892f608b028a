"""Which slots fail the jobs that come to them, and for how long they are left alone.

One job that fails says little about the slot. Jobs of several owners that fail there, one after the
other and without one that got further in between, say that it is the slot: a device that errs, a
volume that is not mounted. It then rests, longer each time, and says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from windrow.conditions import timestamp

# Failures of so many owners, or of so many jobs of one owner, make a slot rest.
_OWNERS: Final = 2
_JOBS: Final = 3
_REMEMBERED: Final = timedelta(hours=1)
_FIRST_REST, _LONGEST_REST = timedelta(minutes=10), timedelta(hours=2)


@dataclass
class _Record:
    failures: dict[str, datetime] = field(default_factory=dict)  # when, by the job's key
    rests: int = 0  # in a row
    until: datetime | None = None
    why: str = ""


class SlotHealth:
    """What failed where, since this replica leads."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def failed(self, slot: str, job: str, now: datetime) -> None:
        """Note that a placement of `job` (namespace/name) ended on `slot` and got no further."""
        record = self._records.setdefault(slot, _Record())
        record.failures = {
            key: at for key, at in record.failures.items() if now - at < _REMEMBERED
        } | {job: now}
        owners = {key.partition("/")[0] for key in record.failures}
        if len(owners) < _OWNERS and len(record.failures) < _JOBS:
            return
        rest = min(_FIRST_REST * 2**record.rests, _LONGEST_REST)
        record.rests += 1
        record.until = now + rest
        names = sorted(record.failures)
        record.why = f"workers of {', '.join(names[:-1])} and {names[-1]} failed on it"
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
        """Return the jobs that failed on `slot` lately: another slot is tried before it."""
        record = self._records.get(slot)
        return frozenset(record.failures) if record else frozenset()

    def forget(self, slot: str) -> None:
        """Drop what is known of a slot that is gone."""
        self._records.pop(slot, None)
