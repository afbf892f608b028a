"""Authenticate a sidecar's stream: its bearer token is bound to one live pod."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import grpc

from windrow.rundir import TOKEN_AUDIENCE
from windrow_operator.bearer_tokens import (
    BearerTokens,
    TokenNotValid,
    TooManyFailures,
    User,
    account_of,
    bearer_token,
    is_too_long,
)
from windrow_operator.cluster_state import ClusterState
from windrow_operator.kube import ApiError, Kube, ObjectNotFound
from windrow_operator.model import Pod
from windrow_operator.pods import pod_of

_POD_NAME = "authentication.kubernetes.io/pod-name"
_POD_UID = "authentication.kubernetes.io/pod-uid"

_BoundTo = tuple[str, str, str]  # namespace, name and UID of a pod


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
        # A sidecar that dials again soon is not asked about again; its pod is looked at all the
        # same.
        self._tokens: BearerTokens[_BoundTo] = BearerTokens(
            kube, TOKEN_AUDIENCE, known_s=10.0, at_once=32, failures_per_second=0.2, most=8192
        )

    async def identify(self, metadata: Mapping[str, str], peer: str = "") -> Pod:
        """Return the live pod that the bearer token is bound to.

        Args:
            metadata: of the stream, with the token.
            peer: the address that it came from: who sent wrong tokens is not asked about for a
                while, so that the API server does not review what somebody makes up.
        """
        token = bearer_token(metadata.get("authorization", ""))
        if not token:
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

    async def _reviewed(self, token: str, peer: str) -> _BoundTo:
        """Return whose pod the token is bound to; asked once in a while for each token."""
        now_s = asyncio.get_running_loop().time()
        if is_too_long(token):
            raise Refused(grpc.StatusCode.UNAUTHENTICATED, "the token is longer than any of ours")
        if (whose := self._tokens.known(token, now_s)) is not None:
            return whose
        try:
            whose = await self._tokens.reviewed(token, peer, now_s, _bound_to)
        except TooManyFailures:
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "too many tokens from this address were not valid: it is asked about later",
            ) from None
        except TokenNotValid as error:
            self._tokens.count_failure(peer, now_s)
            raise Refused(
                grpc.StatusCode.UNAUTHENTICATED, f"the token is not valid: {error}"
            ) from None
        except Refused:
            self._tokens.count_failure(peer, now_s)
            raise
        self._tokens.keep(token, whose, now_s)
        return whose


async def _bound_to(user: User) -> _BoundTo:
    account, extra = account_of(user), user.get("extra") or {}
    if account is None or not extra.get(_POD_UID):
        raise Refused(grpc.StatusCode.PERMISSION_DENIED, "the token is bound to no pod")
    return account[0], extra[_POD_NAME][0], extra[_POD_UID][0]
