"""Turn harvesting off in a whole cluster, and prove slot by slot that it is off."""

from __future__ import annotations

import getpass
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from kubernetes import client as k8s
from kubernetes.client.exceptions import ApiException

from windrow.client import WindrowClient, translating_errors
from windrow.conditions import get_condition
from windrow.crd import GROUP, HARVEST_SLOT, VERSION

# The ConfigMap that turns the cluster off by being there, in the operator's namespace.
SWITCH: Final = "windrow-off"
OPERATOR_NAMESPACE: Final = "windrow-system"
_POLL_S = 0.5
# The operator looks at the switch and writes slots every two seconds: what a slot says sooner may
# be of before the command.
SETTLES_S = 6.0
_TIMEOUT_S = 15


@dataclass(frozen=True, slots=True)
class SlotQuiet:
    """Proof, or its lack, that a slot harvests nothing.

    Attributes:
        name: namespace/name.
        quiet: whether it is proven.
        state: in words.
    """

    name: str
    quiet: bool
    state: str


def quiet_of(slot: Mapping[str, Any], *, pod_is_there: bool = True) -> SlotQuiet:
    """Return what a HarvestSlot object proves; `pod_is_there`: whether its pod still exists.

    A slot is quiet when the operator has sent this to its sidecar and the sidecar, which is
    attached, reports no job. The last status of a sidecar that is not attached proves nothing.
    """
    metadata, status = slot["metadata"], slot.get("status") or {}
    name = f"{metadata['namespace']}/{metadata['name']}"
    if not pod_is_there:
        return SlotQuiet(name, True, "its pod is gone")
    attached = get_condition(status.get("conditions"), "Attached")
    if attached is None or attached["status"] != "True":
        what = "not connected: it stops when the lease of its policy ends, if it runs"
        return SlotQuiet(name, False, what)
    ready = get_condition(status.get("conditions"), "Ready") or {}
    refused = ready.get("reason") == "EngineRefused"
    if jobs := status.get("jobs"):
        return SlotQuiet(name, False, f"runs {status.get('jobName') or len(jobs)}")
    if status.get("mode") == "harvest" and not refused:
        return SlotQuiet(name, False, "no job, but it may get one")
    return SlotQuiet(name, True, f"off, no job: {ready.get('message', 'the policy says so')}")


class ClusterSwitch:
    """The switch of a cluster. All calls block.

    They raise UserError for what is refused, Transient where the API server cannot be reached.

    Args:
        client: whose rights are used: ConfigMaps of the operator's namespace, and slots and pods.
        namespace: of the operator.
        served: namespaces whose slots are looked at; none: all, which needs a right over all.
    """

    def __init__(
        self,
        client: WindrowClient,
        namespace: str = OPERATOR_NAMESPACE,
        served: Iterable[str] = (),
    ) -> None:
        self._client, self._namespace, self._served = client, namespace, tuple(served)
        self._core = k8s.CoreV1Api(client.api)
        self._custom = k8s.CustomObjectsApi(client.api)

    def turn_off(self, reason: str = "") -> bool:
        """Turn everything off; return whether it was on."""
        body = {
            "metadata": {"name": SWITCH},
            "data": {
                "reason": reason,
                "by": _whoever(),
                "at": datetime.now(UTC).isoformat(timespec="seconds"),
            },
        }
        with translating_errors(f"ConfigMap {self._namespace}/{SWITCH}"):
            try:
                self._core.create_namespaced_config_map(
                    self._namespace, body, _request_timeout=_TIMEOUT_S
                )
            except ApiException as error:
                if error.status != 409:
                    raise
                return False
        return True

    def turn_on(self) -> bool:
        """Let policies decide again; return whether it was off."""
        with translating_errors(f"ConfigMap {self._namespace}/{SWITCH}"):
            try:
                self._core.delete_namespaced_config_map(
                    SWITCH, self._namespace, _request_timeout=_TIMEOUT_S
                )
            except ApiException as error:
                if error.status != 404:
                    raise
                return False
        return True

    def slots(self) -> list[SlotQuiet]:
        """Return of every slot whether it is quiet."""
        with translating_errors("HarvestSlots"):
            return [self._quiet(slot) for slot in self._listed()]

    def _listed(self) -> list[Mapping[str, Any]]:
        kind = (GROUP, VERSION)
        if not self._served:
            listed = self._custom.list_cluster_custom_object(
                *kind, HARVEST_SLOT.plural, _request_timeout=_TIMEOUT_S
            )
            return list(listed["items"])
        found: list[Mapping[str, Any]] = []
        for namespace in self._served:
            listed = self._custom.list_namespaced_custom_object(
                *kind, namespace, HARVEST_SLOT.plural, _request_timeout=_TIMEOUT_S
            )
            found += listed["items"]
        return found

    def _quiet(self, slot: Mapping[str, Any]) -> SlotQuiet:
        found = quiet_of(slot)
        if found.quiet or found.state.startswith("runs"):
            return found
        spec, namespace = slot["spec"], slot["metadata"]["namespace"]
        try:
            pod = self._core.read_namespaced_pod(
                spec["podName"], namespace, _request_timeout=_TIMEOUT_S
            )
        except ApiException as error:
            if error.status != 404:
                raise
            return quiet_of(slot, pod_is_there=False)
        return quiet_of(slot, pod_is_there=pod.metadata.uid == spec["podUid"])

    def wait(
        self, within_s: float, said: Callable[[Iterable[SlotQuiet]], None] | None = None
    ) -> bool:
        """Wait until every slot has been quiet for `SETTLES_S`; return whether that was so in time.

        Args:
            within_s: seconds to wait at most.
            said: given the slots whenever anything about them has changed.
        """
        deadline = time.monotonic() + within_s
        before: list[SlotQuiet] | None = None
        quiet_since: float | None = None
        while True:
            now = self.slots()
            if said is not None and now != before:
                said(now)
                before = now
            looked = time.monotonic()
            if not all(slot.quiet for slot in now):
                quiet_since = None
            elif quiet_since is None:
                quiet_since = looked
            if quiet_since is not None and looked - quiet_since >= SETTLES_S:
                return True
            if looked >= deadline:
                return False
            time.sleep(_POLL_S)


def _whoever() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user has no name
        return "nobody that has a name"
