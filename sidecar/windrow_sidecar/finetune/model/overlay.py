"""Build a model whose parameters are tensors that exist already, without a copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from windrow_sidecar.finetune.offload.tensor_files import absent


def build_over(
    tensors: Mapping[str, Tensor],
    config: Any,  # noqa: ANN401
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Return the causal language model of a transformers configuration, in `dtype`.

    It is built over stand-ins of one element, since transformers would bring a device's tensors to
    the host; then each parameter takes over what it stands for, wherever that lies.

    Raises:
        ValueError: a parameter is missing, or had to be copied.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    architecture = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    state = {name: absent(tuple(t.shape), t.dtype) for name, t in tensors.items()}
    model: nn.Module = architecture.from_pretrained(
        None, config=config, state_dict=state, dtype=dtype
    )
    stands_for = {state[name].data_ptr(): tensor for name, tensor in tensors.items()}
    copied = [name for name, p in model.named_parameters() if p.data_ptr() not in stands_for]
    if copied:
        raise ValueError(f"the given weights lack {copied[0]} and {len(copied) - 1} more")
    for parameter in model.parameters():
        parameter.data = stands_for[parameter.data_ptr()]
    return model
