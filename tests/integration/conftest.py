"""Fixtures of the operator's integration tests."""

import pytest
from kubernetes import client
from operator_process import HURRIED, Cluster, OperatorProcess, install_crds


@pytest.fixture(scope="module")
def operator(control_plane, kube, tmp_path_factory):
    """A running OperatorProcess with our CRDs installed; patient for seconds, not minutes."""
    install_crds(kube)
    process = OperatorProcess(
        control_plane.kubeconfig,
        tmp_path_factory.mktemp("operator"),
        *HURRIED,
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


@pytest.fixture
def urgent(kube):
    """The name of a PriorityClass above all others of this test."""
    api = client.SchedulingV1Api(kube)
    body = {"metadata": {"name": "urgent-finetuning"}, "value": 1000}
    api.create_priority_class(body)
    yield body["metadata"]["name"]
    api.delete_priority_class(body["metadata"]["name"])
