"""The pure plans of the worker: micro-batches, grants, memory, rates."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from windrow_sidecar.finetune.colocated.grants import (
    DECODE_STALE_NS,
    Used,
    may_launch,
    memory_delta_bytes,
)
from windrow_sidecar.finetune.engine.group_progress import GroupProgress, tasklet_of
from windrow_sidecar.finetune.engine.orders import (
    ORDERS,
    Lookahead,
    layer_major,
    listing,
    token_major,
    unfold,
)
from windrow_sidecar.finetune.engine.sizing import (
    FRESH,
    LAST,
    SETTLED,
    TRIED,
    Estimates,
    WholeRows,
    Windows,
)
from windrow_sidecar.finetune.memory.chunk_layout import (
    ChunkRun,
    chunks_needed,
    runs_of,
    tokens_that_fit,
)
from windrow_sidecar.finetune.tasklets import (
    MicroBatch,
    Tasklet,
    TokenWindow,
    by_length,
    next_micro_batch,
    optimizer_tasklet,
)
from windrow_sidecar.finetune.training.optimizer import Schedule
from windrow_sidecar.qos.view import Action, Grant, Phase

GO = Grant(action=Action.GO, finetune_units=1)


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=20),
    max_tokens=st.integers(0, 200),
    max_rows=st.integers(0, 5),
)
def test_micro_batches_take_every_row_once_within_the_bounds(lengths, max_tokens, max_rows):
    todo = by_length(range(len(lengths)), lengths)
    taken = []
    while todo:
        micro = next_micro_batch(0, todo, lengths, max_tokens=max_tokens, max_rows=max_rows)
        assert len(micro.rows) == 1 or micro.padded_tokens <= max_tokens
        assert not max_rows or len(micro.rows) <= max_rows
        assert micro.width == max(lengths[row] for row in micro.rows)
        assert micro.tokens == sum(lengths[row] for row in micro.rows)
        taken += micro.rows
        todo = todo[len(micro.rows) :]
    assert sorted(taken) == list(range(len(lengths)))


def test_what_a_layer_holds_is_held_from_its_forward_to_its_backward():
    micro = MicroBatch(0, (0, 1), (4, 3))
    tasklets = list(unfold(layer_major, GroupProgress([micro], 3)))
    deltas = [memory_delta_bytes(tasklet, 10) for tasklet in tasklets]
    assert deltas == [80, 80, 80, 0, -80, -80, -80]
    first, second = tasklets[:2]
    assert memory_delta_bytes(first.joined(second), 10) == 160
    assert memory_delta_bytes(first, 10, of_windows=3) == 80, "whole rows need no cache"
    half = tasklet_of(Phase.FORWARD, micro, 0, TokenWindow(0, 2))
    assert memory_delta_bytes(half, 10, of_windows=3) == 4 * 13
    judged = MicroBatch(0, (0,), (4,), evaluation=True)
    assert memory_delta_bytes(tasklet_of(Phase.FORWARD, judged, 0, judged.whole), 10) == 0
    assert memory_delta_bytes(optimizer_tasklet(0), 10) == 0


def test_a_micro_batch_goes_up_to_the_loss_and_down_again():
    micro = MicroBatch(3, (0,), (4,))
    order = [(t.phase, t.layer) for t in unfold(layer_major, GroupProgress([micro], 2))]
    forward, loss, backward = Phase.FORWARD, Phase.LOSS, Phase.BACKWARD
    assert order == [(forward, 0), (forward, 1), (loss, 2), (backward, 1), (backward, 0)]


@pytest.mark.parametrize("sizing", [Windows(3), Windows(100)])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_what_is_found_ahead_is_what_would_be_found_one_by_one(order, sizing):
    group = [MicroBatch(0, (0, 1), (7, 4)), MicroBatch(0, (2,), (5,))]
    expected = list(unfold(order, GroupProgress(group, 3), sizing))
    progress = GroupProgress(group, 3)
    ahead, found = Lookahead(order, progress), []
    while (tasklet := ahead.peek(sizing)) is not None:
        assert ahead.peek(sizing) is tasklet  # until it has run
        progress.advance(tasklet)
        ahead.ran(tasklet)
        found.append(tasklet)
    assert found == expected


@pytest.mark.parametrize("rows", [1, 2], ids=["one micro-batch", "two of them"])
@pytest.mark.parametrize("layers", [1, 2, 3, 8, 40])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_tasklets_of_several_layers_pass_them_in_the_order_of_single_ones(order, layers, rows):
    group, depth = [MicroBatch(0, (n,), (5 - n,)) for n in range(rows)], 13
    singles = list(unfold(order, GroupProgress(group, depth)))
    joined = list(listing(order, GroupProgress(group, depth), WholeRows(layers)))
    assert [single for tasklet in joined for single in tasklet.each_layer()] == singles
    assert max(tasklet.parts for tasklet in joined) <= layers
    progress = GroupProgress(group, depth)
    for tasklet in joined:
        progress.advance(tasklet)
    assert progress.done
    if rows == 1:  # each of them is as long as it may be
        of_pass = [tasklet.parts for tasklet in joined if tasklet.phase is Phase.FORWARD]
        assert of_pass[:-1] == [layers] * (len(of_pass) - 1)


def test_layers_that_ran_up_by_windows_are_not_joined_with_one_that_ran_whole():
    micro, sizing = MicroBatch(0, (0,), (6,)), WholeRows(8)
    progress = GroupProgress([micro], 3)
    for begin, end in ((0, 4), (4, 6)):
        window = TokenWindow(begin, end)
        progress.advance(tasklet_of(Phase.FORWARD, micro, 0, window))
    for layer in (1, 2):
        progress.advance(tasklet_of(Phase.FORWARD, micro, layer, micro.whole))
    down = [t for t in listing(layer_major, progress, sizing) if t.phase is Phase.BACKWARD]
    assert [(t.layer, t.layer_end, t.window.begin) for t in down] == [
        (1, 3, 0),
        (0, 1, 4),
        (0, 1, 0),
    ]


def test_another_grain_changes_the_very_next_tasklet():
    micro = MicroBatch(0, (0,), (64,))
    progress = GroupProgress([micro], 3)
    ahead = Lookahead(token_major, progress)
    assert ahead.peek(Windows(8)).window == TokenWindow(0, 8)
    for _ in range(4):  # three layers and the loss of the window on its way
        progress.advance(tasklet := ahead.peek(Windows(8)))
        ahead.ran(tasklet)
    assert ahead.peek(Windows(8)).window == TokenWindow(8, 16)
    assert ahead.peek(Windows(20)).window.begin == 8
    assert ahead.peek(Windows(20)).window.tokens > 8


def test_what_has_run_out_of_turn_is_not_offered_again():
    group = [MicroBatch(0, (0,), (4,)), MicroBatch(0, (1,), (3,))]
    progress = GroupProgress(group, 2)
    ahead, sizing = Lookahead(layer_major, progress), Windows(4)
    first, second = islice(unfold(layer_major, progress, sizing), 2)
    assert ahead.peek(sizing) == first
    progress.advance(second)
    ahead.ran(second)
    assert ahead.peek(sizing) == first
    progress.advance(first)
    ahead.ran(ahead.peek(sizing))
    assert ahead.peek(sizing).layer == 1


def test_a_plan_that_was_forgotten_is_made_anew_from_where_the_group_is():
    progress = GroupProgress([MicroBatch(0, (0,), (4,))], 12)
    ahead, sizing = Lookahead(layer_major, progress), Windows(4)
    ahead.peek(sizing)
    for tasklet in list(unfold(layer_major, progress, sizing))[:3]:
        progress.advance(tasklet)  # as the first layers of a tasklet that was broken off
    ahead.forget()
    assert (ahead.peek(sizing).phase, ahead.peek(sizing).layer) == (Phase.FORWARD, 3)


@pytest.mark.parametrize(
    ("grant", "used", "silent_ns", "answer"),
    [
        (GO, Used(), 0, True),
        (Grant(), Used(), 0, False),
        (Grant(action=Action.GO, finetune_units=0), Used(), 0, False),
        (GO, Used(), DECODE_STALE_NS + 1, False),
        (Grant(action=Action.GO, finetune_units=1, n_tasklets=2), Used(1, 0), 0, True),
        (Grant(action=Action.GO, finetune_units=1, n_tasklets=2), Used(2, 0), 0, False),
        (Grant(action=Action.GO, finetune_units=1, budget_us=150), Used(1, 50), 0, True),
        (Grant(action=Action.GO, finetune_units=1, budget_us=149), Used(1, 50), 0, False),
    ],
)
def test_a_tasklet_of_100_us_runs_only_under_a_grant_that_covers_it(grant, used, silent_ns, answer):
    assert may_launch(grant, used, 100, decode_silent_ns=silent_ns) is answer


def test_chunks_side_by_side_form_runs_the_highest_first():
    assert runs_of([2, 3, 5, 8, 9]) == (ChunkRun(8, 10), ChunkRun(5, 6), ChunkRun(2, 4))
    assert runs_of([]) == ()


@given(
    chunks=st.sets(st.integers(0, 30)),
    boundaries=st.integers(1, 12),
    per_token=st.sampled_from([64, 256, 1024]),
)
def test_what_is_said_to_fit_fits_and_one_token_more_does_not(chunks, boundaries, per_token):
    runs = runs_of(sorted(chunks))
    sizes = {"chunk_bytes": 8192, "boundaries": boundaries, "bytes_per_token": per_token}
    tokens = tokens_that_fit(runs, **sizes)

    def room(n: int) -> int:
        return sum(run.chunks * 8192 // (n * per_token) for run in runs)

    assert tokens == 0 or room(tokens) >= boundaries
    assert room(tokens + 1) < boundaries
    if len(runs) == 1 and tokens:
        assert chunks_needed(tokens, **sizes) <= runs[0].chunks


def test_estimates_scale_with_tokens_and_follow_the_machine():
    estimates = Estimates()
    small, large = (
        tasklet_of(Phase.BACKWARD, MicroBatch(0, (0,), (n,)), 0, TokenWindow(0, n))
        for n in (100, 300)
    )
    assert estimates.estimate_us(small, 1) == 0
    assert estimates.tokens_within(Phase.BACKWARD, 5000) == 0
    estimates.learn(small, 1, 4000)
    assert estimates.estimate_us(large, 1) == 12000
    assert estimates.by_level(large, (1, 2)) == (12000, 0)
    assert estimates.tokens_within(Phase.BACKWARD, 5000) == 125
    for _ in range(30):
        estimates.learn(small, 1, 8000)
    # What is left of the first measurement fades; the rest is whole microseconds.
    assert estimates.estimate_us(small, 1) == round(8000 - 4000 * (1 - FRESH) ** 30)


def test_more_units_are_used_until_they_prove_to_be_of_no_use():
    estimates = Estimates()
    micro = MicroBatch(0, (0,), (100,))
    tasklet = tasklet_of(Phase.BACKWARD, micro, 0, micro.whole)

    def measure(units, elapsed_us, times=SETTLED):
        for _ in range(times):
            estimates.learn(tasklet, units, elapsed_us)

    measure(1, 8000)
    measure(2, 9500, times=SETTLED - 1)
    assert estimates.useful_units(tasklet, 2) == 2, "not tried often enough"
    measure(2, 9500, times=1)
    assert estimates.useful_units(tasklet, 2) == 1
    assert estimates.useful_units(tasklet, 1) == 1
    assert estimates.useful_units(tasklet, 4) == 4, "never tried"
    measure(4, 3000)
    assert estimates.useful_units(tasklet, 4) == 4
    other = tasklet_of(Phase.FORWARD, micro, 0, micro.whole)
    assert estimates.useful_units(other, 2) == 2, "each phase by itself"


def settled_on(us_by_units: dict[int, int]) -> tuple[Tasklet, Estimates]:
    """A backward, and what is known after it has often taken so long on so many units."""
    estimates = Estimates()
    micro = MicroBatch(0, (0,), (100,))
    tasklet = tasklet_of(Phase.BACKWARD, micro, 0, micro.whole)
    for units, elapsed_us in us_by_units.items():
        for _ in range(SETTLED):
            estimates.learn(tasklet, units, elapsed_us)
    return tasklet, estimates


def test_units_that_were_of_no_use_are_tried_again():
    tasklet, estimates = settled_on({2: 9500, 1: 8000})
    assert estimates.useful_units(tasklet, 2) == 1
    for _ in range(LAST - TRIED + 1):
        estimates.learn(tasklet, 1, 8000)
    for _ in range(TRIED):
        assert estimates.useful_units(tasklet, 2) == 2
        estimates.learn(tasklet, 2, 5000)
    assert estimates.useful_units(tasklet, 2) == 2, "they are of use by now"


def test_one_tasklet_that_something_held_up_turns_no_units_away():
    tasklet, estimates = settled_on({1: 12_000, 2: 8_000})
    estimates.learn(tasklet, 2, 62_000)
    assert estimates.useful_units(tasklet, 2) == 2


def test_units_that_have_become_slower_for_good_are_left_within_a_few_tasklets():
    tasklet, estimates = settled_on({1: 12_000, 2: 8_000})
    for _ in range(6):
        estimates.learn(tasklet, 2, 20_000)
    assert estimates.useful_units(tasklet, 2) == 1
    for _ in range(20):
        estimates.learn(tasklet, 2, 20_000)
    assert estimates.estimate_us(tasklet, 2) == pytest.approx(20_000, rel=0.02)


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0.0, 0.3])
def test_rates_are_those_of_transformers(kind, warmup):
    ours = Schedule(kind, 0.01, 20, warmup)
    name = "constant_with_warmup" if kind == "constant" else kind
    adamw = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.01)
    theirs = transformers.get_scheduler(name, adamw, ours.warmup_steps, 20)
    for step in range(20):
        assert ours.rate(step) == pytest.approx(adamw.param_groups[0]["lr"])
        adamw.step()
        theirs.step()
