"""Where a job goes: the slot with the most predicted headroom among those that can take it.

Free slots come first, and among them those that serve the job's own model, since there the frozen
weights are shared. Where no slot is free, jobs over one base model share a worker, which carries
them in turns. Every refusal is one sentence, so that a job that waits can say why.
"""

from __future__ import annotations

import itertools
import posixpath
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from windrow.outputs import is_below
from windrow_operator.model import Base, CheckedPolicy, Holder, Job, Slot, key_of

# A message lists so many slots one by one; a cluster may have thousands.
SLOTS_LISTED = 8


@dataclass(frozen=True, slots=True)
class Placement:
    """A slot was found."""

    slot: Slot
    message: str


@dataclass(frozen=True, slots=True)
class NoPlacement:
    """No slot can take the job."""

    message: str


class SlotTable(Mapping[str, Slot]):
    """Slots by key, and those that could take a job grouped by what decides it.

    A cluster has thousands of slots of few kinds, that is of one policy, model, set
    of directories and number of jobs. Whether a job may go there is the same for all of a kind, so
    it is asked once.
    """

    def __init__(self, slots: Iterable[Slot]) -> None:
        self._slots = {slot.key: slot for slot in slots}
        # The slots of a kind that are not closed to everybody, the one to choose in front.
        self._kinds: dict[_Kind, dict[str, Slot]] | None = None
        self._own: dict[str, list[str]] = {}  # slots by the UID of a job that is on them

    def __getitem__(self, key: str) -> Slot:
        """Return a slot."""
        return self._slots[key]

    def __iter__(self) -> Iterator[str]:
        """Return the keys, in the order in which the slots came."""
        return iter(self._slots)

    def __len__(self) -> int:
        """Return how many slots there are."""
        return len(self._slots)

    def put(self, slot: Slot) -> None:
        """Replace a slot: a job was placed on it."""
        before = self._slots.get(slot.key)
        self._slots[slot.key] = slot
        if self._kinds is not None:
            if before is not None and (kind := _kind(before)) in self._kinds:
                self._kinds[kind].pop(slot.key, None)
            self._add(slot)

    def candidates(self, job: Job) -> Iterator[Slot]:
        """Yield the best slot of each kind, and those that `job` is on already."""
        if self._kinds is None:
            self._kinds = {}
            by_promise = sorted(
                self._slots.values(), key=lambda slot: (-slot.predicted_tokens_per_second, slot.key)
            )
            for slot in by_promise:
                self._add(slot)
        for slots in self._kinds.values():
            if slots:
                yield next(iter(slots.values()))
        for key in self._own.get(job.uid, ()):
            yield self._slots[key]

    def _add(self, slot: Slot) -> None:
        for holder in slot.holders:
            self._own.setdefault(holder.uid, []).append(slot.key)
        if (kind := _kind(slot)) is not None and self._kinds is not None:
            self._kinds.setdefault(kind, {})[slot.key] = slot


_Kind = tuple[object, ...]


def _kind(slot: Slot) -> _Kind | None:
    """Return what decides who may be placed on a slot; None: nobody who is not on it."""
    if _unreachable(slot) or _capacity_refusal(slot) or len(slot.holders) >= slot.max_jobs:
        return None
    bases = tuple(holder.base for holder in slot.holders)
    if None in bases:
        return None  # what is not known, or quantised, is not shared
    return (id(slot.terms), slot.model, slot.outputs, slot.failed_jobs, bases)


def place(job: Job, slots: SlotTable | Iterable[Slot]) -> Placement | NoPlacement:
    """Return where `job` goes, or why it cannot go anywhere."""
    table = slots if isinstance(slots, SlotTable) else SlotTable(slots)
    best = min(
        (slot for slot in table.candidates(job) if not refusal(job, slot)),
        key=lambda slot: _preference(job, slot),
        default=None,
    )
    if best is None:
        return NoPlacement(_explain(job, table))
    return Placement(best, _explain_choice(job, best))


def _preference(job: Job, slot: Slot) -> tuple[object, ...]:
    return (
        job.key in slot.failed_jobs,
        len(_others(job, slot)),
        not serves_model(job, slot),
        -slot.predicted_tokens_per_second,
        slot.key,
    )


def refusal(job: Job, slot: Slot) -> str:
    """Return why `slot` cannot take `job`, in words that follow its name; empty: it can."""
    return (
        _unreachable(slot)
        or admission_refusal(job, slot)
        or _capacity_refusal(slot)
        or _unwritable(job, slot)
        or _sharing_refusal(job, slot)
    )


