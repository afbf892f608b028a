"""What an adapter takes over from the base's weights where its layers take turns in memory.

peft makes an adapter of all layers at once, and of those that are in their files it sees NaN (see
`frozen.LayerWeights.detach`). So what it copied or computed from them is made again, layer by layer
while each is there: modules that are trained as a whole, and the magnitudes of DoRA.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from windrow_sidecar.finetune.residency.frozen import FrozenLayers


def take_over(layers: Sequence[nn.Module], frozen: FrozenLayers, adapter: str) -> None:
    """Give the adapter of that name in each of `layers`, from the bottom, its first values.

    Raises:
        OSError: a file could not be read.
    """
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import ModulesToSaveWrapper

    with torch.no_grad():
        for index, layer in enumerate(layers):
            found = [m for m in layer.modules() if isinstance(m, ModulesToSaveWrapper | LoraLayer)]
            if not any(_depends(module, adapter) for module in found):
                continue
            with frozen.forward(index):
                for module in found:
                    if isinstance(module, ModulesToSaveWrapper):
                        _copy(module, adapter)
                    else:
                        _measure(module, adapter)


def _depends(module: Any, adapter: str) -> bool:  # noqa: ANN401 - peft is untyped
    """Whether what the adapter starts from depends on the base's weights."""
    return adapter in getattr(module, "modules_to_save", ()) or adapter in getattr(
        module, "lora_magnitude_vector", ()
    )


def _copy(wrapper: Any, adapter: str) -> None:  # noqa: ANN401
    copied = dict(wrapper.modules_to_save[adapter].named_parameters())
    for name, parameter in wrapper.original_module.named_parameters():
        copied[name].copy_(parameter)


def _measure(module: Any, adapter: str) -> None:  # noqa: ANN401
    """The norm of each output's weights, as `DoraLinearLayer.update_layer` has it."""
    if adapter not in module.lora_magnitude_vector:
        return
    magnitude = module.lora_magnitude_vector[adapter]
    added = module.lora_B[adapter].weight @ module.lora_A[adapter].weight
    weight = module.get_base_layer().weight
    norm = magnitude.get_weight_norm(weight, added, scaling=module.scaling[adapter])
    magnitude.weight.copy_(norm)
