"""`python -m windrow_operator` where the cluster, its kinds or rights in it are missing."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
import yaml
from kubernetes import client
from operator_process import OWN_NAMESPACE, OperatorProcess, install_crds
from waiting import DEADLINE_SECONDS, wait_until

ACCOUNT = "limited-operator"
COMMAND = (
    *("--attach-host", "127.0.0.1", "--advertise-address", "127.0.0.1"),
    *("--attach-port", "0", "--webhook-port", "0", "--metrics-port", "0"),
    *("--namespace", OWN_NAMESPACE),
)


class Starting(OperatorProcess):
    """An operator that is not waited for."""

    def begin(self, **environment):
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env={**os.environ, **environment}
            )

    def await_line(self, words):
        def told():
            assert self.process.poll() is None, self.log.read_text()
            return [line for line in self.log.read_text().splitlines() if words in line]

        return wait_until(told, f"a line with {words!r}; see\n{self.log.read_text()}")[0]

    def readiness(self):
        url = f"http://127.0.0.1:{self.state['metricsPort']}/readyz"
        try:
            with urllib.request.urlopen(url, timeout=DEADLINE_SECONDS) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@pytest.fixture
def starting(tmp_path, control_plane):
    """A Starting operator with the cluster's kubeconfig; ended after the test."""
    made = []

    def starting(kubeconfig=control_plane.kubeconfig):
        made.append(Starting(kubeconfig, tmp_path))
        return made[-1]

    yield starting
    for one in made:
        if one.process is not None and one.process.poll() is None:
            one.process.kill()
            one.process.wait()


def config_of(server, token, authority=""):
    cluster = {"server": server} | ({"certificate-authority-data": authority} if authority else {})
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": token}}],
        }
    )


@pytest.fixture
def limited(kube, tmp_path, control_plane):
    """A kubeconfig of an account that may do everything but list and watch pods."""
    install_crds(kube)
    core, rbac = client.CoreV1Api(kube), client.RbacAuthorizationV1Api(kube)
    named = {"metadata": {"name": ACCOUNT}}
    everything = {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}
    core_but_pods = ["namespaces", "nodes", "events", "secrets", "configmaps"]
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]},
        {"apiGroups": [""], "resources": ["pods/ephemeralcontainers"], "verbs": ["patch"]},
        {"apiGroups": [""], "resources": ["persistentvolumeclaims"], "verbs": ["get"]},
        {"apiGroups": [""], "resources": core_but_pods, "verbs": ["*"]},
        *(
            {**everything, "apiGroups": [group]}
            for group in (
                "windrow.dev",
                "scheduling.k8s.io",
                "authentication.k8s.io",
                "admissionregistration.k8s.io",
                "coordination.k8s.io",
                "authorization.k8s.io",
            )
        ),
    ]
    rbac.create_cluster_role({**named, "rules": rules})
    core.create_namespaced_service_account("default", named)
    subject = {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": "default"}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": ACCOUNT}
    rbac.create_cluster_role_binding({**named, "subjects": [subject], "roleRef": role})
    token = core.create_namespaced_service_account_token(ACCOUNT, "default", {"spec": {}})
    admin = yaml.safe_load(control_plane.kubeconfig.read_text())["clusters"][0]["cluster"]
    path = tmp_path / "limited"
    body = yaml.safe_load(config_of("", token.status.token))
    body["clusters"][0]["cluster"] = admin
    path.write_text(yaml.safe_dump(body))
    yield path
    rbac.delete_cluster_role_binding(ACCOUNT)
    rbac.delete_cluster_role(ACCOUNT)
    core.delete_namespaced_service_account(ACCOUNT, "default")


def forget_webhook(kube):
    api = client.AdmissionregistrationV1Api(kube)
    api.delete_mutating_webhook_configuration("windrow-operator")


def test_a_missing_right_is_named_and_waited_for(starting, limited, kube):
    operator = starting(limited)
    operator.begin()
    line = operator.await_line("not ready")
    assert line.endswith(
        "the operator's account may not list, watch pods. "
        "Install the chart, whose ClusterRole windrow-operator and Roles allow it."
    )
    assert "Traceback" not in operator.log.read_text()
    assert not operator.state["ready"]
    status, text = operator.readiness()
    assert (status, "may not list, watch pods" in text) == (503, True)

    everything = [{"op": "replace", "path": "/rules/0/verbs", "value": ["*"]}]
    client.RbacAuthorizationV1Api(kube).patch_cluster_role(ACCOUNT, everything)
    wait_until(operator.leads, "an operator that leads")
    assert operator.readiness() == (200, "ok")
    operator.end()
    forget_webhook(kube)


def test_a_kind_that_is_not_installed_is_named_and_waited_for(starting, kube):
    install_crds(kube)
    api = client.ApiextensionsV1Api(kube)
    api.delete_custom_resource_definition("latencyprofiles.windrow.dev")
    names = lambda: {d.metadata.name for d in api.list_custom_resource_definition().items}  # noqa: E731
    wait_until(lambda: "latencyprofiles.windrow.dev" not in names(), "the kind is gone")
    operator = starting()
    operator.begin()
    try:
        line = operator.await_line("not ready")
    finally:
        install_crds(kube)
    assert "the API server does not know LatencyProfile" in line
    assert "kubectl apply -f crds/" in line
    wait_until(operator.leads, "an operator that leads")
    operator.end()
    forget_webhook(kube)


def test_a_server_that_does_not_answer_is_named_and_waited_for(starting, tmp_path):
    path = tmp_path / "nowhere"
    path.write_text(config_of("http://127.0.0.1:1", "t"))
    operator = starting(path)
    operator.begin()
    line = operator.await_line("trying again in 1.0 s")  # the second time
    assert "the API server at http://127.0.0.1:1 does not answer" in line
    assert operator.readiness()[0] == 503
    operator.end(signal.SIGTERM)
    assert operator.process.returncode == 0
    assert "Traceback" not in operator.log.read_text()


def test_credentials_that_are_not_accepted_are_said_to_be(starting, tmp_path, control_plane):
    body = yaml.safe_load(control_plane.kubeconfig.read_text())
    body["users"][0]["user"] = {"token": "nobody's"}
    path = tmp_path / "stranger"
    path.write_text(yaml.safe_dump(body))
    operator = starting(path)
    operator.begin()
    assert "does not accept the operator's credentials" in operator.await_line("not ready")


def test_the_environments_kubeconfig_is_taken(starting, tmp_path, kube, control_plane):
    install_crds(kube)
    operator = starting()
    operator._command = [sys.executable, "-m", "windrow_operator", *COMMAND]
    operator._command += ["--state-file", str(operator.state_file)]
    operator.begin(KUBECONFIG=str(control_plane.kubeconfig), KUBERNETES_SERVICE_HOST="192.0.2.1")
    wait_until(operator.leads, "an operator that leads")
    operator.end()
    forget_webhook(kube)


@pytest.mark.parametrize("content", [None, "{", json.dumps({"kind": "Config"})])
def test_without_credentials_it_ends_with_one_line(tmp_path, content):
    path = tmp_path / "kubeconfig"
    if content is not None:
        path.write_text(content)
    done = subprocess.run(
        [sys.executable, "-m", "windrow_operator", "--kubeconfig", str(path), *COMMAND],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == 2
    assert "no cluster to work in" in done.stderr
    assert "--kubeconfig or KUBECONFIG" in done.stderr
    assert "Traceback" not in done.stderr
