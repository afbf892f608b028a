"""A model that cannot be trained layer by layer is refused with the reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from windrow.errors import UserError
from windrow_sidecar.finetune.base.structure import find_layers, record
from windrow_sidecar.finetune.layers.layerwise import DecoderStack
from windrow_sidecar.finetune.layers.loss import Head
from windrow_sidecar.testing.architectures import random_model

pytestmark = pytest.mark.usefixtures("one_thread")

REFUSED = {
    # Takes the first of what a layer returns, also of one that returns a tensor.
    "Bloom": ({}, "fails when its layers are called one by one (Given normalized_shape"),
    "GPT2": ({"n_embd": 32, "n_layer": 3, "n_head": 2}, "no single norm stands between"),
    "Cohere": ({}, "more than a norm and a head make its logits"),
    "Llama4Text": ({"num_hidden_layers": 0}, "no single list of 0 layers"),
}


@pytest.mark.parametrize("architecture", REFUSED)
def test_an_architecture_that_is_no_plain_stack_is_refused_by_name(architecture):
    options, why = REFUSED[architecture]
    model = random_model(architecture, **options)
    with pytest.raises(UserError) as refused:
        Head(DecoderStack(model))
    assert refused.value.field == "spec.model.name"
    assert refused.value.reason == "ModelUnsupported"
    assert why in refused.value.problem


def test_layers_in_two_lists_are_refused():
    model = random_model("Llama")
    decoder = model.get_decoder()
    decoder.more_layers = nn.ModuleList(nn.Identity() for _ in decoder.layers)
    with pytest.raises(UserError, match="no single list of 3 layers"):
        find_layers(decoder, decoder.config)


def test_a_layer_that_is_never_called_is_refused():
    decoder = random_model("Llama").get_decoder()
    layers = list(decoder.layers)
    decoder.layers = nn.ModuleList(layers[:-1])
    with pytest.raises(UserError, match="2 of 3 layers are called"):
        record(decoder, layers, torch.arange(6)[None])


def test_memory_that_is_short_while_a_model_is_asked_is_no_fault_of_the_model():
    model = random_model("Llama")

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model.get_decoder().forward = full
    with pytest.raises(torch.OutOfMemoryError):
        DecoderStack(model)
