"""Random models of a few thousand parameters, one of each supported architecture."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Windows shorter than the rows, so that they matter; layers of both kinds where there are two.
_SLIDING: dict[str, Any] = {"sliding_window": 12}
_TWO_KINDS: dict[str, Any] = {
    **_SLIDING,
    "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "Qwen2": {},
    "Qwen3": {},
    "Mistral": _SLIDING,
    "Gemma2": _SLIDING,
    "Gemma3Text": _TWO_KINDS,
    "Phi3": {},
    "Olmo2": {},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "num_key_value_heads": 4},
    "Mixtral": {**_EXPERTS, "num_local_experts": 4},
    "Qwen3Moe": {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 24},
}

# Others that are lists of layers, each odd in some way: scaled logits, layers that return tuples,
# attention of their own, linear layers the other way round. Options beside the common ones.
_NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
_GPT: dict[str, Any] = {
    **{"n_embd": 32, "n_layer": 3, "n_head": 4, "num_key_value_heads": 4},
    **_NO_DROPOUT,
}
FURTHER: dict[str, dict[str, Any]] = {
    "Granite": {"logits_scaling": 8.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    "Cohere": {"logit_scale": 0.0625},
    "GPT2": _GPT,
    "GPTBigCode": _GPT,
    "GPTJ": {**_GPT, "rotary_dim": 4},
    "CodeGen": {**_GPT, "rotary_dim": 4},
    "GPTNeo": {
        "num_layers": 3,
        "attention_types": [[["global", "local", "global"], 1]],
        "window_size": 12,
    },
    "GPTNeoX": {"num_key_value_heads": 4},
    "Bloom": {"n_layer": 3, "n_head": 4},
    "Mpt": {"d_model": 32, "n_layers": 3, "n_heads": 4},
    "Gemma4Text": {
        **_TWO_KINDS,
        **{"global_head_dim": 16, "num_kv_shared_layers": 0},
        **{"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 96},
    },
    "GptOss": {
        **_SLIDING,
        **_EXPERTS,
        "num_local_experts": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "Starcoder2": {"embedding_dropout": 0.2},
    "Phi": {"embd_pdrop": 0.2},
}

# Further ones that public recipes of SGLang serve (`benchmarks.coverage`).
_LATENT: dict[str, Any] = {
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8},
    **{"v_head_dim": 8, "num_key_value_heads": 4, "head_dim": 16},
}
SERVED: dict[str, dict[str, Any]] = {
    "Arcee": {},
    "DeepseekV3": {
        **_LATENT,
        **_EXPERTS,
        **{"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
        **{"moe_intermediate_size": 24, "head_dim": 8},
    },
    "Ernie4_5_Moe": {
        **{"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24},
        **{"moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    },
    "Glm": {},
    "GraniteMoe": {**_EXPERTS, "num_local_experts": 4},
    "MiniCPM3": _LATENT,
    "MiniMaxM2": {**_EXPERTS, "num_local_experts": 4},
    "NemotronH": {
        "layers_block_type": ["mamba", "attention", "moe"],
        **{"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "chunk_size": 16},
        **_EXPERTS,
        **{"n_groups": 1, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
        **{"moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24},
    },
    "Olmoe": {**_EXPERTS, "num_experts": 4, "num_key_value_heads": 4},
    "Persimmon": {"num_key_value_heads": 4},
    "StableLm": {},
}


def random_model(architecture: str, **overrides: Any) -> nn.Module:  # noqa: ANN401
    """Return a causal language model in fp32, the same one each time.

    Its weights are larger than at a usual start, so that errors show.
    """
    import transformers

    config_class = getattr(transformers, f"{architecture}Config")
    options = {**FURTHER, **SERVED, **ARCHITECTURES}.get(architecture, {})
    config = config_class(**(_COMMON | options | overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32
        )
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1)
    return model.requires_grad_(requires_grad=False)
