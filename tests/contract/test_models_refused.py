"""A model that cannot be trained layer by layer is refused with the reason."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoTokenizer
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from windrow.crd import DatasetSpec
from windrow.errors import UserError
from windrow_sidecar.engine_facts import AdapterLimits
from windrow_sidecar.finetune.adapter.adapters import add_adapter, trainable
from windrow_sidecar.finetune.adapter.served import not_served
from windrow_sidecar.finetune.job.assembly import JobSpec, read_examples
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.model.loading import BaseModel, _check_kind
from windrow_sidecar.finetune.model.loss import Head
from windrow_sidecar.finetune.model.structure import find_layers, record
from windrow_sidecar.testing.architectures import random_model
from windrow_sidecar.testing.equality import small_spec
from windrow_sidecar.testing.models import save_byte_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

REFUSED = {
    "Llama4Text": ({"num_hidden_layers": 0}, "no single list of 0 layers", "one stack of layers"),
    "Mixtral": ({"output_router_logits": True}, "its loss adds", "output_router_logits to false"),
    "OPT": ({"layerdrop": 0.1}, "it leaves out layers at random", "layerdrop to 0"),
}


@pytest.mark.parametrize("architecture", REFUSED)
def test_an_architecture_that_is_no_plain_stack_is_refused_by_name(architecture):
    options, why, remedy = REFUSED[architecture]
    model = random_model(architecture, **options)
    with pytest.raises(UserError) as refused:
        Head(DecoderStack(model))
    assert refused.value.field == "spec.model.name"
    assert refused.value.reason == "ModelUnsupported"
    assert why in refused.value.problem
    assert remedy in refused.value.remedy


def test_logits_that_are_not_made_of_the_last_hidden_states_are_refused():
    model = random_model("Llama")
    makes = model.forward

    def with_a_memory(input_ids, **options):
        out = makes(input_ids=input_ids, **options)
        out.logits += model.lm_head(model.get_decoder().embed_tokens(input_ids))
        return out

    stack = DecoderStack(model)
    model.forward = with_a_memory
    with pytest.raises(UserError, match="not made of its last hidden states alone"):
        Head(stack)


def infinite_norm(model):
    model.model.norm.weight.data[0] = torch.inf


def epsilon_of_nan(model):
    model.model.norm.variance_epsilon = float("nan")


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (infinite_norm, "model.norm.weight holds numbers that are not finite. Copy the model"),
        (epsilon_of_nan, "its logits are not finite. Look for numbers in its config.json"),
    ],
)
def test_a_model_that_computes_no_numbers_is_told_with_what_makes_it(breaks, words):
    model = random_model("Llama")
    breaks(model)
    with pytest.raises(UserError, match=words):
        Head(DecoderStack(model))


class Noisy(nn.Embedding):
    """Adds noise while it trains, by no dropout."""

    def forward(self, ids):
        return super().forward(ids) + torch.randn(self.embedding_dim) * self.training


def test_embeddings_that_change_at_random_but_not_by_a_dropout_are_refused():
    model = random_model("Llama")
    noisy = Noisy(96, 32)
    noisy.weight = model.get_input_embeddings().weight
    model.set_input_embeddings(noisy)
    with pytest.raises(UserError, match="changes what its first layer reads at random"):
        DecoderStack(model)


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


def test_a_row_and_its_prefix_fit_the_models_positions_together(tmp_path):
    model = random_model("OPT")  # 128 positions, which are learned
    save_byte_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    base = BaseModel(model, model.config, tokenizer, shared=False)
    base.config.vocab_size = len(tokenizer)

    def rows(letters):
        (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "a" * letters}) + "\n")
        return read_examples(job, base).train

    spec = small_spec({"type": "prefix", "prefix": {"virtualTokens": 16}}).model_copy(
        update={
            "dataset": DatasetSpec(
                source=str(tmp_path / "rows.jsonl"), format="text", eval_fraction=0.0
            )
        }
    )
    job = JobSpec("default", "j", "j", 1, spec)
    longest = 128 - 16
    extra = rows(2)[0].length - 2  # what the tokenizer puts around
    assert rows(longest - extra)[0].length == longest
    with pytest.raises(UserError, match=r"virtualTokens takes 16\. Set it to 112 or less"):
        rows(longest - extra + 1)


def test_memory_that_is_short_while_a_model_is_asked_is_no_fault_of_the_model():
    model = random_model("Llama")

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model.get_decoder().forward = full
    with pytest.raises(torch.OutOfMemoryError):
        DecoderStack(model)


def composites() -> list[str]:
    """Every type of transformers that is made of several models and has a causal language model."""
    return [
        kind
        for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if kind in CONFIG_MAPPING and getattr(CONFIG_MAPPING[kind], "sub_configs", None)
    ]


def named_by_checkpoints(kind: str) -> str:
    """The class that a published checkpoint of a type names in its config.json."""
    of = (MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    found = next((names[kind] for names in of if kind in names), None)
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    whole = causal.replace("ForCausalLM", "ForConditionalGeneration")
    return found or (whole if hasattr(transformers, whole) else causal)


@pytest.mark.parametrize("kind", composites())
def test_a_model_is_trained_as_the_class_that_its_config_names_or_refused(kind, tmp_path):
    config = CONFIG_MAPPING[kind].__new__(CONFIG_MAPPING[kind])
    config.architectures = [named_by_checkpoints(kind)]
    trained = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__
    if config.architectures == [trained] and not models_of(config):
        _check_kind(tmp_path, config)
        return
    with pytest.raises(UserError) as refused:
        _check_kind(tmp_path, config)
    assert refused.value.field == "spec.model.name"
    assert config.architectures[0] in refused.value.problem


def models_of(config) -> set[str]:
    """The models beside the text's that a configuration is made of."""
    return config.sub_configs.keys() - {"text_config", "attn_config", "ffn_config"}


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe", "llama4", "mllama", "emu3"])
def test_the_text_half_of_a_composite_checkpoint_is_refused_with_the_reason(kind, tmp_path):
    config = CONFIG_MAPPING[kind].__new__(CONFIG_MAPPING[kind])
    config.architectures = [named_by_checkpoints(kind)]
    with pytest.raises(UserError, match="servers would ignore it") as refused:
        _check_kind(tmp_path, config)
    assert MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__ in refused.value.remedy


