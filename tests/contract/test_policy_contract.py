"""Check what every policy promises, whatever it is shown."""

from __future__ import annotations

import math
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windrow_sidecar.qos.control import Controller
from windrow_sidecar.qos.levels import host_levels, overlapping_levels, whole_levels
from windrow_sidecar.qos.policies import POLICIES, Context, make_policy
from windrow_sidecar.qos.predictor import Predictor
from windrow_sidecar.qos.solo import SoloStepModel
from windrow_sidecar.qos.terms import HarvestTerms
from windrow_sidecar.qos.view import LEVELS_MAX, Action, Offer, View

LEVELS = [
    host_levels(2),
    host_levels(8),
    overlapping_levels(132, (16, 32, 64, 96)),
    whole_levels(132),
]
SOLO = {u: SoloStepModel(500 + 2000 / u, 800 / u, 1 / u) for u in (*range(1, 9), 132)}

times = st.integers(0, 10**12)
small = st.integers(0, 10**6)
# A page holds 64-bit words, so every field has a bound.
views = st.builds(
    View,
    step=small,
    admitted_tokens=small,
    heartbeat_ns=times,
    batch=st.integers(0, 512),
    context_tokens=st.integers(0, 10**7),
    waiting=small,
    objective_us=st.integers(1, 10**7),
    slack_us=st.integers(-(10**9), 10**9),
    start_ns=times,
    free_chunks=small,
    waited_us=small,
)
offers = st.builds(
    Offer,
    tasklet_id=small,
    resident_layers=small,
    tokens_done=small,
    heartbeat_ns=times,
    job_epoch=st.integers(0, 5),
    starving=st.integers(0, 1),
    in_flight_us=small,
    pause_epoch_seen=st.integers(0, 3),
    wanted_chunks=small,
    phase=st.integers(0, 4),
    layer_begin=st.integers(0, 8),
    layer_end=st.integers(8, 16),
    tokens=small,
    estimates_us=st.tuples(*[small] * LEVELS_MAX),
    memory_delta_bytes=st.integers(-(2**40), 2**40),
    held_chunks=small,
)


@st.composite
def contexts(draw) -> Context:
    levels = draw(st.sampled_from(LEVELS))
    n = len(levels.splits)
    percent = draw(st.integers(1, 100))
    return Context(
        levels=levels,
        allowed=levels.allowed(percent),
        idle_units=levels.idle_share(percent),
        predicted_us=draw(st.lists(st.floats(1, 1e9), min_size=n, max_size=n)),
        margin=draw(st.floats(0, 1)),
        current=draw(st.integers(0, n - 1)),
        per_request=draw(st.booleans()),
        in_flight_bound_us=draw(small),
        solo_us=draw(st.lists(st.floats(1, 1e9), min_size=n, max_size=n)),
        layers=draw(st.integers(1, 100)),
        gaps=draw(st.booleans()),
        chunk_bytes=draw(st.sampled_from([0, 1 << 27])),
    )


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(view=views, offer=offers, ctx=contexts())
def test_an_answer_stays_within_the_limits_and_is_repeatable(name, view, offer, ctx):
    policy = make_policy(name)
    decision = policy.decide(view, offer, ctx)
    assert decision == policy.decide(view, offer, ctx)
    most = max(s.finetune_units for s in ctx.levels.splits[: ctx.allowed])
    turns = decision.gap_until_ns > 0
    if view.batch == 0 or turns:
        most = max(most, ctx.idle_units)
    assert 0 <= decision.finetune_units <= most
    assert 1 <= decision.decode_units <= ctx.levels.units
    assert (decision.finetune_units > 0) == (decision.action == Action.GO)
    assert decision.hold_admission_until_ns <= view.start_ns + ctx.deferral_us * 1000
    assert math.isfinite(decision.predicted_us)
    if offer.job_epoch == 0 or offer.starving:
        assert decision.action == Action.PAUSE
        assert decision.hold_admission_until_ns == 0
    # Two operations may be rounded otherwise in the policy.
    bound = view.objective_us * (2 if ctx.per_request else 1) * (1 + 2 * sys.float_info.epsilon)
    if turns:
        gap_us = (decision.gap_until_ns - view.start_ns) / 1000
        assert gap_us + ctx.solo_us[0] <= bound
        return
    if not (decision.action == Action.GO and view.batch > 0):
        return
    index = ctx.levels.index_of(decision.finetune_units, decision.decode_units)
    assert ctx.levels.splits[index].decode_units == decision.decode_units
    if name == "static":
        return
    step_us = ctx.predicted_us[index] * (1 + ctx.margin)
    if decision.n_tasklets or decision.budget_us:
        step_us = ctx.solo_us[index] * (1 + ctx.margin)  # the worker runs for a part of it
    assert step_us <= bound


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(
    steps=st.lists(
        st.tuples(views, offers, st.integers(1, 10**8), st.integers(0, 10**7)), max_size=40
    ),
    percent=st.integers(1, 100),
    mode=st.sampled_from(["harvest", "observe", "off"]),
)
@settings(max_examples=60)
def test_over_any_history_the_slot_is_never_granted_beyond_its_limits(name, steps, percent, mode):
    levels = host_levels(8)
    controller = Controller(levels, Predictor(levels, SOLO))
    controller.set_terms(HarvestTerms("p", name, mode, 10_000, max_compute_percent=percent))
    now_ns, pause_epoch = 1, 0
    for view, offer, gap_ns, latency_us in steps:
        now_ns += gap_ns
        view = view._replace(start_ns=now_ns, objective_us=10_000)
        decision = controller.decide(view, offer, now_ns, present=offer.job_epoch > 0)
        assert decision.finetune_units <= levels.units * percent // 100
        assert 1 <= decision.decode_units <= levels.units
        assert decision.pause_epoch >= pause_epoch
        pause_epoch = decision.pause_epoch
        if mode != "harvest":
            assert decision.action == Action.PAUSE
        if view.batch:
            controller.observe(now_ns + latency_us * 1000, latency_us)
