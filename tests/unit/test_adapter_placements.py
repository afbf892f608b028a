"""The matrices of an adapter behind a cut weight are where they cost least of all placements."""

from __future__ import annotations

import pytest

from windrow_sidecar.finetune.tensor_parallel.placements import (
    CHOSEN,
    AdapterPlacement,
    Held,
    Sizes,
    WeightCut,
    placements,
    traffic,
)

# (inputs, outputs): Llama 3 8B's q, k, gate and down, a square one of a 70B.
WEIGHTS = [(4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096), (8192, 8192)]


@pytest.mark.parametrize("base", WeightCut)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("rank", [1, 16, 64, 256])
@pytest.mark.parametrize(("inputs", "outputs"), WEIGHTS)
def test_the_chosen_placement_sends_least_where_a_step_has_as_many_tokens_as_the_weight_is_wide(
    base, ranks, rank, inputs, outputs
):
    """Gradients of a whole matrix are sent once a step, activations for each token of it."""
    whole = inputs if base is WeightCut.COLUMN else outputs
    for tokens in (whole, 4 * whole):
        sizes = Sizes(tokens, rank, inputs, outputs, ranks)
        costs = {at: traffic(base, at, sizes).total_bytes for at in placements()}
        assert costs[CHOSEN[base]] == min(costs.values())


@pytest.mark.parametrize("base", WeightCut)
def test_no_placement_sends_fewer_activations_than_the_chosen_one(base):
    sizes = Sizes(2048, 16, 4096, 14336, 4)
    assert traffic(base, CHOSEN[base], sizes).activation_bytes == 0
    others = [
        traffic(base, at, sizes).activation_bytes for at in placements() if at != CHOSEN[base]
    ]
    assert len(others) == 8
    assert base is WeightCut.COLUMN or all(others)


def test_a_step_of_fewer_tokens_than_the_weight_is_wide_has_a_cheaper_placement_in_bytes():
    """The cheaper one sends messages for each layer and micro-batch, the chosen one one a step."""
    sizes = Sizes(tokens=512, rank=16, inputs=4096, outputs=4096, ranks=4)
    by_rank = AdapterPlacement(Held.RANK, Held.OUT)
    chosen = traffic(WeightCut.COLUMN, CHOSEN[WeightCut.COLUMN], sizes)
    assert traffic(WeightCut.COLUMN, by_rank, sizes).total_bytes < chosen.total_bytes
    assert chosen.activation_bytes == 0


def test_bytes_are_those_of_a_ring():
    sizes = Sizes(tokens=1000, rank=16, inputs=4096, outputs=1024, ranks=4)
    ring = 2 * (4 - 1) / 4 * 2  # all-reduce of two bytes each
    assert (
        traffic(WeightCut.COLUMN, CHOSEN[WeightCut.COLUMN], sizes).gradient_bytes
        == ring * 16 * 4096
    )
    assert traffic(WeightCut.ROW, CHOSEN[WeightCut.ROW], sizes).gradient_bytes == ring * 16 * 1024
    by_rank = traffic(WeightCut.COLUMN, AdapterPlacement(Held.RANK, Held.OUT), sizes)
    assert (by_rank.activation_bytes, by_rank.gradient_bytes) == (ring * 1000 * 16, 0)
    gathered = traffic(WeightCut.ROW, AdapterPlacement(Held.WHOLE, Held.WHOLE), sizes)
    assert gathered.activation_bytes == ring * 1000 * 4096


def test_one_rank_sends_nothing():
    sizes = Sizes(1000, 16, 4096, 1024, 1)
    for base in WeightCut:
        assert all(traffic(base, at, sizes).total_bytes == 0 for at in placements())
