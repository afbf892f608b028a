"""Every kind of adapter over layers that take turns in memory: begins and learns as over all."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

from windrow.errors import UserError
from windrow_sidecar.finetune.adapter.adapters import add_adapter, trainable
from windrow_sidecar.finetune.engine.sizing import Windows
from windrow_sidecar.finetune.model.around import InTurn
from windrow_sidecar.finetune.model.structure import find_layers
from windrow_sidecar.finetune.model.windowed import load_windowed
from windrow_sidecar.finetune.recompute.checkpointed_layers import PlannedLayers
from windrow_sidecar.testing.architectures import random_model
from windrow_sidecar.testing.equality import (
    Cut,
    our_gradients,
    pefts_gradients,
    small_rows,
    small_spec,
    tuned_model,
)
from windrow_sidecar.testing.rounding import apart
from windrow_sidecar.testing.tinyjob import bit_equal

ADAPTERS = {
    "lora": {"lora": {"rank": 4, "dropout": 0.3}},
    "dora": {"lora": {"rank": 4, "useDora": True}},
    "dora on some": {"lora": {"rank": 4, "useDora": True, "layersToTransform": [1]}},
    "norms": {"lora": {"rank": 4, "modulesToSave": "norm,input_layernorm"}},
    "a projection": {"lora": {"rank": 4, "targetModules": "q_proj", "modulesToSave": "up_proj"}},
    "ia3": {"type": "ia3"},
    "prefix": {"type": "prefix"},
}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    random_model("Llama").double().save_pretrained(folder)
    return folder


@pytest.fixture
def windowed(checkpoint):
    config = AutoConfig.from_pretrained(checkpoint)
    model, frozen = load_windowed(checkpoint, config, room_bytes=10**9, dtype=torch.float64)
    frozen.resize(1)
    yield model, frozen
    frozen.close()


@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
def test_an_adapter_over_layers_that_take_turns_equals_one_over_the_whole(windowed, adapter):
    model, frozen = windowed
    spec = small_spec(adapter)
    whole = tuned_model(random_model("Llama").double(), spec)
    tuned = tuned_model(model, spec, frozen)
    assert bit_equal(trainable(tuned), trainable(whole))

    planned = PlannedLayers(find_layers(model.get_decoder(), model.config))
    planned.bytes_per_token = 0
    cut = Cut(Windows(7), around_layer=InTurn(frozen, planned))
    off = apart(our_gradients(tuned, small_rows(), cut), pefts_gradients(whole, small_rows()))
    assert off.by_rounding


def test_a_base_that_is_not_finite_where_the_adapter_begins_is_refused_by_name():
    model = random_model("Llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.inf
    spec = small_spec({"lora": {"rank": 4, "modulesToSave": "up_proj"}})
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj") as refused:
        add_adapter(model, spec)
    assert refused.value.field == "spec.model.name"
    assert add_adapter(random_model("Llama"), spec) is not None
