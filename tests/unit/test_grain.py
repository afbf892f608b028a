"""Sizes of tasklets: a table of bounds and of what is known against tokens, cuts and joins."""

from __future__ import annotations

import random

import pytest

from windrow_sidecar.finetune.engine.group_progress import tasklet_of
from windrow_sidecar.finetune.engine.sizing import (
    FIRST_TOKENS,
    LEAST_QUEUED_TOKENS,
    LEAST_TO_STOP,
    LEAST_TOKENS,
    SETTLED,
    Estimates,
    Paced,
)
from windrow_sidecar.finetune.tasklets import MicroBatch, TokenWindow
from windrow_sidecar.qos.view import Phase

UNITS = 1
FORWARD, LOSS, BACKWARD = Phase.FORWARD, Phase.LOSS, Phase.BACKWARD
ROW = MicroBatch(0, (0,), (100,))


def known(**us_per_token: float) -> Estimates:
    """Return estimates that have seen one layer of 100 tokens in each of those phases."""
    estimates = Estimates()
    for phase, us in us_per_token.items():
        estimates.learn(tasklet_of(Phase[phase], ROW, 0, ROW.whole), UNITS, 100 * us)
    return estimates


@pytest.mark.parametrize(
    ("us_per_token", "bound_us", "most", "phase", "tokens"),
    [
        ({}, 20_000, 0, BACKWARD, FIRST_TOKENS),
        ({"BACKWARD": 10}, 20_000, 0, BACKWARD, 1400),  # 0.7 of the bound
        ({"BACKWARD": 10}, 20_000, 0, FORWARD, 1400),  # a window runs forward and back
        ({"BACKWARD": 10, "FORWARD": 1}, 20_000, 0, FORWARD, 1400),
        ({"FORWARD": 10}, 40_000, 0, BACKWARD, 1400),  # back takes twice as long
        ({"BACKWARD": 10}, 5_000, 0, BACKWARD, LEAST_TOKENS),  # 350 would mostly pay for the call
        ({"LOSS": 5}, 20_000, 0, LOSS, 2800),
        ({"BACKWARD": 10}, 20_000, 0, LOSS, FIRST_TOKENS),
        ({"BACKWARD": 10}, 20_000, 64, BACKWARD, 64),  # what a policy asks for
        ({"BACKWARD": 10}, 20_000, 4096, BACKWARD, 1400),
        ({}, 20_000, 8, BACKWARD, 8),
    ],
)
def test_tokens_of_a_tasklet_follow_the_bound(us_per_token, bound_us, most, phase, tokens):
    assert Paced(known(**us_per_token), bound_us, UNITS, most_tokens=most).tokens(phase) == tokens


def queued(*, tokens: int, overlap_us: float, wait_us: float) -> Estimates:
    """Return estimates that have seen one backward of so many tokens on a device that queues."""
    estimates, row = Estimates(), MicroBatch(0, (0,), (tokens,))
    back = tasklet_of(BACKWARD, row, 0, row.whole)
    estimates.learn(back, UNITS, overlap_us + wait_us, overlap_us=overlap_us)
    return estimates


@pytest.mark.parametrize(
    ("overlap_us", "wait_us", "bound_us", "tokens"),
    [
        # The host takes 5 ms to queue what the device does in less: more rows cost it nothing.
        (5_000, 0, 5_000, 1_740),
        (5_000, 1_000, 5_000, 1_450),
        (0, 7_000, 5_000, 512),  # behind another: its kernels take 7 ms, 3.5 are allowed
        (2_000, 7_000, 5_000, 512),
        (0, 70_000, 5_000, LEAST_QUEUED_TOKENS),
    ],
)
def test_of_a_device_that_queues_the_bound_is_on_what_decode_waits_for(
    overlap_us, wait_us, bound_us, tokens
):
    estimates = queued(tokens=1024, overlap_us=overlap_us, wait_us=wait_us)
    sizing = Paced(estimates, bound_us, UNITS, queues=True)
    assert sizing.tokens(BACKWARD) == pytest.approx(tokens, abs=1)
    grown = MicroBatch(0, (0,), (sizing.tokens(BACKWARD),))
    back = tasklet_of(BACKWARD, grown, 0, grown.whole)
    if tokens > LEAST_QUEUED_TOKENS:
        assert estimates.wait_us(back, UNITS) <= 0.7 * bound_us + 10


@pytest.mark.parametrize("a_token_us", [0.5, 2.0, 5.0, 20.0])
@pytest.mark.parametrize("host_us", [500, 2_000, 8_000])
def test_tasklets_grow_to_what_the_bound_allows_and_never_beyond(a_token_us, host_us):
    """Whatever part of the time is the host's: nobody sees how long kernels take that it hides."""
    estimates, bound_us, tokens = Estimates(), 10_000, 32
    for _ in range(200):
        row = MicroBatch(0, (0,), (tokens,))
        kernels_us = a_token_us * tokens
        wait_us = max(0.0, kernels_us - host_us)  # what is queued last is done at once
        assert wait_us <= bound_us or tokens == LEAST_QUEUED_TOKENS
        estimates.learn(
            tasklet_of(BACKWARD, row, 0, row.whole), UNITS, host_us + wait_us, overlap_us=host_us
        )
        tokens = Paced(estimates, bound_us, UNITS, queues=True).tokens(BACKWARD)
    assert a_token_us * tokens - host_us == pytest.approx(0.7 * bound_us, rel=0.1)


