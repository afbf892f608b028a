"""Arena sizes follow from the model, and what does not fit is refused with what would."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from windrow.errors import UserError
from windrow_sidecar.cgroup import CgroupLimits
from windrow_sidecar.memory.geometry import KvShape, geometry_for, require_memory

SHAPE = KvShape(layers=6, kv_heads=4, head_dim=32, dtype_bytes=4)
MIB = 1 << 20


def test_the_demos_arena_has_128_chunks_of_256_tokens():
    geometry = geometry_for(SHAPE, block_bytes=128 * 1024, arena_bytes=192 * MIB)
    assert (geometry.chunks, geometry.slots_per_chunk) == (128, 256)


def test_the_shape_is_read_from_a_transformers_configuration():
    config = SimpleNamespace(
        num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4, hidden_size=256
    )
    assert KvShape.from_config(config, dtype_bytes=4) == SHAPE
    config.head_dim, config.num_key_value_heads = 64, None
    assert KvShape.from_config(config, dtype_bytes=2) == KvShape(6, 8, 64, 2)


def test_a_block_that_does_not_divide_is_answered_with_one_that_does():
    with pytest.raises(UserError, match="Use a multiple of 4096: 4096 or 8192") as error:
        geometry_for(SHAPE, block_bytes=5000, arena_bytes=192 * MIB)
    assert error.value.field == "block_bytes"


def test_the_block_suits_token_and_page_at_once():
    odd = KvShape(layers=2, kv_heads=3, head_dim=32, dtype_bytes=4)
    with pytest.raises(UserError, match="multiple of 12288: 12288 or 24576"):
        geometry_for(odd, block_bytes=16384, arena_bytes=192 * MIB)


def test_a_budget_below_two_chunks_says_how_much_is_needed():
    with pytest.raises(UserError, match="at least 3145728 bytes") as error:
        geometry_for(SHAPE, block_bytes=128 * 1024, arena_bytes=2 * MIB)
    assert error.value.reason == "ArenaTooSmall"


def test_an_arena_beyond_the_control_groups_memory_is_refused():
    limits = CgroupLimits(cpus=None, memory_bytes=100 * MIB)
    require_memory(75 * MIB, limits=limits)
    with pytest.raises(UserError, match="the control group allows 104857600"):
        require_memory(75 * MIB + 1, limits=limits)


def test_an_arena_beyond_the_machines_memory_is_refused():
    with pytest.raises(UserError, match="the machine has"):
        require_memory(1 << 60, limits=CgroupLimits(cpus=None, memory_bytes=None))
