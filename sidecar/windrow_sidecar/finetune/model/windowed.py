"""Build a model larger than memory: its layers have shapes only, the rest is loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from windrow_sidecar.compute.device import ComputeDevice
from windrow_sidecar.compute.host_device import HostDevice
from windrow_sidecar.engines.streaming.copying import Copier
from windrow_sidecar.engines.streaming.schedule import LEAST_LAYERS
from windrow_sidecar.engines.streaming.tensor_files import Stored, absent, read, stored_tensors
from windrow_sidecar.finetune.model.overlay import build_over
from windrow_sidecar.finetune.model.structure import find_layers
from windrow_sidecar.finetune.model.whole import check_tensors
from windrow_sidecar.finetune.offload.frozen_layers import FrozenLayers, LayerWeights, weights_of


class CannotWindow(ValueError):
    """The model's files do not list its layers one by one, or memory holds fewer than two."""


def load_windowed(
    directory: Path,
    config: Any,  # noqa: ANN401
    *,
    room_bytes: int,
    dtype: torch.dtype = torch.float32,
    copier: Copier | None = None,
    device: ComputeDevice | None = None,
) -> tuple[nn.Module, FrozenLayers]:
    """Build a model with as many layers in memory as fit into `room_bytes`.

    `device`: where it computes (default: the host).

    Raises:
        CannotWindow: says what is in the way.
        UserError: a tensor is missing, unexpected or of another shape; a file is cut short.
        OSError: a file cannot be read.
    """
    stored = stored_tensors(directory)
    skeleton = _skeleton(config)
    _check_stored(directory, skeleton, stored)
    prefixes = _prefixes(skeleton)
    tensors, rest = {}, 0
    for name, parameter in skeleton.state_dict(keep_vars=True).items():
        if not isinstance(parameter, nn.Parameter):
            continue
        if any(name.startswith(prefix) for prefix in prefixes):
            tensors[name] = absent(tuple(parameter.shape), dtype)
        elif name in stored:
            tensors[name] = read(stored[name], dtype)
            rest += tensors[name].nbytes
    try:
        model = build_over(tensors, config, dtype, str(directory))
        model.requires_grad_(requires_grad=False)
        layers = find_layers(model.get_decoder(), config)  # type: ignore[operator]
        weights = weights_of(layers, prefixes, stored)
    except (KeyError, ValueError) as error:
        raise CannotWindow(f"its files keep other tensors than its layers: {error}") from error
    largest = max(layer.n_bytes for layer in weights)
    capacity = min(len(weights), max(0, room_bytes - rest) // largest)
    if capacity < LEAST_LAYERS:
        needed = rest + LEAST_LAYERS * largest
        raise CannotWindow(f"{needed} bytes are needed for two layers, {room_bytes} are there")
    device = device or HostDevice()
    _move(model, device.torch, weights)
    frozen = FrozenLayers(
        weights,
        copier or Copier(device=device),
        capacity=capacity,
        make_slot=lambda n: torch.empty(n, dtype=torch.uint8, device=device.torch),
    )
    return model, frozen


def _check_stored(directory: Path, skeleton: nn.Module, stored: dict[str, Stored]) -> None:
    """Compare a model's parameters with what its files hold, without reading that.

    Raises:
        CannotWindow: the files keep its parameters under other names, in other pieces, or not as
            floating-point numbers.
        UserError: a tensor is missing, unexpected or of another shape.
    """
    if getattr(skeleton.config, "quantization_config", None) is not None:
        raise CannotWindow("its files keep quantised weights")
    state: dict[str, nn.Parameter] = skeleton.state_dict(keep_vars=True)
    tied = getattr(skeleton, "all_tied_weights_keys", {})
    missing = {
        name
        for name, parameter in state.items()
        if isinstance(parameter, nn.Parameter) and not {name, tied.get(name)} & stored.keys()
    }
    ignored = getattr(skeleton, "_keys_to_ignore_on_load_unexpected", None) or ()
    unexpected = {
        name
        for name in stored.keys() - state.keys()
        if not any(re.search(pattern, name) for pattern in ignored)
        and not name.endswith("rotary_emb.inv_freq")  # of checkpoints from before transformers 4.32
    }
    if missing and unexpected:
        raise CannotWindow(f"its files lack {min(missing)} and hold {min(unexpected)}")
    check_tensors(
        skeleton,
        str(directory),
        missing=missing,
        unexpected=unexpected,
        misshaped={
            (name, stored[name].shape, tuple(parameter.shape))
            for name, parameter in state.items()
            if name in stored and stored[name].shape != tuple(parameter.shape)
        },
    )


def _move(model: nn.Module, to: torch.device, layers: list[LayerWeights]) -> None:
    """Move a model to a device but for its layers, which `nn.Module.to` would materialise."""
    if to.type == "cpu":
        return
    waiting = {id(parameter) for layer in layers for parameter, _ in layer.parameters}
    for parameter in model.parameters():
        if id(parameter) in waiting:
            parameter.data = absent(tuple(parameter.shape), parameter.dtype, to)
        else:
            parameter.data = parameter.data.to(to)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(to)


def _skeleton(config: Any) -> nn.Module:  # noqa: ANN401
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def _prefixes(model: nn.Module) -> list[str]:
    """Return the prefix of each layer's parameter names, from the bottom layer up."""
    decoder = model.get_decoder()  # type: ignore[operator]
    names = {id(module): f"{name}." for name, module in model.named_modules()}
    return [names[id(layer)] for layer in find_layers(decoder, model.config)]
