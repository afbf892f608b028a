"""Judge what SGLang's loader makes of adapters by the loader: which modules it needs together."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def loaded(tmp_path_factory, programs) -> dict[str, object]:
    """Return, by targets, which weights have a place on the server, or the loader's error."""
    log = tmp_path_factory.mktemp("adapters") / "log"
    program = Path(__file__).parent / "adapter_process.py"
    with log.open("wb") as output:
        code = programs.run([str(program)], os.environ, output, timeout_s=300)
    assert code == 0, log.read_text()[-4000:]
    return dict(json.loads(log.read_text().splitlines()[-1]))


@pytest.mark.parametrize(
    "targets",
    ["q_proj k_proj v_proj", "q_proj v_proj", "gate_proj", "gate_proj up_proj", "o_proj"],
)
def test_whole_adapters_have_a_place(loaded, targets):
    assert loaded[targets] == {"placed": True}


@pytest.mark.parametrize("targets", ["q_proj", "q_proj k_proj"])
def test_queries_without_values_are_refused_by_a_key(loaded, targets):
    assert "v_proj" in loaded[targets]["error"]


@pytest.mark.parametrize("targets", ["k_proj v_proj", "k_proj", "v_proj", "up_proj down_proj"])
def test_weights_of_parts_have_no_place_and_end_a_server_at_the_first_request(loaded, targets):
    """The server looks for the place of each weight while a batch waits, and finds none."""
    assert loaded[targets] == {"placed": False}


def test_experts_that_lie_in_one_tensor_have_no_place_and_single_ones_have(loaded):
    assert loaded["experts as peft writes them"] == {"placed": False}
    assert loaded["experts one by one"] == {"placed": True}
