"""What tests of more than one folder share: a real API server, and a namespace of one's own."""

import uuid

import pytest
from kubernetes import client, config

from windrow.local.controlplane import ControlPlane, ControlPlaneSettings
from windrow.local.tools import find_tools


@pytest.fixture(scope="session")
def tools():
    """The executables of a control plane."""
    found = find_tools()
    if found is None:
        pytest.skip("no etcd, kube-apiserver and kube-controller-manager on this machine")
    return found


@pytest.fixture(scope="session")
def control_plane(tools):
    """A running ControlPlane: `.kubeconfig`, `.server`, `.version`; one for the whole session."""
    with ControlPlane(ControlPlaneSettings(tools)) as running:
        yield running


@pytest.fixture(scope="session")
def kube(control_plane):
    """A kubernetes.client.ApiClient with the rights of a cluster administrator."""
    with config.new_client_from_config(str(control_plane.kubeconfig)) as api:
        yield api


@pytest.fixture
def namespace(kube):
    """The name of a namespace that is this test's own, deleted (not awaited) after it."""
    core = client.CoreV1Api(kube)
    name = f"test-{uuid.uuid4().hex[:8]}"
    core.create_namespace({"metadata": {"name": name}})
    yield name
    core.delete_namespace(name)
