"""Decode pods of a run: created with the ordinary client, awaited, deleted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from kubernetes import client as k8s

from windrow.client import WindrowClient
from windrow.crd import LABEL_DECODE, LatencyProfileSpec
from windrow.errors import Transient, WindrowError
from windrow.views import SlotView
from windrow_lab.cluster.manifests import (
    APP,
    NAMESPACE,
    DecodePod,
    Json,
    decode_pod,
    harvest_policy,
)
from windrow_lab.machine.devices import Device
from windrow_lab.machine.ports import LOOPBACK, ReservedPort

T = TypeVar("T")
_POLL_S = 0.25
PLACEHOLDER_MS = 1000.0


class NotReady(WindrowError):
    """Error of something that did not come up in time.

    Attributes:
        logs: names of the logs that say why, below the run's log folder.
    """

    def __init__(self, message: str, *, logs: Sequence[str] = ()) -> None:
        self.logs = tuple(logs)
        super().__init__(message)


@dataclass(frozen=True)
class Pods:
    """Decode pods that serve.

    Attributes:
        shaped: makes of a pod or a policy what the cluster's node needs.
    """

    decodes: tuple[DecodePod, ...]
    shaped: Callable[[Json], Json] = lambda body: body

    @property
    def endpoints(self) -> list[str]:
        """URLs at which the pods answer HTTP."""
        return [f"http://{LOOPBACK}:{decode.port}" for decode in self.decodes]

    @property
    def logs(self) -> list[str]:
        """Names of the folders with their containers' logs."""
        return [f"{NAMESPACE}_{decode.name}" for decode in self.decodes]


def plan_pods(
    devices: Sequence[Device],
    model: Path,
    *,
    name: str = "decode",
    inject: bool = True,
    environment: Sequence[tuple[str, str]] = (),
    arena_bytes: int = 0,
    sglang: Path | None = None,
    asks: bool = False,
    ranks: int = 1,
    finetune: str = "process",
    app: str = APP,
    shaped: Callable[[Json], Json] = lambda body: body,
) -> Pods:
    """Name a decode pod for each device and choose free ports.

    `sglang`: the environment whose SGLang decodes; None: the built-in engine. `asks`: there is no
    policy yet, so the pods ask by their label to be prepared for a sidecar. `ranks`: of each
    engine. `finetune`, `app`: see `DecodePod`. `shaped`: see `Pods`.
    """
    with ExitStack() as held:
        ports = [held.enter_context(ReservedPort()).number for _ in devices]
    return Pods(
        tuple(
            DecodePod(
                f"{name}-{i}",
                port,
                device,
                model,
                inject,
                tuple(environment),
                arena_bytes,
                sglang,
                asks,
                ranks,
                finetune,
                app,
            )
            for i, (port, device) in enumerate(zip(ports, devices, strict=True))
        ),
        shaped,
    )


def observe(client: WindrowClient, pods: Pods, name: str, policy: str, within: timedelta) -> None:
    """Apply a policy that only observes, and return once new pods would be prepared under it.

    Its objective is a placeholder: the real one follows from what is observed.
    """
    app = pods.decodes[0].app
    observes = harvest_policy(name, PLACEHOLDER_MS, policy, mode="observe", app=app)
    client.apply_policy(pods.shaped(observes))
    core = k8s.CoreV1Api(client.api)
    probe = pods.shaped(decode_pod(pods.decodes[0]))

    def is_prepared() -> bool:
        made = core.create_namespaced_pod(NAMESPACE, probe, dry_run="All")
        return LABEL_DECODE in made.metadata.labels

    if not poll(is_prepared, bool, within):
        raise NotReady(f"decode pods are not prepared under policy {name}", logs=["operator"])


def await_observed(client: WindrowClient, pods: Pods, within: timedelta) -> None:
    """Return once a sidecar of each pod has reported its slot."""
    names = {decode.name for decode in pods.decodes}

    def missing() -> set[str]:
        return names - {slot.pod for slot in client.slots(namespace=NAMESPACE)}

    if left := poll(missing, lambda found: not found, within):
        message = f"no sidecar of {', '.join(sorted(left))} after {within}"
        raise NotReady(message, logs=[*pods.logs, "operator"])


def create(client: WindrowClient, pods: Pods) -> None:
    """Create the pods."""
    core = k8s.CoreV1Api(client.api)
    for decode in pods.decodes:
        core.create_namespaced_pod(NAMESPACE, pods.shaped(decode_pod(decode)))


def await_ready(client: WindrowClient, pods: Pods, within: timedelta) -> None:
    """Return once every pod is ready, and prepared for a sidecar where it should be."""
    core = k8s.CoreV1Api(client.api)

    def waiting() -> list[str]:
        found = {pod.metadata.name: pod for pod in core.list_namespaced_pod(NAMESPACE).items}
        return [d.name for d in pods.decodes if not _is_ready(found.get(d.name), injected=d.inject)]

    left = poll(waiting, lambda names: not names, within)
    if left:
        raise NotReady(f"{', '.join(left)} not ready after {within}", logs=pods.logs)


def _is_ready(pod: Any, *, injected: bool) -> bool:  # noqa: ANN401 - the client's models are untyped
    if pod is None or pod.status is None:
        return False
    if injected and LABEL_DECODE not in pod.metadata.labels:
        return False
    conditions = pod.status.conditions or []
    return any(c.type == "Ready" and c.status == "True" for c in conditions)


def await_profile(client: WindrowClient, pods: Pods, within: timedelta) -> LatencyProfileSpec:
    """Return the latency profile that the pods took of their kind."""

    def profiles() -> list[LatencyProfileSpec]:
        return [profile for profile in client.profiles() if profile.solo]

    found = poll(profiles, bool, within)
    if not found:
        raise NotReady(f"no LatencyProfile after {within}", logs=[*pods.logs, "operator"])
    return found[0]


def await_slots(client: WindrowClient, pods: Pods, within: timedelta) -> list[SlotView]:
    """Return the pods' slots once all of them can take a job."""
    names = {decode.name for decode in pods.decodes}

    def slots() -> list[SlotView]:
        return [slot for slot in client.slots(namespace=NAMESPACE) if slot.pod in names]

    found = poll(slots, lambda s: len(s) == len(names) and all(x.ready for x in s), within)
    if len(found) < len(names) or not all(slot.ready for slot in found):
        why = "; ".join(f"{slot.name}: {slot.why}" for slot in found) or "no HarvestSlot at all"
        raise NotReady(f"not every slot is ready ({why})", logs=[*pods.logs, "operator"])
    return found


def delete(client: WindrowClient, pods: Pods, within: timedelta) -> None:
    """Delete the pods and return once they are gone."""
    core = k8s.CoreV1Api(client.api)
    names = {decode.name for decode in pods.decodes}
    for name in names:
        core.delete_namespaced_pod(name, NAMESPACE)

    def there() -> set[str]:
        return names & {pod.metadata.name for pod in core.list_namespaced_pod(NAMESPACE).items}

    if left := poll(there, lambda found: not found, within):
        raise NotReady(f"{', '.join(sorted(left))} still there after {within}", logs=pods.logs)


def poll(read: Callable[[], T], done: Callable[[T], bool], within: timedelta) -> T:
    """Read until `done` or the deadline, and return what was read last.

    An API server that does not answer for a moment is waited out.
    """
    deadline = time.monotonic() + within.total_seconds()
    while True:
        try:
            found = read()
            if done(found) or time.monotonic() >= deadline:
                return found
        except Transient:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_POLL_S)
