"""The built-in engine keeps the contract of the step seam; tests/sglang says so of SGLang."""

from __future__ import annotations

import pytest
from support.step_seam import RecordingHook, check_calls

from windrow_sidecar.engines.hook import StepInput

FACTS = StepInput(
    step=1, start_ns=1000, batch=2, context_tokens=9, waiting=0, admitted_tokens=9, slack_us=0
)


def test_a_step_that_begins_and_ends_is_one_step():
    assert (
        check_calls([("before_step", FACTS), ("after_step", (9_001_000, 9000)), ("idle", 0)]) == 1
    )


@pytest.mark.parametrize(
    "calls",
    [
        [("after_step", (2000, 1))],
        [("before_step", FACTS)],
        [("before_step", FACTS), ("idle", 0), ("after_step", (2000, 1))],
        [("before_step", FACTS), ("before_step", FACTS), ("after_step", (2000, 1))],
        [("before_step", FACTS), ("after_step", (9_001_000, 4000))],
        [("before_step", FACTS._replace(batch=0, context_tokens=0, admitted_tokens=0))],
    ],
)
def test_calls_out_of_order_are_found(calls):
    with pytest.raises(AssertionError):
        check_calls(calls)


def test_the_recording_hook_decides_for_decode_alone():
    hook = RecordingHook()
    assert hook.before_step(FACTS).finetune_units == 0
    hook.after_step(9_001_000, 9000)
    assert check_calls(hook.calls) == 1
