"""Check which events of jobs wait for the operator, and when they need not any more."""

from __future__ import annotations

import asyncio

from windrow.proto import attach_pb2
from windrow_sidecar.agent.outbox import EventOutbox

Event = attach_pb2.JobEvent


def kept_of(outbox: EventOutbox) -> list[tuple[str, int, str]]:
    """Return what a new stream would carry."""

    async def read() -> list[tuple[str, int, str]]:
        found, number = [], 0
        while number < outbox.last:
            try:
                async with asyncio.timeout(0):
                    number, event = await outbox.after(number)
            except TimeoutError:
                break
            found.append((event.job_uid, event.epoch, Event.Kind.Name(event.kind)))
        return found

    return asyncio.run(read())


def filled(*events: tuple[str, int, int]) -> EventOutbox:
    outbox = EventOutbox()

    async def add() -> None:
        for uid, epoch, kind in events:
            await outbox.add(Event(job_uid=uid, epoch=epoch, kind=kind))

    asyncio.run(add())
    return outbox


def test_of_each_kind_the_newest_is_kept_in_order():
    outbox = filled(("a", 1, Event.PAUSED), ("b", 1, Event.STARTED), ("a", 1, Event.PAUSED))
    assert kept_of(outbox) == [("b", 1, "STARTED"), ("a", 1, "PAUSED")]


def test_what_the_operator_knows_of_is_forgotten_and_other_jobs_stay():
    outbox = filled(("a", 1, Event.REJECTED), ("a", 2, Event.STARTED), ("b", 1, Event.STARTED))
    outbox.placed_again("a", 2)
    assert kept_of(outbox) == [("a", 2, "STARTED"), ("b", 1, "STARTED")]
    outbox.forget("a", 2)
    assert kept_of(outbox) == [("b", 1, "STARTED")]


def test_warnings_of_different_reasons_are_all_kept():
    outbox = EventOutbox()

    async def warn(*reasons) -> None:
        for reason in reasons:
            await outbox.add(Event(job_uid="u", epoch=1, kind=Event.WARNED, reason=reason))

    asyncio.run(warn("CheckpointUnreadable", "DiskFull", "DiskFull"))
    assert kept_of(outbox) == [("u", 1, "WARNED"), ("u", 1, "WARNED")]
