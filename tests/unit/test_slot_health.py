"""Check which slots rest, and for how long."""

from datetime import UTC, datetime, timedelta

from windrow.crd.harvestslot import HarvestSlotStatus
from windrow_operator.health import SlotHealth

NOW = datetime(2025, 1, 1, 12, 0, tzinfo=UTC)
SLOT = "serving/decode-0"


def test_one_owners_job_that_fails_again_and_again_says_nothing_of_the_slot():
    health = SlotHealth()
    for minutes in range(10):
        health.failed(SLOT, "a", "x", NOW + timedelta(minutes=minutes))
    assert health.resting(SLOT, NOW + timedelta(minutes=10)) == ""
    assert health.failed_jobs(SLOT) == {"x"}


def test_a_slot_that_fails_jobs_of_two_owners_rests_and_names_none_of_them():
    health = SlotHealth()
    health.failed(SLOT, "a", "x", NOW)
    health.failed(SLOT, "b", "y", NOW)
    why = health.resting(SLOT, NOW)
    assert why == "until 2025-01-01T12:10:00Z: workers of 2 jobs of 2 namespaces failed on it"
    assert health.resting(SLOT, NOW + timedelta(minutes=10)) == ""
    assert health.resting("serving/decode-1", NOW) == ""


def test_each_rest_in_a_row_is_longer_and_a_job_that_gets_further_ends_the_row():
    health, now, rests = SlotHealth(), NOW, []
    for _ in range(6):
        for job in ("x", "y", "z"):
            health.failed(SLOT, "a", job, now)
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
    health.failed(SLOT, "a", "x", NOW)
    health.failed(SLOT, "b", "y", NOW + timedelta(hours=2))
    assert health.resting(SLOT, NOW + timedelta(hours=2)) == ""


def test_another_leader_goes_on_from_what_stands_in_the_slots_status():
    first, second = SlotHealth(), SlotHealth()
    for uid in ("x", "y", "z"):
        first.failed(SLOT, "a", uid, NOW)
    first.failed(SLOT, "b", "w", NOW)
    second.take_up(
        SLOT,
        HarvestSlotStatus(health=first.status_of(SLOT)).model_dump(
            by_alias=True, exclude_none=True
        )["health"],
    )
    assert second.resting(SLOT, NOW) == first.resting(SLOT, NOW) != ""
    assert second.failed_jobs(SLOT) == {"w"}
    # The row goes on: the next rest is the longer one.
    second.failed(SLOT, "a", "v", NOW)
    assert second.resting(SLOT, NOW).startswith("until 2025-01-01T12:20:00Z")
