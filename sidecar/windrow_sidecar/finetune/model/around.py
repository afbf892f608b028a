"""What holds around a layer while it runs: nothing, or several things at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Protocol


class AroundLayer(Protocol):
    """What holds while a layer's own code runs: its weights are there, saved tensors are packed."""

    def forward(self, layer: int) -> AbstractContextManager[None]:
        """Enter around the forward of one layer."""

    def backward(self, layer: int) -> AbstractContextManager[None]:
        """Enter around the backward of one layer."""


class NothingAround:
    """Every layer is resident, and autograd keeps what it saves."""

    def forward(self, layer: int) -> AbstractContextManager[None]:
        """Do nothing."""
        del layer
        return NOTHING

    def backward(self, layer: int) -> AbstractContextManager[None]:
        """Do nothing."""
        del layer
        return NOTHING


NOTHING: AbstractContextManager[None] = nullcontext()


class InTurn:
    """Enters the first one first, and leaves it last."""

    def __init__(self, *parts: AroundLayer) -> None:
        self._parts = parts

    @contextmanager
    def forward(self, layer: int) -> Iterator[None]:
        """All of them, around one layer's forward."""
        with ExitStack() as entered:
            for part in self._parts:
                entered.enter_context(part.forward(layer))
            yield

    @contextmanager
    def backward(self, layer: int) -> Iterator[None]:
        """All of them, around one layer's backward."""
        with ExitStack() as entered:
            for part in self._parts:
                entered.enter_context(part.backward(layer))
            yield
