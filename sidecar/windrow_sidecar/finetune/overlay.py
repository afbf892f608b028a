"""How a model is built over tensors that exist already: they become its parameters, uncopied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def build_over(
    tensors: Mapping[str, Tensor],
    config: Any,  # noqa: ANN401
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Return the causal language model of a transformers configuration, in `dtype`.

    Raises:
        ValueError: a parameter is missing, or had to be copied.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    architecture = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model = architecture.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype)
    own = {tensor.data_ptr() for tensor in tensors.values()}
    copied = [name for name, p in model.named_parameters() if p.data_ptr() not in own]
    if copied:
        raise ValueError(f"the given weights lack {copied[0]} and {len(copied) - 1} more")
    return model  # type: ignore[no-any-return]
