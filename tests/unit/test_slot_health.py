"""Which slots rest, and for how long."""

from datetime import UTC, datetime, timedelta

from windrow_operator.health import SlotHealth

NOW = datetime(2025, 1, 1, 12, 0, tzinfo=UTC)
SLOT = "serving/decode-0"


def test_one_owners_job_that_fails_again_and_again_says_nothing_of_the_slot():
    health = SlotHealth()
    for minutes in range(10):
        health.failed(SLOT, "a/x", NOW + timedelta(minutes=minutes))
    assert health.resting(SLOT, NOW + timedelta(minutes=10)) == ""
    assert health.failed_jobs(SLOT) == {"a/x"}


def test_a_slot_that_fails_jobs_of_two_owners_rests_and_names_them():
    health = SlotHealth()
    health.failed(SLOT, "a/x", NOW)
    health.failed(SLOT, "b/y", NOW)
    why = health.resting(SLOT, NOW)
    assert why == "until 2025-01-01T12:10:00Z: workers of a/x and b/y failed on it"
    assert health.resting(SLOT, NOW + timedelta(minutes=10)) == ""
    assert health.resting("serving/decode-1", NOW) == ""


def test_each_rest_in_a_row_is_longer_and_a_job_that_gets_further_ends_the_row():
    health, now, rests = SlotHealth(), NOW, []
    for _ in range(6):
        for job in ("a/x", "a/y", "a/z"):
            health.failed(SLOT, job, now)
        rest = timedelta(0)
        while health.resting(SLOT, now + rest):
            rest += timedelta(minutes=1)
        rests.append(rest.total_seconds() / 60)
        now += rest
    assert rests == [10, 20, 40, 80, 120, 120]
    health.worked(SLOT)
    assert health.resting(SLOT, now) == ""


def test_failures_of_long_ago_do_not_add_up():
    health = SlotHealth()
    health.failed(SLOT, "a/x", NOW)
    health.failed(SLOT, "b/y", NOW + timedelta(hours=2))
    assert health.resting(SLOT, NOW + timedelta(hours=2)) == ""
