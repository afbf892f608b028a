"""Several serving adapters in one decode batch, while chunks are lent and taken back at random."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "windrow-tiny"
TEXT = b"The for statement is used to iterate over the elements of a sequence, such as a string."
NAMES = (None, "first", "second")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """What SGLang is told: a decode instance with two adapters of different ranks."""
    paths = []
    for seed, (name, rank) in enumerate((("first", 4), ("second", 8))):
        folder = tmp_path_factory.mktemp(name)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
            config = LoraConfig(r=rank, lora_alpha=4 * rank, target_modules="all-linear")
            model = get_peft_model(base, config)
            for parameter_name, parameter in model.named_parameters():
                if "lora_B" in parameter_name:  # it starts as zeros
                    torch.nn.init.normal_(parameter, std=0.05)
        model.save_pretrained(folder)
        paths.append({"lora_name": name, "lora_path": str(folder)})
    return {
        "disaggregation_mode": "decode",
        "disaggregation_transfer_backend": "fake",
        "disaggregation_decode_retraction_backup": "cpu_tensor",
        "enable_lora": True,
        "lora_paths": paths,
        "lora_backend": "torch_native",
        "max_loras_per_batch": 3,
    }


def test_a_batch_of_several_adapters_gives_stocks_answers_while_chunks_are_lent(
    play, server, run_dir
):
    chance = random.Random(3)
    requests = [
        {
            "n": n,
            "at": 3 + 3 * n + chance.randrange(3),
            "tokens": chance.randrange(12, 40),
            "prompt": [*TEXT[: 30 + n // 3]],
            "adapter": NAMES[n % 3],
        }
        for n in range(30)
    ]
    script = {"server": server, "requests": requests}
    stock = play(script)
    lending = play({**script, "chaos": 3}, run_dir)
    assert lending["iterations_lent"] > 20
    assert lending["off"] == ""
    assert lending["tokens"] == stock["tokens"]
    assert lending["used"] == stock["used"]
    assert lending["available"] == lending["total"]
    # Of the same prompt, each adapter says something else.
    said = [stock["tokens"][f"r{n}"][:12] for n in range(3)]
    assert len({tuple(tokens) for tokens in said}) == 3
