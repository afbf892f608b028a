"""A slot over several GPUs in the simulator: what is cut, what is exchanged, what stays alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from windrow.errors import UserError
from windrow_simulator.hardware import gpu_named, model_named
from windrow_simulator.run import simulate
from windrow_simulator.scenario import SimulationSettings, build
from windrow_simulator.truth import ROWS_TOGETHER, Assumptions, RooflineTruth

H100, LLAMA = gpu_named("H100"), model_named("llama-3-8b")
SMALL = SimulationSettings(
    rates="published",
    gpu="H100",
    gpus=1,
    seconds=4.0,
    warm_up=1.0,
    rate=4.0,
    policy="windrow",
    objectives_ms=(15.0,),
    processes=1,
)


def test_the_parts_of_a_model_add_up_to_it():
    for ranks in (2, 4, 8):
        part = LLAMA.cut(ranks)
        assert ranks * part.step_parameters == LLAMA.step_parameters
        assert ranks * part.weight_bytes == LLAMA.weight_bytes
        assert ranks * part.kv_token_bytes == LLAMA.kv_token_bytes
        assert part.boundary_bytes_per_token == LLAMA.boundary_bytes_per_token  # whole on each
    assert LLAMA.cut(1) == LLAMA


def test_ranks_that_cannot_share_the_key_value_heads_are_refused():
    with pytest.raises(UserError, match="8 key-value heads of llama-3-8b"):
        LLAMA.cut(3)
    with pytest.raises(UserError, match="4 key-value heads"):
        build(replace(SMALL, model="qwen2.5-7b", ranks=8))


def test_a_step_over_two_gpus_takes_half_of_its_reads_and_two_all_reduces_a_layer():
    part, assumed = LLAMA.cut(2), Assumptions()
    alone, both = RooflineTruth(H100, LLAMA, LLAMA), RooflineTruth(H100, part, part, ranks=2)
    read_us = alone.step_us(8, 8192, H100.sms, 0) - assumed.overhead_us
    # Ring: each GPU sends and receives half of two bytes for each unit of a row, twice.
    bytes_us = 2 * 8 * 4096 * 2 / 2 / (H100.peer_gb_s * 1e3)
    exchanged_us = 2 * LLAMA.layers * (assumed.reduce_us + bytes_us)
    expected_us = assumed.overhead_us + read_us / 2 + exchanged_us
    assert both.step_us(8, 8192, H100.sms, 0) == pytest.approx(expected_us, rel=1e-12)


def test_a_worker_over_two_gpus_is_twice_as_fast_less_its_four_all_reduces_a_layer():
    part, assumed = LLAMA.cut(2), Assumptions()
    alone, both = RooflineTruth(H100, LLAMA, LLAMA), RooflineTruth(H100, part, part, ranks=2)
    row_us = 2 * 4096 * 2 / 2 / (H100.peer_gb_s * 1e3)
    exchanged_us = 4 * LLAMA.layers * (row_us + assumed.reduce_us / ROWS_TOGETHER)
    expected = 1 / (1 / (2 * alone.dedicated_rate) + exchanged_us)
    assert both.dedicated_rate == pytest.approx(expected, rel=1e-12)
    assert both.exchange_share == pytest.approx(exchanged_us * expected, rel=1e-12)
    assert alone.exchange_share == 0


def test_a_group_is_simulated_as_a_slot_whose_price_is_that_of_all_its_gpus():
    one, two = build(SMALL), build(replace(SMALL, ranks=2))
    assert two.price == 2 * one.price
    assert two.geometry.slots_per_chunk == 2 * one.geometry.slots_per_chunk
    _, ours = simulate(two)
    assert ours.tokens > 0
    assert ours.steps > 0
