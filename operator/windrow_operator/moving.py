"""Jobs to move because decode leaves them little where they are: a pure decision.

Decode's load comes and goes, and a move costs the time to load the job elsewhere; so a job moves
only where another slot has predicted several times as much for minutes, where what it would do more
within a while is worth more than the move, and less and less often. What it has done is kept by a
checkpoint, as for every stop.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from windrow.conditions import ConditionType as T
from windrow.conditions import Reason, get_condition
from windrow_operator.model import Job, name_in
from windrow_operator.planning import NoPlacement, place, rate, score
from windrow_operator.slot_table import SlotTable

# The other slot predicts so many times as much, for so long; predictions are smoothed over two
# minutes already (see `reports`), so that a burst of decode alone is none.
_TIMES_AS_MUCH: Final = 3.0
_FOR: Final = timedelta(minutes=5)
# What is won within this time is compared with what loading costs, which is known from this stay.
_HORIZON: Final = timedelta(minutes=10)
_WORTH: Final = 2.0
# A job stays so long after it was placed, doubled with each move.
_FIRST_STAY, _LONGEST_STAY = timedelta(minutes=10), timedelta(hours=4)


@dataclass(frozen=True, slots=True)
class _Placement:
    """One stay of a job on a slot."""

    placed_at: datetime
    loading: timedelta


class JobMoves:
    """Remembers since when jobs could have much more elsewhere."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, int], datetime] = {}  # by UID and epoch

    def due(self, jobs: Iterable[Job], slots: SlotTable, now: datetime) -> dict[str, str]:
        """Return the UIDs of the jobs that are to move, each with the reason in words.

        Args:
            jobs: that have a slot.
            slots: all of them.
            now: an aware datetime.
        """
        since: dict[tuple[str, int], datetime] = {}
        due: dict[str, str] = {}
        taken: set[str] = set()
        for job in jobs:
            found = _better(job, slots, now, taken)
            if found is None:
                continue
            key, words = found
            known = since[job.uid, job.epoch] = self._since.get((job.uid, job.epoch), now)
            if now - known >= _FOR:
                due[job.uid] = words
                taken.add(key)  # one job for each better slot
        self._since = since
        return due


def _better(job: Job, slots: SlotTable, now: datetime, taken: set[str]) -> tuple[str, str] | None:
    """Return the slot that is so much better that a move is worth its cost, and the words."""
    here, stay = slots.get(job.slot), _placement_of(job)
    if here is None or stay is None or not here.attached or here.silent or job.deleted_at:
        return None
    moves = _moves_of(job)
    if now - stay.placed_at < min(_FIRST_STAY * 2**moves, _LONGEST_STAY):
        return None
    choice = place(job, slots)
    if isinstance(choice, NoPlacement) or choice.slot.key in {job.slot, *taken}:
        return None
    there = choice.slot
    if any(holder.uid != job.uid for holder in there.holders):
        return None  # sharing a slot does not help
    rate_here = score(job, here, slots.neighbours(here)) / max(1, len(here.holders))
    rate_there = score(job, there, slots.neighbours(there))
    won = (rate_there - rate_here) * _HORIZON.total_seconds()
    cost = rate_there * stay.loading.total_seconds()
    if rate_there < _TIMES_AS_MUCH * rate_here or won < _WORTH * cost or rate_there <= 0:
        return None
    words = (
        f"decode leaves {rate(rate_here)} tok/s on {name_in(job.slot)} and for minutes "
        f"{name_in(there.key)} has predicted {rate(rate_there)}; loading takes "
        f"{stay.loading.total_seconds():.0f} s"
    )
    return there.key, words


def _placement_of(job: Job) -> _Placement | None:
    """Return since when the job has its slot and how long it took to load; None: it has not yet."""
    conditions = job.status.get("conditions")
    placed, running = get_condition(conditions, T.PLACED), get_condition(conditions, T.RUNNING)
    if not placed or not running or running["status"] != "True":
        return None
    at = datetime.fromisoformat(placed["lastTransitionTime"])
    loaded = datetime.fromisoformat(running["lastTransitionTime"])
    return _Placement(at, max(timedelta(seconds=1), loaded - at))


def _moves_of(job: Job) -> int:
    counts = job.status.get("evictions") or ()
    return next((int(c["count"]) for c in counts if c["reason"] == Reason.DECODE_BUSY), 0)
