"""Say who calls: the namespace and the key behind a bearer token.

A token is one of two kinds. A service account's (three parts with dots) is reviewed by the API
server, which also says whether that account may create FinetuneJobs in its namespace. Any other is
a key whose SHA-256 is in a Secret of the endpoint's own namespace, which tenants cannot write.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from windrow.crd import FINETUNE_JOB, GROUP
from windrow_operator.bearer_tokens import (
    BearerTokens,
    TokenNotValid,
    TooManyFailures,
    User,
    account_of,
    bearer_token,
    digest,
    is_too_long,
)
from windrow_operator.kube import ApiError, Kube, ObjectNotFound
from windrow_operator.openai_api.refusals import CallRefused, busy, unavailable

log = logging.getLogger(__name__)

# What a token for this endpoint is made for: kubectl create token ACCOUNT --audience windrow-api.
AUDIENCE: Final = "windrow-api"
_KNOWN_S: Final = 15.0
_KEY_LINE: Final = re.compile(
    r"(?P<namespace>[a-z0-9]([-a-z0-9]*[a-z0-9])?)\s+(?P<hash>[0-9a-f]{64})"
)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Caller of the API.

    Attributes:
        namespace: whose jobs and files are meant.
        name: of the key within it; a new value under the same name has the same files.
    """

    namespace: str
    name: str

    @property
    def label(self) -> str:
        """The value of the label by which jobs of this key are found."""
        return hashlib.sha256(self.name.encode()).hexdigest()[:32]

    @property
    def folder(self) -> str:
        """The folder of this key, below the place of all files."""
        return f"{self.namespace}/openai/{self.name}"


class Keyring:
    """Knows the keys.

    Args:
        kube: reviews tokens and reads Secrets.
        namespace: where the Secrets with keys are.
        secrets: their names.
    """

    def __init__(self, kube: Kube, namespace: str, secrets: Sequence[str]) -> None:
        self._kube, self._namespace, self._secrets = kube, namespace, tuple(secrets)
        self._tokens: BearerTokens[ApiKey] = BearerTokens(
            kube, AUDIENCE, known_s=_KNOWN_S, at_once=16, failures_per_second=0.5, most=4096
        )
        self._hashes: tuple[tuple[str, ApiKey], ...] = ()
        self._read_at_s = -_KNOWN_S
        self._reading = asyncio.Lock()

    async def key_of(self, authorization: str, peer: str) -> ApiKey:
        """Return who calls.

        Args:
            authorization: the header of that name.
            peer: the address that the call came from.

        Raises:
            CallRefused: the token is not valid, may not create jobs, or could not be checked.
        """
        token = bearer_token(authorization)
        if not token:
            raise _unknown("You didn't provide an API key. Send it as `Authorization: Bearer KEY`.")
        if is_too_long(token):
            raise _unknown("The API key is longer than any key of this server.")
        now_s = asyncio.get_running_loop().time()
        if (known := self._tokens.known(token, now_s)) is not None:
            return known
        try:
            if token.count(".") == 2:
                found = await self._reviewed(token, peer, now_s)
            else:
                found = await self._of_secrets(digest(token), now_s)
        except ApiError as error:
            raise unavailable(f"The API key cannot be checked now: {error}") from error
        except TooManyFailures:
            raise _too_many() from None
        except CallRefused:
            # After the look at the Secrets: callers behind one proxy have one address, and wrong
            # keys of one of them do not keep the right key of another out.
            try:
                self._tokens.check_address(peer, now_s)
            except TooManyFailures:
                raise _too_many() from None
            self._tokens.count_failure(peer, now_s)
            raise
        self._tokens.keep(token, found, now_s)
        return found

    async def _of_secrets(self, digest: str, now_s: float) -> ApiKey:
        async with self._reading:
            if now_s - self._read_at_s >= _KNOWN_S:
                self._hashes = await self._read_secrets()
                self._read_at_s = now_s
        found: ApiKey | None = None
        for known, key in self._hashes:  # all of them, so that the time is the same for each
            if hmac.compare_digest(known, digest):
                found = key
        if found is None:
            raise _unknown(
                "Incorrect API key provided. Ask the administrator of this cluster for one."
            )
        return found

    async def _read_secrets(self) -> tuple[tuple[str, ApiKey], ...]:
        found: list[tuple[str, ApiKey]] = []
        for name in self._secrets:
            try:
                path = f"/api/v1/namespaces/{self._namespace}/secrets/{name}"
                body = await self._kube.get(path)
            except ObjectNotFound:
                log.warning("there is no Secret %s/%s with API keys", self._namespace, name)
                continue
            found += keys_of(name, body)
        return tuple(found)

    async def _reviewed(self, token: str, peer: str, now_s: float) -> ApiKey:
        try:
            return await self._tokens.reviewed(token, peer, now_s, self._account)
        except TokenNotValid as error:
            raise _unknown(
                f"The token is not valid for this server: {error}. Make one: "
                f"kubectl create token ACCOUNT --audience {AUDIENCE}."
            ) from None

    async def _account(self, user: User) -> ApiKey:
        if (account := account_of(user)) is None:
            raise _unknown("The token is not one of a service account.")
        namespace, name = account
        await self._check_rights(user, namespace)
        return ApiKey(namespace, f"sa-{name}")

    async def _check_rights(self, user: User, namespace: str) -> None:
        review = await self._kube.create(
            "/apis/authorization.k8s.io/v1/subjectaccessreviews",
            {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SubjectAccessReview",
                "spec": {
                    "user": user["username"],
                    "groups": user.get("groups") or [],
                    "uid": user.get("uid", ""),
                    "resourceAttributes": {
                        "namespace": namespace,
                        "group": GROUP,
                        "resource": FINETUNE_JOB.plural,
                        "verb": "create",
                    },
                },
            },
        )
        if not (review.get("status") or {}).get("allowed"):
            raise CallRefused(
                403,
                f"{user['username']} may not create {FINETUNE_JOB.plural}.{GROUP} in namespace "
                f"{namespace}. Ask for a Role that allows it.",
                kind="permission_error",
                code="permission_denied",
            )


def keys_of(secret: str, body: dict[str, Any]) -> list[tuple[str, ApiKey]]:
    """Return the keys of a Secret, each with its SHA-256.

    An entry's name is the key's, its value a namespace, a blank and the hash. Others are left out
    and logged by their names.
    """
    found = []
    for entry, text in sorted((body.get("data") or {}).items()):
        try:
            written = base64.b64decode(text).decode().strip()
        except (binascii.Error, UnicodeDecodeError):
            written = ""
        line = _KEY_LINE.fullmatch(written)
        if line is None:
            log.warning(
                "Secret %s: %s is not a namespace, a blank and a SHA-256 in hexadecimal digits",
                secret,
                entry,
            )
            continue
        # A Secret's name has no underscore, so what comes before the first dot is the Secret's.
        name = f"key-{secret.replace('.', '_')}.{entry}"
        found.append((line["hash"], ApiKey(line["namespace"], name)))
    return found


def _too_many() -> CallRefused:
    return busy("Too many wrong API keys came from this address. Try again later.", 5.0)


def _unknown(message: str) -> CallRefused:
    return CallRefused(401, message, code="invalid_api_key")
