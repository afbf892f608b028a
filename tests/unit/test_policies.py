from __future__ import annotations

import pytest

from windrow.errors import UserError
from windrow_sidecar.qos.levels import host_levels
from windrow_sidecar.qos.policies import POLICIES, Context, make_policy
from windrow_sidecar.qos.view import Action, Offer, View

BUSY = View(batch=6, objective_us=10_000)
WORK = Offer(job_epoch=3)
# Four cores: decode alone 4 ms; 6, 8 and 12 ms when the worker has one, two or three of them.
PREDICTED = [4000.0, 6000.0, 8000.0, 12_000.0]


def context(**changes) -> Context:
    values = {
        "levels": host_levels(4),
        "allowed": 4,
        "idle_units": 4,
        "predicted_us": PREDICTED,
        "margin": 0.0,
        "current": 0,
        "per_request": False,
        "in_flight_bound_us": 2500,
        # Alone on four, three, two cores and one: beside a worker it takes as long.
        "solo_us": PREDICTED,
    }
    return Context(**{**values, **changes})


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("offer", [Offer(), Offer(job_epoch=3, starving=1)])
@pytest.mark.parametrize("batch", [0, 6])
def test_without_work_decode_has_everything(name, offer, batch):
    view = View(batch=batch, objective_us=10_000)
    decision = make_policy(name).decide(view, offer, context())
    assert (decision.action, decision.finetune_units, decision.decode_units) == (Action.PAUSE, 0, 4)
    assert decision.predicted_us == 4000


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_limits_that_leave_no_level_leave_nothing(name):
    decision = make_policy(name).decide(BUSY, WORK, context(allowed=1, idle_units=0))
    assert (decision.action, decision.finetune_units) == (Action.PAUSE, 0)


# margin, current -> units of harli and of windrow
@pytest.mark.parametrize(
    ("situation", "changes", "harli", "windrow"),
    [
        ("the largest level below the objective", {}, 2, 2),
        ("a margin counts", {"margin": 0.3}, 1, 1),
        ("at the edge, harli goes in, windrow wants headroom to grow", {"margin": 0.24}, 2, 1),
        ("8 ms are 2.4% below what a margin of 22% leaves of 10: enough", {"margin": 0.22}, 2, 2),
        ("what runs at the edge may stay", {"margin": 0.24, "current": 2}, 2, 2),
        ("harli keeps what is valid, windrow takes more", {"current": 1}, 1, 2),
        ("a share too large shrinks", {"current": 3}, 2, 2),
        ("nothing fits", {"margin": 1.0}, 0, 0),
        ("limits bind", {"allowed": 2}, 1, 1),
    ],
)
def test_what_is_picked_beside_a_busy_decode(situation, changes, harli, windrow):
    ctx = context(**changes)
    assert make_policy("harli").decide(BUSY, WORK, ctx).finetune_units == harli, situation
    assert make_policy("windrow").decide(BUSY, WORK, ctx).finetune_units == windrow, situation


def test_decode_takes_what_the_worker_leaves_and_the_prediction_is_told():
    decision = make_policy("windrow").decide(BUSY, WORK, context())
    assert (decision.action, decision.finetune_units, decision.decode_units) == (Action.GO, 2, 2)
    assert decision.predicted_us == 8000
    assert decision.in_flight_bound_us == 2500


def test_harli_takes_the_latency_closest_to_the_objective_and_windrow_the_largest_share():
    ctx = context(predicted_us=[4000.0, 9000.0, 8000.0, 8500.0])
    assert make_policy("harli").decide(BUSY, WORK, ctx).finetune_units == 1
    assert make_policy("windrow").decide(BUSY, WORK, ctx).finetune_units == 3


def test_harli_gives_a_tie_to_the_larger_share():
    ctx = context(predicted_us=[4000.0, 8000.0, 8000.0, 12_000.0])
    assert make_policy("harli").decide(BUSY, WORK, ctx).finetune_units == 2


@pytest.mark.parametrize("policy", [make_policy("harli"), make_policy("windrow")])
def test_an_idle_decode_leaves_the_whole_device(policy):
    idle = View(batch=0, objective_us=10_000)
    decision = policy.decide(idle, WORK, context())
    assert (decision.action, decision.finetune_units, decision.decode_units) == (Action.GO, 4, 1)
    limited = policy.decide(idle, WORK, context(allowed=3, idle_units=2))
    assert (limited.finetune_units, limited.decode_units) == (2, 2)


def test_static_looks_at_the_limits_only():
    for view in (BUSY, View(batch=64, objective_us=1), View(batch=0, objective_us=10_000)):
        assert make_policy("static").decide(view, WORK, context(allowed=3)).finetune_units == 2


@pytest.mark.parametrize(
    ("slack_us", "units"),
    [(0, 2), (16 * 3000, 3), (16 * 1_000_000, 3), (-16 * 3000, 1), (-16 * 1_000_000, 0)],
)
def test_by_request_saved_time_is_spent_and_debt_is_paid_back(slack_us, units):
    view = View(batch=6, objective_us=10_000, slack_us=slack_us)
    ctx = context(per_request=True)
    assert make_policy("windrow").decide(view, WORK, ctx).finetune_units == units
    # By step, slack does not count.
    assert make_policy("windrow").decide(view, WORK, context()).finetune_units == 2


def test_an_unknown_policy_is_refused_with_the_names_that_exist():
    with pytest.raises(
        UserError,
        match=r"spec\.policy.*'winrow'.*fineinfer, flexllm, harli, iterations, llmstation, static",
    ):
        make_policy("winrow")
