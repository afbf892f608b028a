from __future__ import annotations

import pytest

from windrow_sidecar.qos.guard import SECOND_NS, Guard, GuardSettings
from windrow_sidecar.qos.view import Offer, View

MS = 1_000_000


class Steps:
    """A guard with a clock that each step moves on by 10 ms."""

    def __init__(self, **settings) -> None:
        self.guard = Guard(GuardSettings(**settings))
        self.now_ns = SECOND_NS

    def step(self, over: bool, harvested: bool = True) -> None:
        self.now_ns += 10 * MS
        latency_us = 12_000 if over else 8000
        self.guard.observe(
            self.now_ns, latency_us=latency_us, objective_us=10_000, harvested=harvested
        )

    def may_run(self) -> bool:
        return self.guard.may_run(self.now_ns)


def test_two_steps_over_the_objective_in_a_row_pause_for_50_ms_and_widen_the_margin():
    steps = Steps()
    steps.step(over=True)
    assert steps.may_run()
    assert steps.guard.extra_margin(steps.now_ns) == 0
    steps.step(over=True)
    assert not steps.may_run()
    assert steps.guard.extra_margin(steps.now_ns) == pytest.approx(0.05)
    steps.now_ns += 49 * MS
    assert not steps.may_run()
    steps.now_ns += MS
    assert steps.may_run()


def test_requests_that_wait_pause_until_50_ms_after_the_last_look_at_them():
    steps = Steps()
    steps.guard.queued(steps.now_ns, 49_999)
    assert steps.may_run()
    for _ in range(3):
        steps.guard.queued(steps.now_ns, 50_000)
        steps.now_ns += 49 * MS
        assert not steps.may_run()
    steps.now_ns += MS
    assert steps.may_run()
    assert steps.guard.trips == 0


def test_steps_after_requests_have_waited_are_a_tenth_shorter_than_those_that_could_not_keep_up():
    steps = Steps()
    steps.step(over=False)  # 8 ms of 10
    steps.guard.queued(steps.now_ns, 50_000)
    margin = steps.guard.extra_margin(steps.now_ns)
    assert 10 / (1 + margin) == pytest.approx(0.9 * 8)
    steps.guard.queued(steps.now_ns, 60_000)
    assert steps.guard.extra_margin(steps.now_ns) == margin, "once for those that wait now"


def test_requests_that_wait_leave_steps_a_fifth_of_the_objective_at_least():
    guard = Guard()
    guard.observe(SECOND_NS, latency_us=100, objective_us=10_000, harvested=True)
    guard.queued(SECOND_NS, 50_000)
    assert 1 + guard.extra_margin(SECOND_NS) == pytest.approx(5)
    for _ in range(2):
        guard.observe(SECOND_NS, latency_us=20_000, objective_us=10_000, harvested=True)
    assert guard.trips == 1
    assert 1 + guard.extra_margin(SECOND_NS) == pytest.approx(5), "a trip takes nothing back"


def test_a_step_within_the_objective_between_two_over_it_is_no_trip():
    steps = Steps()
    for over in (True, False, True, False, True):
        steps.step(over)
    assert steps.may_run()
    assert steps.guard.trips == 0


def test_steps_of_decode_alone_never_trip():
    steps = Steps()
    for _ in range(1000):
        steps.step(over=True, harvested=False)
    assert steps.may_run()
    assert steps.guard.trips == 0
    assert steps.guard.reason == ""


def test_margins_of_several_trips_add_up_to_a_bound_and_fade_by_half_in_ten_seconds():
    steps = Steps()
    for _ in range(6):
        steps.step(over=True)
    wide = steps.guard.extra_margin(steps.now_ns)
    assert 0.149 < wide < 0.15
    assert steps.guard.extra_margin(steps.now_ns + 10 * SECOND_NS) == pytest.approx(wide / 2)
    assert steps.guard.extra_margin(steps.now_ns + 200 * SECOND_NS) == 0
    for _ in range(200):
        steps.step(over=True)
    assert steps.guard.extra_margin(steps.now_ns) <= 0.4


def test_without_an_objective_nothing_is_over_it():
    guard = Guard()
    for i in range(10):
        guard.observe(i * MS, latency_us=10**9, objective_us=0, harvested=True)
    assert guard.may_run(11 * MS)


def broken() -> Steps:
    """One step in ten over the objective beside the worker, none alone, until the breaker opens."""
    steps = Steps()
    for i in range(400):
        steps.step(over=False, harvested=False)
        steps.step(over=i % 10 == 0)
        if steps.guard.reason:
            break
    return steps


def test_the_breaker_gives_up_with_a_reason_when_steps_beside_the_worker_break_too_often():
    steps = broken()
    assert not steps.may_run()
    assert "beside the worker broke the objective, 0.0% of those without" in steps.guard.reason


