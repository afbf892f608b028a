"""Check which jobs give way to one of higher priority."""

from dataclasses import replace
from datetime import UTC, datetime

from windrow.crd import parse_job_spec, parse_policy_spec
from windrow_operator.model import (
    Base,
    CheckedPolicy,
    EffectivePolicy,
    Holder,
    Job,
    JobPlacement,
    RunState,
    Slot,
    WorkerProgress,
)
from windrow_operator.preemption import victims

NOW = datetime(2025, 1, 1, 12, 0, tzinfo=UTC)


def job(name, priority, slot="", **changes):
    spec = parse_job_spec(
        {
            "model": {"name": "/m"},
            "dataset": {"source": "/d"},
            "training": {"maxSteps": 1},
            "output": {"destination": "/o"},
        }
    )
    status = {"slot": slot} if slot else {}
    job = Job("team", name, name, 1, NOW, spec, status=status, priority=priority)
    return replace(job, **{"may_preempt": True, **changes})


def slot(name, *holders, **changes):
    spec = parse_policy_spec({"selector": {}, "objective": {"tpot": "1s"}, "mode": "harvest"})
    terms = EffectivePolicy(CheckedPolicy("team", "chat", "p", 1, "", spec), "harvest")
    held = tuple(Holder(one.uid, one.key, Base.of(one.spec)) for one in holders)
    return Slot(f"team/{name}", terms=terms, outputs=("/o",), holders=held, **changes)


def chosen(waiting, placed, *slots, runs=None):
    return victims(placed, {one.key: one for one in slots}, runs or {}, waiting)


def test_the_least_important_job_gives_way_and_only_one_of_them():
    low, mid = job("low", 1, "team/a"), job("mid", 2, "team/b")
    urgent = job("urgent", 9)
    assert chosen([urgent], [mid, low], slot("a", low), slot("b", mid)) == {"low": "team/urgent"}


def test_equal_priority_does_not_preempt_nor_does_a_patient_class():
    first = job("first", 5, "team/a")
    assert chosen([job("second", 5)], [first], slot("a", first)) == {}
    patient = job("patient", 9, may_preempt=False)
    assert chosen([patient], [first], slot("a", first)) == {}


def test_nobody_gives_way_where_a_slot_is_free_or_where_it_would_not_help():
    low, urgent = job("low", 1, "team/a"), job("urgent", 9)
    assert chosen([urgent], [low], slot("a", low), slot("free")) == {}
    assert chosen([urgent], [low], slot("a", low, breaker="too many slow steps")) == {}
    other = job("other", 20)
    shared = slot("a", low, other)
    assert chosen([urgent], [low], shared) == {}  # the other one stays on it


def test_of_equals_the_one_goes_that_has_least_to_do_again():
    jobs = [job("x", 1, "team/a"), job("y", 1, "team/b")]
    runs = {
        name: JobPlacement(
            name, 1, "", RunState.RUNNING, NOW, progress=WorkerProgress(step=90, checkpoint_step=at)
        )
        for name, at in (("x", 50), ("y", 88))
    }
    slots = (slot("a", jobs[0]), slot("b", jobs[1]))
    assert chosen([job("urgent", 9)], jobs, *slots, runs=runs) == {"y": "team/urgent"}


def test_a_slot_that_is_on_its_way_is_not_asked_for_twice():
    low = job("low", 1, "team/a", preempted_by="team/urgent")
    other = job("other", 1, "team/b")
    urgent = job("urgent", 9)
    assert chosen([urgent], [low, other], slot("a", low), slot("b", other)) == {}
