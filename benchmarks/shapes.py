"""Models by shape: a config.json and a tokenizer, no weights. Benchmarks make those up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from windrow_sidecar.testing.models import save_byte_tokenizer

_COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "use_cache": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 500_000.0, "rope_type": "default"},
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
    # The demo's model.
    "tiny": {
        "vocab_size": 264,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": True,
        "dtype": "float32",
    },
    # Large enough for its products to gain from a second core once a batch has a few dozen rows.
    "small": {
        "vocab_size": 264,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 3,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": True,
        "dtype": "float32",
    },
}


def write_shape(folder: Path, shape: str) -> Path:
    """Make `folder` a model directory of that shape, with one token per byte of text."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_COMMON | SHAPES[shape], indent=2) + "\n")
    save_byte_tokenizer(folder)
    return folder
