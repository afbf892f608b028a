"""SGLang's weights, mapped by a worker as the checkpoint's own tensors."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch.utils.dlpack import from_dlpack
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from windrow.rundir import RunDir
from windrow_sidecar._core import Arena, AttachError
from windrow_sidecar.engines.fingerprint import model_fingerprint
from windrow_sidecar.finetune.model.loading import ExportedWeights, read_manifest
from windrow_sidecar.finetune.model.overlay import build_over

ROOT = Path(__file__).resolve().parents[2]
SIZES = {
    "vocab_size": 264,  # SGLang pads it to 320
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def made(config, folder: Path) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():  # biases start as zeros and norms as ones
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(folder)
    return folder


MODELS = {
    "windrow-tiny": lambda folder: ROOT / "models" / "windrow-tiny",
    "qwen2": lambda folder: made(Qwen2Config(**SIZES), folder),
    "qwen3": lambda folder: made(Qwen3Config(**SIZES, head_dim=32), folder),
    "mistral": lambda folder: made(MistralConfig(**SIZES, head_dim=32), folder),
    "gemma": lambda folder: made(GemmaConfig(**SIZES, head_dim=32), folder),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_over_the_served_weights_gives_the_logits_of_the_checkpoint(
    name, play, run_dir, tmp_path
):
    folder = MODELS[name](tmp_path / "model")
    over = tmp_path / "over"
    script = {"server": {"model_path": str(folder)}, "requests": [], "until_file": str(over)}
    played: list[dict] = []
    serving = threading.Thread(target=lambda: played.append(play(script, run_dir)))
    serving.start()
    try:
        ours, same_bytes = logits_over_export(run_dir, folder)
    finally:
        over.touch()
        serving.join()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(ours, logits(model))
    assert same_bytes
    assert played[0]["off"] == ""


def logits(model) -> torch.Tensor:
    tokens = torch.arange(40)[None] * 5 % 264
    with torch.inference_mode():
        return model.eval()(tokens).logits.clone()


def logits_over_export(run_dir: Path, folder: Path) -> tuple[torch.Tensor, bool]:
    """Logits of the worker's model, and whether all of it lies in what SGLang exported."""
    files = RunDir(run_dir)
    arena = attached(str(files.arena_socket()))
    manifest = read_manifest(files.weights_manifest())
    assert manifest is not None
    assert manifest["fingerprint"] == model_fingerprint(folder)
    storage = from_dlpack(arena.imported("weights"))
    exported = ExportedWeights(manifest, storage)
    from transformers import AutoConfig

    model = build_over(exported.tensors(), AutoConfig.from_pretrained(folder), exported.dtype)
    first, end = storage.data_ptr(), storage.data_ptr() + storage.numel()
    inside = all(first <= p.data_ptr() < end for p in model.parameters())
    found = logits(model)
    del model, exported, storage
    arena.close()
    return found, inside


def attached(socket: str) -> Arena:
    """The arena of a scheduler that is still starting."""
    waited = threading.Event()
    for _ in range(1200):
        try:
            return Arena.attach(socket, timeout_s=1.0)
        except AttachError:
            waited.wait(0.25)
    pytest.fail("the scheduler has not opened its arena")
