"""The papers' formulas, with numbers that are worked out beside them."""

from __future__ import annotations

import pytest

from windrow_sidecar._core import accompanied_layers, beside_us
from windrow_sidecar.qos.levels import (
    host_levels,
    offered_levels,
    overlapping_levels,
    pair_levels,
    whole_levels,
)
from windrow_sidecar.qos.policies import FIGURES, Context, make_policy
from windrow_sidecar.qos.view import LEVELS_MAX, Action, Offer, Phase, View

START_NS = 5_000_000_000
BUSY = View(batch=6, objective_us=20_000, start_ns=START_NS)
IDLE = View(batch=0, objective_us=20_000, start_ns=START_NS)
# A backward of four layers and 256 tokens: 4 ms on 66 SMs, 3 ms on all of 132.
WORK = Offer(
    job_epoch=3,
    phase=Phase.BACKWARD,
    layer_begin=4,
    layer_end=8,
    tokens=256,
    estimates_us=(4000, 3000, 0, 0, 0, 0, 0, 0),
)


def gpu(**changes) -> Context:
    """Half of the SMs or none for the worker; decode on all: 10 ms alone, 25 ms beside it."""
    values = {
        "levels": overlapping_levels(132, (66,)),
        "allowed": 2,
        "idle_units": 132,
        "predicted_us": [10_000.0, 25_000.0],
        "margin": 0.0,
        "current": 0,
        "per_request": False,
        "in_flight_bound_us": 5000,
        "solo_us": [10_000.0, 10_000.0],
        "layers": 32,
        "gaps": True,
        "deferral_us": 400_000,
    }
    return Context(**{**values, **changes})


# Eq. 1's inner part: (S - N_all * l_d0) / (l_d - l_d0), clamped.
@pytest.mark.parametrize(
    ("objective", "layers", "solo", "beside", "accompanied"),
    [
        (20_000, 32, 312.5, 781.25, 21),  # 10,000 / 468.75 = 21.3
        (20_000, 32, 625.0, 781.25, 0),  # decode alone takes all of the objective
        (20_000, 32, 312.5, 312.5, 32),  # a tasklet costs nothing: Eq. 1 divides by zero
        (20_000, 32, 312.5, 300.0, 32),
        (90_000, 32, 312.5, 781.25, 32),  # never more layers than there are
    ],
)
def test_llmstation_clamps_equation_one(objective, layers, solo, beside, accompanied):
    assert accompanied_layers(objective, layers, solo, beside) == accompanied


def test_llmstation_turns_accompanied_layers_into_tasklets():
    # 21 layers x 781.25 us = 16,406 us, over 4,000 us a tasklet: 4.1.
    grant = make_policy("llmstation").decide(BUSY, WORK, gpu())
    assert (grant.action, grant.finetune_units, grant.n_tasklets) == (Action.GO, 66, 4)
    # Without an estimate the same time is granted instead.
    unknown = WORK._replace(estimates_us=(0,) * LEVELS_MAX)
    assert make_policy("llmstation").decide(BUSY, unknown, gpu()).budget_us == 16_406
    # As for a tasklet that takes longer: the worker runs a part of it beside each step.
    longer = WORK._replace(estimates_us=(20_000,) * LEVELS_MAX)
    grant = make_policy("llmstation").decide(BUSY, longer, gpu())
    assert (grant.n_tasklets, grant.budget_us) == (0, 16_406)


def test_llmstation_checks_memory_where_tensors_lie_in_lent_chunks():
    full = BUSY._replace(free_chunks=3)
    keeps = WORK._replace(held_chunks=2, memory_delta_bytes=1000)
    assert make_policy("llmstation").decide(full, keeps, gpu(chunk_bytes=1000)).n_tasklets == 3
    none = BUSY._replace(free_chunks=0)
    assert (
        make_policy("llmstation").decide(none, keeps, gpu(chunk_bytes=1000)).action == Action.PAUSE
    )


def test_llmstation_takes_the_split_with_the_most_tasklets():
    # One core of three for the worker: it may run throughout, 15 ms over 10 ms = 1.5 tasklets; two
    # of them: 18 ms over 4 ms = 4.5.
    ctx = gpu(
        levels=host_levels(3),
        allowed=3,
        predicted_us=[8000.0, 15_000.0, 18_000.0],
        solo_us=[8000.0, 12_000.0, 17_000.0],
        layers=8,
    )
    offer = WORK._replace(estimates_us=(10_000, 4000, 3000, 0, 0, 0, 0, 0))
    grant = make_policy("llmstation").decide(BUSY, offer, ctx)
    assert (grant.finetune_units, grant.decode_units, grant.n_tasklets) == (2, 1, 4)


