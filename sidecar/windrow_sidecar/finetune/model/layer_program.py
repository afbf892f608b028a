"""The program that runs a decoder layer: the model's own modules, or a replacement.

A program takes the place of the module's `forward`, so what calls the layer (tasklets, what
records it, what runs it a second time) calls the program. Autograd runs it backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast, runtime_checkable

from torch import Tensor, nn

if TYPE_CHECKING:
    from windrow_sidecar.finetune.model.boundaries import Activations

ProgramName = Literal["eager", "packed", "graphs", "compiled"]


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


class StackGraphs(Protocol):
    """Runs whole layers of a stack by CUDA graphs (see `adapter.layer_graphs`).

    Attributes:
        refused: why it runs none any more; "" as long as it may.
    """

    refused: str

    @property
    def backed_bytes(self) -> int:
        """Bytes of lent memory that graphs have; a group that runs by them takes no others."""

    @property
    def driver_bytes(self) -> int:
        """Bytes that the driver took for graphs."""

    @property
    def expected_bytes(self) -> int:
        """Bytes that it is expected to take for the graphs of one shape on one share."""

    def most_tokens(self) -> int:
        """Return the padded tokens whose graphs keep within the policy's bound; 0: any."""

    def forward(self, at: Activations, layer: int, *, keeps_all: bool) -> Tensor | None:
        """Run a layer on whole rows; return its output, [rows, tokens, hidden]; None: not so."""

    def replays(self, at: Activations, layer: int) -> bool:
        """Return whether a layer that ran by graphs can run back by graphs now."""

    def backward(self, at: Activations, layer: int) -> None:
        """Run it back; moves `at.gradient` down, and sets `.grad` of what learns at its end."""

    def leave(self, ats: Sequence[Activations] = ()) -> bool:
        """Give memory back; inputs of groups on their way move out of it. False: no room."""

    def drop(self) -> None:
        """Forget all graphs: what they read or write is about to move."""


def program_of(layer: nn.Module) -> LayerProgram | None:
    """Return what runs in place of the layer's own forward; None: nothing does."""
    found = layer.__dict__.get("forward")
    return found if isinstance(found, LayerProgram) else None


def install_program(layer: nn.Module, program: LayerProgram) -> None:
    """Let the layer run by `program` from now on."""
    layer.forward = cast("Any", program)
