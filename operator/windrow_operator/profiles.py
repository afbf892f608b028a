"""Store LatencyProfiles that sidecars report, and give them to new pods of a known kind.

To measure a profile takes a pod the better part of a minute before it serves. A pod whose engine
finds one of its own kind in its run directory checks a few steps against it and starts.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from typing import Any

from windrow.crd import API_VERSION, LATENCY_PROFILE, parse_profile_spec
from windrow.errors import UserError
from windrow.proto import attach_pb2 as pb
from windrow_operator.cluster_state import ClusterState
from windrow_operator.kube import ApiError, Kube, kind_path
from windrow_operator.model import Pod

log = logging.getLogger(__name__)

# More than this is no profile of ours; every new pod would be sent it.
_LONGEST = 512 * 1024


class Profiles:
    """The stored profiles, by namespace.

    Args:
        cluster: tells which models pods serve.
        kube: a client that may write.
    """

    def __init__(self, cluster: ClusterState, kube: Kube) -> None:
        self._cluster, self._kube = cluster, kube
        self._known: dict[tuple[str, str], Mapping[str, Any]] = {}  # spec by namespace and name

    async def load(self) -> None:
        """Take up what is stored.

        Raises:
            ApiError: it could not be listed.
        """
        for body in await self._kube.list(kind_path(LATENCY_PROFILE)):
            metadata = body["metadata"]
            self._known[metadata["namespace"], metadata["name"]] = body["spec"]

    async def store(self, pod: Pod, report: pb.ProfileReport) -> None:
        """Keep a latency profile. All pods of one kind share it; the newest stays."""
        try:
            spec = json.loads(report.profile_json)
            parse_profile_spec(spec)
        except (ValueError, UserError) as error:
            log.warning("pod %s/%s sent a broken profile: %s", pod.namespace, pod.name, error)
            return
        name = profile_name(report.key)
        body = {
            "apiVersion": API_VERSION,
            "kind": LATENCY_PROFILE.kind,
            "metadata": {"name": name, "namespace": pod.namespace},
            "spec": spec,
        }
        try:
            await self._kube.apply(kind_path(LATENCY_PROFILE, pod.namespace, name), body)
        except ApiError as error:
            log.warning("profile %s could not be stored: %s", name, error)
            return
        self._known[pod.namespace, name] = spec

    def for_new(self, pod: Pod) -> pb.StoredProfile | None:
        """Return what a pod whose engine has not called yet may start from; None: nothing.

        The newest of its namespace for what other pods with its model turned out to run. Where that
        is of another device or version after all, the engine says so and measures.
        """
        fingerprints = {
            live.facts.model_fingerprint
            for live in self._cluster.slots.values()
            if live.namespace == pod.namespace and pod.model and live.facts.model == pod.model
        }
        found = [
            spec
            for (namespace, _), spec in self._known.items()
            if namespace == pod.namespace and spec.get("modelFingerprint", "") in fingerprints
        ]
        if not found:
            return None
        text = json.dumps(max(found, key=lambda spec: str(spec.get("takenAt", ""))))
        # Where a pod has several engines, each of them looks at what the others have too.
        return pb.StoredProfile(profile_json=text) if len(text) <= _LONGEST else None


def profile_name(key: str) -> str:
    """Return the name of the profile of a key."""
    return f"lp-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
