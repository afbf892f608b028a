"""Find the modules that an adapter may target, and the defaults where a job names none."""

from __future__ import annotations

from typing import Any

from torch import nn

# What makes keys and values; and where one module makes them with the queries.
_KEYS_AND_VALUES = ("k_proj", "v_proj")
_FUSED = ("qkv_proj", "query_key_value", "c_attn", "Wqkv")


def target_names(model: nn.Module) -> list[str]:
    """Return what `targetModules` may name: linear layers, and the projections of experts."""
    linear = {_last(n) for n, m in model.named_modules() if isinstance(m, _linear())}
    return sorted(linear | expert_names(model))


def expert_names(model: nn.Module) -> set[str]:
    """Return the names by which peft adapts experts that lie in one tensor; empty: it does not.

    They are those of each expert's own linear layers, as checkpoints have them.
    """
    from peft.utils.transformers_weight_conversion import (
        _MODEL_TO_CONVERSION_PATTERN,
        _MOE_TARGET_MODULE_MAPPING,
    )

    kind = _MODEL_TO_CONVERSION_PATTERN.get(_config(model).model_type, "")
    tensors = {_last(name) for name, _ in model.named_parameters() if "experts" in name}
    mapping = _MOE_TARGET_MODULE_MAPPING.get(kind, {})
    return {name for name, tensor in mapping.items() if tensor in tensors}


def has_experts(model: nn.Module) -> bool:
    """Return whether the model's layers are mixtures of experts."""
    return any("Experts" in type(m).__name__ for m in model.modules())


def linear_names(model: nn.Module, *, attention_only: bool) -> list[str]:
    """Return the names of the linear layers that repeat in every layer of the model."""
    found = {
        _last(name)
        for parent in model.modules()
        if _is_attention(parent) or not attention_only
        for name, child in parent.named_modules()
        if isinstance(child, _linear()) and child is not model.get_output_embeddings()  # type: ignore[operator]
    }
    return sorted(found)


def ia3_targets(model: nn.Module) -> tuple[list[str], list[str]] | None:
    """Return what (IA)3 scales where the job names nothing: (all targets, those of the MLP).

    Keys, values and the MLP's last linear layer (Liu et al. 2022, section 3.3), found by structure:
    an MLP's last layer is the linear one outside of attention that makes hidden states. None: peft
    has targets of its own for this architecture; or there are no keys and values by a known name.
    """
    from peft.utils import TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING as KNOWN

    config = _config(model)
    attention = linear_names(model, attention_only=True)
    keys_and_values = [n for n in _KEYS_AND_VALUES if n in attention] or [
        n for n in _FUSED if n in attention
    ]
    if config.model_type in KNOWN or not keys_and_values:
        return None
    others = {
        _last(name)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module is not model.get_output_embeddings()  # type: ignore[operator]
        and module.out_features == config.hidden_size
    }
    last = sorted(others - set(attention))
    return keys_and_values + last, last


def _linear() -> tuple[type[nn.Module], ...]:
    """Return the types of linear layers; GPT-2 has one of its own (Conv1D)."""
    from transformers.pytorch_utils import Conv1D

    return nn.Linear, Conv1D


def _is_attention(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Attention")


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _config(model: nn.Module) -> Any:  # noqa: ANN401 - transformers' configuration
    return model.config
