"""A job moves where decode leaves it little for minutes, and never to and fro."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from windrow.conditions import timestamp
from windrow.crd import parse_job_spec, parse_policy_spec
from windrow_operator.model import Base, CheckedPolicy, EffectivePolicy, Holder, Job, Slot
from windrow_operator.moving import JobMoves
from windrow_operator.slot_table import SlotTable

NOW = datetime(2025, 1, 1, 12, 0, tzinfo=UTC)
SPEC = parse_job_spec(
    {
        "model": {"name": "/m"},
        "dataset": {"source": "/d"},
        "training": {"maxSteps": 1},
        "output": {"destination": "/o"},
    }
)
TERMS = EffectivePolicy(
    CheckedPolicy(
        "team",
        "chat",
        "p",
        1,
        "",
        parse_policy_spec({"selector": {}, "objective": {"tpot": "1s"}, "mode": "harvest"}),
    ),
    "harvest",
)
STARVED, FREE = "team/starved", "team/free"


def job(name="tone", slot=STARVED, loading_s=30, moves=0):
    placed = NOW - timedelta(hours=2)
    conditions = [
        {"type": kind, "status": "True", "reason": "x", "lastTransitionTime": timestamp(at)}
        for kind, at in (("Placed", placed), ("Running", placed + timedelta(seconds=loading_s)))
    ]
    evictions = [{"reason": "DecodeBusy", "count": moves}] if moves else []
    status = {"slot": slot, "epoch": 1, "conditions": conditions, "evictions": evictions}
    return Job("team", name, name, 1, NOW, SPEC, status=status)


def slot(key, tokens, *holders, **changes):
    held = tuple(Holder(one.uid, one.key, Base.of(SPEC)) for one in holders)
    return Slot(
        key,
        predicted_tokens_per_second=tokens,
        terms=TERMS,
        outputs=("/o",),
        holders=held,
        **changes,
    )


def due(jobs, *slots, minutes=(0, 2, 5), moves=None):
    """Return what is due at the last of these minutes."""
    moves, table = moves or JobMoves(), SlotTable(slots)
    for minute in minutes:
        found = moves.due(jobs, table, NOW + timedelta(minutes=minute))
    return found


def test_a_starved_job_moves_after_minutes_and_is_told_both_figures():
    one = job()
    slots = (slot(STARVED, 100, one), slot(FREE, 9600))
    assert due([one], *slots, minutes=(0, 4)) == {}
    assert due([one], *slots) == {
        "tone": "decode leaves 100 tok/s on starved and for minutes free has predicted 9.6k; "
        "loading takes 30 s"
    }


@pytest.mark.parametrize(
    ("one", "here", "there"),
    [
        (job(), 4000, slot(FREE, 9600)),  # not even three times as much
        (job(loading_s=600), 100, slot(FREE, 9600)),  # to load takes as long as what is won
        (job(), 100, slot(FREE, 9600, job("other"))),  # no room
        (job(), 100, slot(FREE, 9600, job("other"), max_jobs=4)),  # shared, it is none
        (job(), 100, slot(FREE, 9600, resting="until later")),
        (job(moves=4), 100, slot(FREE, 9600)),  # has moved often enough: it stays for hours
        (job(), 100, slot(FREE, 0)),
    ],
)
def test_a_job_stays_where_a_move_would_not_be_worth_it(one, here, there):
    assert due([one], slot(STARVED, here, one), there) == {}


def test_relief_in_between_begins_the_minutes_anew():
    one, moves = job(), JobMoves()
    starved, relieved = slot(STARVED, 100, one), slot(STARVED, 9000, one)
    assert due([one], starved, slot(FREE, 9600), minutes=(0, 4), moves=moves) == {}
    assert due([one], relieved, slot(FREE, 9600), minutes=(4.5,), moves=moves) == {}
    assert due([one], starved, slot(FREE, 9600), minutes=(5, 9), moves=moves) == {}
    assert due([one], starved, slot(FREE, 9600), minutes=(10,), moves=moves) != {}


def test_of_two_starved_jobs_one_moves_to_the_one_better_slot():
    first, second = job("first", "team/a"), job("second", "team/b")
    slots = (slot("team/a", 100, first), slot("team/b", 100, second), slot(FREE, 9600))
    assert list(due([first, second], *slots)) == ["first"]


def test_a_job_that_has_not_loaded_yet_does_not_move():
    one = job()
    conditions = [{**c, "status": "False"} for c in one.status["conditions"]]
    loading = replace(one, status={**one.status, "conditions": conditions})
    assert due([loading], slot(STARVED, 100, loading), slot(FREE, 9600)) == {}
