"""Stand-in for SGLang's CUDA kernels, which have no build for the host.

The torch_native attention backend and the pytorch sampler call none of them; any call raises.
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

    class _HostEvent:
        """An event on cores: what was called before it has been done."""

        def __init__(self, *_args: object, **_kwargs: object) -> None:
            pass

        def record(self, _stream: object = None) -> None:
            pass

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            pass

    # SGLang's LoRA layers and its prefill instances ask for pinned memory on cores as well, the
    # latter for events too; torch has neither without a driver.
    for _name in ("tensor", "zeros", "empty"):
        setattr(torch, _name, _unpinned(getattr(torch, _name)))
    torch.Tensor.pin_memory = _as_it_is
    torch.cuda.Event = _HostEvent  # type: ignore[misc,assignment]
    torch.cuda.current_stream = lambda *_args: None  # type: ignore[assignment]
