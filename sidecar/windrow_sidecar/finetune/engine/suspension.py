"""How a layer that runs is held up between two of its modules (LLMStation's suspension).

What is in flight is then not a layer but a stretch of one or a few modules, forward or backward, so
rows stay whole where windows would cost more than they save. A wait changes no value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Protocol

from torch import Tensor, nn

from windrow_sidecar.finetune.training.health import StallWatch

# What an adapter adds to three products must not part them from one of their size.
HARDLY_LARGER = 1.25


class BrokenOff(Exception):
    """The tasklet that runs was given up in the middle: it may not go on for a while."""


class Holding(Protocol):
    """Who knows whether what runs may go on (see `grants.GrantGate`)."""

    def revoked(self) -> bool:
        """Whether what was launched last may not go on as it does."""

    def hold(self, give_up: Callable[[], bool]) -> bool:
        """Say that nothing runs and wait until it may go on; False: it is given up."""


class Suspension:
    """Asks between the modules of layers.

    Args:
        gate: is asked.
        stall: does not count what is waited for decode.
        give_up: whether waiting in the middle of a layer helps nobody: somebody wants the memory,
            or the end of the job.
    """

    def __init__(self, gate: Holding, stall: StallWatch, give_up: Callable[[], bool]) -> None:
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


def between_modules(layers: Sequence[nn.Module], point: Callable[..., None]) -> None:
    """Let `point` be called after each stretch of a layer, and before it on the way back.

    It is given whatever torch gives to hooks, and returns nothing.
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


def _ends_of_stretches(layer: nn.Module) -> Iterator[nn.Module]:
    """Modules behind which a layer may be held up; there is no need to behind the last one.

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
    """What takes time: each product of attention and MLP. Norms, of vectors only, ride along."""
    for part in layer.children():
        for module in tuple(part.children()) or (part,):
            if _weights(module):
                yield module


def _weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.dim() > 1)
