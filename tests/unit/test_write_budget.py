"""Check what can wait is written at one rate, however much there is of it."""

from datetime import UTC, datetime, timedelta

from windrow_operator.budget import WriteBudget
from windrow_operator.status import is_urgent

NOW = datetime(2025, 1, 1, 12, 0, tzinfo=UTC)


def test_a_thousand_that_ask_at_once_get_the_rate_and_no_more():
    budget = WriteBudget(1.5, burst=3)
    taken = sum(
        budget.take(NOW + timedelta(seconds=second)) for second in range(60) for _ in range(1000)
    )
    assert taken == 3 + 59 * 1.5 // 1


def test_what_was_not_used_is_kept_up_to_the_burst():
    budget = WriteBudget(2.0, burst=3)
    for later in (0, 3600):
        assert [budget.take(NOW + timedelta(seconds=later)) for _ in range(4)] == [True] * 3 + [
            False
        ]


def test_each_of_many_has_its_turn_in_time():
    assert WriteBudget(2.0).interval(1000) == timedelta(seconds=500)


def condition(reason, message, **changes):
    return {"type": "Placed", "status": "False", "reason": reason, "message": message, **changes}


def test_why_slots_refuse_can_wait_and_that_they_do_cannot():
    refused = {"state": "Pending", "conditions": [condition("NoSlot", "a runs job b")]}
    other = {"state": "Pending", "conditions": [condition("NoSlot", "a runs job c")]}
    assert not is_urgent(refused, other)
    assert is_urgent({}, refused)
    backs_off = {"state": "Pending", "conditions": [condition("BackOff", "again at 12")]}
    assert is_urgent(refused, backs_off)
    assert is_urgent(backs_off, {**backs_off, "conditions": [condition("BackOff", "again at 13")]})
