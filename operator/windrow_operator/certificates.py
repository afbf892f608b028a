"""Keep the operator's certificates valid and trusted for as long as it serves.

The authorities stand in a Secret of the operator's namespace. Each replica reads it twice a minute,
moves a change one step on when its time has come (see `pki.Authorities`), and takes a new
certificate for its own servers well before the old one ends. New handshakes get the new one;
streams that stand go on. What is to be trusted goes into the webhook's registration and into a
ConfigMap of each namespace with decode pods, which the kubelet keeps up to date in the pods.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import grpc

from windrow_operator import pki
from windrow_operator.injection import TRUST_CONFIG_MAP, TRUST_FILE
from windrow_operator.kube import ApiError, Conflict, Kube, ObjectNotFound
from windrow_operator.metrics import Metrics

log = logging.getLogger(__name__)

SECRET = "windrow-operator-ca"
# The kubelet brings a changed ConfigMap to its pods within its sync period and the time that its
# cache is good for, about two minutes; the rest is for nodes and API servers that are away a while.
TRUST_SPREAD: Final = timedelta(hours=6)
_LOOK = timedelta(seconds=30)
# Somebody may have deleted or changed a ConfigMap: it is written again after that time.
_WRITTEN_AGAIN = timedelta(minutes=10)


class Certificates:
    """The certificate that a replica serves with, and what clients are to trust.

    Args:
        kube: reads and writes the Secret.
        namespace: the operator's own.
        hosts: names and addresses by which it is reached.
        metrics: shows when certificates end.
        clock: the time, aware.
        spread: how long it may take until everyone trusts a new authority.
    """

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        hosts: list[str],
        metrics: Metrics,
        *,
        clock: Callable[[], datetime],
        spread: timedelta = TRUST_SPREAD,
    ) -> None:
        self._kube, self._hosts, self._metrics = kube, hosts, metrics
        self._clock, self._spread = clock, spread
        self._namespace = namespace
        self._collection = f"/api/v1/namespaces/{namespace}/secrets"
        self._authorities: pki.Authorities | None = None
        self._webhook_keys: dict[bytes, str] = {}  # by the authority's certificate
        self._server: pki.KeyPair | None = None
        self._grpc: grpc.ServerCertificateConfiguration | None = None

    async def load(self) -> None:
        """Have an authority and a certificate; both are made where there are none.

        Raises:
            ApiError: the API server cannot say, or does not store them.
        """
        self._take(await self._renewed())
        assert self._server is not None
        self.context = pki.server_context(self._server)

    @property
    def trusted(self) -> bytes:
        """Every authority that a client is to trust, PEM."""
        assert self._authorities is not None
        return self._authorities.trusted

    @property
    def webhook_keys(self) -> tuple[str, ...]:
        """Return the words that only the API server shows, by the path that it is given.

        Derived from the authorities' keys, which every replica reads; the first is of the one that
        signs. Those of authorities that have signed since the start are still taken.
        """
        assert self._authorities is not None
        current, later = self._authorities.current, self._authorities.successor
        pairs = [current, later] if later else [current]
        for pair in pairs:
            digest = hmac.digest(pair.key, b"windrow webhook path", "sha256")
            self._webhook_keys[pair.certificate] = digest.hex()
        first = self._webhook_keys[current.certificate]
        return (first, *(key for key in self._webhook_keys.values() if key != first))

    def of_grpc(self) -> grpc.ServerCredentials:
        """Return credentials of a server that takes the newest certificate at each handshake."""
        served = self._grpc
        assert served is not None

        def changed() -> grpc.ServerCertificateConfiguration | None:
            # Each answer but None makes gRPC free what the handshakes beside this one stand on: in
            # grpcio 1.85 a thousand sidecars that came at once ended the process by an abort.
            nonlocal served
            if self._grpc is served:
                return None
            served = self._grpc
            return served

        return grpc.dynamic_ssl_server_credentials(served, changed)

    async def keep(self) -> None:
        """Renew what is due, until cancelled."""
        # Often enough that a replica takes up each step long before the next one.
        pause = min(_LOOK, self._spread / 4)
        while True:
            await asyncio.sleep(pause.total_seconds())
            try:
                await self.refresh()
            except ApiError as error:
                log.warning("cannot read or renew the certificate authority: %s", error)

    async def refresh(self) -> None:
        """Take up what the Secret says, and renew what is due.

        Raises:
            ApiError: the API server cannot say, or does not store it; what was served before is.
        """
        before = self._server
        self._take(await self._renewed())
        if self._server is not None and self._server is not before:
            pki.use(self.context, self._server)
            log.info("serving with a certificate that ends at %s", pki.ends_at(self._server))

    def _take(self, authorities: pki.Authorities) -> None:
        now, before = self._clock(), self._authorities
        signed_by = before.current.certificate if before else b""
        if (
            self._server is None
            or signed_by != authorities.current.certificate
            or pki.is_due(self._server, now)
        ):
            self._server = pki.make_server(authorities.current, self._hosts, now)
            chain = (self._server.key, self._server.certificate)
            self._grpc = grpc.ssl_server_certificate_configuration([chain])
        self._authorities = authorities
        for which, pair in (("authority", authorities.current), ("server", self._server)):
            self._metrics.certificate(which, pki.ends_at(pair))

    async def _renewed(self) -> pki.Authorities:
        """Return the authorities as the Secret has them, moved on where that is due."""
        now = self._clock()
        path = f"{self._collection}/{SECRET}"
        try:
            secret = await self._kube.get(path)
        except ObjectNotFound:
            made = pki.Authorities(pki.make_authority(now))
            try:
                await self._kube.create(self._collection, self._body(made))
            except Conflict:  # another replica was faster: one authority for all
                return pki.from_secret((await self._kube.get(path))["data"])
            return made
        found = pki.from_secret(secret["data"])
        due = found.renewed(now, self._spread)
        if due == found:
            return found
        try:
            await self._kube.replace(path, {**secret, "data": pki.to_secret(due)})
        except Conflict:
            return pki.from_secret((await self._kube.get(path))["data"])
        except ApiError as error:
            # What there is goes on to serve: there is a year for somebody to fix this.
            log.warning("cannot store the renewed certificate authority: %s", error)
            return found
        log.info(
            "%s, valid until %s",
            "a new authority is trusted, and will sign in a while"
            if due.successor
            else "certificates are signed by the authority that is current now",
            pki.ends_at(due.successor or due.current),
        )
        return due

    def _body(self, authorities: pki.Authorities) -> dict[str, Any]:
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "kubernetes.io/tls",
            "metadata": {"name": SECRET, "namespace": self._namespace},
            "data": pki.to_secret(authorities),
        }


@dataclass(frozen=True, slots=True)
class _Written:
    trusted: bytes
    at: datetime


class TrustPublisher:
    """Writes what sidecars are to trust into a ConfigMap of each namespace with decode pods."""

    def __init__(
        self, kube: Kube, certificates: Certificates, clock: Callable[[], datetime]
    ) -> None:
        self._kube, self._certificates, self._clock = kube, certificates, clock
        self._written: dict[str, _Written] = {}  # by namespace

    async def publish(self, namespaces: Collection[str]) -> None:
        """Write it wherever it is not written yet, or was a while ago."""
        trusted, now = self._certificates.trusted, self._clock()
        for namespace in sorted(namespaces):
            last = self._written.get(namespace)
            if last and last.trusted == trusted and now - last.at < _WRITTEN_AGAIN:
                continue
            try:
                await self._write(namespace, trusted)
            except ApiError as error:
                # The sidecars of this namespace keep what they had; others are not held up.
                log.warning(
                    "cannot write the certificates that sidecars trust to %s: %s", namespace, error
                )
                continue
            self._written[namespace] = _Written(trusted, now)

    async def _write(self, namespace: str, trusted: bytes) -> None:
        body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": TRUST_CONFIG_MAP, "namespace": namespace},
            "data": {TRUST_FILE: trusted.decode()},
        }
        path = f"/api/v1/namespaces/{namespace}/configmaps/{TRUST_CONFIG_MAP}"
        await self._kube.apply(path, body)