def test_flexllm_inverts_f_of_c_and_s():
    # f(c, s) = 10 + w (1 - 10 / 25) <= 20 ms: w = 16.67 ms. A token takes 4,000 us / (4 x 256) in a
    # layer and 32 times that in all: 125 us. 133 tokens fit, 128 in steps of 16.
    grant = make_policy("flexllm").decide(BUSY, WORK, gpu())
    assert (grant.window_tokens, grant.budget_us) == (128, 16_000)
    assert grant.predicted_us == 10_000 + 16_000 * 0.6
    # Half of the room: the margin makes the objective 15 ms, w = 8.33 ms, 66 tokens.
    assert make_policy("flexllm").decide(BUSY, WORK, gpu(margin=1 / 3)).window_tokens == 64


def test_flexllm_caps_its_window_and_runs_a_part_of_the_smallest_where_it_does_not_fit():
    fast = WORK._replace(estimates_us=(40, 30, 0, 0, 0, 0, 0, 0))
    assert make_policy("flexllm").decide(BUSY, fast, gpu()).window_tokens == 512
    slow = WORK._replace(estimates_us=(400_000, 300_000, 0, 0, 0, 0, 0, 0))
    part = make_policy("flexllm").decide(BUSY, slow, gpu())
    assert (part.action, part.window_tokens, part.budget_us) == (Action.GO, 16, 16_666)
    none = make_policy("flexllm").decide(BUSY._replace(objective_us=10_000), slow, gpu())
    assert none.action == Action.PAUSE
    unknown = WORK._replace(estimates_us=(0,) * LEVELS_MAX)
    assert make_policy("flexllm").decide(BUSY, unknown, gpu()).window_tokens == 16


@pytest.mark.parametrize(
    ("bound", "solo", "beside", "run_us"),
    [(20_000, 10_000, 25_000, 16_666.7), (20_000, 10_000, 18_000, 18_000), (9000, 10_000, 1, 0)],
)
def test_a_worker_for_a_part_of_a_step_ends_it_at_the_bound(bound, solo, beside, run_us):
    assert beside_us(bound, solo, beside) == pytest.approx(run_us, abs=0.1)


def test_fineinfer_runs_the_worker_until_the_oldest_request_is_due():
    # Bound 400 ms; the switch takes what is in flight, 5 ms: a request is due after 395 ms.
    quiet = make_policy("fineinfer").decide(IDLE, WORK, gpu())
    assert (quiet.action, quiet.finetune_units) == (Action.GO, 132)
    assert quiet.hold_admission_until_ns == START_NS + 395_000_000
    waits = IDLE._replace(waiting=1, waited_us=300_000)
    held = make_policy("fineinfer").decide(waits, WORK, gpu())
    assert (held.action, held.hold_admission_until_ns) == (Action.GO, START_NS + 95_000_000)
    due = make_policy("fineinfer").decide(waits._replace(waited_us=395_000), WORK, gpu())
    assert (due.action, due.hold_admission_until_ns) == (Action.PAUSE, 0)


@pytest.mark.parametrize("own_us", [40_000, 5_000_000])
def test_fineinfer_holds_a_request_by_the_bound_that_came_with_it(own_us):
    """Shorter or longer than the policy's: its arrival and its bound say when it is due."""
    waits = IDLE._replace(waiting=1, waited_us=30_000)
    due_ns = START_NS + 1000 * (own_us - 30_000)
    held = make_policy("fineinfer").decide(waits, WORK, gpu(due_ns=due_ns))
    assert (held.action, held.hold_admission_until_ns) == (Action.GO, due_ns - 5_000_000)
    late = make_policy("fineinfer").decide(waits, WORK, gpu(due_ns=START_NS + 4_000_000))
    assert (late.action, late.hold_admission_until_ns) == (Action.PAUSE, 0)
    nobody = make_policy("fineinfer").decide(IDLE, WORK, gpu(due_ns=due_ns))
    assert nobody.hold_admission_until_ns == START_NS + 395_000_000


def test_fineinfer_decodes_alone_until_the_batch_is_empty():
    grant = make_policy("fineinfer").decide(
        BUSY._replace(waiting=2, waited_us=100_000), WORK, gpu()
    )
    assert (grant.action, grant.hold_admission_until_ns) == (Action.PAUSE, START_NS + 295_000_000)
    # Without work for the worker nobody waits for nothing.
    nobody = make_policy("fineinfer").decide(BUSY._replace(waiting=2), Offer(), gpu())
    assert nobody.hold_admission_until_ns == 0


