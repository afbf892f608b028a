"""An authority is replaced while all runs: nobody meets a certificate that they do not trust."""

from __future__ import annotations

import base64
import contextlib
import socket
import ssl
from datetime import UTC, datetime, timedelta

import pytest
from agent_pod import attached_pod
from cryptography import x509
from kubernetes import client
from operator_process import OWN_NAMESPACE, Cluster, OperatorProcess, install_crds
from waiting import wait_until

from windrow_operator import pki
from windrow_operator.certificates import SECRET
from windrow_sidecar.testing.attached_operator import AttachedOperator, until

SPREAD_SECONDS = 10


@pytest.fixture
def ending(kube):
    """Store an authority that ends in a month; yield its certificate."""
    core = client.CoreV1Api(kube)
    pair = pki.make_authority(datetime.now(UTC), timedelta(days=30))
    with contextlib.suppress(client.ApiException):  # of an earlier test's operator
        core.create_namespace({"metadata": {"name": OWN_NAMESPACE}})
    with contextlib.suppress(client.ApiException):
        core.delete_namespaced_secret(SECRET, OWN_NAMESPACE)
    data = pki.to_secret(pki.Authorities(pair))
    body = {"metadata": {"name": SECRET}, "type": "kubernetes.io/tls", "data": data}
    core.create_namespaced_secret(OWN_NAMESPACE, body)
    yield pair.certificate
    core.delete_namespaced_secret(SECRET, OWN_NAMESPACE)


@pytest.fixture
def cluster(ending, control_plane, kube, namespace, tmp_path):
    install_crds(kube)
    process = OperatorProcess(
        control_plane.kubeconfig, tmp_path, "--trust-spread-seconds", str(SPREAD_SECONDS)
    )
    process.start()
    cluster = Cluster(kube, namespace, process)
    yield cluster
    cluster.close()
    process.end()
    print(process.log.read_text()[-8000:])
    client.AdmissionregistrationV1Api(kube).delete_mutating_webhook_configuration(
        "windrow-operator"
    )


def published(cluster):
    """Return what the sidecars of the namespace are to trust; empty: nothing is said yet."""
    found = cluster.core.list_namespaced_config_map(cluster.namespace).items
    return next((one.data["ca.crt"] for one in found if one.metadata.name == SECRET), "")


def server_on(port, trusted):
    """Shake hands with a server that must be trusted; return its certificate."""
    context = ssl.create_default_context(cadata=trusted)
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as secured,
    ):
        return x509.load_der_x509_certificate(secured.getpeercert(binary_form=True))


def test_a_new_authority_takes_over_without_a_gap(cluster, kube, ending):
    cluster.policy()
    pod = cluster.pod()
    sidecar = cluster.attach(pod)  # trusts the first authority alone
    sidecar.beat()
    trusted = wait_until(lambda: published(cluster), "sidecars are told what to trust")
    state = cluster.operator.state
    ports = [state["webhookPort"], state["attachPort"]]
    first = x509.load_pem_x509_certificate(ending)
    prepared = []

    def both_have_changed():
        # Who read once what to trust, and asks again and again, is never refused.
        servers = [server_on(port, trusted) for port in ports]
        made = cluster.create_pod(
            "asked", {"windrow.dev/inject": "enabled"}, dry_run="All"
        ).spec.volumes
        prepared.append("windrow-run" in {volume.name for volume in made or ()})
        return not any(is_signed_by(server, first) for server in servers)

    wait_until(both_have_changed, "both servers have a certificate of the new authority")
    assert prepared
    assert all(prepared), "the webhook was skipped"
    # The stream from before is open, and the old authority is trusted still.
    cluster.job()
    assert sidecar.next("assign")
    assert len(x509.load_pem_x509_certificates(published(cluster).encode())) == 2
    hooks = client.AdmissionregistrationV1Api(kube).read_mutating_webhook_configuration(
        "windrow-operator"
    )
    bundle = base64.b64decode(hooks.webhooks[0].client_config.ca_bundle)
    assert len(x509.load_pem_x509_certificates(bundle)) == 2


def is_signed_by(server, authority):
    try:
        server.verify_directly_issued_by(authority)
    except Exception:  # noqa: BLE001 - of what kind depends on the key
        return False
    return True


async def test_a_sidecar_reads_anew_what_to_trust_when_it_dials(tmp_path):
    kept = tmp_path / "ca.crt"  # as of a pod that was made before its ConfigMap: not there yet
    async with attached_pod(f"--operator-ca-file={kept}") as (first, _, _):
        now = datetime.now(UTC)
        authority = pki.make_authority(now)
        pair = pki.make_server(authority, ["127.0.0.1"], now)
        second = AttachedOperator((pair.key, pair.certificate))
        second.port = first.port
        await first.stop()
        await second.start()
        try:
            kept.write_bytes(authority.certificate)
            await until(lambda: second.hellos)
        finally:
            await second.stop()
