"""Random checkpoints that are made in a moment: real in form, meaningless in what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

_TINY: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 257,
}


def save_random_llama(folder: Path, *, seed: int = 7, **overrides: Any) -> LlamaForCausalLM:  # noqa: ANN401
    """Save a tiny Llama in fp32 with a byte-level tokenizer, and return it.

    Its weights are larger than at a usual start, so that logits differ clearly from token to token;
    its norms are not all ones, so that one which is left out shows.
    """
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**(_TINY | overrides))).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
        else:
            parameter.data.mul_(4)
    model.save_pretrained(folder, safe_serialization=True)
    save_byte_tokenizer(folder)
    return model


def save_byte_tokenizer(folder: Path) -> None:
    """Save a tokenizer with one token per byte of UTF-8 (ids 0 to 255) and two special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|bos|>", "<|eos|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
