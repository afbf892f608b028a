"""Build a model whose parameters are tensors that exist already, without a copy."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from windrow_sidecar.engines.streaming.tensor_files import absent
from windrow_sidecar.finetune.model.coded import CodedTensor, install
from windrow_sidecar.finetune.model.whole import check_tensors


def build_over(
    tensors: Mapping[str, Tensor | CodedTensor],
    config: Any,  # noqa: ANN401
    dtype: torch.dtype = torch.float32,
    where: str = "the given weights",
) -> nn.Module:
    """Return the causal language model of a transformers configuration, in `dtype`.

    It is built over stand-ins of one element, since transformers would bring a device's tensors to
    the host; then each parameter takes over its real tensor, wherever that is.

    Args:
        tensors: by parameter, [...] in the parameter's shape; used as they lie, never copied. A
            layer over codes takes the place of the model's own where a weight is codes.
        config: of transformers.
        dtype: of the model.
        where: says in errors whence the tensors are.

    Raises:
        UserError: a parameter has no tensor, a tensor no parameter, or the shapes differ; codes
            belong to a module that cannot be computed with over codes.
        ValueError: a parameter had to be copied.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    architecture = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if getattr(config, "quantization_config", None) is not None:
        config = copy.deepcopy(config)  # the codes are ours to compute with, not transformers'
        del config.quantization_config
    state = {
        name: absent(t.model_shape, dtype)
        if isinstance(t, CodedTensor)
        else absent(tuple(t.shape), t.dtype)
        for name, t in tensors.items()
    }
    model: nn.Module
    model, said = architecture.from_pretrained(
        None,
        config=config,
        state_dict=state,
        dtype=dtype,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    check_tensors(
        model,
        where,
        missing=said["missing_keys"],
        unexpected=said["unexpected_keys"],
        misshaped=said["mismatched_keys"],
    )
    stands_for = {state[name].data_ptr(): tensor for name, tensor in tensors.items()}
    copied = [name for name, p in model.named_parameters() if p.data_ptr() not in stands_for]
    if copied:
        raise ValueError(f"{copied[0]} and {len(copied) - 1} more would have to be copied")
    coded: dict[str, CodedTensor] = {}
    for name, parameter in model.named_parameters():
        tensor = stands_for[parameter.data_ptr()]
        if isinstance(tensor, CodedTensor):
            coded[name] = tensor
        else:
            parameter.data = tensor
    install(model, coded, dtype)
    return model
