"""Rows that a process of its own reads are those that are read here, and a bad end is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """Return what each scene of `reading_elsewhere.py` has printed."""
    program = Path(__file__).with_name("reading_elsewhere.py")
    done = subprocess.run(
        [sys.executable, program, tmp_path_factory.mktemp("r")],
        stdout=subprocess.PIPE,
        check=True,
        timeout=240,
    )
    return dict(json.loads(line) for line in done.stdout.splitlines())


def test_rows_order_lengths_and_digest_are_those_that_are_read_here(scenes):
    assert scenes["same"] is True


def test_a_wrong_row_is_the_same_error_with_its_field(scenes):
    elsewhere, here = scenes["wrong"]
    assert elsewhere == here
    assert here["reason"] == "DatasetInvalid"
    assert here["field"].endswith("wrong.jsonl:2")


def test_a_template_that_computes_in_one_call_ends_its_reader_and_names_the_row(scenes):
    power, loop, next_one = scenes["c code"]
    assert power == loop
    assert power["type"] == "UserError"
    assert power["field"].endswith("row.jsonl:1")
    assert "the chat template computes for more than 3 s" in power["says"]
    assert next_one == {}


def test_reading_that_is_ended_is_told_as_such(scenes):
    assert scenes["ended"] == {
        "type": "RuntimeError",
        "says": "the process that read the rows was killed",
    }


def test_rows_that_never_come_end_the_job_with_its_own_reason(scenes):
    reason, detail = scenes["stalled"]
    assert reason == "NoProgress"
    assert "reading the rows has not ended" in detail


def test_a_job_whose_folder_hangs_can_be_given_up_once_and_reads_nothing(scenes):
    assert scenes["folder hangs"] == [True, True, False, True, []]


def test_a_job_that_is_deleted_while_it_loads_leaves_no_checkpoint_unless_its_folder_hangs(scenes):
    removed, hanging = scenes["forgotten"]
    detail = "the job was deleted, its checkpoints are removed; it had not begun"
    assert removed == ["STOPPED", detail, "STOPPED", False]
    detail = "the job was deleted; its folder does not answer, its checkpoints stay"
    assert hanging == ["STOPPED", f"{detail}; it had not begun", "STOPPED", True]


def test_it_stands_still_while_nothing_is_granted_and_is_not_given_up_for_it(scenes):
    assert scenes["held"] == [True, True]


def test_nothing_is_forked_from_a_process_with_threads(scenes):
    assert "before other threads" in scenes["too late"]["says"]


def test_those_that_read_end_with_their_maker(scenes):
    assert scenes["closed"]["type"] == "RuntimeError"
