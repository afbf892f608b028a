"""A slot's forecast of a worker's rate, by the units on which one ran."""

from __future__ import annotations

import pytest

from windrow_sidecar.engines.harvest.stats import GrantedUnits, HarvestRate
from windrow_sidecar.qos.solo import SoloStepModel

PROFILE = {"samples": [{"finetuneUnits": 10, "finetuneTokensPerSecond": 500.0}]}


def ran(rate, units, tokens_per_second, would, *, seconds=100, since=(0.0, 0.0, 0)):
    """Return the last forecast beside a worker on so many units, and the counters."""
    spent, granted_s, made = since
    said = 0.0
    for _ in range(seconds):
        spent, granted_s, made = spent + units, granted_s + 1, made + tokens_per_second
        said = rate.update(spent, granted_s, made, would)
    return said, (spent, granted_s, made)


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


def test_seconds_without_units_are_not_granted():
    granted = GrantedUnits(0)
    granted.set(1_000_000_000, 4)  # none for a second
    granted.set(3_000_000_000, 0)
    granted.set(4_000_000_000, 2)
    assert (granted.seconds, granted.granted_s) == (8.0, 2.0)
