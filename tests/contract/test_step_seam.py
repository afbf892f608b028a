"""The built-in engine keeps the contract of the step seam; tests/sglang says so of SGLang."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from support.step_seam import RecordingHook, check_calls

from windrow_sidecar.engines.harvest import HarvestSettings
from windrow_sidecar.engines.hook import StepInput
from windrow_sidecar.qos.view import View
from windrow_sidecar.testing.stepping_engine import SteppingEngine

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


@pytest.fixture
def engine():
    with tempfile.TemporaryDirectory(prefix="wr-") as folder:  # short: it holds a socket
        # A decision holds however slow this machine is.
        made = SteppingEngine(Path(folder), HarvestSettings(steady_ns=10**15))
        yield made
        made.close()


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (1, "not a StepInput"),
        (FACTS[:5], "not a StepInput"),
        (FACTS._replace(step="1"), "step is not a 64-bit integer"),
        (FACTS._replace(batch=1 << 63), "batch is not a 64-bit integer"),
        (FACTS._replace(tokens="1"), "tokens is not a number"),
    ],
)
def test_facts_that_are_not_of_a_step_are_refused_by_name_and_the_next_step_is_decided(
    engine, facts, said
):
    with pytest.raises(TypeError, match=said):
        engine.hook.before_step(facts)
    assert engine.hook.before_step(FACTS).decode_units == 2
    assert View._make(engine.arena.page.read_view()).batch == FACTS.batch


def test_an_error_of_a_decision_reaches_the_engine_and_the_next_step_is_decided(engine):
    class Broken(Exception):
        pass

    def fail(now_ns):
        raise Broken

    engine.hook._take_terms = fail  # the compiled step calls it where there is news
    engine.hook.set_terms(None)
    with pytest.raises(Broken):
        engine.hook.before_step(FACTS)
    assert engine.hook.before_step(FACTS).decode_units == 2


def test_a_decision_that_is_kept_shows_the_worker_that_decode_lives(engine):
    page = engine.arena.page
    for step in range(1, 4):
        before = View._make(page.read_view())
        engine.hook.before_step(FACTS._replace(step=step, admitted_tokens=0))
        engine.hook.after_step(2_000_000, 1000)
        shown = View._make(page.read_view())
        assert shown.heartbeat_ns > before.heartbeat_ns
    assert shown.step == 1, "each step was decided again"
