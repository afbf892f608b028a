"""Alerts about the operator and its sidecars fire for their causes, seen by a real Prometheus."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import ssl
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from alerting import Alerts, write_hurried_rules
from kubernetes import client
from operator_process import OWN_NAMESPACE, Cluster, OperatorProcess, install_crds, running

from windrow_lab.cluster.monitoring import Prometheus
from windrow_operator import pki
from windrow_operator.certificates import SECRET

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no prometheus (Debian: apt-get install prometheus)"
)


@pytest.fixture
def ending(kube):
    """Store an authority with thirteen days to go."""
    core = client.CoreV1Api(kube)
    pair = pki.make_authority(datetime.now(UTC), timedelta(days=13))
    with contextlib.suppress(client.ApiException):
        core.create_namespace({"metadata": {"name": OWN_NAMESPACE}})
    with contextlib.suppress(client.ApiException):
        core.delete_namespaced_secret(SECRET, OWN_NAMESPACE)
    body = {"metadata": {"name": SECRET}, "data": pki.to_secret(pki.Authorities(pair))}
    core.create_namespaced_secret(OWN_NAMESPACE, body)
    yield
    core.delete_namespaced_secret(SECRET, OWN_NAMESPACE)


@pytest.fixture
def cluster(ending, control_plane, kube, namespace, tmp_path):
    install_crds(kube)
    process = OperatorProcess(control_plane.kubeconfig, tmp_path, "--lost-grace-seconds", "1")
    (tmp_path / "operator.json").symlink_to(process.state_file)  # where Prometheus looks for it
    cluster = Cluster(kube, namespace, process)
    yield cluster
    cluster.close()
    if process.process.poll() is None:
        process.end()
    print(process.log.read_text()[-8000:])
    hooks = client.AdmissionregistrationV1Api(kube)
    hooks.delete_mutating_webhook_configuration("windrow-operator")


@pytest.fixture
def alerts(cluster, tmp_path):
    """A Prometheus that scrapes the operator; the operator starts with it."""
    rules = write_hurried_rules(tmp_path / "rules.yaml")
    cluster.operator.start()
    with Prometheus(tmp_path, tmp_path / "prometheus", rules=rules) as prometheus:
        yield Alerts(prometheus)
    print(Path(tmp_path / "prometheus" / "prometheus.log").read_text()[-2000:])


def ask_what_nobody_understands(cluster):
    """Send the webhook a pod whose containers are no list."""
    body = {"request": {"uid": "1", "object": {"metadata": {}, "spec": {"containers": 5}}}}
    request = urllib.request.Request(
        f"https://127.0.0.1:{cluster.operator.state['webhookPort']}{cluster.webhook_path()}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    context = ssl.create_default_context(cadata=cluster.authority().decode())
    with urllib.request.urlopen(request, context=context) as answer:
        assert json.load(answer)["response"]["allowed"]


@pytest.mark.extended
def test_each_alert_fires_for_its_cause(alerts, cluster):
    # Its certificate cannot last longer than its authority.
    alerts.await_all("WindrowCertificateEnding", seconds=60)

    cluster.policy(
        access={
            "namespaceSelector": {
                "matchLabels": {"kubernetes.io/metadata.name": cluster.namespace}
            },
            "gpuSecondsPerDay": 1,
        }
    )
    sidecar = cluster.attach(cluster.pod())
    sidecar.beat()
    with alerts.caused("WindrowQuotaUsed"):
        cluster.job()
        assigned = sidecar.next("assign")
        sidecar.report(assigned, "STARTED")
        sidecar.beat(running(assigned, step=1, total_steps=100, loss=3.0))

    with alerts.caused("WindrowDecodePodsSkipped"):
        spec = {"containers": [{"name": "v", "image": "v", "command": ["vllm", "serve", "/m"]}]}
        labels = {"windrow.dev/inject": "enabled"}
        body = {"metadata": {"name": "other", "labels": labels}, "spec": spec}
        cluster.core.create_namespaced_pod(cluster.namespace, body, dry_run="All")

    with alerts.caused("WindrowWebhookFailing"):
        ask_what_nobody_understands(cluster)

    with alerts.caused("WindrowSlotSilent"):
        sidecar.close()

    with alerts.caused("WindrowOperatorWithoutLeader"):
        cluster.operator.end(signal.SIGKILL)
