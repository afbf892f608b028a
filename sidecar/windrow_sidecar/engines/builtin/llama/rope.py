"""Rotary position embedding, with the frequency scaling of Llama 3.1."""

from __future__ import annotations

import math

import torch

from windrow_sidecar.engines.builtin.llama.config import Llama3Scaling, LlamaConfig


class RotaryTable:
    """Cosines and sines of every position, laid out so that rotating q and k is three operations.

    `cos`, `sin`: [max_positions, heads + kv_heads, head_dim], for q heads and k heads side by side.
    The sign of the rotation is in `sin`, and attention's 1/sqrt(head_dim) in both for the q heads.
    All of it is fp32, whatever the model is: a bf16 cosine is off by more than a bf16 product.
    """

    def __init__(self, config: LlamaConfig, device: torch.device | str = "cpu") -> None:
        angles = torch.outer(
            torch.arange(config.max_positions, dtype=torch.float32), _frequencies(config)
        )
        half = config.head_dim // 2
        self._half = half
        # [max_positions, head_dim / 2] each, for kernels that include the rotation.
        self.cos, self.sin = angles.cos().to(device), angles.sin().to(device)
        self._cos = torch.cat([self.cos] * 2, dim=-1)[:, None, :]
        self._sin = torch.cat([-self.sin, self.sin], dim=-1)[:, None, :]
        scale = torch.ones(config.heads + config.kv_heads, 1)
        scale[: config.heads] = 1.0 / math.sqrt(config.head_dim)
        self._scale = scale.to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (cos, sin) for positions [n]: each [n, heads + kv_heads, head_dim]."""
        return self._cos[positions] * self._scale, self._sin[positions] * self._scale

    def rotate(self, qk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate qk [n, heads + kv_heads, head_dim] by what `at` returned; keeps its dtype."""
        wide = qk.to(torch.promote_types(qk.dtype, torch.float32))
        return (wide * cos).addcmul_(wide.roll(self._half, dims=-1), sin).to(qk.dtype)


def _frequencies(config: LlamaConfig) -> torch.Tensor:
    """Return inverse frequencies [head_dim / 2]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    plain = 1.0 / config.rope_theta**exponents
    return plain if config.rope_scaling is None else _stretch(plain, config.rope_scaling)


def _stretch(inverse: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Divide the low frequencies by `factor`, keep the high ones, and blend in between.

    Source: the Llama 3.1 model card's reference code; "low" means fewer than `low_freq_factor`
    turns over the original context, "high" more than `high_freq_factor`.
    """
    turns = scaling.original_max_positions * inverse / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return inverse * keep + inverse / scaling.factor * (1.0 - keep)
