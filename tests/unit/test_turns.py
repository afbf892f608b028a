"""Hand the turn of the device over between decode's thread and a finetune thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from windrow_sidecar.engines import turns as turns_module
from windrow_sidecar.engines.turns import Turns

LONG_S = 20.0


@pytest.fixture
def turns() -> Turns:
    return Turns()


def beside(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def test_without_a_finetune_thread_a_gap_ends_at_once(turns):
    began = time.monotonic()
    turns.lend(time.monotonic_ns() + int(LONG_S * 1e9), time.monotonic_ns)
    assert time.monotonic() - began < LONG_S / 2  # not a measurement: the gap is far longer
    assert not turns.held


def test_the_finetune_thread_computes_until_it_rests_again(turns):
    seen: list[bool] = []
    rests = threading.Event()

    def finetune() -> None:
        rests.set()
        if turns.rest(LONG_S):
            seen.append(turns.held)
            turns.give_back()

    thread = beside(finetune)
    rests.wait(LONG_S)
    while not seen:  # a turn may be offered before the other thread waits for it
        turns.lend(time.monotonic_ns() + int(LONG_S * 1e9), time.monotonic_ns)
    assert seen == [True]
    assert not turns.held
    thread.join(LONG_S)


def test_a_turn_that_is_recalled_ends_at_the_next_point(turns):
    order: list[str] = []
    taken = threading.Event()

    def finetune() -> None:
        turns.rest(LONG_S)
        taken.set()
        while turns.held:  # between two points
            pass
        order.append("point")
        turns.rest(0.0)

    assert turns.offer()
    thread = beside(finetune)
    taken.wait(LONG_S)
    assert turns.recall()
    order.append("decode")
    thread.join(LONG_S)
    assert order == ["point", "decode"]


def test_decode_goes_on_beside_a_finetune_thread_that_does_not_come_to_a_point(turns, monkeypatch):
    monkeypatch.setattr(turns_module, "_GIVEN_BACK_WITHIN_S", 0.01)
    release, taken = threading.Event(), threading.Event()

    def finetune() -> None:
        turns.rest(LONG_S)
        taken.set()
        release.wait(LONG_S)
        turns.give_back()

    assert turns.offer()
    thread = beside(finetune)
    taken.wait(LONG_S)
    assert not turns.recall()
    assert turns.overdue == 1
    assert not turns.held, "it may not begin anything"
    assert not turns.offer(), "it has a turn still"
    release.set()
    thread.join(LONG_S)
    assert turns.offer(), "once it is back, turns go on"


def test_after_the_end_no_turn_is_lent(turns):
    turns.end()
    assert not turns.offer()
    assert not turns.rest(0.0)


@pytest.fixture
def iterating(turns):
    """Run a finetune thread that computes until it is recalled, or for as long as it is told to."""
    threads: list[threading.Thread] = []
    stop = threading.Event()

    def make(*, until_recalled: bool) -> None:
        def finetune() -> None:
            while not stop.is_set():
                if not turns.rest(0.05):
                    continue
                while until_recalled and turns.held:
                    time.sleep(0.001)
                turns.give_back()

        threads.append(beside(finetune))

    yield make
    stop.set()
    for thread in threads:
        thread.join(LONG_S)


def lend_until_taken(turns, until_s: float, beats: list[int]):
    while True:  # a turn may be offered before the other thread waits for it
        until_ns = time.monotonic_ns() + int(until_s * 1e9)
        turn = turns.lend_iteration(until_ns, time.monotonic_ns, None, beat=lambda: beats.append(1))
        if turn.taken:
            return turn


def test_a_turn_of_an_iteration_ends_with_the_iteration(turns, iterating):
    iterating(until_recalled=False)
    turn = lend_until_taken(turns, LONG_S, beats := [])
    assert (turn.whole, turn.back) == (True, True)
    assert beats
    assert not turns.held


def test_a_turn_of_an_iteration_that_goes_on_is_recalled_and_shows_meanwhile_that_decode_lives(
    turns, iterating
):
    iterating(until_recalled=True)
    turn = lend_until_taken(turns, 3 * turns_module._BEATS_EVERY_S, beats := [])
    assert (turn.whole, turn.back) == (False, True)
    assert len(beats) >= 2
    assert not turns.held


def test_without_a_finetune_thread_a_turn_of_an_iteration_ends_at_once(turns):
    until_ns = time.monotonic_ns() + int(LONG_S * 1e9)
    turn = turns.lend_iteration(until_ns, time.monotonic_ns, None, beat=lambda: None)
    assert (turn.taken, turn.back) == (False, True)
