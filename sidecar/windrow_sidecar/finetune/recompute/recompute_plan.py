"""A plan for one layer in executable form: what each saved tensor is replaced by."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from windrow_sidecar.finetune.recompute.extraction import Extractor
from windrow_sidecar.finetune.recompute.planning import KeepPlan
from windrow_sidecar.finetune.recompute.recording import Recording


@dataclass(frozen=True, slots=True)
class RecomputePlan:
    """Plan of what each forward and backward of layers of one kind keeps and computes again.

    Attributes:
        recording: how to run operations again.
        plan: the decision.
        taken: by position of a saved tensor: the values to take from it.
        made_by: the operation to run again for a value.
        uses: how often each value is asked for in one backward; then it is let go.
        compact: kept values that are copied, since their storage holds more than is kept.
        random_points: dropouts whose generator state is needed again.
    """

    recording: Recording
    plan: KeepPlan
    taken: dict[int, tuple[tuple[int, Extractor], ...]]
    made_by: dict[int, int]
    uses: dict[int, int]
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
    return RecomputePlan(
        recording=recording,
        plan=plan,
        taken={position: tuple(values) for position, values in taken.items()},
        made_by={v: op for op in sorted(plan.replayed) for v in graph.ops[op].outputs},
        uses=_uses(recording, plan),
        compact=_compact(recording, plan),
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
