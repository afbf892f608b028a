"""Keep the slots that decisions look at, up to date and grouped by what decides over them.

A cluster has thousands of slots of few kinds, that is of one policy, model, set of directories and
number of jobs. Whether a job may go there is the same for all of a kind, so it is asked once, and
of each kind only the slot with the highest predicted rate is looked at.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from windrow_operator.model import CheckedPolicy, Holder, Job, Slot

_Kind = tuple[object, ...]


def unreachable(slot: Slot) -> str:
    """Return why a slot's sidecar cannot be reached; empty: it can."""
    if slot.pod_gone:
        return "belongs to a pod that is ending"
    if not slot.attached:
        return "has no sidecar attached"
    return "has a sidecar that does not report" if slot.silent else ""


def capacity_refusal(slot: Slot) -> str:
    """Return why a slot takes nobody's job now; empty: it takes jobs."""
    if slot.refused:
        return f"has an engine that cannot be harvested: {slot.refused}"
    if slot.off:
        return f"is {slot.off}" if slot.off.startswith("turned") else f"waits: {slot.off}"
    if slot.lacks_ranks:
        return f"has decode on {slot.tensor_parallel} tensor-parallel ranks, and a worker on one"
    if slot.unseen_device:
        return f"has a GPU that no worker can use: {slot.unseen_device}"
    if slot.lacks_space:
        return "shares its GPU in time, and its policy says sharing: spatial"
    if slot.engine_state == "leaving":
        return "has a sidecar that was asked to end"
    if slot.node_leaving:
        return f"is on node {slot.node}, which {slot.node_leaving}"
    if slot.engine_state != "serving":
        return f"has an engine that is {slot.engine_state or 'not ready'}"
    if slot.breaker:
        return f"gave up harvesting ({slot.breaker})"
    if slot.resting:
        return f"rests {slot.resting}"
    return "has no memory to lend" if slot.memory_full else ""


class _Best:
    """Slots of one kind, and the one of them with the highest predicted rate."""

    def __init__(self) -> None:
        self._slots: dict[str, Slot] = {}
        self._heap: list[tuple[float, str]] = []  # outdated entries are dropped when they are met

    def put(self, slot: Slot) -> None:
        known = self._slots.get(slot.key)
        self._slots[slot.key] = slot
        promise = slot.predicted_tokens_per_second
        if known is not None and known.predicted_tokens_per_second == promise:
            return
        heapq.heappush(self._heap, (-promise, slot.key))
        if len(self._heap) > 2 * len(self._slots) + 16:
            self._heap = [(-s.predicted_tokens_per_second, key) for key, s in self._slots.items()]
            heapq.heapify(self._heap)

    def drop(self, key: str) -> bool:
        """Return whether none is left."""
        self._slots.pop(key, None)
        return not self._slots

    def first(self) -> Slot | None:
        while self._heap:
            promise, key = self._heap[0]
            slot = self._slots.get(key)
            if slot is not None and slot.predicted_tokens_per_second == -promise:
                return slot
            heapq.heappop(self._heap)
        return None


