"""Decisions of a node: restarts, probes' verdicts, phases, conditions, which pods it takes."""

from datetime import UTC, datetime, timedelta

import pytest

from windrow_lab.node.backoff import Backoff, BackoffRule, restarts
from windrow_lab.node.binding import wants_binding
from windrow_lab.node.probes import Probe, Streak
from windrow_lab.node.records import ContainerRecord, Running, Terminated, Waiting, resumed
from windrow_lab.node.status import phase_of, pod_status

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
RUNNING = ContainerRecord(Running(NOW, 7), started=True, ready=True)


def ended(code):
    return ContainerRecord(Terminated(code, NOW, NOW, "Error" if code else "Completed"))


def pod_of(policy="Always", sidecar=False, init=False, **more):
    inits = [{"name": "side", "restartPolicy": "Always"}] if sidecar else []
    inits += [{"name": "init"}] if init else []
    spec = {"restartPolicy": policy, "containers": [{"name": "main"}], "initContainers": inits}
    return {"metadata": {}, "spec": spec | more}


def test_the_first_restart_is_at_once_and_the_next_ones_wait_longer_up_to_the_cap():
    backoff = Backoff(BackoffRule(timedelta(seconds=10), timedelta(seconds=60)))
    delays = []
    for _ in range(6):
        delay, backoff = backoff.after_run(timedelta(seconds=1))
        delays.append(delay.total_seconds())
    assert delays == [0, 10, 20, 40, 60, 60]


def test_a_long_run_forgives_earlier_crashes():
    backoff = Backoff(BackoffRule(), in_a_row=9)
    delay, backoff = backoff.after_run(timedelta(minutes=10))
    assert delay == timedelta()
    assert backoff.in_a_row == 1


def test_weeks_of_crashes_do_not_overflow():
    delay, _ = Backoff(BackoffRule(), in_a_row=10_000).after_run(timedelta())
    assert delay == BackoffRule().cap


@pytest.mark.parametrize(
    ("policy", "code", "again"),
    [
        ("Always", 0, True),
        ("Always", 1, True),
        ("OnFailure", 0, False),
        ("OnFailure", 1, True),
        ("Never", 1, False),
    ],
)
def test_the_restart_policy_decides(policy, code, again):
    assert restarts(policy, code) is again


def test_a_verdict_needs_as_many_answers_in_a_row_as_its_threshold():
    streak = Streak(Probe.of({"tcpSocket": {}, "successThreshold": 2, "failureThreshold": 3}))
    verdicts = []
    for ok in (True, True, False, False, True, False, False, False):
        streak = streak.after(ok)
        verdicts.append(streak.verdict)
    assert verdicts == [None, True, None, None, None, None, None, False]


@pytest.mark.parametrize(
    ("policy", "record", "phase"),
    [
        ("Always", ContainerRecord(), "Pending"),
        ("Always", RUNNING, "Running"),
        ("Always", ended(0), "Running"),
        ("Always", ContainerRecord(Waiting("CrashLoopBackOff"), last=ended(1).state), "Running"),
        ("OnFailure", ended(0), "Succeeded"),
        ("OnFailure", ended(1), "Running"),
        ("Never", ended(0), "Succeeded"),
        ("Never", ended(3), "Failed"),
    ],
)
def test_the_phase_follows_from_containers_and_policy(policy, record, phase):
    assert phase_of(pod_of(policy), {"main": record}) == phase


def test_a_failed_init_container_fails_a_pod_that_never_restarts():
    records = {"init": ended(1), "main": ContainerRecord()}
    assert phase_of(pod_of("Never", init=True), records) == "Failed"
    assert phase_of(pod_of("Always", init=True), records) == "Pending"


def test_a_sidecar_neither_completes_nor_fails_a_pod():
    records = {"side": RUNNING, "main": ended(0)}
    assert phase_of(pod_of("Never", sidecar=True), records) == "Succeeded"


def conditions_of(status):
    return {entry["type"]: entry for entry in status["conditions"]}


def test_a_pod_is_ready_when_containers_sidecars_and_gates_are():
    gated = pod_of(sidecar=True, readinessGates=[{"conditionType": "x/gate"}])
    records = {"side": RUNNING, "main": RUNNING}
    ready = conditions_of(pod_status(gated, records, NOW))
    assert ready["ContainersReady"]["status"] == "True"
    assert (ready["Ready"]["status"], ready["Ready"]["reason"]) == (
        "False",
        "ReadinessGatesNotReady",
    )
    gated["status"] = {"conditions": [{"type": "x/gate", "status": "True"}]}
    assert conditions_of(pod_status(gated, records, NOW))["Ready"]["status"] == "True"
    records["side"] = ContainerRecord()
    assert conditions_of(pod_status(gated, records, NOW))["Ready"]["status"] == "False"


def test_a_condition_keeps_its_time_until_its_status_changes():
    pod = pod_of()
    earlier = "2026-01-01T00:00:00Z"
    pod["status"] = {
        "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": earlier}]
    }
    stays = conditions_of(pod_status(pod, {"main": RUNNING}, NOW))["Ready"]
    changes = conditions_of(pod_status(pod, {"main": ContainerRecord()}, NOW))["Ready"]
    assert stays["lastTransitionTime"] == earlier
    assert changes["lastTransitionTime"] == "2026-01-02T03:04:05Z"


def test_an_end_by_signal_has_the_shells_exit_code():
    killed = Terminated.of_status(-9, Running(NOW, 7), NOW)
    assert (killed.exit_code, killed.reason) == (137, "SIGKILL")
    assert killed.as_json()["terminated"]["signal"] == 9


def test_what_ran_under_an_earlier_node_counts_as_killed():
    status = {"state": Running(NOW, 7).as_json(), "restartCount": 2}
    record = resumed(status, NOW)
    assert isinstance(record.state, Terminated)
    assert (record.state.exit_code, record.restarts) == (137, 2)
    assert resumed(None, NOW) == ContainerRecord()
    done = resumed({"state": ended(0).state.as_json(), "restartCount": 1}, NOW)
    assert (done.state.exit_code, done.restarts) == (0, 1)


LABELS = {"kubernetes.io/os": "linux"}


@pytest.mark.parametrize(
    ("spec", "metadata", "taken"),
    [
        ({}, {}, True),
        ({"nodeSelector": {"kubernetes.io/os": "linux"}}, {}, True),
        ({"nodeSelector": {"gpu": "h200"}}, {}, False),
        ({"nodeName": "other"}, {}, False),
        ({"schedulingGates": [{"name": "wait"}]}, {}, False),
        ({"schedulerName": "volcano"}, {}, False),
        ({}, {"deletionTimestamp": "now"}, False),
    ],
)
def test_a_node_takes_pods_that_wait_for_one_like_it(spec, metadata, taken):
    assert wants_binding({"spec": spec, "metadata": metadata}, LABELS) is taken
