"""A real node for all tests of this folder: `make test-node` brings it up around pytest."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from kubernetes import client, config
from operator_process import OperatorProcess, install_crds

from windrow.local.realnode import NODE_ADDRESS, NodeInfo, write_image

IMAGE = "docker.io/windrow/decode:1"


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
    archive = tmp_path_factory.mktemp("image") / "image.tar"
    links = {
        name: Path("/", name) for name in ("lib", "lib64", "bin") if Path("/", name).is_symlink()
    }
    write_image(archive, IMAGE, {"pause": Path(node.bin, "pause"), **links}, ["/pause"])
    ctr = [f"{node.bin}/ctr", "--address", node.containerd, "--namespace", "k8s.io"]
    subprocess.run([*ctr, "images", "import", archive], check=True, capture_output=True)
    return IMAGE


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
