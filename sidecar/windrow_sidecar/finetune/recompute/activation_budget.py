"""Set how many bytes a job's layers may keep, before each group, from the free memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from windrow.conditions import Reason
from windrow.errors import UserError
from windrow_sidecar.finetune.model.boundaries import TorchBoundaries
from windrow_sidecar.finetune.model.capabilities import one_of_each_kind
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.model.token_dropout import TokenDropout
from windrow_sidecar.finetune.recompute.checkpointed_layers import PlannedLayers
from windrow_sidecar.finetune.recompute.memory_model import MemoryModel
from windrow_sidecar.finetune.recompute.planning import largest
from windrow_sidecar.finetune.recompute.recording import layer_tensors
from windrow_sidecar.finetune.tasklets import MicroLimits, TokenWindow

# Of the memory that is free: a group may take so much, short-lived tensors need the rest.
GROUP_SHARE = 0.5
# Of a mantissa, which is a half at least: see `in_steps`.
_STEPS = 32
# Of each byte that learns: its gradient and the sum of a step, and two moments.
_GRADIENTS, _MOMENTS = 2, 2


@dataclass(frozen=True, slots=True)
class JobMemory:
    """Memory that a job takes besides its layers' graphs.

    Attributes:
        longest: tokens of the longest row.
        adapter_bytes: of what learns.
        own_boundaries: whether activations between layers lie in the worker's own memory.
        windows: whether rows may be cut into windows of tokens, if the model lets them.
        prefix: virtual tokens that stand before each row.
        shortest: tokens of the shortest row.
        together: so many rows are in one micro-batch at least.
    """

    longest: int
    adapter_bytes: int
    own_boundaries: bool = True
    windows: bool = False
    prefix: int = 0
    shortest: int = 1
    together: int = 1


class ActivationBudget:
    """Bytes that a job's layers may keep; refuses groups that would not fit.

    Args:
        stack: its layers train.
        planned: follows the budget; None: layers keep all that autograd saves.
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
        planned: PlannedLayers | None,
        needs: JobMemory,
        *,
        least: bool,
        free_bytes: Callable[[], int],
        release_caches: Callable[[], None] = lambda: None,
    ) -> None:
        self._planned, self._free_bytes = planned, free_bytes
        self._release_caches = release_caches
        self._longest, self._least = needs.longest * needs.together, least
        self._has_prefix = needs.prefix > 0
        if planned is not None:
            planned.bytes_per_token = 0 if least else None
        embedding: Tensor = stack.model.get_input_embeddings().weight  # type: ignore[operator]
        self._boundary = int(stack.config.hidden_size) * embedding.element_size()
        first = MemoryModel(
            stack.depth,
            graph=_graph_bytes(stack, planned, needs.longest),
            graphs=1 if least else stack.depth,
            boundary=self._boundary if needs.own_boundaries else 0,
            ends=2 * self._boundary,
            state_bytes=(_GRADIENTS + _MOMENTS) * needs.adapter_bytes,
        )
        if needs.prefix or (needs.windows and not stack.windows_refused):
            kept, sums = _key_value_bytes(stack)
            # A prefix is there as it was made, in the cache, and as a gradient.
            with_prefix = 1 + 3 * needs.prefix / needs.shortest
            first = replace(first, key_values=with_prefix * kept, key_value_sums=sums)
        _check(first, self._longest, free_bytes(), whole=planned is None)
        # Moments are there after the first step and count as taken; gradients come and go.
        self._memory_model = replace(first, state_bytes=_GRADIENTS * needs.adapter_bytes)

    @property
    def memory_model(self) -> MemoryModel:
        """Prediction of what a group takes."""
        return self._memory_model

    @property
    def boundary_bytes_per_token(self) -> int:
        """Bytes a token of the activation between two layers."""
        return self._boundary

    @property
    def longest(self) -> int:
        """Tokens of the longest row, or of the rows that stay together."""
        return self._longest

    @property
    def held_bytes_per_token(self) -> int:
        """Bytes a token that a layer holds from its run up on whole rows to its run back."""
        whole = self._memory_model.graph
        budget = None if self._planned is None else self._planned.bytes_per_token
        graph = whole if budget is None else min(whole, budget)
        cached = self._memory_model.key_values if self._has_prefix else 0
        return self._boundary + round(graph + cached)

    @property
    def window_bytes_per_token(self) -> int:
        """Bytes a token that a run up in windows, or of whole rows behind a prefix, adds."""
        return 0 if self._has_prefix else round(self._memory_model.key_values)

    def parts(self, tokens: int) -> dict[str, int]:
        """Return the bytes by part that a group of so many padded tokens takes at its peak."""
        return self._memory_model.parts(tokens)

    def peak_bytes(self, tokens: int) -> int:
        """Return the peak bytes of a group of so many padded tokens, nothing given up."""
        return self._memory_model.peak_bytes(tokens)

    def fits(self, tokens: int, beside: int = 0) -> bool:
        """Return whether such a group fits now, with the least that is kept and `beside` bytes."""
        needed = self._least_bytes(tokens) + beside
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
            least = self._least_bytes(tokens)
            raise MemoryError(
                f"a group of {tokens} tokens takes {least} bytes at least, "
                f"{self._free_bytes()} are free now"
            )

    def before(self, limits: MicroLimits) -> MicroLimits:
        """Return what a group of at most those limits may have, so that it fits now."""
        whole = self._planned is None
        tokens = self._memory_model.most_tokens(self._room_bytes(), whole=whole)
        together = max(1, min(limits.micro_batches, tokens // self._longest))
        most = max(self._longest, tokens // together)
        return replace(limits, max_tokens=min(limits.max_tokens, most), micro_batches=together)

    def keep_for(self, tokens: int) -> None:
        """Let layers keep what there is room for in a group of so many padded tokens.

        Of the group that was formed, not of the largest that might have been: rows may be few.
        """
        if self._planned is not None and not self._least:
            within = self._memory_model.within(tokens, self._room_bytes())
            self._planned.bytes_per_token = None if within is None else in_steps(within)

    def _least_bytes(self, tokens: int) -> int:
        whole = self._planned is None
        return (self._memory_model.peak_bytes if whole else self._memory_model.least_bytes)(tokens)

    def _room_bytes(self) -> int:
        return int(GROUP_SHARE * self._free_bytes())


def in_steps(budget: float) -> float:
    """Return the next smaller of sixteen sizes between a power of two and the next.

    Free memory differs a little from group to group, and every budget has a plan of its own: while
    lent memory grew, planning took an eighth of a worker's time (Llama 3 8B, an H200).
    """
    mantissa, exponent = math.frexp(budget)
    return math.ldexp(math.floor(mantissa * _STEPS) / _STEPS, exponent)


def _check(memory_model: MemoryModel, longest: int, free_bytes: int, *, whole: bool) -> None:
    needed = memory_model.peak_bytes(longest) if whole else memory_model.least_bytes(longest)
    graphs = "all layers' graphs" if whole else "one layer's graph"
    if needed > free_bytes:
        caches = " with keys and values" if memory_model.key_values else ""
        raise UserError(
            f"a step with a row of {longest} tokens takes {needed} bytes at least ({graphs}, "
            f"{memory_model.layers} boundaries{caches}, gradients and moments), "
            f"{free_bytes} are free",
            field="spec.training.maxSequenceLength",
            remedy="Shorten rows, lower the adapter's rank, or give the worker more memory.",
            reason=Reason.OUT_OF_MEMORY,
        )


def _graph_bytes(stack: DecoderStack, planned: PlannedLayers | None, longest: int) -> float:
    """Return the bytes a token that autograd saves in one layer: the kind that saves most.

    Measured on paper on the longest row; a layer that cannot be measured on paper (a mixture of
    experts, or one that is cut over ranks) runs on the few tokens of the probe.
    """
    if planned is None:
        return max(_held_bytes(stack, index) for index in one_of_each_kind(stack.layers))
    at = stack.begin(torch.zeros(1, longest, dtype=torch.int64, device=stack.probe.device))
    hidden = at.inputs[0]
    assert hidden is not None
    kept = 0.0
    for index in one_of_each_kind(stack.layers):
        call = at.calls[index]
        args = (hidden.detach().requires_grad_(), *call.args)
        with _dropping(stack.layers[index], longest):
            recording = planned.recording(index, args, call.kwargs)
        of_this = largest(recording.graph).kept_bytes / longest if recording else 0.0
        kept = max(kept, of_this or _held_bytes(stack, index))
    return kept


@contextmanager
def _dropping(layer: nn.Module, tokens: int) -> Iterator[None]:
    """Let the adapter's dropouts be active on one row, so that their saved tensors count.

    As in training, whatever stage the job is in.
    """
    dropouts = [m for m in layer.modules() if isinstance(m, TokenDropout)]
    were_training = [dropout.training for dropout in dropouts]
    for dropout in dropouts:
        dropout.pretend(tokens)
    try:
        yield
    finally:
        for dropout, training in zip(dropouts, were_training, strict=True):
            dropout.train(training)


def _held_bytes(stack: DecoderStack, index: int) -> float:
    """Run one layer on the probe; return the bytes a token that autograd saves."""
    at = stack.begin(stack.probe)
    at.inputs[index] = at.inputs[0]
    held, layer, tokens = SavedBytes(stack.layers[index]), stack.layers[index], at.whole.tokens
    with _dropping(layer, tokens), held.watching(tokens):
        stack.forward(at, index, at.whole, TorchBoundaries(), learn=True)
    return held.per_token


def _key_value_bytes(stack: DecoderStack) -> tuple[int, int]:
    """Return the bytes a token of one layer's keys, values and the sums of their gradients.

    Tried out on a window of the probe: only the layer knows how many heads of which size it has.
    """
    at = stack.begin(stack.probe)
    window = TokenWindow(0, at.whole.end - 1)
    kept = sums = 0
    for index in one_of_each_kind(stack.layers):
        at.inputs[index] = at.inputs[0]
        with _dropping(stack.layers[index], window.tokens):
            stack.forward(at, index, window, TorchBoundaries(), learn=False)
        if (key_values := at.key_values[index]) is not None:
            of_this = key_values.bytes_per_token
            kept, sums = max(kept, of_this[0]), max(sums, of_this[1])
    return kept, sums


class SavedBytes:
    """Count the bytes that autograd saves, without a module's parameters.

    Args:
        module: what runs.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parameters = {t.untyped_storage().data_ptr() for t in layer_tensors(module)}
        self._n_bytes = self._tokens = 0

    @contextmanager
    def watching(self, tokens: int) -> Iterator[None]:
        """Count what is saved inside, each tensor once; `tokens`: times layers that run there."""
        known = set(self._parameters)

        def note(tensor: Tensor) -> Tensor:
            at = tensor.untyped_storage().data_ptr()
            if at not in known:
                known.add(at)
                self._n_bytes += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
            yield
        self._tokens += tokens

    @property
    def per_token(self) -> float:
        """Bytes for each token of each layer."""
        return self._n_bytes / max(1, self._tokens)