@pytest.mark.parametrize("kind", ["mpt", "dbrx"])
def test_parts_of_a_layer_make_no_model_of_several(kind, tmp_path):
    config = CONFIG_MAPPING[kind]()
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]
    _check_kind(tmp_path, config)


def test_experts_that_lie_in_one_tensor_are_not_to_be_loaded_into_servers():
    """Servers pass over the names that peft gives parts of a tensor."""

    def refused(targets, **output):
        lora = {"rank": 2, "alpha": 4, "targetModules": targets}
        spec = small_spec({"lora": lora})
        named = {"destination": "/out", **output}
        output = type(spec.output).model_validate(named)
        tuned = add_adapter(random_model("Qwen3Moe"), spec)
        return not_served(tuned, spec.model_copy(update={"output": output}))

    deployed = {"deploy": {"enabled": True}}
    found = refused("q_proj,down_proj", **deployed)
    assert found is not None
    assert found.field == "spec.adapter.lora.targetModules"
    assert refused("q_proj,down_proj") is None
    assert refused("q_proj,v_proj", **deployed) is None


@pytest.mark.parametrize(
    ("model", "targets", "lacking"),
    [
        ("Llama", "q_proj,k_proj,v_proj", None),
        ("Llama", "q_proj,v_proj,gate_proj,down_proj", None),
        ("Llama", "o_proj,down_proj", None),
        ("Llama", "q_proj", "q_proj only together with v_proj. Name v_proj as well"),
        ("Llama", "k_proj,v_proj", "k_proj and v_proj only together with q_proj. Name q_proj"),
        ("Llama", "k_proj", "k_proj only together with q_proj and v_proj"),
        ("Llama", "up_proj,down_proj", "up_proj only together with gate_proj. Name gate_proj"),
        ("Nemotron", "up_proj,down_proj", None),
        ("DeepseekV3", "q_a_proj,kv_a_proj_with_mqa", None),
        ("DeepseekV3", "q_a_proj", "q_a_proj only together with kv_a_proj_with_mqa. Name"),
    ],
)
def test_modules_that_servers_compute_as_one_are_to_be_adapted_together(model, targets, lacking):
    """See tests/sglang/test_sglang_adapters.py for what SGLang's loader makes of these."""
    lora = {"rank": 2, "alpha": 4, "targetModules": targets}
    spec = small_spec({"lora": lora})
    named = {"destination": "/out", "deploy": {"enabled": True}}
    deployed = spec.model_copy(update={"output": type(spec.output).model_validate(named)})
    tuned = add_adapter(random_model(model), spec)
    assert not_served(tuned, spec) is None
    found = not_served(tuned, deployed)
    assert (lacking in str(found)) if lacking else (found is None)


@pytest.mark.parametrize(
    ("limits", "field", "problem"),
    [
        (AdapterLimits(), "", ""),
        (AdapterLimits(rank=4, targets=("k_proj", "o_proj")), "", ""),
        (AdapterLimits(rank=3), "spec.adapter.lora.rank", "rank 3 at most, and this has 4"),
        (
            AdapterLimits(targets=("gate_proj", "o_proj")),
            "spec.adapter.lora.targetModules",
            "loads adapters of gate_proj and o_proj, and this has q_proj and v_proj",
        ),
        (AdapterLimits(off=True), "spec.output.deploy", "loads no adapters. Start it with"),
    ],
)
def test_what_the_server_beside_would_not_load_is_refused_before_it_is_trained(
    limits, field, problem
):
    """SGLang's pool of adapters refuses a larger rank, and targets that were not named."""
    lora = {"rank": 2, "alpha": 4, "targetModules": "q_proj,v_proj", "rankPattern": {"v_proj": 4}}
    spec = small_spec({"lora": lora})
    named = {"destination": "/out", "deploy": {"enabled": True}}
    deployed = spec.model_copy(update={"output": type(spec.output).model_validate(named)})
    tuned = add_adapter(random_model("Llama"), spec)
    assert not_served(tuned, spec, limits) is None
    found = not_served(tuned, deployed, limits)
    assert (found.field if found else "") == field
    assert problem in str(found or "")


def test_an_embedding_is_told_by_what_it_is_not_by_its_name():
    model = random_model("Llama")
    layer = model.get_decoder().layers[0].mlp
    layer.embedder = nn.Linear(32, 32, bias=False)
    makes = layer.forward
    layer.forward = lambda hidden: layer.embedder(makes(hidden))
    tuned = add_adapter(model, small_spec({"lora": {"targetModules": "embedder"}}))
    assert all("embedder" in name for name in trainable(tuned))
    with pytest.raises(UserError, match="is the embedding, which is frozen"):
        add_adapter(random_model("Llama"), small_spec({"lora": {"targetModules": "embed_tokens"}}))
    pattern = {"targetPattern": ".*embed_tokens"}
    with pytest.raises(UserError, match="is an embedding, and those are frozen"):
        add_adapter(random_model("Qwen2"), small_spec({"lora": pattern}))
