"""Read the switch of the cluster: a ConfigMap of the operator's namespace that turns all off."""

from __future__ import annotations

from windrow.off import SWITCH
from windrow_operator.kube import Kube, ObjectNotFound


async def why_off(kube: Kube, namespace: str) -> str:
    """Return why nothing is to be harvested in the cluster; empty: policies decide.

    The ConfigMap turns off by being there, whatever it holds.

    Raises:
        ApiError: the API server does not answer.
    """
    try:
        body = await kube.get(f"/api/v1/namespaces/{namespace}/configmaps/{SWITCH}")
    except ObjectNotFound:
        return ""
    reason = str((body.get("data") or {}).get("reason") or "").strip()
    where = f"ConfigMap {namespace}/{SWITCH} turns the whole cluster off"
    return f"{where}: {reason}" if reason else where
