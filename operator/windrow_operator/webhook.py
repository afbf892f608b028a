"""Serve the admission webhook, which hands pods to `injection`, and keep it registered.

It fails open in every way: the registration says `failurePolicy: Ignore`, and whatever goes wrong
here lets the pod pass as it came. The API server calls it for decode pods of namespaces that have a
HarvestPolicy and for pods that ask by their label, and for no other pod.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import hmac
import json
import logging
import secrets
from collections.abc import Callable, Collection, Coroutine, Iterable
from dataclasses import replace
from typing import Any

from aiohttp import web

from windrow.crd import GROUP, LABEL_DECODE
from windrow.crd.harvestpolicy import SidecarSpec
from windrow_operator import policies
from windrow_operator.cluster_state import ClusterState
from windrow_operator.connections import Connections
from windrow_operator.decode_pods import DECODES, IS_REQUESTED, NOT_DISABLED
from windrow_operator.injection import (
    DECODE_IMAGE,
    Injection,
    PodNamespace,
    SidecarTemplate,
    inject,
)
from windrow_operator.kube import ApiError, Kube, ObjectNotFound
from windrow_operator.metrics import Metrics
from windrow_operator.model import CheckedPolicy, Refusal
from windrow_operator.pods import pod_of
from windrow_operator.reconcile import Event

log = logging.getLogger(__name__)

CONFIGURATION = "windrow-operator"
PATH = "/mutate-pods"
TIMEOUT_SECONDS = 2
# The API server takes objects of a little more than a megabyte.
_MOST_BYTES = 2 * 2**20
_READ_SECONDS = 1.0
# Calls that are answered at a time, and those that wait for a turn; a call has two seconds.
_AT_ONCE = 16
_MOST_WAITING = 512
# Below that of the registration: a pod passes with a warning instead of without a word.
_DECIDE_SECONDS = 1.5
_COLLECTION = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
_NAMESPACE_NAME = "kubernetes.io/metadata.name"

Body = dict[str, Any]


def webhook_configuration(
    client: Body, ca: bytes, own_namespace: str, namespaces: Iterable[str]
) -> Body:
    """Return the registration.

    Args:
        client: where the webhook serves, `url` or `service` of a WebhookClientConfig.
        ca: the authorities that may have signed its certificate, PEM.
        own_namespace: is exempt, as kube-system is.
        namespaces: those that have a HarvestPolicy.
    """
    exempt = {
        "key": _NAMESPACE_NAME,
        "operator": "NotIn",
        "values": sorted({"kube-system", own_namespace}),
    }
    common = {
        "admissionReviewVersions": ["v1"],
        "sideEffects": "NoneOnDryRun",  # events about what a pod does not get
        "failurePolicy": "Ignore",
        "reinvocationPolicy": "IfNeeded",
        "timeoutSeconds": TIMEOUT_SECONDS,
        "clientConfig": {**client, "caBundle": base64.b64encode(ca).decode()},
        "rules": [
            {
                "operations": ["CREATE"],
                "apiGroups": [""],
                "apiVersions": ["v1"],
                "resources": ["pods"],
                "scope": "Namespaced",
            }
        ],
    }
    asks = [
        {"name": "not-disabled", "expression": NOT_DISABLED},
        {"name": "requested", "expression": IS_REQUESTED},
    ]
    webhooks = [
        {
            **common,
            "name": f"requested.{GROUP}",
            "namespaceSelector": {"matchExpressions": [exempt]},
            "matchConditions": asks,
        }
    ]
    if values := sorted(set(namespaces) - set(exempt["values"])):
        within = {"key": _NAMESPACE_NAME, "operator": "In", "values": values}
        decodes = [
            {"name": "not-disabled", "expression": NOT_DISABLED},
            {"name": "decodes", "expression": DECODES},
        ]
        webhooks.append(
            {
                **common,
                "name": f"policy.{GROUP}",
                "namespaceSelector": {"matchExpressions": [within]},
                "matchConditions": decodes,
            }
        )
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": CONFIGURATION},
        "webhooks": webhooks,
    }


class WebhookRegistration:
    """Keeps the API server's list of when to call the webhook, whatever others do to it.

    Args:
        kube: a client that may write.
        client: returns where the webhook serves now, as a WebhookClientConfig.
        ca: returns the authorities that may have signed its certificate, PEM.
        own_namespace: is exempt.
    """

    def __init__(
        self, kube: Kube, client: Callable[[], Body], ca: Callable[[], bytes], own_namespace: str
    ) -> None:
        self._kube, self._client, self._ca, self._own = kube, client, ca, own_namespace
        self._namespaces: Collection[str] = ()
        self._wanted: Body | None = None  # as last registered; None: not yet

    async def keep(self, namespaces: Collection[str]) -> None:
        """Register for these namespaces, unless that is how it was last done.

        Raises:
            ApiError: the API server did not take it; what was registered before holds.
        """
        self._namespaces = namespaces
        wanted = webhook_configuration(self._client(), self._ca(), self._own, namespaces)
        if wanted != self._wanted:
            await self._apply(wanted)

    async def compare(self) -> None:
        """Register again where the registration is not the one that was last made.

        Raises:
            ApiError: the API server could not say, or did not take it.
        """
        if self._wanted is None:
            return
        await self.keep(self._namespaces)  # the authorities may have changed
        try:
            found = await self._kube.get(f"{_COLLECTION}/{CONFIGURATION}")
        except ObjectNotFound:
            found = {}
        if not _agrees(self._wanted["webhooks"], found.get("webhooks") or []):
            log.warning("the webhook's registration was changed or deleted: it is restored")
            await self._apply(self._wanted)

    async def _apply(self, wanted: Body) -> None:
        # The list of webhooks is ours alone: entries that are no longer named go.
        await self._kube.apply(f"{_COLLECTION}/{CONFIGURATION}", wanted)
        self._wanted = wanted


def _agrees(wanted: object, found: object) -> bool:
    """Return whether `found` says what `wanted` says; fields with defaults may have come to it."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        return all(_agrees(value, found.get(name)) for name, value in wanted.items())
    if isinstance(wanted, list) and isinstance(found, list):
        return len(wanted) == len(found) and all(map(_agrees, wanted, found))
    return wanted == found


