"""Make certificates and keys for an authority and a server, and say when each is renewed.

Pure but for the random numbers; `certificates.py` keeps them in the cluster and serves with them.
"""

from __future__ import annotations

import base64
import ipaddress
import secrets
import ssl
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from windrow.errors import UserError

_AUTHORITY_LIFETIME = timedelta(days=3650)
# An authority has a successor this long before it ends: every server certificate that it signs
# until then outlives the change.
_SUCCESSOR_BEFORE = timedelta(days=365)
_SERVER_LIFETIME = timedelta(days=90)
_SERVER_RENEWED_AT = 2 / 3  # of its lifetime, as cert-manager does
# Clocks of nodes differ a little.
_SKEW = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate and its key, PEM."""

    certificate: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class Authorities:
    """The authority that signs, and those that are trusted before and after their time.

    A change has three steps, so that nobody meets a certificate that they do not trust yet: the
    successor is trusted; when everyone has read that, it signs; the old one is trusted to its end.

    Attributes:
        current: signs.
        successor: is trusted already and will sign.
        former: certificate, PEM, that has signed before; empty: none.
    """

    current: KeyPair
    successor: KeyPair | None = None
    former: bytes = b""

    @property
    def trusted(self) -> bytes:
        """Every certificate that a client is to trust, PEM, the one that signs first."""
        later = self.successor.certificate if self.successor else b""
        return self.current.certificate + later + self.former

    def renewed(self, now: datetime, spread: timedelta) -> Authorities:
        """Return what is due at `now`; itself where nothing is.

        Args:
            now: the time, aware.
            spread: how long it may take until everyone trusts a successor.
        """
        due = self
        if due.former and _ends_at(due.former) <= now:
            due = replace(due, former=b"")
        if due.successor is None:
            if now < ends_at(due.current) - _SUCCESSOR_BEFORE:
                return due
            due = replace(due, successor=make_authority(now))
        assert due.successor is not None
        # One that has ended is trusted by nobody: there is nothing to wait for.
        if now >= min(begins_at(due.successor) + spread, ends_at(due.current)):
            return Authorities(due.successor, None, due.current.certificate)
        return due


def make_authority(now: datetime, lifetime: timedelta = _AUTHORITY_LIFETIME) -> KeyPair:
    """Return a new self-signed authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    # A name of its own: clients look for the issuer by name first, and two are trusted for a while.
    own = f"windrow-operator-ca {now.astimezone(UTC):%Y-%m-%d} {secrets.token_hex(4)}"
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, own)])
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    builder = _builder(name, name, key.public_key(), now, lifetime)
    certificate = (
        builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return KeyPair(_pem(certificate), _key_pem(key))


def make_server(authority: KeyPair, hosts: list[str], now: datetime) -> KeyPair:
    """Return a server certificate for `hosts` (names and addresses), signed by `authority`."""
    signer = serialization.load_pem_private_key(authority.key, password=None)
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise TypeError("the authority's key is not an elliptic-curve key")
    issuer = x509.load_pem_x509_certificate(authority.certificate)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "windrow-operator")])
    # None outlives its authority: clients refuse the chain as soon as one of it has ended.
    lifetime = min(_SERVER_LIFETIME, issuer.not_valid_after_utc - now.astimezone(UTC))
    builder = _builder(name, issuer.subject, key.public_key(), now, lifetime)
    certificate = (
        builder.add_extension(
            x509.SubjectAlternativeName([_general_name(host) for host in dict.fromkeys(hosts)]),
            critical=False,
        )
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()),
            critical=False,
        )
        .sign(signer, hashes.SHA256())
    )
    return KeyPair(_pem(certificate), _key_pem(key))


def ends_at(pair: KeyPair) -> datetime:
    """Return when a certificate ends."""
    return _ends_at(pair.certificate)


def begins_at(pair: KeyPair) -> datetime:
    """Return when a certificate was made."""
    return x509.load_pem_x509_certificate(pair.certificate).not_valid_before_utc + _SKEW


def is_due(server: KeyPair, now: datetime) -> bool:
    """Return whether a server's certificate is due for renewal."""
    begun, ends = begins_at(server), ends_at(server)
    return now >= begun + _SERVER_RENEWED_AT * (ends - begun)


def _ends_at(certificate: bytes) -> datetime:
    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc


def server_context(pair: KeyPair) -> ssl.SSLContext:
    """Return a TLS context that serves with `pair`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    use(context, pair)
    return context


def use(context: ssl.SSLContext, pair: KeyPair) -> None:
    """Serve with `pair` from the next handshake on; connections that stand are not touched."""
    # `load_cert_chain` reads files only; the directory is private and gone at once.
    with tempfile.TemporaryDirectory() as scratch:
        chain = Path(scratch) / "chain.pem"
        chain.touch(mode=0o600)
        chain.write_bytes(pair.key + pair.certificate)
        context.load_cert_chain(chain)


def ask_for_client(context: ssl.SSLContext, authorities: Path) -> None:
    """Refuse clients whose certificate none of these authorities, PEM, has signed.

    Raises:
        UserError: the file holds none.
    """
    try:
        context.load_verify_locations(authorities)
    except OSError as error:  # ssl.SSLError among them
        raise UserError(
            f"{authorities} holds no certificate authority: {error.strerror or error}",
            field="--webhook-client-ca",
            remedy="Name a PEM file of the authority that signs the API server's client "
            "certificate.",
        ) from error
    context.verify_mode = ssl.CERT_REQUIRED


def from_secret(data: Mapping[str, str]) -> Authorities:
    """Return what the data of a Secret hold (see `to_secret`)."""
    known = {name: base64.b64decode(value) for name, value in data.items()}
    successor = None
    if known.get("next.crt"):
        successor = KeyPair(known["next.crt"], known["next.key"])
    current = KeyPair(known["tls.crt"], known["tls.key"])
    return Authorities(current, successor, known.get("former.crt", b""))


def to_secret(authorities: Authorities) -> dict[str, str]:
    """Return the data of the Secret that keeps `authorities`."""
    parts = {"tls.crt": authorities.current.certificate, "tls.key": authorities.current.key}
    if authorities.successor is not None:
        parts["next.crt"] = authorities.successor.certificate
        parts["next.key"] = authorities.successor.key
    if authorities.former:
        parts["former.crt"] = authorities.former
    return {name: base64.b64encode(value).decode() for name, value in parts.items()}


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    now: datetime,
    lifetime: timedelta,
) -> x509.CertificateBuilder:
    moment = now.astimezone(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(moment - _SKEW)
        .not_valid_after(moment + lifetime)
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
