"""Check what is kept of a forward is a decision over plain data: exact, and within the budget."""

from __future__ import annotations

from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windrow_sidecar.finetune.recompute.activation_budget import in_steps
from windrow_sidecar.finetune.recompute.layer_graph import LayerGraph, Op, OpKind, Value
from windrow_sidecar.finetune.recompute.memory_model import MemoryModel
from windrow_sidecar.finetune.recompute.planning import (
    BudgetTooSmall,
    largest,
    plan_at,
    plan_within,
    smallest,
    work_of,
)

X, NORMED, GATE, SILU, UP, PRODUCT = range(6)
# A gated block: norm (cheap), two projections, silu and product. Backward reads all but the input.
BLOCK = LayerGraph(
    values=(
        Value(100, there=True),
        Value(100, can_be_kept=True),
        Value(400, can_be_kept=True),
        Value(400, can_be_kept=True),
        Value(400, can_be_kept=True),
        Value(400, can_be_kept=True),
    ),
    ops=(
        Op("norm", OpKind.CHEAP, (X,), (NORMED,), 100, 200),
        Op("gate", OpKind.GEMM, (NORMED,), (GATE,), 10**9, 900),
        Op("silu", OpKind.CHEAP, (GATE,), (SILU,), 400, 800),
        Op("up", OpKind.GEMM, (NORMED,), (UP,), 10**9, 900),
        Op("product", OpKind.CHEAP, (SILU, UP), (PRODUCT,), 400, 1200),
    ),
    needs=(NORMED, GATE, SILU, UP, PRODUCT),
)


def test_with_room_for_all_nothing_runs_again():
    plan = plan_within(BLOCK, 10_000)
    assert plan.kept == {NORMED, GATE, SILU, UP, PRODUCT}
    assert plan.replayed == frozenset()
    assert plan.kept_bytes == 1700


def test_without_products_running_again_the_projections_are_what_stays():
    plan = smallest(BLOCK)
    assert plan.kept == {GATE, UP}
    assert {BLOCK.ops[op].name for op in plan.replayed} == {"norm", "silu", "product"}


def test_what_is_cheapest_for_its_bytes_runs_again_first():
    # silu gives 400 bytes back for less than the product would, and the norm gives only 100.
    plan = plan_within(BLOCK, 1300)
    assert [BLOCK.ops[op].name for op in plan.replayed] == ["silu"]


def test_leftover_bytes_are_used():
    # The hull jumps from keeping one of the two large ones to none; 100 bytes keep the norm.
    plan = plan_within(BLOCK, 900)
    assert plan.kept == {NORMED, GATE, UP}


def test_a_budget_that_only_products_could_meet_is_refused_with_the_least():
    with pytest.raises(BudgetTooSmall) as refused:
        plan_within(BLOCK, 799)
    assert refused.value.least_bytes == 800


def test_products_run_again_when_asked_for():
    plan = plan_within(BLOCK, 500, gemm_again=True)
    assert plan.kept_bytes <= 500
    assert plan.extra_flops > 10**9
    assert plan_within(BLOCK, 0, gemm_again=True).kept == frozenset()


def test_signs_stand_for_a_result_of_which_only_they_are_read():
    relu, bits = Value(3200, can_be_kept=True), Value(100, can_be_kept=True)
    ops = (
        Op("up", OpKind.GEMM, (0,), (1,), 10**9, 3300),
        Op("relu", OpKind.CHEAP, (1,), (2,), 800, 6400),
        Op("signs", OpKind.CHEAP, (2,), (3,), 0, 3300),
    )
    values = (Value(100, there=True), Value(3200), relu, bits)
    assert smallest(LayerGraph(values, ops, needs=(3,))).kept == {3}
    # Where the result itself is read as well, the signs cost nothing more.
    assert smallest(LayerGraph(values, ops, needs=(2, 3))).kept == {2}


def test_what_would_come_out_differently_is_kept():
    ops = (
        Op("draw", OpKind.NEVER, (), (0,), 10, 10),
        Op("times", OpKind.CHEAP, (0,), (1,), 10, 10),
    )
    graph = LayerGraph((Value(10, can_be_kept=True), Value(10, can_be_kept=True)), ops, (0, 1))
    assert smallest(graph, gemm_again=True).kept == {0}


