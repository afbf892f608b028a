"""Every arm has the same bytes, and what its trainer holds is missing from decode's."""

from pathlib import Path

from windrow_lab.compare import baselines

MIB = 1 << 20
MODEL = Path(__file__).parents[2] / "models" / "windrow-tiny"


def test_decode_keeps_three_fifths_beside_a_plain_loop_and_the_rest_is_what_that_holds():
    parts = baselines.memory(loop_bytes=200 * MIB, own_worker_bytes=50 * MIB)
    assert parts == {
        "device": 500 * MIB,
        "alone": 500 * MIB,
        "loop": 300 * MIB,
        "policy": 450 * MIB,
    }


def test_tokens_of_an_arena_are_those_of_the_models_kv():
    # 6 layers, K and V, 4 heads of 32 numbers of 4 bytes.
    assert baselines.kv_tokens(6144 * 1000 + 5, MODEL) == 1000


def test_the_loop_that_stands_beside_decode_is_one_of_those_that_are_tried():
    assert baselines.BESIDE_DECODE in baselines.TRIED
