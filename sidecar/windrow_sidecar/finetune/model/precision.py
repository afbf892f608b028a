"""Precisions of frozen weights (fp32, bf16, 8 and 4 bit), and what each needs."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from windrow.crd import FinetuneJobSpec
from windrow.errors import UserError
from windrow.wheel import install_extra

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# With the scales of each block of 64 (nf4) or each row (int8).
_QUANTISED_BYTES = {"nf4": 0.57, "int8": 1.01}


@dataclass(frozen=True, slots=True)
class WeightForm:
    """The dtype of computation, and the form of the weights of linear layers."""

    dtype: torch.dtype = torch.float32
    quantization: Literal["none", "nf4", "int8"] = "none"

    @classmethod
    def of(cls, spec: FinetuneJobSpec, served: torch.dtype | None = None) -> WeightForm:
        """Read it from the spec; `served`: what decode has, where its weights could be shared."""
        dtype = _DTYPES.get(spec.training.precision)
        if dtype is None:
            dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
            if served is not None and spec.model.quantization == "none":
                dtype = served
        return cls(dtype, spec.model.quantization)

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of a weight in memory."""
        return _QUANTISED_BYTES.get(self.quantization, self.dtype.itemsize)

    def config(self) -> Any:  # noqa: ANN401 - transformers' or None
        """Return the configuration that `from_pretrained` takes; None: weights stay as they are.

        Raises:
            UserError: the library is not there.
        """
        if self.quantization == "none":
            return None
        try:
            import bitsandbytes  # noqa: F401
        except ImportError as error:
            raise UserError(
                f"{self.quantization} needs bitsandbytes, which this worker has not ({error})",
                field="spec.model.quantization",
                remedy=f"In the sidecar's image: {install_extra('quantized')}, or write none.",
            ) from error
        from transformers import BitsAndBytesConfig

        # It says at every multiplication that int8 computes in fp16.
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
        if self.quantization == "int8":
            return BitsAndBytesConfig(load_in_8bit=True)
        return BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=self.dtype
        )


def keep_differentiable(model: nn.Module) -> None:
    """Keep bitsandbytes from repacking 4-bit weights.

    On CPUs with AVX512-BF16 it does so at the first forward without gradient, for a kernel that has
    no backward.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
