"""Several things that hold around a layer at once (see `layerwise.AroundLayer`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from windrow_sidecar.finetune.layers.layerwise import AroundLayer


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
