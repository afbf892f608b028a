"""Elect the replica that acts by a Lease of the API server; each leadership is a numbered term.

Several replicas run; one leads. A leader that could not renew its Lease in time does nothing, and
becomes silent before another one can have taken over. The term is the Lease's time of acquisition
in microseconds, made greater than the one before, so that it grows also where the Lease was deleted
or etcd restored; sidecars obey no term below the highest that they have heard.

Rules and times follow client-go's leader election: expiry is judged by one's own clock since the
Lease was last seen to change, never by comparing clocks of two machines.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from windrow.errors import Transient
from windrow_operator.kube import ApiError, Body, Conflict, Kube, ObjectNotFound

log = logging.getLogger(__name__)

LEASE = "windrow-operator"
ANNOTATION_ADDRESS = "windrow.dev/attach-address"
_MICROSECOND = timedelta(microseconds=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class NotLeading(Transient):
    """Error of a replica that may not act now."""


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Times of a lease in seconds. Another takes over `duration` + 2 `retry` after a renewal.

    It sees the renewal at its next look, and that it is old enough at a later one; what the API
    server takes to answer comes on top.

    Attributes:
        duration: so long after the last change that was seen, the Lease may be taken.
        deadline: so long after its last renewal a leader acts; shorter than `duration`.
        retry: between two looks.
        request: for one answer of the API server.
        abandon: so long after its last renewal a leader keeps its streams. An API server that
            restarts costs no stream; a leader that alone is cut off gives them to the next one.
    """

    duration: float = 10.0
    deadline: float = 7.0
    retry: float = 1.5
    request: float = 3.0
    abandon: float = 20.0


