"""Stands where SGLang expects its CUDA kernels, which have no build for the host.

The torch_native attention backend and the pytorch sampler call none of them; whatever does is told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

__version__ = "0.0"


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no build for the host")

    kernel.__name__ = name
    return kernel


if not torch.cuda.is_available():

    def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401
            return make(*args, **kwargs)

        return made

    def _as_it_is(tensor: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:  # noqa: ANN401
        return tensor

    # SGLang's LoRA layers ask for pinned memory on cores as well; torch has none without a driver.
    torch.tensor = _unpinned(torch.tensor)
    torch.zeros = _unpinned(torch.zeros)
    torch.Tensor.pin_memory = _as_it_is
