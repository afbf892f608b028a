"""SGLang's command line says which adapters it loads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from windrow.proto import agent_pb2
from windrow_sidecar.engine_facts import NO_LIMITS, AdapterLimits, EngineFacts
from windrow_sidecar.engines.sglang.adapters import adapter_limits


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({}, AdapterLimits(off=True)),
        ({"enable_lora": False}, AdapterLimits(off=True)),
        (
            {"enable_lora": True, "max_lora_rank": 16, "lora_target_modules": {"v_proj", "q_proj"}},
            AdapterLimits(rank=16, targets=("q_proj", "v_proj")),
        ),
        (
            {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": {"all"}},
            AdapterLimits(rank=8),
        ),
        ({"enable_lora": True, "lora_paths": ["a=/a"], "max_lora_rank": 8}, NO_LIMITS),
    ],
)
def test_the_limits_are_those_of_the_command_line(args, expected):
    plain = {"enable_lora": None, "max_lora_rank": None, "lora_target_modules": None}
    said = adapter_limits(SimpleNamespace(**{**plain, "lora_paths": None, **args}))
    hello = agent_pb2.EngineHello(adapters=said)
    assert EngineFacts.of_hello(hello).adapters == expected


def test_an_engine_that_says_nothing_of_adapters_has_no_limits():
    assert EngineFacts.of_hello(agent_pb2.EngineHello()).adapters == NO_LIMITS
    assert EngineFacts.of_hello(None) == EngineFacts.of_document(None) == EngineFacts()
