"""A plan for one layer in executable form: what each saved tensor is replaced by."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import Tensor

from windrow_sidecar.finetune.recompute.extraction import Extractor, TensorLayout
from windrow_sidecar.finetune.recompute.layer_graph import OpKind
from windrow_sidecar.finetune.recompute.planning import KeepPlan
from windrow_sidecar.finetune.recompute.recording import Recording


class SavedCheck:
    """Layout of the tensor that autograd saves at one position, and what to keep of it.

    Args:
        layout: that it had when it was recorded.
        taken: values to take from it, and whether each is copied.
        as_it_is: whether autograd keeps it: all of its memory is kept anyway.
    """

    __slots__ = ("_dtype", "_layout", "_seen", "_size", "as_it_is", "taken")

    def __init__(
        self,
        layout: TensorLayout,
        taken: tuple[tuple[int, Extractor, bool], ...],
        *,
        as_it_is: bool = False,
    ) -> None:
        self._layout, self._size, self._dtype = layout, layout.size, layout.dtype
        self._seen: tuple[int, ...] | None = None  # strides that did fit
        self.taken, self.as_it_is = taken, as_it_is

    def fits(self, tensor: Tensor) -> bool:
        """Return whether a tensor [...] of another run is alike (see `TensorLayout.fits`)."""
        strides = tensor.stride()
        if strides == self._seen and tensor.shape == self._size and tensor.dtype is self._dtype:
            return True
        if not self._layout.fits(tensor):
            return False
        self._seen = strides
        return True


@dataclass(frozen=True, slots=True)
class RecomputePlan:
    """Plan of what each forward and backward of layers of one kind keeps and computes again.

    Attributes:
        recording: how to run operations again.
        plan: the decision.
        made_by: the operation to run again for a value.
        uses: how often each value is asked for in one backward, but for tensors that autograd keeps
            as they are; then it is let go.
        checks: of each saved tensor, in order.
        compact: kept values that are copied, since their storage holds more than is kept.
        random_points: dropouts whose generator state is needed again.
    """

    recording: Recording
    plan: KeepPlan
    made_by: dict[int, int]
    uses: dict[int, int]
    checks: tuple[SavedCheck, ...]
    compact: frozenset[int]
    random_points: frozenset[int]


def recompute_plan_of(
    recording: Recording, plan: KeepPlan, *, weights_stay: bool = False
) -> RecomputePlan:
    """Make a plan for `recording.graph` executable.

    Args:
        recording: of the layer.
        plan: what to keep of it.
        weights_stay: whether weights stay where they are between a forward and its backward, so
            that views of them cost nothing.
    """
    graph, compact = recording.graph, _compact(recording, plan)
    as_they_are = _as_they_are(recording, plan, compact, weights_stay=weights_stay)
    uses = Counter(value for n, value in enumerate(graph.needs) if n not in as_they_are)
    for op in plan.replayed:
        uses.update(graph.ops[op].inputs)
    taken: dict[int, list[tuple[int, Extractor]]] = {}
    for value in sorted(plan.kept):
        take = recording.takes[value]
        if uses[value]:
            taken.setdefault(take.position, []).append((value, take))
    calls = (recording.calls[op] for op in plan.replayed)
    checks = tuple(
        SavedCheck(
            layout,
            tuple((value, take, value in compact) for value, take in taken.get(position, ())),
            as_it_is=position in as_they_are,
        )
        for position, layout in enumerate(recording.layouts)
    )
    return RecomputePlan(
        recording=recording,
        plan=plan,
        made_by={v: op for op in sorted(plan.replayed) for v in graph.ops[op].outputs},
        uses=dict(uses),
        checks=checks,
        compact=compact,
        random_points=frozenset(
            call.random_point for call in calls if call and call.random_point is not None
        ),
    )


def _as_they_are(
    recording: Recording, plan: KeepPlan, compact: frozenset[int], *, weights_stay: bool
) -> frozenset[int]:
    """Return the positions of saved tensors whose memory is there in any case.

    Those of the call's arguments, kept values of which the whole storage is kept, and views of
    weights that stay. Nothing is looked up for them again.
    """
    of_weights: set[int] = set()
    if weights_stay:
        of_weights = {value for value, (in_layer, _) in recording.there.items() if in_layer}
        for op in recording.graph.ops:
            if op.kind is OpKind.VIEW and of_weights.issuperset(op.inputs):
                of_weights.update(op.outputs)
    arguments = {value for value, (in_layer, _) in recording.there.items() if not in_layer}
    whole = {value for value in plan.kept if value not in compact and _is_shared(recording, value)}
    there = of_weights | arguments | whole
    return frozenset(
        position
        for position, value in enumerate(recording.graph.needs)
        if value in there and position not in recording.signs
    )


def _is_shared(recording: Recording, value: int) -> bool:
    """Return whether a value is taken as a part of the saved tensor's own storage."""
    return all(hasattr(step, "shift") for step in recording.takes[value].steps)


def _compact(recording: Recording, plan: KeepPlan) -> frozenset[int]:
    """Kept values of storages of which less is kept than there is."""
    kept: dict[int, list[int]] = {}
    for value in plan.kept:
        if _is_shared(recording, value):
            kept.setdefault(recording.storages[value], []).append(value)
    values = recording.graph.values
    return frozenset(
        value
        for storage, members in kept.items()
        for value in members
        if sum(values[v].n_bytes for v in members) < recording.storage_bytes[storage]
    )
