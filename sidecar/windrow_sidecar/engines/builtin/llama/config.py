"""Read the configuration of a Llama checkpoint, and refuse what is not supported."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windrow.errors import UserError
from windrow_sidecar.engines.fingerprint import read_config_bytes

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Frequency scaling of Llama 3.1 and later: long wavelengths are stretched by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Shape of a Llama model."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    max_positions: int
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]

    @property
    def q_per_kv(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def kv_width(self) -> int:
        """Elements of one token's K or V in one layer."""
        return self.kv_heads * self.head_dim


def read_config(model_dir: Path) -> LlamaConfig:
    """Read config.json (and eos ids of generation_config.json, where there is one).

    Raises UserError naming the key for an architecture or a feature that the engine does not have.
    """
    try:
        raw = json.loads(read_config_bytes(model_dir))
    except ValueError as error:
        raise _refuse(f"is not valid JSON ({error})", "", "Copy the checkpoint again.") from error
    generation = model_dir / "generation_config.json"
    eos = raw.get("eos_token_id")
    if generation.exists():
        eos = json.loads(generation.read_bytes()).get("eos_token_id", eos)
    return parse_config(raw, eos_token_ids=_as_ids(eos))


def parse_config(raw: dict[str, Any], *, eos_token_ids: tuple[int, ...]) -> LlamaConfig:
    """Turn the contents of a config.json into a LlamaConfig; see `read_config` for errors."""
    _check_supported(raw)
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    heads, hidden = _positive(raw, "num_attention_heads"), _positive(raw, "hidden_size")
    kv_heads = raw.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise _refuse(f"{heads} query heads over {kv_heads} KV heads", "num_key_value_heads")
    return LlamaConfig(
        vocab=_positive(raw, "vocab_size"),
        hidden=hidden,
        intermediate=_positive(raw, "intermediate_size"),
        layers=_positive(raw, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=raw.get("head_dim") or hidden // heads,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
        rope_scaling=_scaling(rope),
        max_positions=_positive(raw, "max_position_embeddings"),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        eos_token_ids=eos_token_ids,
    )


def _check_supported(raw: dict[str, Any]) -> None:
    found = raw.get("architectures") or [raw.get("model_type", "nothing")]
    if found[0] not in SUPPORTED_ARCHITECTURES:
        raise _refuse(
            f"architecture {found[0]} is not supported",
            "architectures",
            f"The built-in engine serves {', '.join(SUPPORTED_ARCHITECTURES)}.",
            reason="UnsupportedArchitecture",
        )
    for key in ("attention_bias", "mlp_bias"):
        if raw.get(key):
            raise _refuse("biases are not supported", key)
    if raw.get("hidden_act", "silu") != "silu":
        raise _refuse(f"activation {raw['hidden_act']!r} is not supported", "hidden_act")
    if raw.get("quantization_config"):
        raise _refuse("quantised weights are not supported", "quantization_config")


def _scaling(rope: dict[str, Any]) -> Llama3Scaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise _refuse(f"RoPE scaling {kind!r} is not supported", "rope_scaling.rope_type")
    return Llama3Scaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_positions=int(rope["original_max_position_embeddings"]),
    )


def _positive(raw: dict[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value <= 0:
        raise _refuse(f"must be a positive integer, not {value!r}", key)
    return value


def _as_ids(eos: int | list[int] | None) -> tuple[int, ...]:
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)


def _refuse(
    problem: str,
    key: str,
    remedy: str = "Serve a Llama checkpoint without it.",
    *,
    reason: str = "UnsupportedModel",
) -> UserError:
    field = f"config.json:{key}" if key else "config.json"
    return UserError(problem, field=field, remedy=remedy, reason=reason)
