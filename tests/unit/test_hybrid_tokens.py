"""Choose how many finetune tokens share a decode step, by a profile of iterations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windrow_sidecar.qos.hybrid_tokens import (
    GRAIN_TOKENS,
    MOST_TOKENS,
    IterationPlan,
    JoinedCost,
    JoinedSample,
    hybrid_tokens,
    plan_iteration,
)
from windrow_sidecar.qos.policies import POLICIES
from windrow_sidecar.qos.terms import HarvestTerms, in_turns
from windrow_sidecar.qos.view import Phase

# A step reads the weights in 4 ms; a row adds 50 us, a finetune token 20 us.
BATCHES, TOKENS = (1, 8, 32), (0, 64, 256)
LINEAR = [JoinedSample(c, s, 4000.0 + 50 * c + 20 * s) for c in BATCHES for s in TOKENS]


@pytest.fixture
def cost() -> JoinedCost:
    return JoinedCost(LINEAR)


@pytest.mark.parametrize(("c", "s"), [(1, 0), (8, 64), (5, 32), (20, 100), (64, 512), (32, 0)])
def test_between_and_beyond_profiled_points_it_is_linear(cost, c, s):
    assert cost.us(c, s) == pytest.approx(4000 + 50 * c + 20 * s)


def test_a_profile_that_falls_with_more_rows_counts_as_noise():
    noisy = [JoinedSample(1, 0, 100), JoinedSample(1, 16, 90), JoinedSample(2, 0, 80)]
    cost = JoinedCost([*noisy, JoinedSample(2, 16, 120)])
    assert cost.us(1, 16) == cost.us(1, 0) == cost.us(2, 0) == 100
    assert cost.us(2, 16) == 120


def test_what_is_no_grid_or_takes_no_time_is_refused():
    with pytest.raises(ValueError, match="same finetune tokens"):
        JoinedCost([JoinedSample(1, 0, 10.0), JoinedSample(2, 16, 10.0)])
    with pytest.raises(ValueError, match="longer than nothing"):
        JoinedCost([JoinedSample(1, 0, 0.0)])


def test_as_many_tokens_as_the_objective_has_room_for(cost):
    # 4000 + 50 * 8 = 4400 alone; 3200 us are 160 tokens.
    assert hybrid_tokens(cost, 8, 7600.0) == 160
    assert hybrid_tokens(cost, 8, 7599.0) == 144
    assert hybrid_tokens(cost, 8, 4400.0) == 0
    assert hybrid_tokens(cost, 8, 1e9) == MOST_TOKENS


@given(
    st.integers(1, 64),
    st.floats(1.0, 1e5),
    st.lists(st.floats(1.0, 1e5), min_size=9, max_size=9),
)
def test_the_choice_keeps_the_bound_and_one_grain_more_would_not(batch, bound_us, measured):
    places = [(c, s) for c in BATCHES for s in TOKENS]
    made = JoinedCost(JoinedSample(c, s, us) for (c, s), us in zip(places, measured, strict=True))
    tokens = hybrid_tokens(made, batch, bound_us)
    assert tokens % GRAIN_TOKENS == 0
    assert not tokens or made.us(batch, tokens) <= bound_us
    assert tokens == MOST_TOKENS or made.us(batch, tokens + GRAIN_TOKENS) > bound_us


def test_what_iterations_take_corrects_the_cost_of_finetune_rows_and_not_of_decode(cost):
    alone, before = cost.us(8, 0), cost.us(8, 64)
    for _ in range(200):
        cost.learn(8, 64, alone + 2 * (before - alone))
    assert cost.us(8, 0) == alone
    assert cost.us(8, 64) == pytest.approx(alone + 2 * (before - alone), rel=1e-3)
    cost.learn(8, 0, 1e9)  # says nothing of finetune rows
    assert cost.us(8, 0) == alone
    for _ in range(1000):
        cost.learn(8, 64, 1e12)
    assert cost.factor <= 8.0


def test_in_one_process_policies_that_share_by_units_have_the_time_before_a_step():
    played = {name: in_turns(terms_of(name)).policy for name in POLICIES}
    assert {name for name, policy in played.items() if policy == name} == {
        "temporal",
        "fineinfer",
        "iterations",
        "static",
    }
    assert {played[name] for name in ("windrow", "harli", "llmstation", "flexllm")} == {"temporal"}
    assert in_turns(terms_of("flexllm")).objective_us == terms_of("flexllm").objective_us


def terms_of(policy: str) -> HarvestTerms:
    return HarvestTerms(name="p", policy=policy, mode="harvest", objective_us=40_000)


@pytest.mark.parametrize(
    ("phase", "batch", "bound_us", "plan"),
    [
        (Phase.FORWARD, 8, 7600.0, IterationPlan("joined", tokens=160)),
        (Phase.BACKWARD, 8, 7600.0, IterationPlan("before", gap_us=3200.0)),
        (Phase.OPTIMIZER, 8, 7600.0, IterationPlan("before", gap_us=3200.0)),
        (Phase.FORWARD, 0, 7600.0, IterationPlan("before", gap_us=7600.0)),
        (Phase.FORWARD, 8, 4700.0, IterationPlan("none")),
        (Phase.BACKWARD, 8, 4700.0, IterationPlan("none")),
        (Phase.BACKWARD, 8, 1000.0, IterationPlan("none")),
        (Phase.NONE, 8, 1e6, IterationPlan("none")),
    ],
)
def test_forward_passes_join_and_the_rest_comes_before_the_step(cost, phase, batch, bound_us, plan):
    found = plan_iteration(phase, batch, bound_us, cost)
    assert (found.form, found.tokens) == (plan.form, plan.tokens)
    assert found.gap_us == pytest.approx(plan.gap_us)
