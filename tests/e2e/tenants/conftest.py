"""Two tenants on a real API server, started once for all attempts."""

from __future__ import annotations

import pytest
from kubernetes import config
from operator_process import HURRIED, OperatorProcess, install_crds
from two_tenants import hold_operator, operators_kubeconfig, take_back, tenant


@pytest.fixture(scope="module")
def operators_token(control_plane, kube, tmp_path_factory):
    """A kubeconfig with the token of the operator's account."""
    install_crds(kube)
    yield operators_kubeconfig(kube, control_plane, tmp_path_factory.mktemp("account"))
    take_back(kube)


@pytest.fixture(scope="module")
def operator(operators_token, kube, tmp_path_factory):
    """The operator with the rights of its chart and no others, held by its admission policies."""
    process = OperatorProcess(operators_token, tmp_path_factory.mktemp("operator"), *HURRIED)
    process.start()
    hold_operator(kube, address=process.state["attachAddress"])
    yield process
    process.end()
    print(process.log.read_text()[-20000:])


@pytest.fixture(scope="module")
def blue(kube, operator):
    """The tenant that is attacked."""
    made = tenant(kube, operator, "blue")
    yield made
    made.close()
    made.core.delete_namespace(made.namespace)


@pytest.fixture(scope="module")
def red(kube, operator):
    """The tenant that attacks."""
    made = tenant(kube, operator, "red")
    yield made
    made.close()
    made.core.delete_namespace(made.namespace)


@pytest.fixture(scope="module")
def thief(operators_token):
    """The API with the operator's stolen token."""
    with config.new_client_from_config(str(operators_token)) as api:
        yield api
