"""Run one layer under a recompute plan: keep some tensors, compute the others in backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from windrow_sidecar.finetune.model.window_attention import looking_as_now
from windrow_sidecar.finetune.recompute.dropouts import AtDropouts, random_state
from windrow_sidecar.finetune.recompute.extraction import SignBits, unsigned
from windrow_sidecar.finetune.recompute.recompute_plan import RecomputePlan
from windrow_sidecar.finetune.recompute.recording import LayerTensors, OpCall, Ref


class CheckpointedForward:
    """The saved tensors of one layer between its forward and the end of its backward.

    A forward that does not show the tensors that the plan expects (a mixture of experts that routes
    otherwise, a kernel that was chosen again) is run a second time as a whole in its backward:
    slower, never wrong.

    Args:
        layer, args, kwargs: the call. Weights are looked up when they are needed: they may be
            elsewhere by then.
        recompute_plan: None: keep nothing but the arguments.
        weights: where the layer's are, if somebody knows.
    """

    def __init__(
        self,
        layer: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        recompute_plan: RecomputePlan | None,
        weights: LayerTensors | None = None,
    ) -> None:
        self._layer, self._recompute_plan = layer, recompute_plan
        self._args, self._kwargs = args, kwargs
        self._weights = weights or LayerTensors(layer)
        self._leaves: list[Any] | None = None  # of the call, once one is asked for
        self._checks = recompute_plan.checks if recompute_plan else ()
        self._state = torch.get_rng_state() if layer.training else None
        self._looking = looking_as_now()
        self._points: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._uses = dict(recompute_plan.uses) if recompute_plan else {}
        self._packed = 0
        self._fits = recompute_plan is not None
        self._again: dict[int, Tensor] | None = None

    @property
    def misfit(self) -> bool:
        """True where the forward differed from the plan's."""
        return self._recompute_plan is not None and not self._fits

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Take what the layer's forward saves while this is open."""
        with self._noting(), torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            yield
        self._fits = self._fits and self._packed == len(self._checks)
        if not self._fits:
            self._values.clear()

    def pack(self, tensor: Tensor) -> int | Tensor:
        """Keep of the next saved tensor [...] what the recompute plan says.

        Returns:
            its position; or the tensor, where the plan leaves it to autograd. What is kept shares
            its memory, unless the plan asks for a compact copy.
        """
        position = self._packed
        self._packed = position + 1
        if not self._fits:
            return position
        if position >= len(self._checks):
            self._fits = False
            return position
        check = self._checks[position]
        if not check.fits(tensor):
            self._fits = False
            return position
        for value, take, is_copied in check.taken:
            kept = take(tensor.detach())
            self._values[value] = kept.clone() if is_copied else kept
        return tensor.detach() if check.as_it_is else position

    def unpack(self, position: int | Tensor) -> Tensor:
        """Return the saved tensor [...], without graph, for what `pack` returned."""
        if not isinstance(position, int):
            return position
        recompute_plan = self._recompute_plan
        if recompute_plan is None or not self._fits:
            return self._from_second_run(position)
        if torch.is_grad_enabled():  # never in a backward of ours
            with torch.no_grad():
                return self._needed(recompute_plan, position)
        return self._needed(recompute_plan, position)

    def _needed(self, recompute_plan: RecomputePlan, position: int) -> Tensor:
        value = self._value(recompute_plan, recompute_plan.recording.graph.needs[position])
        if position in recompute_plan.recording.signs:
            return unsigned(value, recompute_plan.recording.layouts[position])
        return value

    def _value(self, recompute_plan: RecomputePlan, value: int) -> Tensor:
        """Return a value; it is let go with the last use that is to be expected."""
        origin = recompute_plan.recording.there.get(value)
        if origin is not None:
            return self._found(*origin)
        if value not in self._values:
            self._run(recompute_plan, recompute_plan.made_by[value])
        tensor = self._values[value]
        self._uses[value] -= 1
        if self._uses[value] <= 0:
            del self._values[value]
        return tensor

    def _found(self, in_layer: bool, index: int) -> Tensor:
        if in_layer:
            return self._weights[index].detach()
        if self._leaves is None:
            self._leaves = pytree.tree_leaves((self._args, self._kwargs))
        tensor: Tensor = self._leaves[index]
        return tensor.detach()

    def _run(self, recompute_plan: RecomputePlan, op: int) -> None:
        call = recompute_plan.recording.calls[op]
        if call is None:
            signs = recompute_plan.recording.graph.ops[op]
            self._keep(signs.outputs, [SignBits()(self._value(recompute_plan, signs.inputs[0]))])
            return
        leaves = [
            self._value(recompute_plan, x.value) if isinstance(x, Ref) else x for x in call.leaves
        ]
        if call.mutates:
            leaves[0] = leaves[0].clone()
        if call.plain_args:
            args: Any = leaves
            kwargs: dict[str, Any] = {}
        else:
            args, kwargs = pytree.tree_unflatten(leaves, call.spec)
        if call.random_point is None:
            result = call.function(*args, **kwargs)
        else:
            with self._drawing_as(call):
                result = call.function(*args, **kwargs)
        self._keep(call.outputs, list(result) if isinstance(result, tuple | list) else [result])

    def _keep(self, outputs: tuple[int | None, ...], results: list[Any]) -> None:
        for value, result in zip(outputs, results, strict=True):
            if value is not None and self._uses.get(value, 0) > 0:
                self._values.setdefault(value, result)

    def _noting(self) -> AbstractContextManager[Any]:
        """Note the generator's state before each dropout whose mask will be drawn again."""
        wanted = self._recompute_plan.random_points if self._recompute_plan else frozenset()

        @contextmanager
        def note(point: int) -> Iterator[None]:
            if point in wanted:
                self._points[point] = torch.get_rng_state()
            yield

        return AtDropouts(note) if wanted else nullcontext()

    def _drawing_as(self, call: OpCall) -> AbstractContextManager[None]:
        state = None if call.random_point is None else self._points[call.random_point]
        return random_state(state)

    def _from_second_run(self, position: int) -> Tensor:
        if self._again is None:
            self._again = self._run_again()
        return self._again.pop(position)

    def _run_again(self) -> dict[int, Tensor]:
        """Run the layer's forward once more and return all that it saves, by position."""
        saved: list[Tensor] = []

        def pack(tensor: Tensor) -> int:
            saved.append(tensor.detach())
            return 0

        def refuse(_: int) -> Tensor:
            raise RuntimeError("the second run of a forward has no backward of its own")

        hidden = self._args[0].detach().requires_grad_(self._args[0].requires_grad)
        with (
            torch.enable_grad(),
            self._looking(),
            random_state(self._state),
            torch.autograd.graph.saved_tensors_hooks(pack, refuse),
        ):
            self._layer(hidden, *self._args[1:], **self._kwargs)
        return dict(enumerate(saved))
