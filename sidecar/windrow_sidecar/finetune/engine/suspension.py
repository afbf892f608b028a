"""Suspend a layer between two of its modules while decode needs the device (LLMStation).

What is in flight is then not a layer but a stretch of one or a few modules, forward or backward, so
rows stay whole where windows would cost more than they save. A loss is suspended around the product
of its head. A wait changes no value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, Protocol

from torch import Tensor, nn

from windrow_sidecar.finetune.model.coded import weight_elements

# What an adapter adds to three products must not part them from one of their size.
HARDLY_LARGER = 1.25


class BrokenOff(Exception):
    """The running tasklet was aborted between two modules; it runs again from its beginning."""


class Holding(Protocol):
    """Source of whether the running tasklet may go on (see `grants.GrantGate`)."""

    def revoked(self) -> bool:
        """Return whether what was launched last may not go on as it does."""

    def hold(self, give_up: Callable[[], bool]) -> bool:
        """Say that nothing runs and wait until it may go on; False: it is given up."""


class Watch(Protocol):
    """Watch over work that does not end (see `health.StallWatch`)."""

    def held(self) -> AbstractContextManager[None]:
        """Exclude the time in which running work waits for decode."""


class Suspension:
    """Ask between the modules of a layer whether it may go on, and wait or abort.

    Args:
        gate: is asked.
        stall: does not count what is waited for decode.
        give_up: whether waiting in the middle of a layer helps nobody: somebody wants the memory,
            or the end of the job.
    """

    def __init__(self, gate: Holding, stall: Watch, give_up: Callable[[], bool]) -> None:
        self._gate, self._stall, self._give_up = gate, stall, give_up

    def point(self, *_: object) -> None:
        """Go on at once where that is allowed, else as soon as it is. Takes what a hook is given.

        Raises:
            BrokenOff: it will not be soon.
        """
        if not self._gate.revoked():
            return
        with self._stall.held():
            if not self._gate.hold(self._give_up):
                raise BrokenOff


def between_modules(
    layers: Sequence[nn.Module], head: nn.Module | None, point: Callable[..., None]
) -> None:
    """Call `point` after each stretch of modules in forward, and before each in backward.

    Args:
        layers: of the decoder.
        head: that makes logits; None: the model has none of its own. One that learns has no point:
            a loss that is broken off would have added a part of its gradient.
        point: is given whatever torch gives to hooks, and returns nothing.
    """

    def after(module: nn.Module, args: Any, made: Any) -> None:  # noqa: ANN401
        del module, args, made
        point()

    def after_frozen(module: nn.Module, args: Any, made: Any) -> None:  # noqa: ANN401
        del module, args
        point()
        out = made[0] if isinstance(made, tuple) else made
        if isinstance(out, Tensor) and out.requires_grad:
            out.register_hook(point)  # type: ignore[no-untyped-call]

    for layer in layers:
        for module in _ends_of_stretches(layer):
            learning = [parameter for parameter in module.parameters() if parameter.requires_grad]
            module.register_forward_hook(after if learning else after_frozen)
            # The gradient of what comes last in a module is there first on the way back. A hook of
            # a parameter is registered once, one of an output at each pass, which costs more than
            # calling it.
            for parameter in learning[-1:]:
                parameter.register_post_accumulate_grad_hook(point)  # type: ignore[no-untyped-call]
    if head is not None and not any(parameter.requires_grad for parameter in head.parameters()):
        head.register_forward_hook(after_frozen)


def _ends_of_stretches(layer: nn.Module) -> Iterator[nn.Module]:
    """Return the modules after which a layer may be suspended; never the last one.

    Modules that follow each other are one stretch as long as together they are hardly larger than
    the largest of the layer (queries, keys and values beside an MLP's matrix, for instance).
    """
    modules = [(module, _weights(module)) for module in _modules_of(layer)]
    largest = max((weights for _, weights in modules), default=0)
    stretch = 0
    for (module, weights), (_, following) in pairwise(modules):
        stretch += weights
        if stretch + following > HARDLY_LARGER * largest:
            yield module
            stretch = 0


def _modules_of(layer: nn.Module) -> Iterator[nn.Module]:
    """Return the modules that take time: the linear layers of attention and MLP, not the norms."""
    for part in layer.children():
        for module in tuple(part.children()) or (part,):
            if _weights(module):
                yield module


def _weights(module: nn.Module) -> int:
    return weight_elements(module, of_products=True)