def test_the_breaker_stays_shut_when_decode_alone_is_as_bad():
    steps = Steps()
    for i in range(1000):
        steps.step(over=i % 10 == 0)
        steps.step(over=i % 10 == 0, harvested=False)
    assert steps.guard.reason == ""


def test_few_steps_are_no_reason_to_give_up():
    steps = Steps()
    for i in range(199):
        steps.step(over=i % 3 == 0)
    assert steps.guard.reason == ""


def test_the_breaker_lets_a_trial_through_and_waits_twice_as_long_after_a_bad_one():
    steps = broken()
    first_end = steps.now_ns + 10 * SECOND_NS
    assert not steps.guard.may_run(first_end - 2 * SECOND_NS)
    steps.now_ns = first_end
    assert steps.may_run()
    assert steps.guard.reason == ""
    while not steps.guard.reason:
        assert steps.now_ns < first_end + 5 * SECOND_NS, "a bad trial must not go on"
        steps.step(over=False)
        steps.step(over=True)
    steps.now_ns += 11 * SECOND_NS
    assert not steps.may_run()
    steps.now_ns += 10 * SECOND_NS
    assert steps.may_run()


def test_after_a_long_good_time_the_next_break_is_short_again():
    steps = broken()
    steps.now_ns += 10 * SECOND_NS
    assert steps.may_run()
    for _ in range(1600):
        steps.step(over=False)
    for i in range(1, 200):
        steps.step(over=i % 5 == 0)
    assert steps.guard.reason
    steps.now_ns += 10 * SECOND_NS
    assert steps.may_run()


def test_a_percentile_of_90_allows_ten_times_as_many():
    steps = Steps()
    steps.guard.set_percentile(90)
    for i in range(1000):
        steps.step(over=i % 10 == 0)
    assert steps.guard.reason == ""


NOW_NS = 100 * SECOND_NS
SANE = View(batch=4, context_tokens=2000, objective_us=10_000, start_ns=NOW_NS - MS)


@pytest.mark.parametrize(
    ("view", "predicted_us", "doubt"),
    [
        (SANE, [4000.0, 6000.0], ""),
        (SANE._replace(start_ns=0), [4000.0], ""),  # an engine that does not say
        (SANE._replace(start_ns=NOW_NS - 2 * SECOND_NS), [4000.0], "the view is stale"),
        (SANE._replace(start_ns=NOW_NS + 2 * SECOND_NS), [4000.0], "the view is stale"),
        (SANE._replace(batch=-1), [4000.0], "the view holds impossible figures"),
        (SANE._replace(context_tokens=-1), [4000.0], "the view holds impossible figures"),
        (SANE._replace(objective_us=0), [4000.0], "the view holds impossible figures"),
        (SANE, [4000.0, float("nan")], "the prediction is impossible"),
        (SANE, [4000.0, float("inf")], "the prediction is impossible"),
        (SANE, [0.0, 6000.0], "the prediction is impossible"),
        (SANE, [-4000.0, 6000.0], "the prediction is impossible"),
    ],
)
def test_figures_that_cannot_be_are_no_ground_for_a_decision(view, predicted_us, doubt):
    assert Guard().doubt(view, Offer(), predicted_us, NOW_NS) == doubt


@pytest.mark.parametrize("field", ["batch", "slack_us"])
def test_a_view_that_no_page_could_hold_is_refused_by_its_field(field):
    view = SANE._replace(**{field: float("nan")})
    with pytest.raises(TypeError, match=f"{field} is not a 64-bit integer"):
        Guard().doubt(view, Offer(), [4000.0], NOW_NS)


def test_a_clock_that_stands_or_runs_back_is_no_ground_either():
    guard = Guard()
    answers = [guard.doubt(SANE, Offer(), [4000.0], NOW_NS) for _ in range(4)]
    assert answers == ["", "", "", "the clock does not advance"]
    assert guard.doubt(SANE, Offer(), [4000.0], NOW_NS - 1) == "the clock does not advance"
    assert guard.doubt(SANE, Offer(), [4000.0], NOW_NS + 1) == ""


def test_a_latency_that_cannot_be_pauses_for_a_while():
    guard = Guard()
    guard.distrust(NOW_NS)
    assert not guard.may_run(NOW_NS + 49 * MS)
    assert guard.may_run(NOW_NS + 50 * MS)


def test_a_cpu_limit_that_holds_decode_up_opens_the_breaker_each_time_for_longer():
    steps = Steps()
    for break_s in (10, 20):
        steps.guard.throttled(steps.now_ns, 0.25)
        assert "250 ms" in steps.guard.reason
        steps.now_ns += (break_s - 1) * SECOND_NS
        steps.guard.throttled(steps.now_ns, 0.5)  # while it is open nothing is added
        assert not steps.may_run()
        steps.now_ns += SECOND_NS
        assert steps.may_run()
        assert steps.guard.reason == ""
