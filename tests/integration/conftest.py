"""What the operator's integration tests share."""

import pytest
from kubernetes import client
from operator_process import Cluster, OperatorProcess, install_crds


@pytest.fixture(scope="module")
def operator(control_plane, kube, tmp_path_factory):
    """A running OperatorProcess with our CRDs installed; patient for seconds, not minutes."""
    install_crds(kube)
    process = OperatorProcess(
        control_plane.kubeconfig,
        tmp_path_factory.mktemp("operator"),
        *("--gone-grace-seconds", "1", "--lost-grace-seconds", "3"),
        *("--backoff-base-seconds", "0.2", "--stop-timeout-seconds", "4"),
    )
    process.start()
    yield process
    if process.process.poll() is None:
        process.end()
    # Others of the session create pods as well: no call to a webhook that is gone.
    client.AdmissionregistrationV1Api(kube).delete_mutating_webhook_configuration(
        "windrow-operator"
    )
    print(process.log.read_text()[-20000:])


@pytest.fixture
def cluster(kube, namespace, operator):
    """A Cluster: this test's namespace, with the operator at work."""
    cluster = Cluster(kube, namespace, operator)
    yield cluster
    cluster.close()
