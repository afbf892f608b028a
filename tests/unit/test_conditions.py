"""Conditions by Kubernetes' conventions."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from windrow.conditions import (
    LIFECYCLE,
    STATES,
    ConditionType,
    Reason,
    get_condition,
    is_finished,
    set_condition,
    state_of,
)

NOW = datetime(2025, 1, 1, 12, 0, tzinfo=UTC)
LATER = NOW + timedelta(minutes=1)


def of(*facts):
    held = []
    for type_, status, reason in facts:
        held = set_condition(held, type_, status, reason, "", 1, NOW)
    return held


def test_the_transition_time_changes_with_the_status():
    held = of(("Placed", "False", "NoSlot"))
    held = set_condition(held, "Placed", "True", "Placed", "on a", 2, LATER)
    assert get_condition(held, "Placed")["lastTransitionTime"] == "2025-01-01T12:01:00Z"


def test_the_transition_time_stays_while_only_the_message_changes():
    held = of(("Placed", "False", "NoSlot"))
    held = set_condition(held, "Placed", "False", "BackOff", "in 10 s", 2, LATER)
    condition = get_condition(held, "Placed")
    assert condition["lastTransitionTime"] == "2025-01-01T12:00:00Z"
    assert (condition["reason"], condition["observedGeneration"]) == ("BackOff", 2)


def test_setting_a_condition_leaves_the_others_and_the_argument_alone():
    held = of(("Accepted", "True", "Valid"), ("Placed", "True", "Placed"))
    before = [dict(condition) for condition in held]
    changed = set_condition(held, "Placed", "False", "SlotLost", "", 1, LATER)
    assert held == before
    assert [condition["type"] for condition in changed] == ["Accepted", "Placed"]


def test_a_reason_that_kubernetes_would_refuse_is_replaced():
    held = set_condition([], "Failed", "True", "no such file!", "", 1, NOW)
    assert get_condition(held, "Failed")["reason"] == Reason.WORKER_ERROR


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        ([], "Pending"),
        ([("Accepted", "False", "InvalidSpec")], "Invalid"),
        ([("Accepted", "True", "Valid"), ("Placed", "False", "NoSlot")], "Pending"),
        ([("Admitted", "False", "Queued"), ("Placed", "False", "Queued")], "Queued"),
        ([("Placed", "False", "QueueUnavailable")], "Pending"),
        ([("Placed", "True", "Placed"), ("Running", "False", "Starting")], "Placed"),
        ([("Placed", "True", "Placed"), ("Running", "True", "Started")], "Running"),
        ([("Placed", "True", "Placed"), ("Running", "True", "Stopping")], "Stopping"),
        ([("Placed", "False", "Suspended"), ("Suspended", "True", "Suspended")], "Suspended"),
        ([("Running", "False", "Finished"), ("Succeeded", "True", "Completed")], "Succeeded"),
        ([("Running", "False", "Finished"), ("Failed", "True", "DatasetEmpty")], "Failed"),
    ],
)
def test_the_conditions_come_down_to_one_word(facts, word):
    assert state_of(of(*facts)) == word
    assert word in STATES


def test_a_job_is_finished_when_it_succeeded_or_failed():
    assert is_finished(of(("Succeeded", "True", "Completed")))
    assert is_finished(of(("Failed", "True", "DeadlineExceeded")))
    assert not is_finished(of(("Running", "True", "Started")))
    assert not is_finished(None)


def test_the_lifecycle_covers_its_types_and_repeats_no_row():
    assert {row.type for row in LIFECYCLE} == {
        ConditionType.ACCEPTED,
        ConditionType.ADMITTED,
        ConditionType.PLACED,
        ConditionType.RUNNING,
        ConditionType.SUSPENDED,
        ConditionType.CHECKPOINTED,
        ConditionType.TRACKED,
        ConditionType.EVICTED,
        ConditionType.REQUEUED,
        ConditionType.SUCCEEDED,
        ConditionType.FAILED,
        ConditionType.DEPLOYED,
    }
    keys = [(row.type, row.status, row.reason) for row in LIFECYCLE]
    assert len(keys) == len(set(keys))