def test_temporal_gives_the_time_before_the_step():
    grant = make_policy("temporal").decide(BUSY, WORK, gpu())
    assert (grant.action, grant.finetune_units, grant.decode_units) == (Action.GO, 132, 132)
    assert grant.gap_until_ns == START_NS + 10_000_000
    assert grant.predicted_us == 20_000
    assert grant.in_flight_bound_us == 5000
    # On a device that is shared in time only, without a split, it is the same.
    whole = gpu(levels=whole_levels(132), allowed=1, predicted_us=[10_000.0], solo_us=[10_000.0])
    assert make_policy("temporal").decide(BUSY, WORK, whole).gap_until_ns == START_NS + 10_000_000


@pytest.mark.parametrize(
    "changes",
    [
        {"gaps": False},
        {"idle_units": 0},
        {"solo_us": [20_000.0 - FIGURES["least_gap_us"] + 1, 1.0]},
        {"margin": 1.0},
    ],
)
def test_temporal_leaves_decode_alone_where_there_is_no_gap(changes):
    assert make_policy("temporal").decide(BUSY, WORK, gpu(**changes)).action == Action.PAUSE


def test_temporal_by_iterations_lets_the_one_that_has_begun_end():
    policy = make_policy("iterations")
    waits = IDLE._replace(waiting=1, waited_us=100_000)
    assert policy.decide(BUSY, WORK, gpu()).action == Action.PAUSE
    begun = policy.decide(waits, WORK, gpu())
    assert (begun.action, begun.hold_admission_until_ns) == (Action.GO, START_NS + 300_000_000)
    fresh = WORK._replace(phase=Phase.FORWARD, layer_begin=0)
    assert policy.decide(waits, fresh, gpu()).action == Action.PAUSE
    assert policy.decide(waits._replace(waited_us=400_000), WORK, gpu()).action == Action.PAUSE


def test_harli_has_its_45_pairs():
    levels = pair_levels(100)
    assert len(levels.splits) == 46
    # t = 50 ms / decode's share, 2% more for each tenth of the worker. Below 100 ms, closest: 6/10
    # for decode (83.3 ms) with four tenths for the worker, 83.3 x 1.08 = 90; at 5/10 with none over
    # 100 x 1.02 = 102.
    predicted = [
        50_000 / (s.decode_units / 100) * (1 + s.finetune_units / 500) for s in levels.splits
    ]
    ctx = gpu(levels=levels, allowed=46, predicted_us=predicted, solo_us=predicted)
    grant = make_policy("harli").decide(BUSY._replace(objective_us=100_000), WORK, ctx)
    assert (grant.finetune_units, grant.decode_units) == (40, 60)
    assert levels.splits[levels.index_of(40, 60)].decode_units == 60


def test_windrow_takes_a_part_of_the_step_where_no_share_fits_throughout():
    grant = make_policy("windrow").decide(BUSY, WORK, gpu(gaps=False))
    assert (grant.finetune_units, grant.budget_us, grant.predicted_us) == (66, 16_666, 20_000)
    # Four tasklets of 4,166 us fill it; three of the bound's 5 ms would leave 1.6 ms of it unused.
    assert grant.in_flight_bound_us == 4166
    # Where decode would be on fewer cores for the whole step, there are no parts.
    host = gpu(levels=host_levels(2), gaps=False)
    assert make_policy("windrow").decide(BUSY, WORK, host).action == Action.PAUSE


def test_windrow_takes_a_share_that_fits_until_such_steps_have_said_what_a_worker_costs():
    levels = overlapping_levels(132, (16, 120))
    known = {"levels": levels, "allowed": 3, "solo_us": [10_000.0] * 3}
    of_prior = gpu(**known, predicted_us=[10_000.0, 12_000.0, 25_000.0], gaps=False)
    assert make_policy("windrow").decide(BUSY, WORK, of_prior).finetune_units == 120
    untaught = make_policy("windrow").decide(BUSY, WORK, of_prior._replace(taught=False))
    assert (untaught.finetune_units, untaught.budget_us) == (16, 0)
    # Nothing fits throughout, so nothing can be learned either.
    none_fits = gpu(**known, predicted_us=[10_000.0, 24_000.0, 25_000.0], gaps=False, taught=False)
    assert make_policy("windrow").decide(BUSY, WORK, none_fits).budget_us > 0


@pytest.mark.parametrize(
    "levels", [host_levels(2), host_levels(8), overlapping_levels(132, (8, 64))]
)
def test_every_share_has_its_own_estimate(levels):
    shares = [s.finetune_units for s in levels.splits[1:]] + [levels.units]
    assert [levels.offered_index(units) for units in shares] == list(range(len(shares)))


def test_a_large_cpu_set_offers_estimates_for_the_shares_that_decode_grants():
    assert offered_levels(range(1, 65)) == (8, 16, 24, 32, 39, 47, 55, 63, 64)
    assert offered_levels((8, 16, 132)) == (8, 16, 132)
