"""Keep the objects of a collection of the API server at hand: one listing, then a watch.

The watch goes on from the last version that it has seen, also of a bookmark. A version that the
server no longer keeps (410) means another listing; whatever else fails is tried again, at growing
intervals. Source: Kubernetes' "Efficient detection of changes".
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any, Final

from windrow_operator.kube import ApiError, Kube

log = logging.getLogger(__name__)

Body = dict[str, Any]

_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 30.0
URGENT_PAUSE_S: Final = 2.0
_LOOK_S: Final = 0.5  # during a pause, whether it has become urgent
_GONE: Final = 410


class WatchedCollection:
    """The objects of one collection. Call `run` in a task; the rest is for the same event loop.

    Args:
        kube: the client.
        path: of the collection.
        labels: a selector; empty: all.
        on_change: called when objects or the error have changed.
        is_urgent: whether somebody waits for them: no pause is longer than `URGENT_PAUSE_S` then.
        first_pause_s: before what failed is tried again; twice as long each time.

    Attributes:
        objects: by namespace ("" for a kind without) and name; replaced or changed by `run` alone.
        error: why they may be out of date; None: they are what the server has.
        is_listed: whether they were listed since the last such error that left them unknown.
    """

    def __init__(
        self,
        kube: Kube,
        path: str,
        *,
        labels: str = "",
        on_change: Callable[[], None],
        is_urgent: Callable[[], bool] = lambda: True,
        first_pause_s: float = _FIRST_PAUSE_S,
    ) -> None:
        self._kube, self._path, self._labels = kube, path, labels
        self._on_change, self._is_urgent = on_change, is_urgent
        self._first_pause_s = first_pause_s
        self._version = ""  # to watch from; empty: to be listed
        self.objects: dict[tuple[str, str], Body] = {}
        self.error: ApiError | None = None
        self.is_listed = False

    async def run(self) -> None:
        """List and watch, until cancelled."""
        pause_s = self._first_pause_s
        while True:
            try:
                if not self._version:
                    await self._list()
                async for event in self._kube.watch(
                    self._path, self._version, labels=self._labels, opened=self._opened
                ):
                    pause_s = self._first_pause_s
                    self._take(event)
            except ApiError as error:
                self._failed(error)
                # Not all operators at once after a server's restart.
                await self._pause(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _pause(self, seconds: float) -> None:
        clock = asyncio.get_running_loop().time
        begun_s = clock()
        while (waited_s := clock() - begun_s) < seconds:
            if waited_s >= URGENT_PAUSE_S and self._is_urgent():
                return
            await asyncio.sleep(min(_LOOK_S, seconds - waited_s))

    async def _list(self) -> None:
        found, self._version = await self._kube.list_at(self._path, labels=self._labels)
        self.objects = {_key(body): body for body in found}
        self.is_listed, self.error = True, None
        self._on_change()

    def _opened(self) -> None:
        if self.error is not None:
            self.error = None
            self._on_change()

    def _take(self, event: Body) -> None:
        body, kind = event["object"], event["type"]
        if kind == "ERROR":
            raise ApiError(int(body.get("code") or 0), str(body.get("message", "the watch failed")))
        self._version = str(body["metadata"]["resourceVersion"])
        if kind == "BOOKMARK":
            return
        if kind == "DELETED":
            self.objects.pop(_key(body), None)
        else:
            self.objects[_key(body)] = body
        self._on_change()

    def _failed(self, error: ApiError) -> None:
        if error.status == _GONE:
            self._version = ""
            log.info("%s is listed again: %s", self._path, error)
            return  # what is known is old, and no older than a moment ago
        if error.is_refusal:
            self._version, self.is_listed, self.objects = "", False, {}
        if str(error) != str(self.error):
            self.error = error
            self._on_change()


def _key(body: Body) -> tuple[str, str]:
    metadata = body["metadata"]
    return metadata.get("namespace", ""), metadata["name"]
