"""Decisions about jobs with a queue: their steps, their Workloads, and checks of headroom."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
from test_reconcile import KEY, NOW, Life, run, slot, spec

from windrow.conditions import Reason, set_condition
from windrow_operator import headroom, workloads
from windrow_operator.headroom import HeadroomCheck
from windrow_operator.model import Job, QueueAdmission, RunState
from windrow_operator.queues import Queues
from windrow_operator.reconcile import Command
from windrow_operator.slot_table import SlotTable
from windrow_operator.workloads import Priority, WorkloadStep, next_step, unavailable, workload_of

ADMITTED = QueueAdmission(
    admitted=True, reserved=True, reason=Reason.ADMITTED, message="Admitted by ClusterQueue all"
)
WAITS = QueueAdmission(
    admitted=False, reserved=False, reason=Reason.QUEUED, message="insufficient quota"
)
TAKEN = replace(WAITS, reason=Reason.QUEUE_EVICTED, message="Kueue evicted the Workload")


def job(**changes):
    values = {"namespace": "team", "name": "tone", "uid": "u", "generation": 1, "queue": "tuning"}
    return Job(**{**values, "created": NOW, "spec": spec(), **changes})


def workload(of=None, *facts, **status):
    body = workload_of(of or job(), None)
    held = []
    for type_, value, reason in facts:
        held = set_condition(held, type_, value, reason, f"{reason}!", 1, NOW)
    return {**body, "status": {"conditions": held, **status}}


RESERVED = ("QuotaReserved", "True", "QuotaReserved")
IS_ADMITTED = ("Admitted", "True", "Admitted")
IS_READY = ("PodsReady", "False", "WaitForStart")
EVICTED = ("Evicted", "True", "Preempted")


# --- steps of the job -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("admission", "reason", "state"),
    [
        (None, "Queued", "Queued"),
        (WAITS, "Queued", "Queued"),
        (unavailable("no Kueue"), "QueueUnavailable", "Pending"),
    ],
)
def test_a_job_with_a_queue_is_placed_by_nobody_before_it_is_admitted(admission, reason, state):
    life = Life(queue="tuning", admission=admission)
    actions = life.step()
    assert actions.commands == ()
    assert life.condition("Placed")["reason"] == reason
    assert life.state == state
    life.job = replace(life.job, admission=ADMITTED)
    assert life.step().commands == (Command("ASSIGN", KEY, 1),)
    assert life.condition("Admitted")["status"] == "True"


def test_a_running_job_whose_admission_is_not_known_goes_on():
    life = Life(queue="tuning", admission=ADMITTED).running()
    life.job = replace(life.job, admission=None)  # another replica leads
    assert life.step(run()).commands == ()
    assert life.condition("Admitted")["status"] == "True"


def test_a_running_job_that_loses_its_admission_stops_and_is_counted_as_evicted():
    life = Life(queue="tuning", admission=ADMITTED).running()
    life.job = replace(life.job, admission=TAKEN)
    (command,) = life.step(run()).commands
    assert command.action == "STOP"
    assert "LocalQueue tuning does not admit it any more: Kueue evicted" in command.reason
    life.step(run(RunState.STOPPED, stop_asked_at=NOW, stop_reason=command.reason))
    assert life.job.status["evictions"] == [{"reason": "QueueEvicted", "count": 1}]
    assert life.state == "Queued"
    life.job = replace(life.job, admission=WAITS)
    life.step()
    assert life.condition("Placed")["message"] == "insufficient quota"


def test_a_job_that_leaves_its_queue_drops_the_condition():
    life = Life(queue="tuning", admission=WAITS)
    life.step()
    life.job = replace(life.job, queue="", admission=None)
    life.step()
    assert life.condition("Admitted") is None
    assert life.state == "Placed"


# --- its Workload ---------------------------------------------------------------------------------


def test_a_name_is_one_label_value_and_of_one_job_alone():
    long = job(name="a" * 253)
    assert len(workloads.name_of(long)) == 63
    assert workloads.name_of(long) != workloads.name_of(replace(long, uid="v"))


def test_a_workload_is_made_once_and_asked_about_then():
    step = next_step(job(), None, None, NOW)
    assert step.create is not None
    assert step.admission is not None
    assert not step.admission.admitted
    waiting = next_step(job(), workload(), None, NOW)
    assert (waiting.create, waiting.delete, waiting.status) == (None, False, None)
    admitted = next_step(job(), workload(None, RESERVED, IS_ADMITTED, IS_READY), None, NOW)
    assert (admitted.create, admitted.delete, admitted.status) == (None, False, None)
    assert admitted.admission is not None
    assert admitted.admission.admitted


@pytest.mark.parametrize(
    "changes",
    [
        {"spec": None, "error": "wrong"},
        {"spec": spec(suspend=True)},
        {"destination_owner": "job team/other"},
        {"priority_class_missing": "rush"},
        {"queue": ""},
    ],
)
def test_a_job_that_cannot_run_holds_no_quota(changes):
    assert next_step(job(**changes), None, None, NOW) == WorkloadStep()
    assert next_step(job(**changes), workload(), None, NOW) == WorkloadStep(delete=True)


def test_a_suspended_job_keeps_its_quota_until_its_worker_has_stopped():
    stopping = job(spec=spec(suspend=True), status={"slot": KEY}, admission=ADMITTED)
    held = workload(None, RESERVED, IS_ADMITTED)
    assert next_step(stopping, held, None, NOW) == WorkloadStep(admission=ADMITTED)


def test_quota_goes_back_once_the_worker_of_an_evicted_job_has_stopped():
    held = workload(None, RESERVED, IS_ADMITTED, EVICTED, admission={"clusterQueue": "all"})
    running = next_step(job(status={"slot": KEY}), held, None, NOW)
    assert running.status is None
    assert running.admission is not None
    assert running.admission.reason == Reason.QUEUE_EVICTED
    stopped = next_step(job(), held, None, NOW).status
    assert stopped is not None
    facts = {each["type"]: each["status"] for each in stopped["conditions"]}
    assert facts == {
        "QuotaReserved": "False",
        "Admitted": "False",
        "Evicted": "True",
        "Requeued": "True",
    }
    assert stopped["admission"] is None


@pytest.mark.parametrize("reason", ["AdmissionCheck", "Deactivated", "PodsReadyTimeout"])
def test_kueue_decides_when_a_job_is_queued_again_that_was_not_preempted(reason):
    held = workload(None, RESERVED, ("Evicted", "True", reason))
    status = next_step(job(), held, None, NOW).status
    assert status is not None
    (again,) = [each for each in status["conditions"] if each["type"] == "Requeued"]
    assert (again["status"], again["reason"]) == ("False", reason)


def forged(**changes):
    body = workload(None, RESERVED, IS_ADMITTED)
    return {**body, "spec": {**body["spec"], **changes}}


@pytest.mark.parametrize(
    "found",
    [
        forged(queueName="night"),
        forged(priorityClassRef={"group": "g", "kind": "k", "name": "n"}),
        forged(podSets=[{"name": "main", "count": 1, "template": {"spec": {"containers": [{}]}}}]),
        {**forged(), "metadata": {"name": "x"}},
    ],
)
def test_a_workload_that_promises_less_or_is_anothers_admits_nobody(found):
    step = next_step(job(), found, None, NOW)
    assert step.delete
    assert step.admission is not None
    assert not step.admission.admitted
    placed = next_step(job(status={"slot": KEY}), found, None, NOW)
    assert not placed.delete  # first its worker stops
    assert placed.admission is not None
    assert placed.admission.reason == Reason.QUEUE_EVICTED


def test_a_priority_class_comes_with_its_value():
    priority = Priority("kueue.x-k8s.io", "WorkloadPriorityClass", "rush", 1000)
    made = workload_of(job(), priority)["spec"]
    assert (made["priorityClassRef"]["name"], made["priority"]) == ("rush", 1000)


@pytest.mark.parametrize("reason", ["Succeeded", "Failed"])
def test_the_end_of_a_job_is_the_end_of_its_workload(reason):
    held = set_condition([], reason, "True", "Why", "because", 1, NOW)
    ended = job(status={"conditions": held})
    status = next_step(ended, workload(None, RESERVED, IS_ADMITTED), None, NOW).status
    assert status is not None
    finished = status["conditions"][-1]
    assert (finished["type"], finished["reason"], finished["message"]) == (
        *("Finished", reason),
        "because",
    )
    again = workload(None, ("Finished", "True", reason))
    assert next_step(ended, again, None, NOW) == WorkloadStep()


def test_what_a_job_waits_for_is_in_kueues_words():
    assert workloads.waits_for(workload()) == "Waits in LocalQueue tuning"
    inactive = workload()
    inactive["spec"]["active"] = False
    assert "is deactivated" in workloads.waits_for(inactive)
    states = [
        {"name": "headroom", "state": "Ready", "message": "fine"},
        {"name": "budget", "state": "Pending", "message": ""},
    ]
    checked = workload(None, RESERVED, admissionChecks=states)
    assert workloads.waits_for(checked).endswith("admission checks: budget is Pending")


# --- checks of headroom ---------------------------------------------------------------------------


def check_body(least=None, controller=headroom.CONTROLLER):
    annotations = {} if least is None else {headroom.ANNOTATION_LEAST: least}
    metadata = {"name": "headroom", "annotations": annotations}
    return {"metadata": metadata, "spec": {"controllerName": controller}}


def test_a_check_of_another_controller_is_left_to_it():
    assert headroom.check_of(check_body(controller="other.dev/check")) is None
    assert headroom.check_of(check_body("250")) == HeadroomCheck("headroom", 250.0)


@pytest.mark.parametrize("said", ["fast", "-1", "nan", "inf"])
def test_a_check_with_a_wrong_rate_is_inactive_and_says_why(said):
    check = headroom.check_of(check_body(said))
    assert check is not None
    status = headroom.activity(check_body(said), check, NOW)
    assert status is not None
    (active,) = status["conditions"]
    assert active["status"] == "False"
    assert f"{said!r} is not a number" in active["message"]
    assert headroom.activity({**check_body(said), "status": status}, check, NOW) is None


def test_headroom_is_a_slot_that_would_take_the_job_at_the_rate_that_is_asked_for():
    slots = SlotTable([slot(predicted_tokens_per_second=900.0)])
    assert headroom.answer(job(), 0, slots).state == "Ready"
    slow = headroom.answer(job(), 1000, slots)
    assert slow.state == "Retry"
    assert "the check asks for 1.0k tok/s" in slow.message
    assert headroom.answer(job(), 0, SlotTable()).state == "Retry"


def test_a_slot_admits_one_job_of_those_that_ask_at_once():
    slots = SlotTable([slot()])
    coming = job(uid="c", name="coming")
    left = headroom.without_coming(slots, [coming])
    assert headroom.answer(job(), 0, left).state == "Retry"
    assert headroom.answer(job(), 0, slots).state == "Ready"  # the table itself is as it was


def test_a_check_is_answered_once_and_again_after_an_eviction():
    checks = {"headroom": HeadroomCheck("headroom")}
    states = [{"name": "headroom", "state": "Pending"}, {"name": "other", "state": "Pending"}]
    asks = workload(None, RESERVED, admissionChecks=states)
    assert headroom.pending(asks, checks) == [HeadroomCheck("headroom")]
    assert headroom.pending(workload(None, admissionChecks=states), checks) == []
    gone = workload(None, RESERVED, EVICTED, admissionChecks=states)
    assert headroom.pending(gone, checks) == []
    status = headroom.answered(asks, {"headroom": headroom.Answer("Retry", "none")}, NOW)
    retried, other = status["admissionChecks"]
    assert (retried["state"], retried["requeueAfterSeconds"]) == ("Retry", 15)
    assert other == states[1]
    states[0]["retryCount"] = 20
    status = headroom.answered(asks, {"headroom": headroom.Answer("Retry", "none")}, NOW)
    assert status["admissionChecks"][0]["requeueAfterSeconds"] == 300


def test_a_slot_has_a_while_to_come_after_a_job_got_its_quota():
    asks = workload(None, RESERVED)
    assert headroom.may_still_come(asks, NOW + timedelta(seconds=29))
    assert not headroom.may_still_come(asks, NOW + timedelta(seconds=31))


@pytest.mark.parametrize("where", [{"namespace": "other"}, {"name": "made-up"}])
def test_a_workload_with_the_label_of_anothers_job_hears_nothing_of_it(where):
    found = SimpleNamespace(jobs={"u": {}}, job_view=lambda uid: job(uid=uid))
    kept = Queues(found, None, SlotTable([slot()]), clock=lambda: NOW, on_news=lambda: None)
    asks = workload(None, RESERVED)
    asks["metadata"] = asks["metadata"] | where
    late = NOW + timedelta(minutes=2)
    check = HeadroomCheck("headroom", 1e9)  # no slot leaves so much
    assert kept._answers(asks, [check], SlotTable(), late) == {"headroom": headroom.NOT_A_JOB}
    assert kept._no_headroom == {}
    own = kept._answers(workload(None, RESERVED), [check], SlotTable(), late)
    assert own["headroom"].state == "Retry"
    kept._forget_gone()
    assert kept._no_headroom.keys() == {"u"}
    found.jobs.clear()  # jobs that come and go leave no words behind
    kept._forget_gone()
    assert kept._no_headroom == {}
