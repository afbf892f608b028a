"""The Node object: what the cluster sees of this machine, and that it lives."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
from datetime import UTC, datetime

import httpx

from windrow_lab.node.api import Api, Json, NodeApiError
from windrow_lab.node.expansion import POD_ADDRESS
from windrow_lab.node.records import timestamp

log = logging.getLogger(__name__)

LABEL_PROCESS_NODE = "windrow.dev/process-node"
_RENEW_SECONDS = 10
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"


def node_labels(name: str) -> dict[str, str]:
    """Return the labels that node selectors of pods are held against."""
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    return {
        "kubernetes.io/hostname": name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": machine,
        LABEL_PROCESS_NODE: "true",
    }


def node_status(name: str, *, ready: bool, reason: str, now: datetime) -> Json:
    """Return the status of the Node: this machine's CPUs and memory, and whether it is ready."""
    memory_kib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 1024
    capacity = {
        "cpu": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory_kib}Ki",
        "pods": "110",
    }
    return {
        "capacity": capacity,
        "allocatable": capacity,
        "addresses": [
            {"type": "InternalIP", "address": POD_ADDRESS},
            {"type": "Hostname", "address": name},
        ],
        "conditions": [
            {
                "type": "Ready",
                "status": "True" if ready else "False",
                "reason": reason,
                "message": "runs the containers of pods as local processes",
                "lastHeartbeatTime": timestamp(now),
                "lastTransitionTime": timestamp(now),
            }
        ],
        "nodeInfo": {
            "machineID": "",
            "systemUUID": "",
            "bootID": "",
            "kernelVersion": platform.release(),
            "osImage": platform.platform(),
            "containerRuntimeVersion": "process://1",
            "kubeletVersion": "process-node",
            "kubeProxyVersion": "",
            "operatingSystem": "linux",
            "architecture": node_labels(name)["kubernetes.io/arch"],
        },
    }


class NodeRegistration:
    """Keeps the Node object and its lease."""

    def __init__(self, api: Api, name: str) -> None:
        self._api, self._name = api, name
        self._path = f"/api/v1/nodes/{name}"

    async def register(self) -> None:
        """Create the Node, or take over the one of that name, and say that it is ready."""
        metadata = {"name": self._name, "labels": node_labels(self._name)}
        await _create_or_exists(self._api, "/api/v1/nodes", {"metadata": metadata})
        # Admission taints each new node as not ready, and no controller runs here to lift it.
        await self._api.patch(self._path, {"metadata": metadata, "spec": {"taints": None}})
        await self._say(ready=True, reason="ProcessNodeReady")
        lease = {"metadata": {"name": self._name}, "spec": {"holderIdentity": self._name}}
        await _create_or_exists(self._api, _LEASES, lease)

    async def keep_alive(self) -> None:
        """Renew the lease, for ever."""
        while True:
            renewed = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            spec = {"renewTime": renewed, "leaseDurationSeconds": 4 * _RENEW_SECONDS}
            try:
                await self._api.patch(f"{_LEASES}/{self._name}", {"spec": spec})
            except (NodeApiError, httpx.TransportError) as error:
                log.warning("lease was not renewed: %r", error)
            await asyncio.sleep(_RENEW_SECONDS)

    async def retire(self) -> None:
        """Say that the node has stopped; a server that is away is not waited for."""
        try:
            await self._say(ready=False, reason="ProcessNodeStopped")
        except (NodeApiError, httpx.TransportError) as error:
            log.info("the node's end was not written: %r", error)

    async def _say(self, *, ready: bool, reason: str) -> None:
        status = node_status(self._name, ready=ready, reason=reason, now=datetime.now(UTC))
        await self._api.patch(f"{self._path}/status", {"status": status})


async def _create_or_exists(api: Api, path: str, body: Json) -> None:
    try:
        await api.create(path, body)
    except NodeApiError as error:
        if error.code != httpx.codes.CONFLICT:
            raise
