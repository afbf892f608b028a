"""Store LatencyProfiles that sidecars report, and give them to new pods of a known kind.

To measure a profile takes a pod the better part of a minute before it serves. So what pods have
measured is in a ConfigMap of their namespace, which every decode pod mounts: an engine that finds
its own kind there checks a few steps against it and starts.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from windrow.crd import API_VERSION, LATENCY_PROFILE, parse_profile_spec
from windrow.errors import UserError
from windrow.proto import attach_pb2 as pb
from windrow.rundir import profile_file
from windrow_operator.injection import PROFILES_CONFIG_MAP
from windrow_operator.kube import ApiError, Kube, kind_path
from windrow_operator.model import Pod
from windrow_operator.rate_limit import TokenBucket

log = logging.getLogger(__name__)

# A ConfigMap holds 1 MiB at most, names and all. The newest profiles are in it.
_ROOM: Final = 900 * 1024
# Kinds of decode that one namespace can have profiles of, and the bytes of one.
MOST_PROFILES: Final = 64
_MOST_BYTES: Final = 512 * 1024
# Profiles that a namespace has stored: so many at once, and so many a second.
_AT_ONCE, _PER_SECOND = 2.0 * MOST_PROFILES, 0.1
# Somebody may have deleted or changed a ConfigMap: it is written again after that time.
_WRITTEN_AGAIN: Final = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class _Stored:
    uid: str  # of the object
    spec: Mapping[str, Any]

    @property
    def taken_at(self) -> str:
        return str(self.spec.get("takenAt", ""))


class Profiles:
    """The stored profiles, by namespace.

    Args:
        kube: a client that may write.
        namespaces: that are served; none: all.
        clock: seconds of any clock that never goes back.
    """

    def __init__(
        self,
        kube: Kube,
        namespaces: tuple[str, ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube, self._namespaces, self._clock = kube, namespaces, clock
        self._buckets: dict[str, TokenBucket] = {}  # by namespace
        self._known: dict[str, dict[str, _Stored]] = {}  # by namespace and name
        self._written: dict[str, tuple[dict[str, Any], datetime]] = {}  # ConfigMaps, by namespace

    async def load(self) -> None:
        """Take up what is stored now.

        Raises:
            ApiError: it could not be listed.
        """
        found: dict[str, dict[str, _Stored]] = {}
        for namespace in self._namespaces or (None,):
            for body in await self._kube.list(kind_path(LATENCY_PROFILE, namespace)):
                metadata = body["metadata"]
                of_namespace = found.setdefault(metadata["namespace"], {})
                of_namespace[metadata["name"]] = _Stored(metadata["uid"], body["spec"])
        self._known = found

    async def store(self, pod: Pod, report: pb.ProfileReport) -> None:
        """Keep a latency profile, unless it is broken or one as new is stored of its kind.

        Raises:
            ApiError: it could not be stored now; to be called again.
        """
        if len(report.profile_json) > _MOST_BYTES:
            log.warning("pod %s/%s sent a profile that is too long", pod.namespace, pod.name)
            return
        try:
            spec = json.loads(report.profile_json)
            parse_profile_spec(spec)
        except (ValueError, UserError, RecursionError) as error:
            log.warning("pod %s/%s sent a broken profile: %s", pod.namespace, pod.name, error)
            return
        name, of_namespace = _object_name(report.key), self._known.setdefault(pod.namespace, {})
        new = _Stored("", spec)
        old = of_namespace.get(name)
        if old is not None and new.taken_at <= old.taken_at:
            return  # each sidecar reports at each attach, thousands to a new leader
        if old is None and len(of_namespace) >= MOST_PROFILES:
            log.warning(
                "pod %s/%s measured another kind of decode, and the namespace has %d latency "
                "profiles already: delete some to have it stored",
                *(pod.namespace, pod.name, len(of_namespace)),
            )
            return
        if not self._may_store(pod.namespace):
            log.warning("pod %s/%s: too many profiles came there", pod.namespace, pod.name)
            return
        body = {
            "apiVersion": API_VERSION,
            "kind": LATENCY_PROFILE.kind,
            "metadata": {"name": name, "namespace": pod.namespace},
            "spec": spec,
        }
        try:
            stored = await self._kube.apply(kind_path(LATENCY_PROFILE, pod.namespace, name), body)
        except ApiError as error:
            if not error.is_refusal:
                raise
            log.warning("profile %s of %s/%s: %s", name, pod.namespace, pod.name, error)
            return
        of_namespace[name] = _Stored(stored["metadata"]["uid"], stored["spec"])

    def _may_store(self, namespace: str) -> bool:
        """Return whether one more is stored: a sidecar may say that each is newer than the last."""
        now_s = self._clock()
        full = TokenBucket.full(_PER_SECOND, _AT_ONCE, now_s)
        bucket = self._buckets.setdefault(namespace, full)
        if bucket.level_at(now_s) < 1:
            return False
        bucket.take(1, now_s)
        return True

    async def publish(self, now: datetime) -> None:
        """Bring the ConfigMap of each namespace up to date with what is stored there.

        A failed write is reported and holds up no other; it is tried at the next call.
        """
        for namespace in sorted(self._known.keys() | self._written.keys()):
            wanted = _config_map(namespace, self._known.get(namespace, {}))
            last, at = self._written.get(namespace, ({}, now))
            if wanted == last and now - at < _WRITTEN_AGAIN:
                continue
            path = f"/api/v1/namespaces/{namespace}/configmaps/{PROFILES_CONFIG_MAP}"
            try:
                if wanted["data"]:
                    await self._kube.apply(path, wanted)
                    self._written[namespace] = (wanted, now)
                else:
                    await self._kube.delete(path)
                    self._written.pop(namespace, None)
            except ApiError as error:
                log.warning("cannot give new pods of %s its profiles: %s", namespace, error)


def _config_map(namespace: str, stored: Mapping[str, _Stored]) -> dict[str, Any]:
    """Return the ConfigMap of a namespace: the newest profiles that have room in it.

    It belongs to the profiles, so that it goes with the last one also where nobody is left to
    delete it: when Windrow is uninstalled.
    """
    data: dict[str, str] = {}
    owners, room = [], _ROOM
    for name, one in sorted(stored.items(), key=lambda item: item[1].taken_at, reverse=True):
        file, text = profile_file(str(one.spec["key"])), json.dumps(one.spec, sort_keys=True)
        if file in data or (left := room - len(file) - len(text)) < 0:
            continue
        data[file], room = text, left
        kind = {"apiVersion": API_VERSION, "kind": LATENCY_PROFILE.kind}
        owners.append({**kind, "name": name, "uid": one.uid})
    metadata = {"name": PROFILES_CONFIG_MAP, "namespace": namespace, "ownerReferences": owners}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def _object_name(key: str) -> str:
    return f"lp-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
