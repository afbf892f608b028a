"""The program that runs a decoder layer: the model's own modules, or a replacement.

A program takes the place of the module's `forward`, so what calls the layer (tasklets, what
records it, what runs it a second time) calls the program. Autograd runs it backward.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, cast, runtime_checkable

from torch import Tensor, nn

ProgramName = Literal["eager", "packed"]


@runtime_checkable
class LayerProgram(Protocol):
    """Runs one layer for a micro-batch, forward; autograd runs backward what it leaves.

    Attributes:
        name: of the kind of program.
        tensors: what it computes with besides the layer's parameters and buffers, by name; [...]
            each. Their content changes with the adapter (`refresh`), their memory only when
            `release` was called in between.
    """

    name: ProgramName
    tensors: dict[str, Tensor]

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Return the layer's output, [rows, tokens, hidden], for an input of that shape."""

    def refresh(self) -> None:
        """Compute `tensors` again from what has changed since."""

    def release(self) -> None:
        """Give its own memory back; it is taken again when the layer runs next."""


def program_of(layer: nn.Module) -> LayerProgram | None:
    """Return what runs in place of the layer's own forward; None: nothing does."""
    found = layer.__dict__.get("forward")
    return found if isinstance(found, LayerProgram) else None


def install_program(layer: nn.Module, program: LayerProgram) -> None:
    """Let the layer run by `program` from now on."""
    layer.forward = cast("Any", program)
