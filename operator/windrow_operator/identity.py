"""Authenticate a sidecar's stream: its bearer token is bound to one live pod."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from typing import Final

import grpc

from windrow.rundir import TOKEN_AUDIENCE
from windrow_operator.cluster_state import ClusterState
from windrow_operator.kube import ApiError, Kube, ObjectNotFound
from windrow_operator.model import Pod
from windrow_operator.pods import pod_of
from windrow_operator.rate_limit import Forgetful, TokenBucket

_POD_NAME = "authentication.kubernetes.io/pod-name"
_POD_UID = "authentication.kubernetes.io/pod-uid"
_ACCOUNT = "system:serviceaccount:"
# A projected token has a kilobyte or two.
_LONGEST_TOKEN: Final = 16 * 2**10
# Reviews under way at a time: the API server has others to serve.
_REVIEWS_AT_ONCE: Final = 32
# A sidecar that dials again soon is not asked about again; its pod is looked at all the same.
_KNOWN_S: Final = 10.0
# Tokens from one address that were not valid: so many at once, and so many a second after that.
_FAILURES_AT_ONCE: Final = 20.0
_FAILURES_PER_SECOND: Final = 0.2
_FAILURES_S: Final = 300.0
_MOST_REMEMBERED: Final = 8192


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
        self._reviews = asyncio.Semaphore(_REVIEWS_AT_ONCE)
        self._known: Forgetful[tuple[str, str, str]] = Forgetful(_KNOWN_S, _MOST_REMEMBERED)
        self._failures: Forgetful[TokenBucket] = Forgetful(_FAILURES_S, _MOST_REMEMBERED)

    async def identify(self, metadata: Mapping[str, str], peer: str = "") -> Pod:
        """Return the live pod that the bearer token is bound to.

        Args:
            metadata: of the stream, with the token.
            peer: the address that it came from: who sent wrong tokens is not asked about for a
                while, so that the API server does not review what somebody makes up.
        """
        scheme, _, token = metadata.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Refused(grpc.StatusCode.UNAUTHENTICATED, "no bearer token")
        try:
            namespace, name, uid = await self._reviewed(token, peer)
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

    async def _reviewed(self, token: str, peer: str) -> tuple[str, str, str]:
        """Return whose pod the token is bound to; asked once in a while for each token."""
        now_s = asyncio.get_running_loop().time()
        if len(token) > _LONGEST_TOKEN:
            raise Refused(grpc.StatusCode.UNAUTHENTICATED, "the token is longer than any of ours")
        digest = hashlib.sha256(token.encode()).digest()
        if (whose := self._known.get(digest, now_s)) is not None:
            return whose
        failures = self._failures.get(peer, now_s)
        if failures is not None and failures.level_at(now_s) < 1:
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "too many tokens from this address were not valid: it is asked about later",
            )
        try:
            async with self._reviews:
                whose = await self._review(token)
        except Refused:
            bucket = failures or TokenBucket.full(_FAILURES_PER_SECOND, _FAILURES_AT_ONCE, now_s)
            bucket.take(1, now_s)
            self._failures.put(peer, bucket, now_s)
            raise
        self._known.put(digest, whose, now_s)
        return whose

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
