"""Decide which pods this node takes, since there is no scheduler; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]


def wants_binding(pod: Json, labels: Mapping[str, str]) -> bool:
    """Tell whether a pod waits for a node and this one, of these labels, may take it.

    Scheduling gates and node selectors are honoured; resources are not counted, since processes
    share the machine anyway. Affinities, taints and spread constraints are not looked at.
    """
    spec, metadata = pod["spec"], pod["metadata"]
    if spec.get("nodeName") or "deletionTimestamp" in metadata or spec.get("schedulingGates"):
        return False
    if spec.get("schedulerName", "default-scheduler") != "default-scheduler":
        return False
    selector: Mapping[str, str] = spec.get("nodeSelector") or {}
    return selector.items() <= labels.items()


def binding(pod: Json, node: str) -> Json:
    """Return the Binding that puts a pod on a node."""
    metadata = pod["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": metadata["name"], "uid": metadata["uid"]},
        "target": {"apiVersion": "v1", "kind": "Node", "name": node},
    }
