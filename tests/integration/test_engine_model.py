"""The engine's forward pass against transformers' own, from the same random checkpoint."""

from __future__ import annotations

import random

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.decode_bench import DecodeBench

from windrow.errors import UserError
from windrow_sidecar.engines.builtin.llama.config import read_config
from windrow_sidecar.engines.builtin.llama.weights import load_weights, plan_layout
from windrow_sidecar.engines.fingerprint import model_fingerprint
from windrow_sidecar.testing.models import save_random_llama
from windrow_sidecar.testing.rounding import LogitDistances

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(
    params=[
        pytest.param({}, id="tied"),
        pytest.param({"tie_word_embeddings": False, "num_key_value_heads": 8}, id="untied-mha"),
        pytest.param({"rope_parameters": LLAMA3_ROPE}, id="llama3-rope"),
    ]
)
def checkpoint(request, tmp_path):
    return tmp_path, save_random_llama(tmp_path, **request.param)


@pytest.mark.equality
@torch.inference_mode()
def test_decode_of_a_mixed_batch_equals_transformers_at_every_step(checkpoint):
    folder, reference = checkpoint
    engine = DecodeBench(folder)
    rng = random.Random(1)
    prompts = [[rng.randrange(264) for _ in range(n)] for n in (1, 16, 33, 130)]
    kvs = [engine.sequence(len(prompt) + 20) for prompt in prompts]
    for prompt, kv in zip(prompts, kvs, strict=True):
        for begin in range(0, len(prompt) - 1, 48):
            engine.model.prefill(prompt[begin : min(begin + 48, len(prompt) - 1)], kv)
    found = [[] for _ in prompts]
    for _ in range(20):
        logits = engine.decode([prompt[-1] for prompt in prompts], kvs)
        for of_one, prompt, row in zip(found, prompts, logits, strict=True):
            of_one.append(row)
            prompt.append(int(row.argmax()))
    for of_one, prompt in zip(found, prompts, strict=True):
        distances = LogitDistances(reference)
        distances.add(prompt[:-1], of_one)
        assert distances.equal


@torch.inference_mode()
def test_prefill_in_pieces_writes_the_same_cache_as_prefill_in_one_go(checkpoint):
    folder, reference = checkpoint
    tokens = [random.Random(2).randrange(264) for _ in range(110)]
    for piece in (99, 7):
        engine, distances = DecodeBench(folder), LogitDistances(reference)
        kv = engine.sequence(len(tokens))
        for begin in range(0, 99, piece):
            engine.model.prefill(tokens[begin : min(begin + piece, 99)], kv)
        distances.add(tokens, [engine.decode([token], [kv])[0] for token in tokens[99:]])
        assert distances.equal


@torch.inference_mode()
def test_a_request_gets_the_same_logits_whatever_runs_beside_it(tmp_path):
    reference = save_random_llama(tmp_path)
    tokens = [random.Random(4).randrange(264) for _ in range(60)]
    for others in (0, 1, 7):
        engine, distances = DecodeBench(tmp_path), LogitDistances(reference)
        kvs = [engine.sequence(60) for _ in range(others + 1)]
        for i, kv in enumerate(kvs):
            engine.model.prefill([(t + i) % 264 for t in tokens[:49]], kv)
        found = [
            engine.decode([(token + i) % 264 for i in range(others + 1)], kvs)[0]
            for token in tokens[49:]
        ]
        distances.add(tokens, found)
        assert distances.equal


@torch.inference_mode()
def test_a_filled_request_decodes_to_finite_logits_and_leaves_its_neighbour_alone(tmp_path):
    distances = LogitDistances(save_random_llama(tmp_path))
    engine = DecodeBench(tmp_path)
    prefilled, filled = engine.sequence(50), engine.sequence(50)
    engine.model.prefill(list(range(39)), prefilled)
    engine.cache.fill(filled, 39)
    tokens = list(range(200, 210))
    found = [engine.decode([token, token], [prefilled, filled]) for token in tokens]
    assert torch.isfinite(torch.stack(found)).all()
    distances.add([*range(39), *tokens], [logits[0] for logits in found])
    assert distances.equal


def test_bf16_checkpoints_are_computed_in_fp32(tmp_path):
    model = save_random_llama(tmp_path)
    model.to(torch.bfloat16).save_pretrained(tmp_path, safe_serialization=True)
    config = read_config(tmp_path)
    layout = plan_layout(config)
    storage = torch.zeros(layout.n_bytes, dtype=torch.uint8)
    load_weights(tmp_path, layout, storage)
    for name, place in layout.parameters.items():
        stored = storage[place.offset : place.offset + place.n_bytes].view(torch.float32)
        wanted = model.state_dict()[name].float()
        assert torch.equal(stored.view(place.shape), wanted), name


def test_the_fingerprint_tells_a_finetuned_copy_from_its_base(tmp_path):
    model = save_random_llama(tmp_path)
    base = model_fingerprint(tmp_path)
    assert base == model_fingerprint(tmp_path)
    with torch.no_grad():
        model.model.norm.weight.add_(1e-3)
    model.save_pretrained(tmp_path, safe_serialization=True)
    assert model_fingerprint(tmp_path) != base


def test_the_fingerprint_notices_a_change_in_any_of_the_tensors(tmp_path):
    model = save_random_llama(tmp_path, hidden_size=64, intermediate_size=256)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert file.stat().st_size > 100_000
    seen = {model_fingerprint(tmp_path)}
    for name, tensor in tensors.items():
        save_file({**tensors, name: tensor * 1.01}, file, metadata={"format": "pt"})
        seen.add(model_fingerprint(tmp_path))
    assert len(seen) == 1 + len(tensors)
    assert len(tensors) > 2 * model.config.num_hidden_layers


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            "rope_scaling.rope_type",
        ),
    ],
)
def test_a_model_with_an_unsupported_feature_is_refused_by_its_key(tmp_path, overrides, field):
    save_random_llama(tmp_path, **overrides)
    with pytest.raises(UserError) as refused:
        read_config(tmp_path)
    assert refused.value.field == f"config.json:{field}"


def test_a_checkpoint_of_another_shape_than_its_config_is_refused(tmp_path):
    save_random_llama(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(
        text.replace('"intermediate_size": 96', '"intermediate_size": 64')
    )
    layout = plan_layout(read_config(tmp_path))
    storage = torch.zeros(layout.n_bytes, dtype=torch.uint8)
    with pytest.raises(UserError, match="has shape"):
        load_weights(tmp_path, layout, storage)
