"""The node's main loop: watches pods, takes those that wait for a node, runs those that are its."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import httpx

from windrow_lab.node.api import Api, Json, NodeApiError
from windrow_lab.node.binding import binding, wants_binding
from windrow_lab.node.pod import NodeServices, PodRunner
from windrow_lab.node.registration import NodeRegistration, node_labels

log = logging.getLogger(__name__)

_BIND_RETRY_SECONDS = 1.0


class NodeAgent:
    """Runs the pods of one node."""

    def __init__(self, name: str, api: Api, services: NodeServices) -> None:
        self._name, self._api, self._services = name, api, services
        self._labels: Mapping[str, str] = node_labels(name)
        self._pods: dict[str, tuple[PodRunner, asyncio.Task[None]]] = {}
        self._binding: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Register, then run pods until cancelled; their containers end with it."""
        registration = NodeRegistration(self._api, self._name)
        await registration.register()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(registration.keep_alive(), name="lease")
            tasks.create_task(self._services.recorder.run(), name="events")
            try:
                await self._follow_pods()
            finally:
                await self._stop_all()
                await registration.retire()

    async def _follow_pods(self) -> None:
        async for kind, seen in self._api.watch("/api/v1/pods"):
            if kind == "LISTED":
                items: list[Json] = seen.get("items") or []
                for uid in self._pods.keys() - {item["metadata"]["uid"] for item in items}:
                    self._on_gone(uid)
                for item in items:
                    self._on_pod(item)
            elif kind == "DELETED":
                self._on_gone(seen["metadata"]["uid"])
            else:
                self._on_pod(seen)

    def _on_pod(self, seen: Json) -> None:
        uid = seen["metadata"]["uid"]
        if wants_binding(seen, self._labels):
            if uid not in self._binding:
                self._binding[uid] = asyncio.create_task(self._bind(seen), name=f"bind {uid}")
        elif seen["spec"].get("nodeName") == self._name:
            if uid not in self._pods:
                pod = PodRunner(seen, self._services)
                task = asyncio.create_task(self._run_pod(pod), name=f"pod {uid}")
                self._pods[uid] = pod, task
            self._pods[uid][0].update(seen)

    def _on_gone(self, uid: str) -> None:
        if uid in self._pods:
            # Deleted without a grace: nobody waits for its containers any more.
            self._pods[uid][0].ask_to_stop(0)

    async def _run_pod(self, pod: PodRunner) -> None:
        try:
            await pod.run()
        except Exception:
            # One broken pod must not take the others down.
            log.exception("pod %s failed", pod.uid)
        finally:
            self._pods.pop(pod.uid, None)

    async def _bind(self, seen: Json) -> None:
        metadata = seen["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/binding"
        try:
            while True:
                try:
                    await self._api.create(path, binding(seen, self._name))
                except NodeApiError as error:
                    # Gone, or taken by another node.
                    log.info("pod %s was not bound: %s", metadata["name"], error)
                    return
                except httpx.TransportError as error:
                    log.info("pod %s was not bound yet: %r", metadata["name"], error)
                    await asyncio.sleep(_BIND_RETRY_SECONDS)
                else:
                    return
        finally:
            self._binding.pop(metadata["uid"], None)

    async def _stop_all(self) -> None:
        for task in self._binding.values():
            task.cancel()
        running = list(self._pods.values())
        for pod, _ in running:
            pod.ask_to_stop(_SHUTDOWN_GRACE_SECONDS)
        await asyncio.gather(*(task for _, task in running), return_exceptions=True)


# The node ends for the whole machine: pods get this long, whatever their own grace.
_SHUTDOWN_GRACE_SECONDS = 3.0
