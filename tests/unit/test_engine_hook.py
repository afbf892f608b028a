from __future__ import annotations

import logging

import pytest

from windrow_sidecar.engines.hook import FailClosed, NullHook, StepInput, first_due_ns
from windrow_sidecar.qos.view import Grant

FACTS = StepInput(
    step=1, start_ns=0, batch=2, context_tokens=300, waiting=0, admitted_tokens=0, slack_us=0
)


class Granting:
    """Grants one unit, and raises in the method named `broken`."""

    def __init__(self, broken: str = "") -> None:
        self.broken = broken
        self.calls: list[str] = []

    def _enter(self, method: str) -> None:
        self.calls.append(method)
        if method == self.broken:
            raise ZeroDivisionError(method)

    def before_step(self, facts: StepInput) -> Grant:
        self._enter("before_step")
        return Grant(decode_units=1, finetune_units=1)

    def after_step(self, end_ns: int, latency_us: int) -> None:
        self._enter("after_step")

    def after_prompt(self, tokens: int, latency_us: int, grant: Grant) -> None:
        self._enter("after_prompt")

    def after_first_token(self, after_us: int) -> None:
        self._enter("after_first_token")

    def idle(self, now_ns: int) -> Grant:
        self._enter("idle")
        return Grant(finetune_units=2)

    def close(self) -> None:
        self._enter("close")


def test_a_sound_hook_is_passed_through():
    hook = FailClosed(Granting())
    assert hook.before_step(FACTS).decode_units == 1
    assert hook.idle(0).finetune_units == 2
    assert not hook.failed


@pytest.mark.parametrize(
    "method", ["before_step", "after_step", "after_prompt", "after_first_token", "idle"]
)
def test_a_hook_that_raises_is_closed_and_decode_gets_every_unit_from_then_on(method, caplog):
    inner, heard = Granting(broken=method), []
    hook = FailClosed(inner, on_failure=heard.append)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            last = hook.before_step(FACTS)
            hook.after_step(10, 10)
            hook.after_prompt(5, 10, last)
            hook.after_first_token(10)
            hook.idle(20)
    assert hook.failed
    assert inner.calls.count(method) == 1
    assert inner.calls[-1] == "close"
    assert last == Grant()
    assert len(heard) == 1
    assert method in heard[0]
    assert len(caplog.records) == 1


def test_a_hook_that_cannot_say_whom_it_judges_is_switched_off():
    hook = FailClosed(Granting())  # has no request_objective_us
    assert hook.request_objective_us == 0
    assert hook.failed
    assert FailClosed(NullHook()).request_objective_us == 0


def test_the_first_request_that_is_due_has_the_earliest_end_of_its_bound():
    ms = 1_000_000
    waiting = [(100 * ms, 0), (150 * ms, 40_000), (120 * ms, 9_000_000)]
    assert first_due_ns(waiting, 400_000) == 190 * ms
    assert first_due_ns(waiting[::2], 400_000) == 500 * ms, "the one with the policy's bound"
    assert first_due_ns(waiting[:1], 400_000) == 0, "none has a bound of its own"
    assert first_due_ns(waiting, 0) == first_due_ns([], 400_000) == 0


def test_a_hook_that_cannot_say_whether_it_defers_is_switched_off():
    hook = FailClosed(Granting())
    assert hook.deferral_us == 0
    assert hook.failed
    assert FailClosed(NullHook()).deferral_us == 0


def test_a_hook_that_cannot_even_close_is_left_behind(caplog):
    class Hopeless(Granting):
        def close(self) -> None:
            raise OSError("gone")

    hook = FailClosed(Hopeless(broken="before_step"))
    assert hook.before_step(FACTS) == Grant()
    assert "could not be closed" in caplog.text


def test_a_hook_that_answers_nonsense_is_switched_off():
    class Nonsense(NullHook):
        def before_step(self, facts: StepInput) -> Grant:
            return None  # type: ignore[return-value]

    hook = FailClosed(Nonsense())
    assert hook.before_step(FACTS) == Grant()
    assert hook.failed
