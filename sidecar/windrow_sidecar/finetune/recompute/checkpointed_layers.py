"""Keep each layer within its activation budget (see `around.AroundLayer`)."""

from __future__ import annotations

import itertools
import logging
import sys
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from windrow_sidecar.finetune.model.window_attention import is_looking_back
from windrow_sidecar.finetune.recompute.checkpointed_forward import CheckpointedForward
from windrow_sidecar.finetune.recompute.planning import BudgetTooSmall, plan_within
from windrow_sidecar.finetune.recompute.recompute_plan import RecomputePlan, recompute_plan_of
from windrow_sidecar.finetune.recompute.recording import (
    CannotRecord,
    LayerTensors,
    Recording,
    record,
)

log = logging.getLogger(__name__)

ALL = inf
# Shapes and budgets that are remembered, a few hundred KiB each.
RECORDINGS_KEPT, PLANS_KEPT = 64, 256
# Kinds of calls that have a number.
KINDS_KEPT = 1024


class PlannedLayers:
    """Keep what fits a layer's budget, and compute the rest again in backward.

    `bytes_per_token` is that budget for one layer; it may change between two layers. None keeps
    everything as autograd does, at no cost; 0 keeps nothing but the layer's input, at the price of
    a second forward; `ALL` keeps everything but weights, which are looked up again, so that they
    may leave meanwhile.

    Args:
        layers: of the model.
        gemm_again: whether single matrix products may run again where a budget asks for it.
            Otherwise a budget that is too small for cheap operations means 0.
        weights_stay: whether weights stay where they are between a layer's forward and its
            backward, so that views of them are not made again.
    """

    def __init__(
        self, layers: Sequence[nn.Module], *, gemm_again: bool = True, weights_stay: bool = False
    ) -> None:
        self._layers, self._gemm_again = layers, gemm_again
        self._weights_stay = weights_stay
        self.bytes_per_token: float | None = None
        self._recordings: OrderedDict[tuple[int, int], Recording | None] = OrderedDict()
        self._plans: OrderedDict[tuple[int, int, float], RecomputePlan | None] = OrderedDict()
        self._tensors: dict[int, LayerTensors] = {}
        # Numbers of kinds of calls and of layers: their descriptions are long to hash.
        self._kinds: dict[Hashable, int] = {}
        self._numbers = itertools.count()
        # Layers that computed the same when they were first seen share all later recordings.
        self._likeness: dict[int, int] = {}

    @contextmanager
    def forward(self, layer: int) -> Iterator[None]:
        """Follow the layer's forward; the backward that belongs to it may run once."""
        if self.bytes_per_token is None or not torch.is_grad_enabled():
            yield
            return
        followed: list[CheckpointedForward] = []
        with ExitStack() as open_until_it_returns:

            def follow(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                hook.remove()  # what records the layer, or runs it again, is not followed
                recompute_plan = self.recompute_plan(layer, args, kwargs)
                tensors = self._tensors_of(layer)
                followed.append(CheckpointedForward(module, args, kwargs, recompute_plan, tensors))
                open_until_it_returns.enter_context(followed[-1].forward())

            hook = self._layers[layer].register_forward_pre_hook(follow, with_kwargs=True)
            try:
                yield
            finally:
                hook.remove()
        if any(following.misfit for following in followed):
            # It is not like the other layer after all: from now on it has recordings of its own.
            self._likeness[layer] = next(self._numbers)

    def backward(self, layer: int) -> AbstractContextManager[None]:
        """Return an empty context: autograd asks for what it needs."""
        del layer
        return nullcontext()

    def _tensors_of(self, layer: int) -> LayerTensors:
        """Return where the layer's tensors are, as the newest recordings number them."""
        if layer not in self._tensors:
            self._tensors[layer] = LayerTensors(self._layers[layer])
        return self._tensors[layer]

    def recording(
        self,
        layer: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: int | None = None,
    ) -> Recording | None:
        """Return what the layer computes in a call of that kind; None: it is unknown.

        `call`: the number of the kind, where it is known.
        """
        call = self._number(_call_key(args, kwargs)) if call is None else call
        if layer not in self._likeness:
            found = self._record(layer, args, kwargs)
            alike = (call, found.constants) if found else ("layer", layer)
            self._likeness[layer] = self._number(alike)
            self._recordings.setdefault((self._likeness[layer], call), found)
        key = (self._likeness[layer], call)
        if key not in self._recordings:
            self._recordings[key] = self._record(layer, args, kwargs)
        _touch(self._recordings, key, RECORDINGS_KEPT)
        return self._recordings[key]

    def recompute_plan(
        self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> RecomputePlan | None:
        """Return how to keep to the budget in a call of that kind; None: keep its arguments."""
        if not self.bytes_per_token:
            return None
        budget = min(self.bytes_per_token * args[0].shape[:-1].numel(), sys.maxsize)
        call = self._number(_call_key(args, kwargs))
        recording = self.recording(layer, args, kwargs, call)
        key = (self._likeness[layer], call, budget)
        if key not in self._plans:
            self._plans[key] = self._within(recording, round(budget))
        _touch(self._plans, key, PLANS_KEPT)
        return self._plans[key]

    def _within(self, recording: Recording | None, budget: int) -> RecomputePlan | None:
        if recording is None:
            return None
        for again in (False, True) if self._gemm_again else (False,):
            try:
                plan = plan_within(recording.graph, budget, gemm_again=again)
            except BudgetTooSmall:
                continue
            return recompute_plan_of(recording, plan, weights_stay=self._weights_stay)
        return None

    def _number(self, of: Hashable) -> int:
        found = self._kinds.get(of)
        if found is None:
            if len(self._kinds) >= KINDS_KEPT:  # layers keep their numbers
                self._kinds.clear()
            found = self._kinds[of] = next(self._numbers)
        return found

    def _record(
        self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Recording | None:
        # A recording numbers the tensors that layers have now: the adapter's dropout may have come
        # since they were looked up. Layers that are alike share it.
        self._tensors.clear()
        try:
            return record(self._layers[layer], args, kwargs)
        except CannotRecord as error:
            log.info("layer %d is recomputed as a whole: %s", layer, error)
            return None


def _call_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    return (is_looking_back(), _key_of(args), _key_of(kwargs))


def _key_of(value: Any) -> Hashable:  # noqa: ANN401 - an argument, or what it consists of
    """Return its part of a call's kind; walked by hand, since pytree takes far longer."""
    if isinstance(value, Tensor):
        return (value.shape, value.stride(), value.dtype, value.requires_grad)
    if value is None or isinstance(value, int | float | str):
        return value
    kind = type(value)
    if kind is tuple or kind is list:
        return (kind, *map(_key_of, value))
    if kind is dict:
        return (kind, *((name, _key_of(inner)) for name, inner in value.items()))
    leaves, spec = pytree.tree_flatten(value)
    if spec.is_leaf():
        if isinstance(value, Hashable):
            return value
        return f"{kind.__module__}.{kind.__qualname__}"
    return (str(spec), *map(_key_of, leaves))


def _touch(held: OrderedDict[Any, Any], key: Hashable, most: int) -> None:
    """Move `key` to the end of an ordered cache, and evict beyond `most` entries."""
    held.move_to_end(key)
    while len(held) > most:
        held.popitem(last=False)