def admission_refusal(job: Job, slot: Slot) -> str:
    """Return why the slot's policy does not admit `job` now; empty: it does."""
    if slot.terms is None:
        return "is selected by no valid HarvestPolicy"
    policy = slot.terms.policy
    if slot.terms.mode != "harvest":
        return f"may not be harvested now ({slot.terms.why or f'mode {slot.terms.mode}'})"
    if job.spec and job.spec.policies and not _accepts(job, policy):
        return f"is under policy {policy.name}, which spec.policies does not name"
    if job.namespace in slot.terms.spent:
        return f"gives namespace {job.namespace} no more today by policy {policy.name}"
    if not _is_open_to(policy, job):
        return f"is closed to namespace {job.namespace} by policy {policy.name}"
    return ""


def _accepts(job: Job, policy: CheckedPolicy) -> bool:
    named = job.spec.policies if job.spec else ()
    return any(
        policy.key == (name if "/" in name else key_of(job.namespace, name)) for name in named
    )


def _is_open_to(policy: CheckedPolicy, job: Job) -> bool:
    if policy.spec is None:
        return True
    selector = policy.spec.access.namespace_selector
    if selector.is_empty:
        return job.namespace == policy.namespace
    return selector.matches(dict(job.namespace_labels))


def serves_model(job: Job, slot: Slot) -> bool:
    """Return whether decode serves the very model that the job trains."""
    return same_model(job, slot.model)


def same_model(job: Job, model: str) -> bool:
    """Return whether `job` trains `model`, a name or a path."""
    return job.spec is not None and (
        posixpath.normpath(job.spec.model.name) == posixpath.normpath(model)
    )


def _others(job: Job, slot: Slot) -> list[Holder]:
    return [holder for holder in slot.holders if holder.uid != job.uid]


def _sharing_refusal(job: Job, slot: Slot) -> str:
    """Return why `job` cannot share the slot with the jobs on it; empty: it can."""
    others = _others(job, slot)
    if not others:
        return ""
    runs = f"runs job{'s' if others[1:] else ''} {_names(others)}"
    if slot.max_jobs == 1:
        return runs
    if len(others) >= slot.max_jobs:
        return f"{runs}, as many as it takes"
    base = Base.of(job.spec) if job.spec else None
    if base is None:
        return f"{runs}, and a quantised base is not shared"
    different = [holder for holder in others if holder.base != base]
    return f"{runs}, {_names(different)} over another base" if different else ""


def _names(holders: list[Holder]) -> str:
    return " and ".join(holder.name for holder in holders)


def _unreachable(slot: Slot) -> str:
    if slot.pod_gone:
        return "belongs to a pod that is ending"
    if not slot.attached:
        return "has no sidecar attached"
    return "has a sidecar that does not report" if slot.silent else ""


def _capacity_refusal(slot: Slot) -> str:
    if slot.tensor_parallel > 1:
        return f"is one of {slot.tensor_parallel} tensor-parallel ranks, which cannot lend yet"
    if slot.engine_state != "serving":
        return f"has an engine that is {slot.engine_state or 'not ready'}"
    if slot.breaker:
        return f"gave up harvesting ({slot.breaker})"
    if slot.resting:
        return f"rests {slot.resting}"
    return "has no memory to lend" if slot.memory_full else ""


def _unwritable(job: Job, slot: Slot) -> str:
    """Return why the adapter cannot be written from the slot; empty: it can, as far as is known."""
    if job.spec is None or (slot.outputs and is_below(slot.outputs, job.spec.output.destination)):
        return ""
    given = ", ".join(slot.outputs) or "none"
    return (
        f"cannot write {job.spec.output.destination}: of its policy's volumes its pod has to write "
        f"to: {given}"
    )


def _explain_choice(job: Job, slot: Slot) -> str:
    shared = ", shares the served model's weights" if serves_model(job, slot) else ""
    predicted = slot.predicted_tokens_per_second
    # A policy that has just come has no second of decode behind it.
    promise = f"predicts {rate(predicted)} tok/s" if predicted > 0 else "has predicted no rate yet"
    others = _others(job, slot)
    turns = f", in turns with {_names(others)}" if others else ""
    return f"{_name(job, slot)} {promise}{shared}{turns}"


def _name(job: Job, slot: Slot) -> str:
    """Return the slot's name, with its namespace where that is not the job's."""
    return slot.key.removeprefix(f"{job.namespace}/")


def rate(tokens_per_second: float) -> str:
    """Return a rate for people: `940`, `9.6k`."""
    if tokens_per_second < 1000:
        return f"{tokens_per_second:.0f}"
    return f"{tokens_per_second / 1000:.1f}k"


def _explain(job: Job, table: SlotTable) -> str:
    if not table:
        return "There is no harvested slot: no sidecar of a decode pod has attached"
    first = itertools.islice(table.values(), SLOTS_LISTED)
    listed = [f"{_name(job, slot)} {refusal(job, slot)}" for slot in first]
    more = len(table) - len(listed)
    return "; ".join(listed) + (f"; and {more} more slots refuse" if more else "")
