"""Thirty forms of a decode pod: policy, QoS class, quota, image, and what answers the webhook."""

from __future__ import annotations

from dataclasses import dataclass, field

from support.node_pods import decode_container

AMOUNTS = {"cpu": "50m", "memory": "64Mi"}
RESOURCES = {
    "BestEffort": {},
    "Burstable": {"requests": AMOUNTS},
    "Guaranteed": {"requests": AMOUNTS, "limits": AMOUNTS},
}
CLAIM = {"name": "data", "mountPath": "/data", "persistentVolumeClaim": {"claimName": "none"}}
DIRECTORY = {"name": "srv", "mountPath": "/srv", "hostPath": {"path": "/srv"}}


@dataclass(frozen=True)
class Case:
    """One decode pod, and what it finds.

    Attributes:
        policy: fields of the HarvestPolicy over those that every one has; None: there is none.
        level: of Pod Security that the namespace enforces.
        quota: the namespace's quota is exactly the pod's.
        limits: the namespace's limit range allows containers of the pod's size and no larger.
        asks: the pod asks by its label.
        webhook: what answers instead of the operator.
    """

    policy: dict | None = field(default_factory=dict)
    qos: str = "Guaranteed"
    level: str = "restricted"
    quota: bool = False
    limits: bool = False
    asks: bool = False
    webhook: str = ""


OBSERVE = {"mode": "observe"}
NATIVE = {"sidecar": {"form": "sidecar"}}
CASES = {
    "no policy": Case(policy=None),
    "no policy, asks by label": Case(policy=None, asks=True),
    "attach, Guaranteed": Case(),
    "attach, Burstable": Case(qos="Burstable"),
    "attach, BestEffort": Case(qos="BestEffort"),
    "attach, baseline": Case(level="baseline"),
    "attach, privileged": Case(level="privileged"),
    "attach, observing": Case(policy=OBSERVE),
    "attach, observing, Burstable": Case(policy=OBSERVE, qos="Burstable"),
    "attach, observing, BestEffort": Case(policy=OBSERVE, qos="BestEffort"),
    "attach, off": Case(policy={"mode": "off"}),
    "attach, exact quota": Case(policy=OBSERVE, quota=True),
    "attach, exact limits": Case(policy=OBSERVE, limits=True),
    "attach, missing claim": Case(policy={**OBSERVE, "sidecar": {"volumes": [CLAIM]}}),
    "attach, directory of the node": Case(policy={"sidecar": {"volumes": [DIRECTORY]}}),
    "sidecar, Guaranteed": Case(policy=NATIVE),
    "sidecar, Burstable": Case(policy=NATIVE, qos="Burstable"),
    "sidecar, BestEffort": Case(policy=NATIVE, qos="BestEffort"),
    "sidecar, exact quota": Case(policy=NATIVE, quota=True),
    "sidecar, exact limits": Case(policy=NATIVE, limits=True),
    "sidecar, BestEffort, exact limits": Case(policy=NATIVE, qos="BestEffort", limits=True),
    "sidecar, missing claim": Case(
        policy={"sidecar": {"form": "sidecar", "volumes": [CLAIM]}}, quota=True
    ),
    "operator down": Case(webhook="down"),
    "webhook slow": Case(webhook="slow"),
    "webhook wrong": Case(webhook="wrong"),
    "certificate of another authority": Case(webhook="untrusted"),
    "certificate expired": Case(webhook="expired"),
}
# The sidecar's image is not to be had.
WITHOUT_IMAGE = {
    "attach, missing image": Case(policy=OBSERVE),
    "attach, missing image, Burstable": Case(policy=OBSERVE, qos="Burstable"),
    "sidecar, missing image": Case(policy=NATIVE),
}


def decode_pod(case, image, labels=None):
    wishes = {"windrow.dev/inject": "enabled"} if case.asks else {}
    container = decode_container(image, RESOURCES[case.qos])
    return {
        "metadata": {"name": "decode", "labels": {**wishes, **(labels or {})}},
        "spec": {"terminationGracePeriodSeconds": 0, "containers": [container]},
    }