def test_a_group_that_fits_has_no_budget_and_one_that_does_not_leaves_room_for_a_whole_layer():
    memory_model = MemoryModel(layers=4, graph=100.0, graphs=4)
    assert memory_model.peak_bytes(10) == 4000
    assert memory_model.within(10, room_bytes=4000) is None
    tight = memory_model.within(10, room_bytes=3000)
    assert 10 * (4 * tight + 100.0) == 3000
    assert memory_model.within(10, room_bytes=900) == 0.0


@given(st.floats(1e-3, 1e9))
def test_budgets_that_differ_a_little_share_a_plan_and_give_up_a_sixteenth_at_most(budget):
    step = in_steps(budget)
    assert budget * 16 / 17 <= step <= budget
    assert in_steps(step) == step


def test_budgets_come_in_few_steps():
    assert len({in_steps(100_000.0 + n) for n in range(100_000)}) <= 17
    assert in_steps(0.0) == 0.0


@st.composite
def graphs(draw):
    """Chains and joins of up to seven operations over two values that are there."""
    values, ops = [Value(8, there=True), Value(8, there=True)], []
    for _ in range(draw(st.integers(1, 7))):
        inputs = draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=2))
        kind = draw(st.sampled_from([OpKind.CHEAP, OpKind.CHEAP, OpKind.GEMM, OpKind.VIEW]))
        flops = draw(st.integers(1, 50)) * (1000 if kind is OpKind.GEMM else 1)
        flops = 0 if kind is OpKind.VIEW else flops
        ops.append(Op("op", kind, tuple(inputs), (len(values),), flops, flops // 60))
        values.append(Value(draw(st.integers(1, 20)), can_be_kept=True))
    needs = draw(st.lists(st.integers(2, len(values) - 1), min_size=1, max_size=6))
    return LayerGraph(tuple(values), tuple(ops), tuple(needs))


def choices(graph: LayerGraph, *, gemm_again: bool):
    """Every legal choice: (bytes kept, work done again)."""
    own = [i for i, value in enumerate(graph.values) if not value.there]
    for kept in chain.from_iterable(combinations(own, n) for n in range(len(own) + 1)):
        again = [graph.ops[op] for op in graph.replayed(kept)]
        if gemm_again or not any(op.kind is OpKind.GEMM for op in again):
            work = sum(work_of(op) for op in again if op.kind is not OpKind.VIEW)
            yield sum(graph.values[value].n_bytes for value in kept), work


@given(graphs(), st.booleans(), st.sampled_from([1e-12, 0.01, 0.3, 5.0, 1e3]))
@settings(max_examples=150)
def test_for_a_price_no_choice_is_better(graph, gemm_again, price):
    plan = plan_at(graph, price, gemm_again=gemm_again)
    again = [graph.ops[op] for op in plan.replayed if graph.ops[op].kind is not OpKind.VIEW]
    found = plan.kept_bytes + price * sum(work_of(op) for op in again)
    best = min(kept + price * work for kept, work in choices(graph, gemm_again=gemm_again))
    assert found == pytest.approx(best)


@given(graphs(), st.integers(0, 60), st.booleans())
@settings(max_examples=150)
def test_a_plan_keeps_to_its_budget_and_can_be_followed(graph, budget, gemm_again):
    least = smallest(graph, gemm_again=gemm_again).kept_bytes
    if least > budget:
        with pytest.raises(BudgetTooSmall, match=f"{least} bytes"):
            plan_within(graph, budget, gemm_again=gemm_again)
        return
    plan = plan_within(graph, budget, gemm_again=gemm_again)
    assert plan.kept_bytes <= budget
    assert plan.replayed == graph.replayed(plan.kept)
    assert plan.kept_bytes <= largest(graph).kept_bytes


@given(tokens=st.integers(1, 10_000), room=st.integers(0, 10**7))
def test_what_a_budget_leaves_never_takes_more_than_there_is(tokens, room):
    memory_model = MemoryModel(
        4,
        graph=100.0,
        graphs=4,
        boundary=16.0,
        key_values=3.0,
        key_value_sums=6.0,
        ends=32.0,
        state_bytes=5_000,
    )
    assert memory_model.least_bytes(tokens) <= memory_model.peak_bytes(tokens)
    most = memory_model.most_tokens(room)
    assert most == 0 or memory_model.least_bytes(most) <= room
    assert memory_model.least_bytes(most + 1) > room
    kept = memory_model.within(tokens, room)
    if kept is None:
        assert memory_model.peak_bytes(tokens) <= room
    elif kept > 0:
        beside = 5_000 + tokens * (4 * (16 + 3) + 6 + 32)
        assert beside + tokens * (100 + 4 * kept) <= room + 1
