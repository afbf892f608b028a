"""Put the Kubernetes events that kopf delivers into the cluster state, and wake the driver.

kopf watches; nothing is decided here and nothing is written, so that kopf needs neither finalizers
nor annotations on anybody's objects.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import kopf

from windrow.crd import (
    ANNOTATION_INJECTED_BY,
    FINETUNE_JOB,
    GROUP,
    HARVEST_POLICY,
    LABEL_DECODE,
    VERSION,
)
from windrow_operator.cluster_state import ClusterState
from windrow_operator.metrics import Metrics
from windrow_operator.model import key_of
from windrow_operator.reconcile import Event

DECODE_SELECTOR = f"{LABEL_DECODE}=true"
# Below the interval at which the driver counts as live, so that a stalled watch is replaced first.
_WATCH_SECONDS = 50  # whole: the server parses it as an integer

Note = Callable[[dict[str, Any], Event], Awaitable[None]]


@dataclasses.dataclass(frozen=True)
class Watching:
    """Objects that the handlers act on."""

    cluster: ClusterState
    metrics: Metrics
    wake: Callable[[], None]
    note: Note  # writes an event about an object


def operator_settings() -> kopf.OperatorSettings:
    """Return how kopf works for us."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False  # events are ours to word
    settings.peering.standalone = True
    # The kinds are known; looking for new ones would need rights over all definitions.
    settings.scanning.disabled = True
    settings.persistence.finalizer = f"{GROUP}/kopf"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP)
    settings.watching.server_timeout = _WATCH_SECONDS
    settings.watching.client_timeout = _WATCH_SECONDS + 10
    # The server filters: a cluster has thousands of pods and few that decode.
    settings.watching.label_selectors["pods"] = DECODE_SELECTOR
    settings.queueing.exit_timeout = 0.5
    settings.background.instant_exit_timeout = 0.5
    return settings


class Handlers:
    """One method per kind."""

    def __init__(self, watching: Watching) -> None:
        self._watching, self._cluster = watching, watching.cluster
        # kopf tells only the last of the changes that come close together, and lists without a
        # type, so "ADDED" does not say that a pod is new; that we have not seen it does.
        self._told = set(watching.cluster.pods)

    async def job(self, event: kopf.RawEvent, **_: object) -> None:
        """Take up a FinetuneJob."""
        body = _plain(event)
        if event["type"] == "DELETED":
            self._cluster.drop_job(body["metadata"]["uid"])
        else:
            self._cluster.put_job(body)
        self._seen()

    async def policy(self, event: kopf.RawEvent, **_: object) -> None:
        """Take up a HarvestPolicy."""
        body = _plain(event)
        if event["type"] == "DELETED":
            metadata = body["metadata"]
            self._cluster.drop_policy(key_of(metadata["namespace"], metadata["name"]))
        else:
            self._cluster.put_policy(body)
        self._seen()

    async def pod(self, event: kopf.RawEvent, **_: object) -> None:
        """Take up a decode pod; say by which rule a new one was found."""
        body = _plain(event)
        uid = body["metadata"]["uid"]
        if event["type"] == "DELETED":
            self._cluster.drop_pod(uid)
            self._told.discard(uid)
        else:
            rule = self._cluster.put_pod(body).annotations.get(ANNOTATION_INJECTED_BY)
            if rule and uid not in self._told:
                self._told.add(uid)
                message = f"Made harvestable: decode pod by rule `{rule}`"
                await self._watching.note(body, Event("Injected", message))
        self._seen()

    async def namespace(self, event: kopf.RawEvent, **_: object) -> None:
        """Take up a namespace's labels."""
        metadata = _plain(event)["metadata"]
        if event["type"] == "DELETED":
            self._cluster.drop_namespace(metadata["name"])
        else:
            self._cluster.put_namespace({"metadata": metadata})
        self._seen()

    async def priority_class(self, event: kopf.RawEvent, **_: object) -> None:
        """Take up a PriorityClass."""
        body = _plain(event)
        if event["type"] == "DELETED":
            self._cluster.drop_priority_class(body["metadata"]["name"])
        else:
            self._cluster.put_priority_class(body)
        self._seen()

    async def node(self, event: kopf.RawEvent, **_: object) -> None:
        """Take up whether a node takes new pods."""
        body = _plain(event)
        if event["type"] == "DELETED":
            self._cluster.drop_node(body["metadata"]["name"])
        else:
            self._cluster.put_node(body)
        self._seen()

    def _seen(self) -> None:
        self._watching.metrics.watched()
        self._watching.wake()


def registry_of(
    watching: Watching, credentials: Callable[[], Awaitable[kopf.ConnectionInfo]]
) -> kopf.OperatorRegistry:
    """Return what kopf watches for us, and how it logs in."""
    registry = kopf.OperatorRegistry()
    handlers = Handlers(watching)

    async def login(**_: object) -> kopf.ConnectionInfo:
        return await credentials()

    kopf.on.login(registry=registry)(login)
    for where, handler in (
        ((GROUP, VERSION, FINETUNE_JOB.plural), handlers.job),
        ((GROUP, VERSION, HARVEST_POLICY.plural), handlers.policy),
        (("", "v1", "namespaces"), handlers.namespace),
        (("scheduling.k8s.io", "v1", "priorityclasses"), handlers.priority_class),
        (("", "v1", "nodes"), handlers.node),
    ):
        kopf.on.event(*where, registry=registry)(handler)
    kopf.on.event("", "v1", "pods", labels={LABEL_DECODE: "true"}, registry=registry)(handlers.pod)
    return registry


async def watch(
    registry: kopf.OperatorRegistry,
    namespaces: tuple[str, ...],
    *,
    stop: asyncio.Event,
    ready: asyncio.Event,
) -> None:
    """Watch until `stop`; set `ready` once it watches; raise what kopf raises."""
    await kopf.operator(
        registry=registry,
        settings=operator_settings(),
        clusterwide=not namespaces,
        namespaces=namespaces,
        standalone=True,
        # Else kopf asks for the name of a user that an image need not know.
        identity=f"{GROUP}/operator",
        stop_flag=stop,
        ready_flag=ready,
    )


def _plain(event: kopf.RawEvent) -> dict[str, Any]:
    return dict(event["object"])
