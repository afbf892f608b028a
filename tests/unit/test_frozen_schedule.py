"""Check which frozen layers come and go: the farthest in the schedule, never the one that runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windrow.errors import UserError
from windrow_sidecar.engines.streaming.copying import RateLimit
from windrow_sidecar.engines.streaming.schedule import (
    Moves,
    coming,
    micro_batches_to_hide,
    moves,
    next_moves,
)
from windrow_sidecar.finetune.job.assembly import check_turns


def test_on_the_way_up_what_lies_above_comes_first_and_the_bottom_last():
    assert coming(5, 2, up=True) == (2, 3, 4, 1, 0)


def test_on_the_way_down_the_next_step_begins_at_the_bottom():
    assert coming(5, 2, up=False) == (2, 1, 0, 3, 4)


def test_an_evaluation_begins_at_the_bottom_again():
    assert coming(5, 3, up=True, returns=False) == (3, 4, 0, 1, 2)


def test_a_window_moves_along_with_the_layers():
    assert moves(coming(6, 2, up=True), {0, 1, 2}, 3) == Moves(evict=(0, 1), load=(3, 4))


def test_at_the_top_nothing_moves_for_what_was_just_used_comes_next():
    assert moves(coming(6, 5, up=True), {3, 4, 5}, 3) == Moves((), ())
    assert moves(coming(6, 5, up=False), {3, 4, 5}, 3) == Moves((), ())


def test_a_smaller_window_lets_the_farthest_go_first():
    assert moves(coming(6, 2, up=True), {0, 2, 3, 4}, 2) == Moves(evict=(0, 4), load=())


def loads(depth: int, visits: list[tuple[int, ...]], capacity: int, of=next_moves) -> int:
    """Return how many layers are loaded for visits, given by their orders, of the second half."""
    held: set[int] = set()
    counts = []
    for order in visits:
        found = of(order, held, capacity)
        held = (held - set(found.evict)) | set(found.load)
        assert order[0] in held
        assert len(held) <= capacity
        counts.append(len(found.load))
    return sum(counts[len(visits) // 2 :])


@pytest.mark.parametrize("capacity", [2, 3, 8, 14])
def test_a_pass_that_begins_at_the_bottom_again_reads_little_more_than_memory_lacks(capacity):
    depth = 16
    passes = [coming(depth, layer, up=True, returns=False) for layer in range(depth)] * 4
    assert depth - capacity <= loads(depth, passes, capacity) / 2 <= depth - capacity + 2


@pytest.mark.parametrize("capacity", [2, 3, 8, 14])
def test_an_iteration_up_and_down_reads_what_memory_lacks_twice(capacity):
    depth = 16
    up = [coming(depth, layer, up=True) for layer in range(depth)]
    down = [coming(depth, layer, up=False) for layer in reversed(range(depth))]
    assert loads(depth, (up + down) * 4, capacity) == 2 * 2 * (depth - capacity)


@given(
    st.integers(1, 12).flatmap(
        lambda depth: st.tuples(
            st.just(depth),
            st.integers(0, depth - 1),
            st.booleans(),
            st.booleans(),
            st.sets(st.integers(0, depth - 1)),
            st.integers(0, depth),
        )
    )
)
def test_moves_keep_to_the_capacity_and_to_what_is_nearest(case):
    depth, layer, up, returns, held, capacity = case
    order = coming(depth, layer, up=up, returns=returns)
    assert sorted(order) == list(range(depth))
    decided = moves(order, held, capacity)
    after = (held - set(decided.evict)) | set(decided.load)
    assert len(after) <= capacity
    assert set(order[:capacity]) <= after
    assert capacity == 0 or layer not in decided.evict
    # Nothing goes that would come back before something that stays.
    stays = [order.index(i) for i in held - set(decided.evict)]
    assert all(order.index(gone) > max(stays, default=-1) for gone in decided.evict)
    # Without need nothing goes.
    assert not decided.evict or len(after) == capacity


@given(st.integers(1, 8), st.integers(2, 8))
def test_a_climb_and_descent_loads_each_layer_no_more_than_twice(capacity, depth):
    held, loads = set(), 0
    for up, layers in ((True, range(depth)), (False, range(depth - 1, -1, -1))):
        for layer in layers:
            decided = moves(coming(depth, layer, up=up), held, capacity)
            held = (held - set(decided.evict)) | set(decided.load)
            loads += len(decided.load)
    # What is in memory at the turn is not loaded again.
    assert loads <= 2 * depth - min(capacity, depth) + max(0, capacity - 1)


def test_enough_micro_batches_hide_a_transfer():
    # Of an 8B model over PCIe 5: 436 MB at 55 GB/s are 7.9 ms; a forward of 2,048 tokens takes 1.9.
    assert micro_batches_to_hide(436 * 10**6, 55e9, 1.9e-3) == 5
    assert micro_batches_to_hide(10**6, 55e9, 1.9e-3) == 1


def test_a_rate_limit_spreads_pieces_evenly_and_saves_nothing_up():
    limit = RateLimit(100.0)
    assert limit.delay_s(50, now_s=10.0) == 0.0
    assert limit.delay_s(50, now_s=10.0) == 0.5
    assert limit.delay_s(50, now_s=10.25) == 0.75
    assert limit.delay_s(50, now_s=99.0) == 0.0
    assert limit.delay_s(50, now_s=99.0) == 0.5
    assert RateLimit(None).delay_s(10**12, now_s=0.0) == 0.0


def test_biases_of_layers_that_take_turns_are_not_trained():
    check_turns(["layers.0.q_proj.lora_A.default.weight"])
    with pytest.raises(UserError, match="read again at each visit"):
        check_turns(["layers.0.q_proj.base_layer.bias"])