def test_nothing_is_waited_for_that_was_never_measured():
    back = tasklet_of(BACKWARD, ROW, 0, ROW.whole)
    assert Estimates().wait_us(back, UNITS) == 0
    assert queued(tokens=100, overlap_us=5, wait_us=0).wait_us(back, UNITS) == 1
    assert queued(tokens=100, overlap_us=5, wait_us=0).wait_us(back, UNITS + 1) == 0


@pytest.mark.parametrize(
    ("us_a_token", "tokens"),
    [
        (2, LEAST_TOKENS),  # 896 tokens can be stopped within the bound
        (7, 607),  # 0.85 of the bound
        (20, LEAST_TO_STOP),  # below it most of a tasklet would be the call
    ],
)
def test_a_tasklet_that_could_not_be_stopped_in_time_has_fewer_tokens(us_a_token, tokens):
    estimates = known(BACKWARD=10)
    back = tasklet_of(BACKWARD, ROW, 0, ROW.whole)
    for n in range(SETTLED):
        assert Paced(estimates, 5_000, UNITS).tokens(BACKWARD) == LEAST_TOKENS, n
        estimates.learn_stretch(back, UNITS, 100 * us_a_token)
    assert Paced(estimates, 5_000, UNITS).tokens(BACKWARD) == pytest.approx(tokens, rel=0.03)
    assert Paced(estimates, 20_000, UNITS).tokens(BACKWARD) >= 1400  # where layers fit the bound


def test_most_stretches_are_shorter_than_what_is_kept_of_them_and_one_alone_says_little():
    estimates, draw = known(BACKWARD=10), random.Random(5)
    back = tasklet_of(BACKWARD, ROW, 0, ROW.whole)

    def kept_us() -> float:
        return 1e6 / estimates.tokens_to_stop_within(BACKWARD, 1e6)

    took_us = [draw.lognormvariate(2, 0.3) for _ in range(3000)]
    shorter = 0
    for us in took_us:
        estimates.learn_stretch(back, UNITS, 100 * us)
        shorter += estimates.tokens_to_stop_within(BACKWARD, 1e6) > 0 and us < kept_us()
    assert 0.92 < shorter / len(took_us) < 0.98  # 0.95, and steps of 4% around it
    before = kept_us()
    estimates.learn_stretch(back, UNITS, 1e9)
    assert kept_us() < 1.04 * before


@pytest.mark.parametrize(
    ("lengths", "windows", "most", "phase", "cut"),
    [
        ((800,), True, 0, FORWARD, 800),  # fits as it is
        ((1000,), True, 0, BACKWARD, 500),  # two even windows, not 896 and 104
        ((300, 300, 300, 300), True, 0, FORWARD, 150),  # 224 of each row fit
        ((1000,), False, 0, FORWARD, 1000),  # the model's rows cannot be cut
        ((1000,), False, 0, LOSS, 500),  # the loss can always be
        ((7, 7, 7), True, 2, FORWARD, 1),  # fewer tokens than rows: one of each
        ((100,), True, 64, FORWARD, 50),
    ],
)
def test_rows_are_cut_into_even_windows(lengths, windows, most, phase, cut):
    estimates = known(BACKWARD=10, LOSS=10)  # 350 tokens in the bound, so the least: 896
    micro = MicroBatch(0, tuple(range(len(lengths))), lengths)
    assert Paced(estimates, 5_000, UNITS, windows, most).cut(phase, micro) == cut


@pytest.mark.parametrize(
    ("layers", "bound_us", "fits"),
    [(1, 2_000, True), (2, 2_000, False), (2, 3_000, True), (3, 3_000, False), (3, 4_286, True)],
)
def test_layers_are_joined_while_they_stay_within_the_bound(layers, bound_us, fits):
    tasklet = tasklet_of(FORWARD, ROW, 0, TokenWindow(0, 100))
    for layer in range(1, layers):
        tasklet = tasklet.joined(tasklet_of(FORWARD, ROW, layer, TokenWindow(0, 100)))
    estimates = known(FORWARD=10)  # a layer takes 1,000 us
    assert Paced(estimates, bound_us, UNITS).fits(tasklet) == fits


def test_layers_of_which_nothing_is_known_are_not_joined():
    assert not Paced(Estimates(), 10**9, UNITS).fits(tasklet_of(FORWARD, ROW, 0, TokenWindow(0, 1)))
