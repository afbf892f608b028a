"""What a job's layers keep, decided before each group of micro-batches from the memory there is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from windrow.conditions import Reason
from windrow.errors import UserError
from windrow_sidecar.finetune.activations.budget import Appetite
from windrow_sidecar.finetune.activations.planned import PlannedLayers
from windrow_sidecar.finetune.activations.planning import largest
from windrow_sidecar.finetune.layers.layerwise import DecoderStack
from windrow_sidecar.finetune.stream import MicroLimits

# Of the memory that is free: a group may take so much, short-lived tensors need the rest.
GROUP_SHARE = 0.5
# Of each byte that learns: its gradient and the sum of a step, and two moments.
_GRADIENTS, _MOMENTS = 2, 2


@dataclass(frozen=True, slots=True)
class Needs:
    """What a job keeps besides graphs.

    Attributes:
        longest: tokens of the longest row.
        adapter_bytes: of what learns.
        own_boundaries: whether activations between layers lie in the worker's own memory.
    """

    longest: int
    adapter_bytes: int
    own_boundaries: bool = True


class Keeping:
    """Sets the budget of a stack's layers, and forms no group that would not fit.

    Args:
        stack: its layers train.
        planned: follows the budget.
        needs: of the job.
        least: whether memory is so short that no graph is kept, whatever is free now.
        free_bytes: memory that may still be taken.
        release_caches: gives back what this process holds without using it; called before
            anything is said not to fit.

    Raises:
        UserError: not even one layer of the longest row fits; says how many bytes are needed.
    """

    def __init__(
        self,
        stack: DecoderStack,
        planned: PlannedLayers,
        needs: Needs,
        *,
        least: bool,
        free_bytes: Callable[[], int],
        release_caches: Callable[[], None] = lambda: None,
    ) -> None:
        self._planned, self._free_bytes = planned, free_bytes
        self._release_caches = release_caches
        self._longest, self._least = needs.longest, least
        planned.bytes_per_token = 0 if least else None
        embedding: Tensor = stack.model.get_input_embeddings().weight  # type: ignore[operator]
        self._boundary = int(stack.config.hidden_size) * embedding.element_size()
        state = (_GRADIENTS + _MOMENTS) * needs.adapter_bytes
        graph = 0.0 if least else _graph_bytes(stack, planned, needs.longest)
        boundary = self._boundary if needs.own_boundaries else 0
        first = Appetite(stack.depth, graph, boundary, state)
        _check(first, needs.longest, free_bytes())
        # Moments are there after the first step and count as taken; gradients come and go.
        self._appetite = replace(first, state_bytes=_GRADIENTS * needs.adapter_bytes)

    @property
    def held_bytes_per_token(self) -> int:
        """What a layer that has run up holds of each token until it has run back."""
        whole, budget = self._appetite.bytes_per_token, self._planned.bytes_per_token
        return self._boundary + round(whole if budget is None else min(whole, budget))

    def peak_bytes(self, tokens: int) -> int:
        """What a group of so many padded tokens takes at its peak, nothing given up."""
        return self._appetite.peak_bytes(tokens)

    def fits(self, tokens: int, beside: int = 0) -> bool:
        """Whether such a group fits now, with the least that must be kept, and `beside` bytes."""
        needed = self._appetite.least_bytes(tokens) + beside
        if needed <= self._free_bytes():
            return True
        self._release_caches()
        return needed <= self._free_bytes()

    def check(self, tokens: int) -> None:
        """Refuse to begin a group of so many padded tokens that does not fit.

        Raises:
            MemoryError: says how many bytes it takes and how many are free.
        """
        if not self.fits(tokens):
            raise MemoryError(
                f"a group of {tokens} tokens takes {self._appetite.least_bytes(tokens)} bytes at "
                f"least, {self._free_bytes()} are free now"
            )

    def before(self, limits: MicroLimits) -> MicroLimits:
        """Set the budget for a group of at most those limits; returns what it may have."""
        room = int(GROUP_SHARE * self._free_bytes())
        tokens = self._appetite.most_tokens(room)
        together = max(1, min(limits.micro_batches, tokens // self._longest))
        most = max(self._longest, tokens // together)
        fitting = replace(limits, max_tokens=min(limits.max_tokens, most), micro_batches=together)
        if not self._least:
            tokens = max(fitting.max_tokens, self._longest) * together
            self._planned.bytes_per_token = self._appetite.within(tokens, room)
        return fitting


def _check(appetite: Appetite, longest: int, free_bytes: int) -> None:
    needed = appetite.least_bytes(longest)
    if needed > free_bytes:
        raise UserError(
            f"a step with a row of {longest} tokens takes {needed} bytes at least (one layer's "
            f"graph, {appetite.layers} boundaries, gradients and moments), {free_bytes} are free",
            field="spec.training.maxSequenceLength",
            remedy="Shorten rows, lower the adapter's rank, or give the worker more memory.",
            reason=Reason.OUT_OF_MEMORY,
        )


def _graph_bytes(stack: DecoderStack, planned: PlannedLayers, longest: int) -> float:
    """Measure on paper what one layer keeps of a token of the longest row; 0: it cannot be told."""
    at = stack.begin(torch.zeros(1, longest, dtype=torch.int64, device=stack.probe.device))
    hidden = at.inputs[0]
    assert hidden is not None
    call = at.calls[0]
    recording = planned.recording(0, (hidden.detach().requires_grad_(), *call.args), call.kwargs)
    return largest(recording.graph).kept_bytes / longest if recording else 0.0
