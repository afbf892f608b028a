"""Check what two processes say to each other, and what of an error a person gets to see."""

from __future__ import annotations

import dataclasses
import json
import typing

import pytest

from windrow.errors import UserError, WindrowError
from windrow.proto import agent_pb2, attach_pb2
from windrow.protocol import ENDS, EventKind, WorkerEvent, error_line, error_of
from windrow_sidecar.agent.job_run import _TERMINAL
from windrow_sidecar.finetune.job.failures import failure

WRONG = UserError(
    "'messages' is missing",
    field="rows.jsonl:17",
    remedy="Write chat rows.",
    reason="DatasetInvalid",
)


def test_an_error_crosses_to_the_process_that_started_it_with_field_and_remedy():
    heard = error_of(json.loads(json.dumps(error_line(WRONG))))
    assert isinstance(heard, UserError)
    assert (heard.problem, heard.field, heard.remedy) == (WRONG.problem, WRONG.field, WRONG.remedy)
    assert str(heard) == str(WRONG)


@pytest.mark.parametrize(
    ("error", "said"),
    [(WindrowError("no answer"), "no answer"), (KeyError("x"), "KeyError: 'x'")],
)
def test_an_error_that_nobody_can_correct_crosses_as_such(error, said):
    heard = error_of(error_line(error), user_error=False)
    assert type(heard) is WindrowError
    assert str(heard) == said


def test_a_result_is_not_an_error():
    assert error_of({"seconds": 1.0}) is None


def test_a_failure_for_what_a_person_wrote_names_the_field_and_the_remedy():
    event, _ = failure(WRONG, "")
    assert (event.user_error, event.field, event.remedy) == (True, WRONG.field, WRONG.remedy)
    event, _ = failure(ValueError("x"), "")
    assert (event.user_error, event.field, event.remedy) == (False, "", "")


def test_events_have_the_kinds_and_fields_of_the_wire():
    kinds = typing.get_args(EventKind)
    assert set(kinds) < set(attach_pb2.JobEvent.Kind.keys())
    assert {attach_pb2.JobEvent.Kind.Value(kind) for kind in ENDS} == set(_TERMINAL)
    told = {field.name for field in dataclasses.fields(WorkerEvent)}
    # The sidecar has what a job begins with in `detail`.
    assert told - {"notes"} == set(agent_pb2.WorkerEvent.DESCRIPTOR.fields_by_name)
