"""SGLang's own scheduler over the arena: the same answers and the same sums, whatever is lent."""

from __future__ import annotations

import random

import pytest

TEXT = (
    b"The for statement is used to iterate over the elements of a sequence, such as a string, a "
    b"tuple or a list, or of another object that supports iteration."
)

DECODE = {
    "disaggregation_mode": "decode",
    "disaggregation_transfer_backend": "fake",
    "disaggregation_decode_retraction_backup": "cpu_tensor",
}
KINDS = {
    "decode": DECODE,
    "decode without overlap": {**DECODE, "disable_overlap_schedule": True},
    "prefill and decode": {},
}


def conversation(n: int, seed: int, *, longest: int = 60) -> list[dict]:
    """Requests that come a few iterations apart, with an idle time in the middle."""
    chance = random.Random(seed)
    return [
        {
            "n": i,
            "at": 3 + 4 * i + chance.randrange(4) + (2 * i >= n) * 3 * longest,
            "tokens": chance.randrange(8, longest),
            "prompt": [*TEXT[: chance.randrange(5, len(TEXT))]],
        }
        for i in range(n)
    ]


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture(scope="module")
def stock(play, kind):
    """What SGLang does without the plugin."""
    return play({"server": kind, "requests": conversation(40, 5), "aborts": {"r7": 40, "r20": 99}})


def test_answers_and_sums_are_stock_ones_while_chunks_are_lent_at_random(
    play, kind, stock, run_dir
):
    script = {
        "server": kind,
        "requests": conversation(40, 5),
        "aborts": {"r7": 40, "r20": 99},
        "chaos": 3,  # what is lent is filled with NaN, all of it
        "record": True,  # and check the contract of the step seam
    }
    lending = play(script, run_dir)
    assert lending["iterations_lent"] > 40
    assert lending["most_lent"] > lending["total"] // 2
    assert lending["tokens"] == stock["tokens"]
    assert len(lending["tokens"]) >= 38
    assert lending["ends"] == stock["ends"]
    assert lending["used"] == stock["used"]
    assert lending["idle_lent"] > 10  # SGLang looks for leaks whenever it is idle
    assert lending["available"] == lending["total"] == stock["total"]
    assert lending["off"] == ""
    assert lending["steps"] > 100


def test_without_a_run_directory_nothing_of_sglang_is_touched(stock):
    assert stock["hooks"] == 0
    assert "windrow:" not in stock["log"]


def test_requests_that_find_no_memory_are_retracted_and_answered_all_the_same(play, run_dir):
    server = {**DECODE, "max_total_tokens": 1536}
    script = {"server": server, "requests": conversation(48, 9, longest=120)}
    stock = play(script)
    lending = play({**script, "chaos": 4}, run_dir)
    assert lending["iterations_lent"] > 40
    assert lending["ends"] == stock["ends"]
    assert lending["tokens"] == stock["tokens"]
    assert lending["available"] == lending["total"]


def test_a_worker_that_is_stopped_killed_and_replaced_costs_no_request_and_delays_no_step(
    play, run_dir
):
    script = {"server": DECODE, "requests": [], "endless": True, "worker": 6, "at_most_s": 300}
    played = play(script, run_dir)
    phases = {phase: facts for phase, *facts in played["faults"]}
    assert [*phases] == ["lending", "stopped", "going on", "killed", "a new one", "over"]
    for phase in ("stopped", "killed"):
        lent, steps, without = phases[phase]
        assert lent > 0
        # The worker runs no tasklet meanwhile, so that a step which waited for one would not end.
        assert steps > 20
        assert without <= 1  # the loop's round in which a batch is made launches none
    assert phases["over"][0] > 0  # lent to the new one
    # The new worker still holds what it was lent.
    assert played["available"] + played["lent"] == played["total"]
    assert set(played["ends"].values()) == {"length"}
    assert played["off"] == ""
