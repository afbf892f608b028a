"""Models that mix attention with layers that carry a state: exact in whole rows, not in windows."""

from __future__ import annotations

import copy

import pytest

from windrow_sidecar.finetune.engine.sizing import Windows
from windrow_sidecar.finetune.job.packing import packing_refused
from windrow_sidecar.finetune.model.capabilities import one_of_each_kind
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.testing.architectures import random_model
from windrow_sidecar.testing.equality import (
    Cut,
    our_gradients,
    pefts_gradients,
    small_rows,
    small_spec,
    tuned_model,
)
from windrow_sidecar.testing.rounding import apart, in_type_of

# The first layer is one of attention, so that it says nothing about the second.
HYBRIDS = {
    "Lfm2": {"layer_types": ["full_attention", "conv", "full_attention"]},
    "Jamba": {
        "attn_layer_offset": 0,
        "attn_layer_period": 2,
        "expert_layer_offset": 98,
        "expert_layer_period": 99,
    },
    "Qwen3Next": {
        "layer_types": ["full_attention", "linear_attention", "full_attention"],
        "mlp_only_layers": [0, 1, 2],
    },
}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_a_hybrid_is_cut_neither_into_windows_nor_packed_and_is_exact_in_whole_rows(architecture):
    lora = {"lora": {"rank": 4, "targetModules": "q_proj"}}
    model = random_model(architecture, **HYBRIDS[architecture]).double()
    tuned = tuned_model(model, small_spec(lora))
    with in_type_of(tuned):
        stack = DecoderStack(tuned.get_base_model())
        assert packing_refused(stack) == "in layer 1 a row sees the one before it"
    assert stack.windows_refused == (
        "layer 1 looks at tokens other than by transformers' attention functions"
    )

    theirs = pefts_gradients(tuned, small_rows())
    off = apart(our_gradients(copy.deepcopy(tuned), small_rows(), Cut()), theirs)
    assert off.by_rounding
    # Were it not refused, nobody would notice.
    wrong = apart(our_gradients(tuned, small_rows(), Cut(Windows(7))), theirs)
    assert not wrong.by_rounding


def test_one_layer_of_each_kind_is_tried():
    assert one_of_each_kind(DecoderStack(random_model("Gemma3Text")).layers) == [0]
    hybrid = random_model("Lfm2", **HYBRIDS["Lfm2"])
    assert one_of_each_kind(hybrid.get_decoder().layers) == [0, 1]
