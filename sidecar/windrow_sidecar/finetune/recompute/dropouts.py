"""Observe each dropout of a forward, whether it is a module or a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class AtDropouts(TorchFunctionMode):
    """Enter `around(n)` around the n-th active dropout, counted from 0."""

    def __init__(self, around: Callable[[int], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._around, self._count = around, 0

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        if func is not functional.dropout or not _active(*args[1:], **kwargs):
            return func(*args, **kwargs)
        point = self._count
        self._count += 1
        with self._around(point):
            return func(*args, **kwargs)


def _active(p: float = 0.5, training: bool = True, inplace: bool = False, **_: Any) -> bool:  # noqa: ANN401 - torch's own signature
    del inplace
    return training and p > 0


@contextmanager
def random_state(state: Tensor | None) -> Iterator[None]:
    """Set torch's random state, uint8 [bytes] on the host, inside; restore the old one afterwards.

    None: leave it as it is.
    """
    if state is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(state)
        yield
