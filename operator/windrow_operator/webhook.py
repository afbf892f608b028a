"""The admission webhook: hands pods to `injection` and registers itself with the API server.

It fails open in every way: the registration says `failurePolicy: Ignore`, and whatever goes wrong
here lets the pod pass as it came. Serving never waits for us.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from aiohttp import web

from windrow.crd import GROUP
from windrow_operator import policies
from windrow_operator.injection import SidecarTemplate, inject, matching_rule
from windrow_operator.kube import Kube
from windrow_operator.metrics import Metrics
from windrow_operator.world import World, pod_of

log = logging.getLogger(__name__)

CONFIGURATION = "windrow-operator"
PATH = "/mutate-pods"
TIMEOUT_SECONDS = 5
_COLLECTION = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"


def webhook_configuration(url: str, ca: bytes, own_namespace: str) -> dict[str, Any]:
    """Return the registration of a webhook that serves at `url` under the authority `ca` (PEM)."""
    exempt = {
        "key": "kubernetes.io/metadata.name",
        "operator": "NotIn",
        "values": ["kube-system", own_namespace],
    }
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": CONFIGURATION},
        "webhooks": [
            {
                "name": f"inject.{GROUP}",
                "admissionReviewVersions": ["v1"],
                "sideEffects": "None",
                "failurePolicy": "Ignore",
                "reinvocationPolicy": "IfNeeded",
                "timeoutSeconds": TIMEOUT_SECONDS,
                "clientConfig": {"url": url, "caBundle": base64.b64encode(ca).decode()},
                "namespaceSelector": {"matchExpressions": [exempt]},
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
        ],
    }


async def register(kube: Kube, url: str, ca: bytes, own_namespace: str) -> None:
    """Tell the API server about the webhook, in place of an earlier registration."""
    body = webhook_configuration(url, ca, own_namespace)
    await kube.apply(f"{_COLLECTION}/{CONFIGURATION}", body)


class Webhook:
    """Answers AdmissionReviews."""

    def __init__(
        self, world: World, template: Callable[[], SidecarTemplate], metrics: Metrics
    ) -> None:
        self._world, self._template, self._metrics = world, template, metrics

    def application(self) -> web.Application:
        """Return the HTTP application."""
        application = web.Application(client_max_size=16 * 2**20)
        application.router.add_post(PATH, self._mutate)
        return application

    async def _mutate(self, request: web.Request) -> web.Response:
        review = await request.json()
        return web.json_response(self.review(review))

    def review(self, review: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to one AdmissionReview. Every pod is allowed, some are patched."""
        asked = review["request"]
        answer: dict[str, Any] = {"uid": asked["uid"], "allowed": True}
        pod = asked["object"]
        try:
            patch = self._patch(pod, asked.get("namespace", ""))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            log.exception("a pod could not be injected; it passes as it came")
            answer["warnings"] = [f"windrow: not injected: {error!r}"]
            patch = []
        if patch:
            answer["patchType"] = "JSONPatch"
            answer["patch"] = base64.b64encode(json.dumps(patch).encode()).decode()
            self._metrics.injected(matching_rule(pod))
        return {
            "apiVersion": "admission.k8s.io/v1",
            "kind": "AdmissionReview",
            "response": answer,
        }

    def _patch(self, pod: dict[str, Any], namespace: str) -> list[dict[str, Any]]:
        # A pod under creation may not have its namespace yet; the review has.
        candidate = replace(pod_of(pod), namespace=namespace)
        policy = policies.select(candidate, self._world.policies.values())
        template = self._template()
        if policy is None or policy.spec is None:
            return inject(pod, template)
        sidecar = policy.spec.sidecar
        return inject(pod, replace(template, mps=sidecar.mps), sidecar.volumes)
