"""Authenticate a sidecar's stream: its bearer token is bound to one live pod."""

from __future__ import annotations

from collections.abc import Mapping

import grpc

from windrow.rundir import TOKEN_AUDIENCE
from windrow_operator.cluster_state import ClusterState
from windrow_operator.kube import ApiError, Kube, ObjectNotFound
from windrow_operator.model import Pod
from windrow_operator.pods import pod_of

_POD_NAME = "authentication.kubernetes.io/pod-name"
_POD_UID = "authentication.kubernetes.io/pod-uid"
_ACCOUNT = "system:serviceaccount:"


class Refused(Exception):
    """The stream is not who it says, speaks another version, or came to the wrong replica."""

    def __init__(self, code: grpc.StatusCode, message: str, leader: str = "") -> None:
        self.code, self.leader = code, leader
        super().__init__(message)


class Identity:
    """Asks the API server about tokens.

    Args:
        cluster: the pods that are watched.
        kube: reviews tokens and reads pods.
    """

    def __init__(self, cluster: ClusterState, kube: Kube) -> None:
        self._cluster, self._kube = cluster, kube

    async def identify(self, metadata: Mapping[str, str]) -> Pod:
        """Return the live pod that the bearer token is bound to."""
        scheme, _, token = metadata.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Refused(grpc.StatusCode.UNAUTHENTICATED, "no bearer token")
        try:
            namespace, name, uid = await self._review(token)
            known = self._cluster.pods.get(uid)
            if known is not None and known.sidecar.prepared and not known.ending:
                return known  # as the watch has it; thousands come at once to a new leader
            body = await self._kube.get(f"/api/v1/namespaces/{namespace}/pods/{name}")
        except ObjectNotFound:
            # A deleted pod's token stays valid for some seconds.
            raise Refused(grpc.StatusCode.PERMISSION_DENIED, "the pod is gone") from None
        except ApiError as error:
            raise Refused(grpc.StatusCode.UNAVAILABLE, str(error)) from error
        if body["metadata"]["uid"] != uid:
            raise Refused(
                grpc.StatusCode.PERMISSION_DENIED, f"another pod is now named {namespace}/{name}"
            )
        if not pod_of(body).sidecar.prepared:
            raise Refused(
                grpc.StatusCode.PERMISSION_DENIED,
                f"pod {namespace}/{name} was not made harvestable: it lacks what the webhook adds",
            )
        return self._cluster.put_pod(body)

    async def _review(self, token: str) -> tuple[str, str, str]:
        review = await self._kube.create(
            "/apis/authentication.k8s.io/v1/tokenreviews",
            {
                "apiVersion": "authentication.k8s.io/v1",
                "kind": "TokenReview",
                "spec": {"token": token, "audiences": [TOKEN_AUDIENCE]},
            },
        )
        status = review.get("status") or {}
        if not status.get("authenticated") or TOKEN_AUDIENCE not in status.get("audiences", ()):
            why = status.get("error") or f"it is not for audience {TOKEN_AUDIENCE}"
            raise Refused(grpc.StatusCode.UNAUTHENTICATED, f"the token is not valid: {why}")
        user = status["user"]
        extra = user.get("extra") or {}
        if not user["username"].startswith(_ACCOUNT) or not extra.get(_POD_UID):
            raise Refused(grpc.StatusCode.PERMISSION_DENIED, "the token is bound to no pod")
        namespace = user["username"].removeprefix(_ACCOUNT).partition(":")[0]
        return namespace, extra[_POD_NAME][0], extra[_POD_UID][0]