def monotonic() -> float:
    """Return seconds of a clock that also runs while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaderLease:
    """Takes the Lease where it is free, renews it, and says whether this replica may act.

    Args:
        kube: the API server.
        namespace: of the Lease, the operator's own.
        identity: of this replica. After a restart under the same one the Lease is taken at once, so
            no two processes may share it at a time.
        address: host:port at which sidecars reach this replica when it leads.
        clock: the time, aware.
        times: how long for what.

    Attributes:
        term: of this replica's leadership; 0 while it does not lead.
        leader_address: of the replica that leads, as last seen; empty: not known.
        acquired, lost: which of both holds now; to be waited for.
    """

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        identity: str,
        address: str,
        *,
        clock: Callable[[], datetime],
        times: LeaseTimes = LeaseTimes(),
    ) -> None:
        self._kube = kube.variant(timeout_s=times.request)
        self._identity, self._address, self._clock, self.times = identity, address, clock, times
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._path = f"{self._collection}/{LEASE}"
        self._body: Body = {}  # as last written by this replica
        self._renewed = 0.0  # when the renewal that succeeded last was sent
        self._seen: tuple[object, ...] = ()  # what was last found of another's
        self._seen_at = 0.0
        self._look = asyncio.Event()
        self.term = 0
        self.leader_address = ""
        self.acquired, self.lost = asyncio.Event(), asyncio.Event()
        self.lost.set()

    def holds(self) -> bool:
        """Return whether this replica may act at this moment."""
        return bool(self.term) and monotonic() - self._renewed < self.times.deadline

    def require(self) -> None:
        """Return if this replica may act.

        Raises:
            NotLeading: it may not, or not any more.
        """
        if not self.holds():
            raise NotLeading(f"replica {self._identity} does not hold the Lease")

    def doubt(self) -> None:
        """Look at the Lease now: somebody knows of a later leader."""
        self._look.set()

    async def run(self) -> None:
        """Take the Lease when it can be had and renew it, until cancelled."""
        while True:
            sent = monotonic()
            try:
                if self.term:
                    await self._renew(sent)
                else:
                    await self._acquire(sent)
            except ApiError as error:
                log.warning("the Lease could not be %s: %s", self._verb(), error)
            if self.term and monotonic() - self._renewed > self.times.abandon:
                self._end_term("it could not be renewed")
            self._look.clear()
            try:
                await asyncio.wait_for(self._look.wait(), self.times.retry)
            except TimeoutError:
                continue

    async def release(self) -> None:
        """Give the Lease back, so that another replica takes over at once."""
        if not self.term:
            return
        self._end_term("the operator ends")
        spec = {**self._body["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}
        try:
            await self._kube.replace(self._path, {**self._body, "spec": spec})
        except ApiError as error:
            log.info("cannot release the Lease, so it expires: %s", error)

    def _verb(self) -> str:
        return "renewed" if self.term else "read"

    async def _renew(self, sent: float) -> None:
        body = {**self._body, "spec": {**self._body["spec"], "renewTime": _time(self._clock())}}
        try:
            self._body = await self._kube.replace(self._path, body)
        except (Conflict, ObjectNotFound):
            found = await self._found()
            if found and not self._is_mine(found["spec"]):
                self._end_term(f"{found['spec'].get('holderIdentity') or 'nobody'} has it")
                return
            if found:
                self._body = found  # a renewal whose answer was lost, or an edit of something else
                self._look.set()
                return
            # Deleted, which the server calls a conflict: the UID that is to be replaced is gone.
            metadata = {k: v for k, v in body["metadata"].items() if k in _OURS}
            self._body = await self._kube.create(self._collection, {**body, "metadata": metadata})
        self._renewed = sent

    def _is_mine(self, spec: Body) -> bool:
        mine = self._body["spec"]
        return all(spec.get(name) == mine[name] for name in ("holderIdentity", "acquireTime"))

    async def _acquire(self, sent: float) -> None:
        found = await self._found()
        spec = found.get("spec") or {}
        if found and not self._is_free(spec, sent):
            annotations = found["metadata"].get("annotations") or {}
            self.leader_address = annotations.get(ANNOTATION_ADDRESS, "")
            return
        acquired = self._clock()
        if spec.get("acquireTime"):
            acquired = max(acquired, datetime.fromisoformat(spec["acquireTime"]) + _MICROSECOND)
        body = self._taken(found, acquired)
        try:
            if found:
                self._body = await self._kube.replace(self._path, body)
            else:
                self._body = await self._kube.create(self._collection, body)
        except Conflict:
            return  # another was faster
        self._renewed = sent
        self._begin_term((acquired - _EPOCH) // _MICROSECOND)

    async def _found(self) -> Body:
        """Return the Lease; nothing where there is none."""
        try:
            return await self._kube.get(self._path)
        except ObjectNotFound:
            return {}

    def _is_free(self, spec: Body, now: float) -> bool:
        holder = spec.get("holderIdentity")
        if not holder or holder == self._identity:
            return True
        seen = (holder, spec.get("acquireTime"), spec.get("renewTime"))
        if seen != self._seen:
            self._seen, self._seen_at = seen, now
        return now - self._seen_at >= float(spec.get("leaseDurationSeconds") or 1)

    def _taken(self, found: Body, acquired: datetime) -> Body:
        before = found.get("spec") or {}
        metadata = found.get("metadata") or {"name": LEASE}
        annotations = {**(metadata.get("annotations") or {}), ANNOTATION_ADDRESS: self._address}
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {**metadata, "annotations": annotations},
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": round(self.times.duration),
                "acquireTime": _time(acquired),
                "renewTime": _time(self._clock()),
                "leaseTransitions": int(before.get("leaseTransitions") or 0) + bool(found),
            },
        }

    def _begin_term(self, term: int) -> None:
        log.info("replica %s leads, term %d", self._identity, term)
        self.term, self.leader_address = term, self._address
        self.lost.clear()
        self.acquired.set()

    def _end_term(self, why: str) -> None:
        log.warning("replica %s does not lead any more: %s", self._identity, why)
        self.term, self.leader_address = 0, ""
        self.acquired.clear()
        self.lost.set()


_OURS = ("name", "annotations", "labels")


def _time(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
