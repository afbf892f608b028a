"""The operator's certificates: an authority that lives as long as the cluster, and a server's.

Injected sidecars carry the authority's certificate in their environment, so it must survive a
restart of the operator: it stands in a Secret. The server's certificate is made anew each time.
"""

from __future__ import annotations

import base64
import ipaddress
import ssl
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from windrow_operator.kube import Conflict, Kube, ObjectNotFound

SECRET = "windrow-operator-ca"
_AUTHORITY_YEARS = 10
_SERVER_DAYS = 397
# Clocks of nodes differ a little.
_SKEW = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate and its key, PEM."""

    certificate: bytes
    key: bytes


def make_authority(now: datetime) -> KeyPair:
    """Return a new self-signed authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "windrow-operator-ca")])
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
    builder = _builder(name, name, key.public_key(), now, timedelta(days=365 * _AUTHORITY_YEARS))
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
    builder = _builder(name, issuer.subject, key.public_key(), now, timedelta(days=_SERVER_DAYS))
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


async def load_authority(kube: Kube, namespace: str, now: datetime) -> KeyPair:
    """Return the cluster's authority from its Secret, made and stored when there is none."""
    path = f"/api/v1/namespaces/{namespace}/secrets"
    try:
        return _from_secret(await kube.get(f"{path}/{SECRET}"))
    except ObjectNotFound:
        authority = make_authority(now)
    body = {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/tls",
        "metadata": {"name": SECRET, "namespace": namespace},
        "data": {
            "tls.crt": base64.b64encode(authority.certificate).decode(),
            "tls.key": base64.b64encode(authority.key).decode(),
        },
    }
    try:
        await kube.create(path, body)
    except Conflict:
        # Another replica was faster: one authority for all.
        return _from_secret(await kube.get(f"{path}/{SECRET}"))
    return authority


def ends_at(pair: KeyPair) -> datetime:
    """Return when a certificate ends."""
    return x509.load_pem_x509_certificate(pair.certificate).not_valid_after_utc


def server_context(pair: KeyPair) -> ssl.SSLContext:
    """Return a TLS context that serves with `pair`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # `load_cert_chain` reads files only; the directory is private and gone at once.
    with tempfile.TemporaryDirectory() as scratch:
        chain = Path(scratch) / "chain.pem"
        chain.touch(mode=0o600)
        chain.write_bytes(pair.key + pair.certificate)
        context.load_cert_chain(chain)
    return context


def _from_secret(secret: dict[str, dict[str, str]]) -> KeyPair:
    data = secret["data"]
    return KeyPair(base64.b64decode(data["tls.crt"]), base64.b64decode(data["tls.key"]))


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
