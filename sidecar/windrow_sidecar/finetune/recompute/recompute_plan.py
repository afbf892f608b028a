"""A plan for one layer in executable form: what each saved tensor is replaced by."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import Tensor

from windrow_sidecar.finetune.recompute.extraction import Extractor, TensorLayout
from windrow_sidecar.finetune.recompute.planning import KeepPlan
from windrow_sidecar.finetune.recompute.recording import Recording


class SavedCheck:
    """Layout of the tensor that autograd saves at one position, and what to keep of it.

    Args:
        layout: that it had when it was recorded.
        taken: values to take from it, and whether each is copied.
    """

    __slots__ = ("_dtype", "_layout", "_seen", "_size", "taken")

    def __init__(
        self, layout: TensorLayout, taken: tuple[tuple[int, Extractor, bool], ...]
    ) -> None:
        self._layout, self._size, self._dtype = layout, layout.size, layout.dtype
        self._seen: tuple[int, ...] | None = None  # strides that did fit
        self.taken = taken

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
        uses: how often each value is asked for in one backward; then it is let go.
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


def recompute_plan_of(recording: Recording, plan: KeepPlan) -> RecomputePlan:
    """Make a plan for `recording.graph` executable."""
    graph = recording.graph
    taken: dict[int, list[tuple[int, Extractor]]] = {}
    for value in sorted(plan.kept):
        take = recording.takes[value]
        taken.setdefault(take.position, []).append((value, take))
    calls = (recording.calls[op] for op in plan.replayed)
    compact = _compact(recording, plan)
    checks = tuple(
        SavedCheck(
            layout,
            tuple((value, take, value in compact) for value, take in taken.get(position, ())),
        )
        for position, layout in enumerate(recording.layouts)
    )
    return RecomputePlan(
        recording=recording,
        plan=plan,
        made_by={v: op for op in sorted(plan.replayed) for v in graph.ops[op].outputs},
        uses=_uses(recording, plan),
        checks=checks,
        compact=compact,
        random_points=frozenset(
            call.random_point for call in calls if call and call.random_point is not None
        ),
    )


def _uses(recording: Recording, plan: KeepPlan) -> dict[int, int]:
    graph = recording.graph
    uses = Counter(graph.needs)
    for op in plan.replayed:
        uses.update(graph.ops[op].inputs)
    return dict(uses)


def _compact(recording: Recording, plan: KeepPlan) -> frozenset[int]:
    """Kept values of storages of which less is kept than there is."""
    kept: dict[int, list[int]] = {}
    for value in plan.kept:
        take = recording.takes[value]
        if all(hasattr(step, "shift") for step in take.steps):  # still the saved tensor's storage
            kept.setdefault(recording.storages[value], []).append(value)
    values = recording.graph.values
    return frozenset(
        value
        for storage, members in kept.items()
        for value in members
        if sum(values[v].n_bytes for v in members) < recording.storage_bytes[storage]
    )
