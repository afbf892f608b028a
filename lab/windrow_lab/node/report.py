"""Write back a pod's status, where its logs are, and its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import httpx

from windrow.crd import ANNOTATION_LOGS
from windrow_lab.node.api import Api, Json, NodeApiError

log = logging.getLogger(__name__)

RETRY_SECONDS = 2.0
# The pod is gone, or another one has its name.
_GONE = (httpx.codes.NOT_FOUND, httpx.codes.CONFLICT)


class PodStatusReporter:
    """Writes the status of one pod after each change that was reported."""

    def __init__(self, api: Api, pod: Json, make_status: Callable[[], Json]) -> None:
        self._api, self._make_status = api, make_status
        self._uid: str = pod["metadata"]["uid"]
        self._path = (
            f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
        )
        self._changed = asyncio.Event()
        self._written: Json | None = None

    def changed(self) -> None:
        """Have the status written soon; changes that come together are written together."""
        self._changed.set()

    async def run(self) -> None:
        """Write what changes, for ever; a server that is away is tried again."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._write()
            except (NodeApiError, httpx.TransportError) as error:
                if isinstance(error, NodeApiError) and error.code in _GONE:
                    continue
                log.warning("status of %s was not written: %r", self._path, error)
                await asyncio.sleep(RETRY_SECONDS)
                self._changed.set()

    async def annotate_logs(self, pod: Json, directory: Path) -> None:
        """Say on the pod where its logs are."""
        if (pod["metadata"].get("annotations") or {}).get(ANNOTATION_LOGS) != str(directory):
            change = {"uid": self._uid, "annotations": {ANNOTATION_LOGS: str(directory)}}
            await self._api.patch(self._path, {"metadata": change})

    async def finish_deletion(self) -> None:
        """Write the last status and let the object go; tries until it is gone."""
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": self._uid}}
        while True:
            try:
                await self._write()
                await self._api.delete(self._path, options)
            except (NodeApiError, httpx.TransportError) as error:
                if isinstance(error, NodeApiError) and error.code in _GONE:
                    return
                log.warning("%s was not deleted: %r", self._path, error)
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return

    async def _write(self) -> None:
        status = self._make_status()
        if status != self._written:
            body = {"metadata": {"uid": self._uid}, "status": status}
            await self._api.patch(f"{self._path}/status", body)
            self._written = status
