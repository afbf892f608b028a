"""A real node for all tests of this folder: `make test-node` brings it up around pytest."""

from __future__ import annotations

import pytest
from kubernetes import client, config
from operator_process import OperatorProcess, install_crds

from windrow_lab.realnode.node import NODE_ADDRESS, NodeInfo
from windrow_lab.realnode.pods import import_decode_image


@pytest.fixture(scope="session")
def node():
    """The node that these tests run on."""
    info = NodeInfo.of_environment()
    if info is None:
        pytest.skip("no real node here: `make test-node` brings one up")
    return info


@pytest.fixture(scope="session")
def kube(node):
    """An API client with the rights of a cluster administrator."""
    with config.new_client_from_config(node.kubeconfig) as api:
        yield api


@pytest.fixture(scope="session")
def image(node, tmp_path_factory):
    """An image that waits, and that runs this machine's programs where /usr is mounted."""
    return import_decode_image(node, tmp_path_factory.mktemp("image"))


@pytest.fixture(scope="module")
def start_operator(node, kube, tmp_path_factory):
    """Return a function that starts the operator as a process on the node, with more arguments."""
    install_crds(kube)
    started = []

    def start(*arguments):
        for earlier in started:
            earlier.end()
        started.clear()
        process = OperatorProcess(
            node.kubeconfig,
            tmp_path_factory.mktemp("operator"),
            *("--attach-host", "0.0.0.0", "--advertise-address", NODE_ADDRESS),
            *arguments,
        )
        process.start()
        started.append(process)
        return process

    yield start
    for process in started:
        process.end()
        print(process.log.read_text()[-20000:])
    hooks = client.AdmissionregistrationV1Api(kube)
    hooks.delete_mutating_webhook_configuration("windrow-operator")


@pytest.fixture(scope="session")
def store_address():
    """Return the address of these tests' S3 server: pods reach the node by that one alone."""
    return NODE_ADDRESS
