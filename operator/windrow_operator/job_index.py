"""Index jobs by slot, phase and output directory, so that nobody searches all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from windrow.conditions import get_condition, is_finished, is_true
from windrow.crd import FINALIZER_ADAPTER, LABEL_QUEUE, FinetuneJobSpec, parse_job_spec
from windrow.crd.finetunejob import MANAGED_BY_US
from windrow.errors import UserError
from windrow_operator import policies
from windrow_operator.model import CheckedPolicy, Mount, key_of

Body = Mapping[str, Any]

# Not placed before, time of creation, key: the smallest one has the destination.
_Rank = tuple[bool, str, str]


@dataclass(frozen=True, slots=True)
class _Entry:
    """Keys of a job in the indexes."""

    slot: str = ""
    places: frozenset[str] = frozenset()
    namespace: str = ""


class JobIndex:
    """The jobs' specs, checked, and indexes that are kept as jobs change."""

    def __init__(self) -> None:
        self.waiting: dict[str, None] = {}  # UIDs of jobs that wait for a slot
        self.with_priority: dict[str, None] = {}  # of those: that name a PriorityClass
        self.queued: dict[str, None] = {}  # that name a queue of Kueue
        self.with_adapters: dict[str, None] = {}  # that ask for adapters in serving pods
        self.held: dict[str, dict[str, None]] = {}  # UIDs by the slot of their status
        # By each place that a destination may be (`policies.places_of`): UIDs of unfinished jobs.
        self._claims: dict[str, dict[str, _Rank]] = {}
        # By place: UIDs of jobs that have succeeded there, each with its namespace.
        self._published: dict[str, dict[str, str]] = {}
        self._entries: dict[str, _Entry] = {}  # by UID
        self._specs: dict[str, tuple[int, FinetuneJobSpec | None, UserError | None]] = {}  # by UID

    def spec(self, body: Body) -> tuple[FinetuneJobSpec | None, UserError | None]:
        """Return a job's checked spec, or None and what is wrong with it."""
        metadata = body["metadata"]
        generation = metadata.get("generation", 0)
        known = self._specs.get(metadata["uid"])
        if known is None or known[0] != generation:
            try:
                known = (generation, parse_job_spec(body.get("spec") or {}), None)
            except UserError as error:
                known = (generation, None, error)
            self._specs[metadata["uid"]] = known
        return known[1], known[2]

    def put(
        self, body: Body, policies_: Iterable[CheckedPolicy], mounts: Iterable[Mount]
    ) -> set[str]:
        """Index a job again; return the UIDs of the jobs whose destination this may decide.

        Args:
            body: the job.
            policies_: those that the job may run under.
            mounts: what the pod that the job is on can write.
        """
        metadata, status = body["metadata"], body.get("status") or {}
        uid, conditions = metadata["uid"], status.get("conditions")
        touched = self.drop(uid, keep_spec=True)
        spec, _ = self.spec(body)
        finished = is_finished(conditions)
        slot, places = status.get("slot") or "", frozenset[str]()
        if slot:
            self.held.setdefault(slot, {})[uid] = None
        namespace = metadata["namespace"]
        if spec is not None and is_true(conditions, "Succeeded"):
            places = policies.places_of(spec.output.destination, policies_, mounts)
            for place in places:
                touched |= self._claims.get(place, {}).keys()
                self._published.setdefault(place, {})[uid] = namespace
        elif spec is not None and not finished:
            places = policies.places_of(spec.output.destination, policies_, mounts)
            key = key_of(namespace, metadata["name"])
            rank = (not status.get("epoch"), metadata["creationTimestamp"], key)
            for place in places:
                touched |= self._claims.setdefault(place, {}).keys()
                self._claims[place][uid] = rank
        if not slot and not finished and _asks(spec, body) and _is_unplaced(conditions):
            self.waiting[uid] = None
            if spec is not None and spec.priority_class_name:
                self.with_priority[uid] = None
        if queue_of(body):
            self.queued[uid] = None
        if _has_adapter(spec, body):
            self.with_adapters[uid] = None
        self._entries[uid] = _Entry(slot, places, namespace)
        return touched

    def drop(self, uid: str, *, keep_spec: bool = False) -> set[str]:
        """Forget a job; return the UIDs of the jobs whose destination this may decide."""
        entry = self._entries.pop(uid, _Entry())
        _drop(self.held, entry.slot, uid)
        touched: set[str] = set()
        for place in entry.places:
            _drop(self._claims, place, uid)
            _drop(self._published, place, uid)
            touched |= self._claims.get(place, {}).keys()
        self.waiting.pop(uid, None)
        self.with_priority.pop(uid, None)
        self.queued.pop(uid, None)
        self.with_adapters.pop(uid, None)
        if not keep_spec:
            self._specs.pop(uid, None)
        return touched

    def destination_owner(self, uid: str) -> str:
        """Return which job the destination of `uid` belongs to: of the unfinished the first.

        A job that has been placed keeps its destination against one that is older by the clock. It
        belongs to a job of another namespace that has succeeded there, too: its adapter is there.
        """
        claims = dict(self._rivals(uid))
        if claims and (first := min(claims, key=claims.__getitem__)) != uid:
            return first
        entry = self._entries[uid]
        for place in sorted(entry.places):
            for other, namespace in self._published.get(place, {}).items():
                if other != uid and namespace != entry.namespace and claims:
                    return other
        return uid

    def _rivals(self, uid: str) -> Iterator[tuple[str, _Rank]]:
        for place in self._entries[uid].places:
            yield from self._claims.get(place, {}).items()


def _is_unplaced(conditions: Any) -> bool:  # noqa: ANN401 - JSON
    placed = get_condition(conditions, "Placed")
    return placed is None or placed["status"] != "True"


def _asks(spec: FinetuneJobSpec | None, body: Body) -> bool:
    """Return whether a job may be placed by us, as far as it says so itself."""
    if spec is None or spec.suspend or body["metadata"].get("deletionTimestamp"):
        return False
    return spec.managed_by in (None, MANAGED_BY_US)


def queue_of(body: Body) -> str:
    """Return the LocalQueue of Kueue that a job's label names; empty: none."""
    return str((body["metadata"].get("labels") or {}).get(LABEL_QUEUE) or "")


def _has_adapter(spec: FinetuneJobSpec | None, body: Body) -> bool:
    asked = spec is not None and spec.output.deploy.enabled
    return asked or FINALIZER_ADAPTER in (body["metadata"].get("finalizers") or ())


def _drop(index: dict[str, dict[str, Any]], key: str, uid: str) -> None:
    """Remove a job from an entry of an index, and the entry with its last one."""
    if (entry := index.get(key)) is not None:
        entry.pop(uid, None)
        if not entry:
            del index[key]