class SlotTable(Mapping[str, Slot]):
    """Slots by key.

    Attributes:
        room: grows whenever a slot has changed so that a job which waits might go there now, or
            would get another message.
        policies: all of them by key, for what is said where there is no slot.
        off: why nothing at all is harvested; empty: policies decide.
    """

    def __init__(self, slots: Iterable[Slot] = ()) -> None:
        self.room = 0
        self.policies: Mapping[str, CheckedPolicy] = {}
        self.off = ""
        self._slots: dict[str, Slot] = {}
        self._kinds: dict[_Kind, _Best] = {}
        self._kind_of: dict[str, _Kind | None] = {}
        self._own: dict[str, dict[str, None]] = {}  # slots by the UID of a job that is on them
        self._by_namespace: dict[str, dict[str, None]] = {}
        self._on_node: dict[str, dict[str, int]] = {}  # jobs by slot, by node
        self._reserved: dict[str, tuple[str, Holder]] = {}  # slot by the job's UID
        for slot in slots:
            self.put(slot)

    def __getitem__(self, key: str) -> Slot:
        """Return a slot."""
        return self._slots[key]

    def __iter__(self) -> Iterator[str]:
        """Return the keys, in the order in which the slots came."""
        return iter(self._slots)

    def __len__(self) -> int:
        """Return how many slots there are."""
        return len(self._slots)

    def put(self, slot: Slot) -> bool:
        """Add or replace a slot; return whether anything about it has changed."""
        slot = self._with_reservations(slot)
        before = self._slots.get(slot.key)
        if before is slot:
            return False
        if before is None or _matters(before) != _matters(slot):
            self.room += 1
        self._replace(before, slot)
        return True

    def remove(self, key: str) -> bool:
        """Forget a slot; return whether there was one."""
        before = self._slots.pop(key, None)
        if before is None:
            return False
        self.room += 1
        self._unlink(before)
        for other in self._count_on_node(before, None):
            self._link(self._slots[other])
        return True

    def reserve(self, key: str, holder: Holder) -> None:
        """Give a place to a job whose status does not say so yet; nobody else gets it."""
        self._reserved[holder.uid] = (key, holder)
        if (before := self._slots.get(key)) is not None:
            self._replace(before, self._with_reservations(before))

    def release(self, uid: str) -> str:
        """Forget a reservation; return the slot, which is to be put again; empty: none."""
        key, _ = self._reserved.pop(uid, ("", None))
        return key

    def candidates(self, job: Job) -> Iterator[Slot]:
        """Yield the best slot of each kind, and those that `job` is on already."""
        for best in self._kinds.values():
            if (slot := best.first()) is not None:
                yield slot
        for key in self._own.get(job.uid, ()):
            yield self._slots[key]

    def of_namespace(self, namespace: str) -> Iterator[Slot]:
        """Yield the slots of a namespace."""
        for key in self._by_namespace.get(namespace, ()):
            yield self._slots[key]

    def number_of(self, namespace: str) -> int:
        """Return how many slots a namespace has."""
        return len(self._by_namespace.get(namespace, ()))

    def neighbours(self, slot: Slot) -> int:
        """Return how many jobs are on other devices of the slot's node."""
        jobs = self._on_node.get(slot.node, {})
        return sum(jobs.values()) - jobs.get(slot.key, 0)

    def _with_reservations(self, slot: Slot) -> Slot:
        there = {holder.uid for holder in slot.holders}
        coming = [
            holder
            for key, holder in self._reserved.values()
            if key == slot.key and holder.uid not in there
        ]
        return replace(slot, holders=(*slot.holders, *coming)) if coming else slot

    def _replace(self, before: Slot | None, slot: Slot) -> None:
        self._slots[slot.key] = slot
        if before is not None and before.holders != slot.holders:
            self._unlink_holders(before)
        moved = self._count_on_node(before, slot)
        self._by_namespace.setdefault(slot.key.partition("/")[0], {})[slot.key] = None
        for holder in slot.holders:
            self._own.setdefault(holder.uid, {})[slot.key] = None
        self._link(slot)
        for key in moved:  # how many jobs their node has is part of their kind
            if key != slot.key:
                self._link(self._slots[key])

    def _link(self, slot: Slot) -> None:
        kind = self._kind(slot)
        known = self._kind_of.get(slot.key)
        if known is not None and known != kind:
            self._drop_from(known, slot.key)
        self._kind_of[slot.key] = kind
        if kind is not None:
            self._kinds.setdefault(kind, _Best()).put(slot)

    def _unlink(self, slot: Slot) -> None:
        kind = self._kind_of.pop(slot.key, None)
        if kind is not None:
            self._drop_from(kind, slot.key)
        self._by_namespace[slot.key.partition("/")[0]].pop(slot.key, None)
        self._unlink_holders(slot)

    def _drop_from(self, kind: _Kind, key: str) -> None:
        if self._kinds[kind].drop(key):
            del self._kinds[kind]

    def _unlink_holders(self, slot: Slot) -> None:
        for holder in slot.holders:
            own = self._own.get(holder.uid, {})
            own.pop(slot.key, None)
            if not own:
                self._own.pop(holder.uid, None)

    def _count_on_node(self, before: Slot | None, after: Slot | None) -> list[str]:
        """Count the jobs of a slot for its node; return the slots of nodes whose count changed."""
        was = (before.node, len(before.holders)) if before else ("", 0)
        now = (after.node, len(after.holders)) if after else ("", 0)
        if was == now:
            return []
        slot = after or before
        assert slot is not None
        changed: list[str] = []
        if was[0] and (before is not None):
            self._on_node.get(was[0], {}).pop(slot.key, None)
            changed += self._on_node.get(was[0], {})
        if now[0] and after is not None:
            self._on_node.setdefault(now[0], {})[slot.key] = now[1]
            changed += self._on_node[now[0]]
        return list(dict.fromkeys(changed))

    def _kind(self, slot: Slot) -> _Kind | None:
        """Return what decides who may be placed on a slot; None: nobody who is not on it."""
        if unreachable(slot) or capacity_refusal(slot) or len(slot.holders) >= slot.max_jobs:
            return None
        bases = tuple(holder.base for holder in slot.holders)
        if None in bases:
            return None  # what is not known, or quantised, is not shared
        terms, tenants = id(slot.terms), frozenset(holder.namespace for holder in slot.holders)
        where = (slot.model, slot.outputs, slot.failed_jobs)
        return (terms, tenants, where, bases, self.neighbours(slot))


def _matters(slot: Slot) -> tuple[object, ...]:
    """Return what of a slot decides whether a job may go there, and what its job is shown of it."""
    return (
        *(id(slot.terms), slot.model, slot.outputs, slot.failed_jobs, slot.max_jobs),
        *(slot.holders, unreachable(slot), capacity_refusal(slot)),
    )
