"""What a job's layers keep, decided before each group of micro-batches from the memory there is."""

from __future__ import annotations

from collections.abc import Callable

import torch

from windrow_sidecar.finetune.activations.budget import Appetite
from windrow_sidecar.finetune.activations.planned import PlannedLayers
from windrow_sidecar.finetune.activations.planning import largest
from windrow_sidecar.finetune.layerwise import DecoderStack
from windrow_sidecar.finetune.stream import MicroLimits

# Of the memory that is free: graphs may take so much, short-lived tensors need the rest.
GRAPHS_SHARE = 0.5


class Keeping:
    """Sets the budget of a stack's layers.

    Args:
        stack: its layers train.
        planned: follows the budget.
        longest: tokens of the longest row.
        least: whether memory is so short that nothing is kept, whatever is free now.
        free_bytes: memory that may still be taken.
    """

    def __init__(
        self,
        stack: DecoderStack,
        planned: PlannedLayers,
        longest: int,
        *,
        least: bool,
        free_bytes: Callable[[], int],
    ) -> None:
        self._planned, self._free_bytes, self._longest = planned, free_bytes, longest
        self._appetite = None if least else _appetite(stack, planned, longest)
        planned.bytes_per_token = 0 if least else None

    def before(self, limits: MicroLimits) -> MicroLimits:
        """Set the budget for a group of those limits; returns them."""
        if self._appetite is not None:
            tokens = max(limits.max_tokens, self._longest) * max(1, limits.micro_batches)
            room = int(GRAPHS_SHARE * self._free_bytes())
            self._planned.bytes_per_token = self._appetite.within(tokens, room)
        return limits


def _appetite(stack: DecoderStack, planned: PlannedLayers, longest: int) -> Appetite | None:
    """Measure on paper what one layer keeps of the longest row; None: that cannot be told."""
    at = stack.begin(torch.zeros(1, longest, dtype=torch.int64, device=stack.probe.device))
    hidden = at.inputs[0]
    assert hidden is not None
    call = at.calls[0]
    recording = planned.recording(0, (hidden.detach().requires_grad_(), *call.args), call.kwargs)
    if recording is None:
        return None
    return Appetite(stack.depth, largest(recording.graph).kept_bytes / longest)
