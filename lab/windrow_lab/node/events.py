"""Kubernetes Events about pods, repeated ones counted on one object."""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime

import httpx

from windrow_lab.node.api import Api, Json, NodeApiError

log = logging.getLogger(__name__)

# The API server keeps events for an hour; a repetition after that is a new event.
_FORGET_SECONDS = 3000.0
_MAX_QUEUED = 1000


class NodeEventRecorder:
    """Writes events behind the callers' backs; a lost one is logged and never hurts the pod."""

    def __init__(self, api: Api, node: str) -> None:
        self._api, self._node = api, node
        self._seen: dict[tuple[str, ...], tuple[str, int, float]] = {}
        self._queue: asyncio.Queue[tuple[Json, str, str, str]] = asyncio.Queue(_MAX_QUEUED)

    def record(self, pod: Json, kind: str, reason: str, message: str) -> None:
        """Say that `reason` happened to a pod; `kind` is Normal or Warning. Does not wait."""
        try:
            self._queue.put_nowait((pod["metadata"], kind, reason, message))
        except asyncio.QueueFull:
            log.warning("event %s of %s dropped: too many", reason, pod["metadata"]["name"])

    async def run(self) -> None:
        """Write what was recorded, for ever."""
        while True:
            await self._write(*await self._queue.get())

    async def _write(self, metadata: Json, kind: str, reason: str, message: str) -> None:
        key = (metadata["uid"], reason, message)
        name, count, at = self._seen.get(key, ("", 0, 0.0))
        path = f"/api/v1/namespaces/{metadata['namespace']}/events"
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        try:
            if name and time.monotonic() - at < _FORGET_SECONDS:
                await self._api.patch(
                    f"{path}/{name}", {"count": count + 1, "lastTimestamp": stamp}
                )
            else:
                name, count = f"{metadata['name']}.{time.time_ns():x}", 0
                await self._api.create(
                    path, self._event(name, metadata, kind, reason, message, stamp)
                )
        except (NodeApiError, httpx.TransportError) as error:
            log.info("event %s of %s was not written: %s", reason, metadata["name"], error)
            return
        self._seen[key] = (name, count + 1, time.monotonic())

    def forget(self, uid: str) -> None:
        """Drop what is known of a pod that is gone."""
        self._seen = {key: value for key, value in self._seen.items() if key[0] != uid}

    def _event(
        self,
        name: str,
        metadata: Json,
        kind: str,
        reason: str,
        message: str,
        stamp: str,
    ) -> Json:
        return {
            "metadata": {"name": name, "namespace": metadata["namespace"]},
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Pod",
                "namespace": metadata["namespace"],
                "name": metadata["name"],
                "uid": metadata["uid"],
            },
            "type": kind,
            "reason": reason,
            "message": message,
            "count": 1,
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "source": {"component": "windrow-process-node", "host": self._node},
        }
