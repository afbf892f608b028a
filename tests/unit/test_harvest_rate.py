"""A slot's forecast of a worker's rate, by the units on which one ran."""

from __future__ import annotations

from typing import cast

import pytest

from windrow_sidecar._core import Arena
from windrow_sidecar.engines.harvest import HarvestHook
from windrow_sidecar.engines.harvest.stats import HarvestRate
from windrow_sidecar.qos.levels import host_levels
from windrow_sidecar.qos.solo import SoloStepModel
from windrow_sidecar.qos.terms import HarvestTerms
from windrow_sidecar.qos.view import Offer
from windrow_sidecar.testing.stepping_engine import PROFILE as DECODE_PROFILE
from windrow_simulator.arena import ArenaGeometry, SimulatedArena, SimulatedPage

PROFILE = {"samples": [{"finetuneUnits": 10, "finetuneTokensPerSecond": 500.0}]}


def ran(rate, units, tokens_per_second, would, *, seconds=100, since=(0.0, 0.0, 0)):
    """Return the last forecast beside a worker on so many units, and the counters."""
    spent, granted_s, made = since
    said = 0.0
    for _ in range(seconds):
        spent, granted_s, made = spent + units, granted_s + 1, made + tokens_per_second
        said = rate.update(spent, granted_s, made, would)
    return said, (spent, granted_s, made)


def idle_slot(clock, offer):
    """Return the hook of a simulated slot under a policy."""
    page = SimulatedPage(offer, lambda grant: None)
    geometry = ArenaGeometry(chunks=64, chunk_bytes=1 << 20, slots_per_chunk=16)
    arena = cast(Arena, SimulatedArena(geometry, page, reserved=1))
    hook = HarvestHook(arena, host_levels(2), DECODE_PROFILE, clock=clock)
    hook.set_terms(HarvestTerms("p", "windrow", "harvest", objective_us=12_000))
    return hook


def test_a_rate_that_the_host_bounds_does_not_grow_with_the_units():
    # As on an H200: 580 tokens a second on 8 SMs and 2,000 on 112, where 8,120 are in proportion.
    rate = HarvestRate(PROFILE, {}, 132)
    _, counters = ran(rate, 8, 580, 8)
    assert rate.at(8) == pytest.approx(580, rel=0.01)
    said, _ = ran(rate, 112, 2000, 112, since=counters)
    assert said == pytest.approx(2000, rel=0.01)
    assert rate.at(8) == pytest.approx(580, rel=0.01)
    # Between the two a line, above them by units.
    assert rate.at(60) == pytest.approx((580 + 2000) / 2, rel=0.01)
    assert rate.at(132) == pytest.approx(2000 * 132 / 112, rel=0.01)
    assert rate.at(4) == pytest.approx(290, rel=0.01)


def test_before_a_worker_ran_the_profile_says_it_and_else_the_step_does():
    assert HarvestRate(PROFILE, {}, 132).at(20) == pytest.approx(1000)
    assert HarvestRate(None, {}, 132).at(20) == 0
    solo = {2: SoloStepModel(c0_us=1000.0, b0_us=250.0, k0_us=0.0)}
    assert HarvestRate(None, solo, 2).at(2) == pytest.approx(1e6 / (4 * 250))


def test_a_rate_says_what_it_rests_on_and_a_worker_that_ran_here_is_the_surest():
    solo = {2: SoloStepModel(c0_us=1000.0, b0_us=250.0, k0_us=0.0)}
    assert HarvestRate(None, {}, 132).basis == "", "nothing is predicted"
    assert HarvestRate(None, solo, 2).basis == "derived"
    rate = HarvestRate(PROFILE, {}, 132)
    assert rate.basis == "profiled"
    ran(rate, 8, 580, 8)
    assert rate.basis == "measured"


def test_seconds_without_units_are_not_granted():
    now_ns, offers = [0], [Offer()]
    hook = idle_slot(lambda: now_ns[0], lambda: offers[0])

    def idle(second: int, offer: Offer) -> None:
        now_ns[0], offers[0] = second * 1_000_000_000, offer
        hook.idle(now_ns[0])

    idle(1, Offer(job_epoch=1))  # none for a second
    units = hook.snapshot().finetune_units
    assert units > 0
    idle(3, Offer())
    idle(4, Offer(job_epoch=1))
    taken = hook.snapshot()
    assert (taken.unit_seconds, taken.granted_s) == (2.0 * units, 2.0)


def test_throttling_counts_whenever_another_thread_leaves_it():
    now_ns = [1_000_000_000]
    hook = idle_slot(lambda: now_ns[0], lambda: Offer(job_epoch=1))
    hook.idle(now_ns[0])
    assert hook.snapshot().finetune_units > 0

    # The link's thread may come between any two lines of the hook's: here, while terms are taken.
    take = hook._take_throttled

    def take_and_leave_more(at_ns: int) -> None:
        take(at_ns)
        hook._take_throttled = take
        hook.throttled(0.5)

    hook._take_throttled = take_and_leave_more
    hook._news()
    now_ns[0] += 100_000_000
    hook.idle(now_ns[0])
    assert "500 ms" in hook.controller.guard.reason
    assert hook.snapshot().finetune_units == 0
