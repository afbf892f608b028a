"""List the cluster's objects: once before a replica acts, and then now and again to compare.

A watch that restarts after its version has expired reports no object that was deleted
meanwhile, and one that is stuck reports nothing. So now and then everything is listed; what the
watch should have reported and did not is taken up and logged. A listing that has an older version
than was known before it began is of a store that was put back to a snapshot: then the older one is
true.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from windrow.crd import FINETUNE_JOB, HARVEST_POLICY, Kind
from windrow_operator import handlers
from windrow_operator.cluster_state import ClusterState
from windrow_operator.kube import Kube, kind_path
from windrow_operator.model import key_of, version_of

Body = Mapping[str, Any]

# A watch that works has reported a change by then.
_TOLD_WITHIN_S = 5.0


@dataclass(frozen=True)
class _Watched:
    """One kind: where it is listed, and how it is kept.

    Attributes:
        path: of its collection, by namespace; None: of all.
        key: under which an object is kept.
        known: the versions of what is kept, by key.
        put: takes an object up; with `put_back` also one that is older than what is kept.
        drop: forgets one, by key.
        labels: that the objects carry.
        namespaced: whether its objects are in namespaces.
    """

    name: str
    path: Callable[[str | None], str]
    key: Callable[[Body], str]
    known: Callable[[], dict[str, int]]
    put: Callable[..., object]
    drop: Callable[[str], None]
    labels: str = ""
    namespaced: bool = True


class Resync:
    """Lists what is watched into the store.

    Args:
        kube: the API server.
        cluster: the store.
        namespaces: that are served; none: all.
    """

    def __init__(self, kube: Kube, cluster: ClusterState, namespaces: tuple[str, ...]) -> None:
        self._kube, self._namespaces = kube, namespaces
        self._kinds = _watched(cluster)

    async def run(self) -> None:
        """Take up everything as it is now.

        Raises:
            ApiError: it could not be listed; what was known stays.
        """
        for kind in self._kinds:
            before, listed = kind.known(), set[str]()
            async for body in self._each(kind):
                listed.add(kind.key(body))
                kind.put(body)
            for key in before.keys() - listed:
                kind.drop(key)

    async def compare(self) -> dict[str, int]:
        """Take up what the watches have missed; return how many objects of which kind.

        Raises:
            ApiError: it could not be listed.
        """
        missed: dict[str, int] = {}
        for kind in self._kinds:
            before, listed, put_back = kind.known(), set[str](), 0
            changed: dict[str, Body] = {}  # and nothing else: there may be thousands
            async for body in self._each(kind):
                key = kind.key(body)
                listed.add(key)
                known = before.get(key, -1)
                if known < version_of(body):
                    changed[key] = body
                elif known != _ANY and known > version_of(body):
                    put_back += 1
                    kind.put(body, put_back=True)
            gone = before.keys() - listed
            await asyncio.sleep(_TOLD_WITHIN_S)
            now = kind.known()
            gone &= now.keys()
            newer = {
                key: body
                for key, body in changed.items()
                if now.get(key, -1) < version_of(body) and (key in now or key not in before)
            }
            for body in newer.values():
                kind.put(body)
            for key in gone:
                kind.drop(key)
            if gone or newer or put_back:
                missed[kind.name] = len(gone) + len(newer) + put_back
        return missed

    async def _each(self, kind: _Watched) -> AsyncIterator[Body]:
        """Yield the objects of a kind, some of them twice where the listing had to restart."""
        where = self._namespaces if kind.namespaced and self._namespaces else (None,)
        for namespace in where:
            async for piece in self._kube.pieces(kind.path(namespace), labels=kind.labels):
                for body in piece:
                    yield body


def _watched(cluster: ClusterState) -> tuple[_Watched, ...]:
    """Return the kinds, those first that others are judged by."""
    return (
        _Watched(
            "namespaces",
            lambda _: "/api/v1/namespaces",
            _name,
            lambda: dict.fromkeys(cluster.namespaces, _ANY),
            cluster.put_namespace,
            cluster.drop_namespace,
            namespaced=False,
        ),
        _Watched(
            "priorityclasses",
            lambda _: "/apis/scheduling.k8s.io/v1/priorityclasses",
            _name,
            lambda: dict.fromkeys(cluster.priorities, _ANY),
            cluster.put_priority_class,
            cluster.drop_priority_class,
            namespaced=False,
        ),
        _Watched(
            "nodes",
            lambda _: "/api/v1/nodes",
            _name,
            lambda: dict(cluster.nodes),
            cluster.put_node,
            cluster.drop_node,
            namespaced=False,
        ),
        _Watched(
            "pods",
            lambda namespace: f"/api/v1{_in(namespace)}/pods",
            _uid,
            lambda: {uid: pod.version for uid, pod in cluster.pods.items()},
            cluster.put_pod,
            cluster.drop_pod,
            labels=handlers.DECODE_SELECTOR,
        ),
        _Watched(
            HARVEST_POLICY.plural,
            _path_of(HARVEST_POLICY),
            lambda body: key_of(body["metadata"]["namespace"], body["metadata"]["name"]),
            lambda: {key: version_of(body) for key, body in cluster.policy_bodies.items()},
            cluster.put_policy,
            cluster.drop_policy,
        ),
        _Watched(
            FINETUNE_JOB.plural,
            _path_of(FINETUNE_JOB),
            _uid,
            lambda: {uid: version_of(body) for uid, body in cluster.jobs.items()},
            cluster.put_job,
            cluster.drop_job,
        ),
    )


# Of kinds whose versions are not kept: they are few, and each listing is taken as it is.
_ANY = 2**63


def _path_of(kind: Kind) -> Callable[[str | None], str]:
    return lambda namespace: kind_path(kind, namespace)


def _in(namespace: str | None) -> str:
    return f"/namespaces/{namespace}" if namespace else ""


def _name(body: Body) -> str:
    return str(body["metadata"]["name"])


def _uid(body: Body) -> str:
    return str(body["metadata"]["uid"])
