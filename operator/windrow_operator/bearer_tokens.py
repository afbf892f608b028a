"""Check bearer tokens: what every port of ours that takes them does alike.

A token is reviewed by the API server for one audience. So many reviews are under way at a time, a
token that is known is not reviewed again for a while, and an address that has sent too many wrong
ones waits. Time is an argument, in seconds of any clock that never goes back.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import Any, Final, Generic, TypeVar

from windrow_operator.kube import Kube
from windrow_operator.rate_limit import Forgetful, TokenBucket

Caller = TypeVar("Caller")
User = dict[str, Any]  # UserInfo of a TokenReview

ACCOUNT: Final = "system:serviceaccount:"
# A projected token has a kilobyte or two.
_LONGEST: Final = 16 * 2**10
_FAILURES_AT_ONCE: Final = 20.0
_FAILURES_S: Final = 300.0


class TokenNotValid(Exception):
    """The API server does not know a token, or it is for another audience; says why."""


class TooManyFailures(Exception):
    """Too many tokens of an address were wrong: it is asked about later."""


class BearerTokens(Generic[Caller]):
    """The tokens of one port. Used from one event loop.

    Args:
        kube: reviews tokens.
        audience: that a token has to be for.
        known_s: for how long a token that was good is not reviewed again.
        at_once: reviews under way at a time: the API server has others to serve.
        failures_per_second: that an address may have in the long run, after 20 at once.
        most: tokens, and addresses, that are remembered.
    """

    def __init__(
        self,
        kube: Kube,
        audience: str,
        *,
        known_s: float,
        at_once: int,
        failures_per_second: float,
        most: int,
    ) -> None:
        self._kube, self._audience, self._per_second = kube, audience, failures_per_second
        self._turns = asyncio.Semaphore(at_once)
        self._known: Forgetful[Caller] = Forgetful(known_s, most)
        self._failures: Forgetful[TokenBucket] = Forgetful(_FAILURES_S, most)

    def known(self, token: str, now_s: float) -> Caller | None:
        """Return who a token was good for a short time ago; None: that has to be found out."""
        return self._known.get(digest(token), now_s)

    def keep(self, token: str, caller: Caller, now_s: float) -> None:
        """Note that a token is good for `caller`."""
        self._known.put(digest(token), caller, now_s)

    def check_address(self, peer: str, now_s: float) -> None:
        """Raise TooManyFailures for an address that has to wait."""
        failures = self._failures.get(peer, now_s)
        if failures is not None and failures.level_at(now_s) < 1:
            raise TooManyFailures

    def count_failure(self, peer: str, now_s: float) -> None:
        """Note that a token of an address was wrong."""
        bucket = self._failures.get(peer, now_s) or TokenBucket.full(
            self._per_second, _FAILURES_AT_ONCE, now_s
        )
        bucket.take(1, now_s)
        self._failures.put(peer, bucket, now_s)

    async def reviewed(
        self,
        token: str,
        peer: str,
        now_s: float,
        accept: Callable[[User], Awaitable[Caller]],
    ) -> Caller:
        """Return who a token is good for, by the API server's word. It counts no failure.

        Args:
            token: as it was sent.
            peer: the address that it came from.
            now_s: the time.
            accept: returns the caller of a user, or refuses it; within the turn of the review.

        Raises:
            TokenNotValid: the API server does not take it.
            TooManyFailures: the address has to wait; also where others of its tokens were found
                wrong while this one waited for its turn.
            ApiError: the API server could not say.
        """
        self.check_address(peer, now_s)
        async with self._turns:
            self.check_address(peer, now_s)
            return await accept(await self._user_of(token))

    async def _user_of(self, token: str) -> User:
        review = await self._kube.create(
            "/apis/authentication.k8s.io/v1/tokenreviews",
            {
                "apiVersion": "authentication.k8s.io/v1",
                "kind": "TokenReview",
                "spec": {"token": token, "audiences": [self._audience]},
            },
        )
        status = review.get("status") or {}
        if not status.get("authenticated") or self._audience not in (status.get("audiences") or ()):
            raise TokenNotValid(status.get("error") or f"it is not for audience {self._audience}")
        return dict(status["user"])


def bearer_token(authorization: str) -> str:
    """Return the token of an `authorization` header; empty: it has none."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def is_too_long(token: str) -> bool:
    """Return whether no token of any kind of ours is as long."""
    return len(token) > _LONGEST


def digest(token: str) -> str:
    """Return the SHA-256 of a token in hexadecimal digits: tokens are not kept."""
    return hashlib.sha256(token.encode()).hexdigest()


def account_of(user: User) -> tuple[str, str] | None:
    """Return namespace and name of a service account; None: the user is of another kind."""
    username = str(user.get("username", ""))
    namespace, _, name = username.removeprefix(ACCOUNT).partition(":")
    return (namespace, name) if username.startswith(ACCOUNT) and name else None
