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
from windrow_operator.kube import ApiError, Kube, ObjectNotFound
from windrow_operator.openai_api.refusals import CallRefused, busy, unavailable
from windrow_operator.rate_limit import Forgetful, TokenBucket

log = logging.getLogger(__name__)

# What a token for this endpoint is made for: kubectl create token ACCOUNT --audience windrow-api.
AUDIENCE: Final = "windrow-api"
_ACCOUNT: Final = "system:serviceaccount:"
_LONGEST_TOKEN: Final = 16 * 2**10
_KNOWN_S: Final = 15.0
_MOST_REMEMBERED: Final = 4096
_REVIEWS_AT_ONCE: Final = 16
# Wrong tokens of one address: so many at once, and so many a second after that.
_FAILURES_AT_ONCE, _FAILURES_PER_SECOND, _FAILURES_S = 20.0, 0.5, 300.0
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
        self._reviews = asyncio.Semaphore(_REVIEWS_AT_ONCE)
        self._known: Forgetful[ApiKey] = Forgetful(_KNOWN_S, _MOST_REMEMBERED)
        self._failures: Forgetful[TokenBucket] = Forgetful(_FAILURES_S, _MOST_REMEMBERED)
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
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            raise _unknown("You didn't provide an API key. Send it as `Authorization: Bearer KEY`.")
        if len(token) > _LONGEST_TOKEN:
            raise _unknown("The API key is longer than any key of this server.")
        now_s = asyncio.get_running_loop().time()
        digest = hashlib.sha256(token.encode()).hexdigest()
        if (known := self._known.get(digest, now_s)) is not None:
            return known
        try:
            if token.count(".") == 2:
                self._check_failures(peer, now_s)
                found = await self._reviewed(token)
            else:
                found = await self._of_secrets(digest, now_s)
        except ApiError as error:
            raise unavailable(f"The API key cannot be checked now: {error}") from error
        except CallRefused:
            # After the look at the Secrets: callers behind one proxy have one address, and wrong
            # keys of one of them do not keep the right key of another out.
            self._check_failures(peer, now_s)
            bucket = self._failures.get(peer, now_s) or TokenBucket.full(
                _FAILURES_PER_SECOND, _FAILURES_AT_ONCE, now_s
            )
            bucket.take(1, now_s)
            self._failures.put(peer, bucket, now_s)
            raise
        self._known.put(digest, found, now_s)
        return found

    def _check_failures(self, peer: str, now_s: float) -> None:
        failures = self._failures.get(peer, now_s)
        if failures is not None and failures.level_at(now_s) < 1:
            raise busy("Too many wrong API keys came from this address. Try again later.", 5.0)

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

    async def _reviewed(self, token: str) -> ApiKey:
        async with self._reviews:
            review = await self._kube.create(
                "/apis/authentication.k8s.io/v1/tokenreviews",
                {
                    "apiVersion": "authentication.k8s.io/v1",
                    "kind": "TokenReview",
                    "spec": {"token": token, "audiences": [AUDIENCE]},
                },
            )
            status = review.get("status") or {}
            if not status.get("authenticated") or AUDIENCE not in (status.get("audiences") or ()):
                raise _unknown(
                    f"The token is not valid for this server: "
                    f"{status.get('error') or f'it is not for the audience {AUDIENCE}'}. Make one: "
                    f"kubectl create token ACCOUNT --audience {AUDIENCE}."
                )
            user = status["user"]
            username = str(user.get("username", ""))
            namespace, _, account = username.removeprefix(_ACCOUNT).partition(":")
            if not username.startswith(_ACCOUNT) or not account:
                raise _unknown("The token is not one of a service account.")
            await self._check_rights(user, namespace)
        return ApiKey(namespace, f"sa-{account}")

    async def _check_rights(self, user: dict[str, Any], namespace: str) -> None:
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
        found.append((line["hash"], ApiKey(line["namespace"], f"key-{secret}.{entry}")))
    return found


def _unknown(message: str) -> CallRefused:
    return CallRefused(401, message, code="invalid_api_key")
