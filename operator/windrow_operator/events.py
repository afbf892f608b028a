"""Write Kubernetes events, which `kubectl describe` and `kubectl get events` show."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from windrow.conditions import timestamp
from windrow_operator.kube import ApiError, Kube
from windrow_operator.lease import NotLeading
from windrow_operator.rate_limit import Forgetful, TokenBucket
from windrow_operator.reconcile import Event

log = logging.getLogger(__name__)

COMPONENT = "windrow-operator"
# The API server refuses longer ones.
_MESSAGE_MAX = 1024
_WAITING_MAX = 10_000  # of those that wait to be written
# Of one object: so many at once, and so many a second. Others of it are only logged, each minute.
_BURST, _PER_SECOND = 50.0, 0.1
_OBJECTS_MAX = 10_000
# The same words about the same object are news again after a while.
_REPEAT = timedelta(minutes=1)


class Recorder:
    """Records events; one that cannot be written is only logged."""

    def __init__(self, kube: Kube, clock: Callable[[], datetime]) -> None:
        self._kube, self._clock = kube, clock
        self._said: dict[tuple[str, str, str], datetime] = {}
        self._forgotten_at = clock()
        self._last_number = 0
        self._buckets: Forgetful[TokenBucket] = Forgetful(_BURST / _PER_SECOND, _OBJECTS_MAX)
        self._queue: asyncio.Queue[tuple[Mapping[str, Any], Event]] = asyncio.Queue(_WAITING_MAX)

    def put(self, about: Mapping[str, Any] | None, event: Event) -> None:
        """Let `run` record an event, so that nobody waits for it. Too many: it is only logged.

        Words of one object, which a sidecar may change as often as it likes, leave room for others.
        """
        if about is None or not self._may_say(_key(about), event):
            return
        try:
            self._queue.put_nowait((about, event))
        except asyncio.QueueFull:
            log.warning("event %s of %s was dropped", event.reason, about["metadata"]["name"])

    async def run(self) -> None:
        """Record what was put, until cancelled."""
        while True:
            about, event = await self._queue.get()
            try:
                await self._write(about, event)
            except NotLeading as error:
                log.info("event %s was not written: %s", event.reason, error)

    async def record(self, about: Mapping[str, Any] | None, event: Event) -> None:
        """Record `event` about an object (None: it is gone, nothing happens); see `put`."""
        if about is not None and self._may_say(_key(about), event):
            await self._write(about, event)

    async def _write(self, about: Mapping[str, Any], event: Event) -> None:
        if not self._is_news(_key(about), event):
            return
        metadata = about["metadata"]
        log.info(
            "%s %s/%s: %s: %s",
            about["kind"],
            metadata["namespace"],
            metadata["name"],
            event.reason,
            event.message,
        )
        path = f"/api/v1/namespaces/{metadata['namespace']}/events"
        try:
            await self._kube.create(path, self._body(about, event))
        except ApiError as error:
            log.warning("event %s of %s was not written: %s", event.reason, metadata["name"], error)

    def _may_say(self, about: str, event: Event) -> bool:
        now_s = self._clock().timestamp()
        bucket = self._buckets.get(about, now_s)
        if bucket is None:
            bucket = TokenBucket.full(_PER_SECOND, _BURST, now_s)
        self._buckets.put(about, bucket, now_s)
        if bucket.level_at(now_s) >= 1:
            bucket.take(1, now_s)
            return True
        if self._is_news(about, Event(event.reason, "")):  # one line, whatever the words are
            log.warning("events %s of %s are left out: it has too many", event.reason, about)
        return False

    def _is_news(self, about: str, event: Event) -> bool:
        now = self._clock()
        if now - self._forgotten_at > _REPEAT:
            self._forgotten_at = now
            self._said = {key: at for key, at in self._said.items() if now - at < _REPEAT}
        key = (about, event.reason, event.message)
        if (said := self._said.get(key)) is not None and now - said < _REPEAT:
            return False
        self._said[key] = now
        return True

    def _body(self, about: Mapping[str, Any], event: Event) -> dict[str, Any]:
        metadata = about["metadata"]
        now = self._clock()
        # Times of events are whole seconds: the name has their order, in which they are listed.
        self._last_number = max(self._last_number + 1, int(now.timestamp() * 1e9))
        at = timestamp(now)
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": f"{metadata['name']}.{self._last_number:x}",
                "namespace": metadata["namespace"],
            },
            "involvedObject": {
                "apiVersion": about["apiVersion"],
                "kind": about["kind"],
                "namespace": metadata["namespace"],
                "name": metadata["name"],
                "uid": metadata["uid"],
            },
            "type": "Warning" if event.warning else "Normal",
            "reason": str(event.reason),
            "message": event.message[:_MESSAGE_MAX],
            "source": {"component": COMPONENT, "host": socket.gethostname()},
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": 1,
        }


def _key(about: Mapping[str, Any]) -> str:
    """Return what tells an object from others; owners of pods are named by who creates the pods."""
    return f"{about['metadata']['namespace']}/{about['metadata']['uid']}"