class Webhook:
    """Answers AdmissionReviews.

    Args:
        cluster: policies and namespaces.
        kube: asked whether claims are bound, and whether a changed pod would be admitted.
        template: what is the same in every sidecar.
        metrics: counts.
        note: writes an event about an object.
        prepulled: DaemonSet of the operator's namespace, namespace/name, whose pods have the
            sidecar's image on their nodes; empty: there is none.
        keys: returns the words that the API server shows by the path that it was given in the
            registration, which nobody else may read: a caller without one gets no answer.
            Default: a word of this process alone.
        client_names: of the API server's client certificate, where one is asked for; empty: any
            that the authority has signed.

    Attributes:
        connections: those of callers that have not shown yet that they are the API server.
    """

    def __init__(
        self,
        cluster: ClusterState,
        kube: Kube,
        template: Callable[[], SidecarTemplate],
        metrics: Metrics,
        note: Callable[[Body, Event], Coroutine[Any, Any, None]],
        prepulled: str = "",
        keys: Callable[[], Collection[str]] | None = None,
        client_names: Collection[str] = (),
    ) -> None:
        self._cluster, self._kube, self._template = cluster, kube, template
        self._metrics, self._note, self._prepulled = metrics, note, prepulled
        self._notes: set[asyncio.Task[None]] = set()  # on their way
        own = secrets.token_urlsafe(32)
        self._keys = keys or (lambda: (own,))
        self._client_names = frozenset(client_names)
        self._turns, self._waiting = asyncio.Semaphore(_AT_ONCE), 0
        self.connections = Connections()

    def application(self) -> web.Application:
        """Return the HTTP application."""
        application = web.Application(client_max_size=_MOST_BYTES)
        application.router.add_post(PATH, self._mutate)
        application.router.add_post(PATH + "/{key}", self._mutate)
        return application

    async def _mutate(self, request: web.Request) -> web.Response:
        # Before anything of it is read: only the API server knows the path.
        if not self._is_api_server(request):
            refusal = _nothing_said(403)
            refusal.force_close()
            return refusal
        self.connections.forget(request.transport)
        if self._waiting >= _MOST_WAITING:
            return _nothing_said(503)
        self._waiting += 1
        try:
            async with self._turns:
                return await self._answered(request)
        finally:
            self._waiting -= 1

    async def _answered(self, request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(_READ_SECONDS):
                review = json.loads(await request.read())
        except (ValueError, RecursionError, TimeoutError):
            return _nothing_said(400)
        asked = review.get("request") if isinstance(review, dict) else None
        if not isinstance(asked, dict) or not isinstance(asked.get("uid"), str):
            return _nothing_said(400)
        with self._metrics.webhook_seconds.time():
            return web.json_response(await self.review(review))

    def _is_api_server(self, request: web.Request) -> bool:
        shown = request.match_info.get("key", "").encode()
        known = [hmac.compare_digest(shown, key.encode()) for key in self._keys()]
        if not any(known) or not self._client_names:
            return any(known)
        certificate = (request.transport and request.transport.get_extra_info("peercert")) or {}
        names = {value for part in certificate.get("subject", ()) for _, value in part}
        return not names.isdisjoint(self._client_names)

    async def review(self, review: Body) -> Body:
        """Return the answer to one AdmissionReview. Every pod is allowed, some are patched."""
        asked = review["request"]
        answer: Body = {"uid": asked["uid"], "allowed": True}
        warnings: list[str] = []
        try:
            async with asyncio.timeout(_DECIDE_SECONDS):
                done = await self._decide(
                    _object(asked), asked.get("namespace", ""), dry_run=bool(asked.get("dryRun"))
                )
        except Refusal as refusal:
            warnings, done = [str(refusal)], None
            self._metrics.not_injected(refusal.reason)
        except (ApiError, TimeoutError) as error:
            warnings, done = [f"it could not be checked in time: {error}"], None
            self._metrics.not_injected("NotChecked")
        except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
            log.exception("injection failed; the pod is admitted unchanged")
            warnings, done = [f"its spec was not understood: {error!r}"], None
            self._metrics.not_injected("NotUnderstood")
        if done is not None and done.patch:
            answer["patchType"] = "JSONPatch"
            answer["patch"] = base64.b64encode(json.dumps(done.patch).encode()).decode()
            if not asked.get("dryRun"):
                self._metrics.injected(done.rule)
        said = [*warnings, *(done.said if done else ())]
        if said:
            what = "" if done else "the pod is left as it came: "
            answer["warnings"] = [f"windrow: {what}{sentence}" for sentence in said]
        return {
            "apiVersion": "admission.k8s.io/v1",
            "kind": "AdmissionReview",
            "response": answer,
        }

    async def _decide(self, pod: Body, namespace: str, *, dry_run: bool) -> Injection | None:
        # A pod under creation may not have its namespace yet; the review has.
        candidate = replace(pod_of(pod), namespace=namespace)
        policy = policies.select(candidate, self._cluster.policies.values())
        sidecar = policy.spec.sidecar if policy and policy.spec else None
        around = PodNamespace(
            self._cluster.namespaces.get(namespace) or {},
            await self._shared_claims(namespace, sidecar),
        )
        sharing = policy.spec.wanted_sharing if policy and policy.spec else "auto"
        done = inject(pod, self._template(), sidecar, around, sharing)
        if policy is not None and done is not None and not dry_run:
            lacks = [done.gpu.lacks] if done.gpu.lacks else []
            self._tell(policy, candidate.name, "VolumeLeftOut", done.warnings)
            self._tell(policy, candidate.name, "GpuNotShared", lacks)
        if done is None or done.form == "attach" or _has_sidecar(pod):
            return done
        await self._require_image(policy)
        await self._require_admitted(pod, done, namespace)
        return done

    def _tell(self, policy: CheckedPolicy, pod: str, reason: str, warnings: Iterable[str]) -> None:
        """Say of the policy what a pod does not get by it. The pod is not held up for that."""
        if (about := self._cluster.policy_bodies.get(policy.key)) is None:
            return
        for sentence in warnings:
            event = Event(reason, f"pod {pod}: {sentence}", warning=True)
            task = asyncio.create_task(self._note(about, event))
            self._notes.add(task)
            task.add_done_callback(self._notes.discard)

    async def _shared_claims(self, namespace: str, sidecar: SidecarSpec | None) -> frozenset[str]:
        names = {
            volume.persistent_volume_claim.claim_name
            for volume in (sidecar.volumes if sidecar else ())
            if volume.persistent_volume_claim
        }
        found = set()
        for name in names:
            try:
                claim = await self._kube.get(
                    f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{name}"
                )
            except ObjectNotFound:
                continue
            status = claim.get("status") or {}
            modes = {"ReadWriteMany", "ReadOnlyMany"} & set(status.get("accessModes") or ())
            if status.get("phase") == "Bound" and modes:
                found.add(name)
        return frozenset(found)

    async def _require_image(self, policy: CheckedPolicy | None) -> None:
        """Refuse a native sidecar whose image would have to be pulled before decode starts."""
        image = self._template().image
        if image == DECODE_IMAGE:
            return
        what = f"image {image} is not known to be on the nodes"
        who = f"policy {policy.name} asks for the form sidecar" if policy else "the form is sidecar"
        if not self._prepulled:
            raise Refusal("ImageNotOnNodes", f"{who}, and {what}: install the chart with prePull")
        namespace, _, name = self._prepulled.partition("/")
        path = f"/apis/apps/v1/namespaces/{namespace}/daemonsets/{name}"
        try:
            status = (await self._kube.get(path)).get("status") or {}
        except ObjectNotFound:
            status = {}
        ready, all_ = status.get("numberReady", 0), status.get("desiredNumberScheduled", 0)
        if not all_ or ready < all_:
            raise Refusal(
                "ImageNotOnNodes",
                f"{who}, and {what}: DaemonSet {name} has it on {ready} of {all_}",
            )

    async def _require_admitted(self, pod: Body, done: Injection, namespace: str) -> None:
        """Refuse a change with which the pod would not be admitted: quota, Pod Security, limits."""
        changed = copy.deepcopy(pod)
        for operation in done.patch:
            _, parent, leaf = operation["path"].split("/")
            changed[parent][leaf] = operation["value"]
        # Names itself: the original is created in the same moment.
        metadata = changed["metadata"]
        base = metadata.pop("name", "") or metadata.get("generateName", "pod")
        metadata["generateName"] = f"{base[:40]}-"
        metadata["namespace"] = namespace
        try:
            await self._kube.try_create(f"/api/v1/namespaces/{namespace}/pods", changed)
        except ApiError as error:
            if not error.is_refusal:
                raise
            raise Refusal("NotAdmitted", f"with a native sidecar it is refused: {error}") from error


def _object(asked: Body) -> Body:
    pod = asked["object"]
    if not isinstance(pod, dict) or not isinstance(pod.get("spec"), dict):
        raise TypeError("it is not a pod")
    return pod


def _nothing_said(status_: int) -> web.Response:
    """Return an answer that admits a pod as it came and says nothing."""
    response = {"uid": "", "allowed": True}
    body = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
    return web.json_response(body, status=status_)


def _has_sidecar(pod: Body) -> bool:
    """Return whether this is our own question, or a second call for a pod that was changed."""
    labels = pod.get("metadata", {}).get("labels") or {}
    return labels.get(LABEL_DECODE) == "true" and any(
        container.get("restartPolicy") == "Always" and container["name"] == "windrow"
        for container in pod["spec"].get("initContainers") or ()
    )
