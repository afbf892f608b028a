"""Stands where SGLang expects its CUDA kernels, which have no build for the host.

The torch_native attention backend and the pytorch sampler call none of them; whatever does is told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

__version__ = "0.0"


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no build for the host")

    kernel.__name__ = name
    return kernel
