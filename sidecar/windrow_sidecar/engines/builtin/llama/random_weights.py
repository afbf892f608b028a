"""Weights that say nothing: benchmarks need a model's shape, and not 16 GB of its files."""

from __future__ import annotations

import torch

from windrow_sidecar.engines.builtin.llama.weights import Layout, view

# As transformers initialises Llama (`initializer_range`): logits stay finite at any depth.
_STD = 0.02


def fill_random(layout: Layout, storage: torch.Tensor, seed: int) -> None:
    """Write weights drawn with `seed` into `storage` (uint8 [layout.n_bytes], on any device).

    Norms are ones. The same seed gives the same bytes on the same kind of device.
    """
    draw = torch.Generator(device=storage.device).manual_seed(seed)
    for name in layout.parameters:
        parameter = view(layout, storage, name)
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, _STD, generator=draw)
