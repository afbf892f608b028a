"""Architectures of public recipes that count as harvested: gradients equal those of peft.

Apart from the further ones, which are held to more: these are ordinary lists of layers.
"""

from __future__ import annotations

import copy

import pytest

from benchmarks import coverage
from windrow_sidecar.testing.architectures import ARCHITECTURES, FURTHER, SERVED, random_model
from windrow_sidecar.testing.equality import (
    Cut,
    our_gradients,
    pefts_gradients,
    small_rows,
    small_spec,
    tuned_model,
)
from windrow_sidecar.testing.rounding import apart

# Held to peft elsewhere: test_coded_weights, test_hybrid_layers; a name of its own for the text.
_ELSEWHERE = {"DeepseekV2", "Qwen3Next", "Gemma3"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("architecture", SERVED)
def test_gradients_equal_those_of_peft(architecture):
    tuned = tuned_model(random_model(architecture).double(), small_spec())
    theirs = pefts_gradients(copy.deepcopy(tuned), small_rows())
    # A row at a time, where peft has all rows in one batch.
    assert apart(our_gradients(tuned, small_rows(), Cut(max_tokens=1)), theirs).by_rounding


def test_what_counts_as_harvested_is_held_to_peft():
    counted = {name.removesuffix("ForCausalLM") for name in coverage.POOLS}
    assert counted <= {*ARCHITECTURES, *FURTHER, *SERVED, *_ELSEWHERE}


@pytest.mark.parametrize(
    ("name", "architecture", "options", "harvested"),
    [
        ("vicuna-7b-rt", "LlamaForCausalLM", {}, True),
        ("vicuna-7b-rt", "LlamaForCausalLM", {"is-embedding": True}, False),
        ("gte-qwen2-7b-instruct-rt", "Qwen2ForCausalLM", {}, False),
        ("nemotron-ultra-253b-rt", "LlamaForCausalLM", {}, False),
        ("qwen2-vl-7b-rt", "Qwen2VLForConditionalGeneration", {}, False),
        ("llama-rt", "LlamaForCausalLM", {"quantization": "w4afp8"}, False),
        ("llama-rt", "LlamaForCausalLM", {"kv-cache-dtype": "fp4_e2m1"}, False),
    ],
)
def test_a_runtime_counts_by_the_architecture_that_it_declares(
    name, architecture, options, harvested
):
    pool = coverage.pool_of(name, architecture, options)
    found = coverage.Deployment(pool, over_ranks=False, precision="", options=options)
    assert (coverage.refusal(found, "ignored") == "") == harvested
