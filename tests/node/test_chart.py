"""The chart: what it renders, what it refuses, and which rights it gives."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from kubernetes import client
from operator_process import install_crds
from waiting import wait_until

from windrow_operator.prerequisites import RIGHTS

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "windrow"
NAMESPACE = "windrow-system"
NATIVE = ("--set", "sidecar.native.enabled=true")
ALL = (
    *NATIVE,
    *("--set", "sidecar.image=windrow/sidecar:1", "--set", "sidecar.native.prePull=true"),
    *("--set", "networkPolicy.enabled=true", "--set", "metrics.podMonitor=true"),
    *("--set", "metrics.rules=true", "--set", "metrics.dashboards.enabled=true"),
    *("--set", "metrics.runbooks=https://runbooks.example/"),
)


def render(node, *arguments):
    command = [f"{node.bin}/helm", "template", "windrow", CHART, "--namespace", NAMESPACE]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)


def objects(node, *arguments):
    done = render(node, *arguments)
    assert done.returncode == 0, done.stderr
    return [body for body in yaml.safe_load_all(done.stdout) if body]


def test_the_chart_passes_helms_own_checks(node):
    done = subprocess.run(
        [f"{node.bin}/helm", "lint", "--strict", CHART], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_its_definitions_are_the_projects_and_stay_on_uninstall(node):
    found = {
        body["metadata"]["name"]: body
        for body in objects(node)
        if body["kind"] == "CustomResourceDefinition"
    }
    files = sorted((ROOT / "crds").glob("*.yaml"))
    assert len(found) == len(files) > 0
    for path in files:
        ours = yaml.safe_load(path.read_text())
        theirs = found[ours["metadata"]["name"]]
        kept = theirs["metadata"]["annotations"].pop("helm.sh/resource-policy")
        assert kept == "keep"
        if not ours["metadata"].get("annotations"):
            del theirs["metadata"]["annotations"]
        assert theirs == ours


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("sidecars.image=x", "'sidecars' not allowed"),
        ("sidecar.imagee=x", "'imagee' not allowed"),
        ("replicas=0", "/replicas"),
        ("image.pullPolicy=Sometimes", "/image/pullPolicy"),
        ("operator.arguments=--verbose", "/operator/arguments"),
    ],
)
def test_values_with_a_typo_or_out_of_range_are_refused(node, wrong, told):
    done = render(node, "--set", wrong)
    assert done.returncode != 0
    assert told in done.stderr


def test_pulling_decodes_own_image_ahead_is_refused_with_what_to_do(node):
    done = render(node, *NATIVE, "--set", "sidecar.native.prePull=true")
    assert done.returncode != 0
    assert "set sidecar.image, or prePull to false" in done.stderr


def test_the_api_server_takes_every_object_that_the_chart_can_make(node, kube):
    install_crds(kube)
    bodies = [
        body
        for body in objects(node, *ALL)
        # Of other projects: the Prometheus operator's definition is not here.
        if body["kind"] not in ("PodMonitor", "PrometheusRule", "CustomResourceDefinition")
    ]
    text = yaml.safe_dump_all([_in(body, "default") for body in bodies])
    command = [f"{node.bin}/kubectl", "--kubeconfig", node.kubeconfig, "apply", "--server-side"]
    command += ["--dry-run=server", "--validate=strict", "-f", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(bodies) >= 10


def test_every_container_of_the_chart_passes_the_level_restricted(node):
    for body in objects(node, *ALL):
        spec = body.get("spec") or {}
        pod = spec.get("template", {}).get("spec") or (spec if body["kind"] == "Pod" else None)
        if pod is None:
            continue
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["requests"]
            assert container["resources"]["limits"]["memory"]


# --- rights ---------------------------------------------------------------------------------------

OURS, HOOKS = "windrow.dev", "admissionregistration.k8s.io"
# What the operator calls: verb, group, resource, namespace, name.
CALLS = [
    (verb, right.group, right.resource, NAMESPACE if right.own else "", right.name)
    for right in RIGHTS
    for verb in right.verbs
]
# Some of what it does not: to read others' secrets, to make or change what runs.
OTHERS = [
    ("create", "", "pods", "", ""),
    ("delete", "", "pods", "", ""),
    ("patch", "", "pods", "", ""),
    ("create", "", "pods/exec", "", ""),
    ("create", "", "pods/eviction", "", ""),
    ("get", "", "secrets", NAMESPACE, "another"),
    ("get", "", "secrets", "default", "windrow-operator-ca"),
    ("list", "", "secrets", NAMESPACE, ""),
    ("create", "", "serviceaccounts/token", "", ""),
    ("patch", HOOKS, "mutatingwebhookconfigurations", "", "another"),
    ("delete", HOOKS, "mutatingwebhookconfigurations", "", "windrow-operator"),
    ("create", "rbac.authorization.k8s.io", "clusterrolebindings", "", ""),
    ("update", "", "namespaces", "", ""),
    ("create", OURS, "harvestpolicies", "", ""),
    ("create", OURS, "finetunejobs", "", ""),
    ("get", "", "nodes", "", ""),
    ("update", "coordination.k8s.io", "leases", NAMESPACE, "another"),
    ("update", "coordination.k8s.io", "leases", "kube-system", "windrow-operator"),
    ("list", "coordination.k8s.io", "leases", NAMESPACE, ""),
    ("get", "apps", "daemonsets", NAMESPACE, "windrow-prepull"),
]
USER = f"system:serviceaccount:{NAMESPACE}:windrow-operator"


@pytest.fixture(scope="module")
def allowed(node, kube):
    """Return a function that asks the API server what the operator's account may do."""
    core = client.CoreV1Api(kube)
    there = {item.metadata.name for item in core.list_namespace().items}
    if NAMESPACE not in there:
        core.create_namespace({"metadata": {"name": NAMESPACE}})

    def ask(values=()):
        rights = [
            body
            for body in objects(node, *values)
            if body["apiVersion"].startswith("rbac.") or body["kind"] == "ServiceAccount"
        ]
        command = [f"{node.bin}/kubectl", "--kubeconfig", node.kubeconfig, "apply", "-f", "-"]
        subprocess.run(command, input=yaml.safe_dump_all(rights).encode(), check=True)
        return lambda call: review(kube, *call)

    yield ask
    names = ["role/windrow-operator-secrets", "rolebinding/windrow-operator-secrets"]
    kubectl = [f"{node.bin}/kubectl", "--kubeconfig", node.kubeconfig]
    subprocess.run([*kubectl, "-n", "default", "delete", "--ignore-not-found", *names], check=True)
    names = [*("-n", NAMESPACE, "delete", "role/windrow-operator", "rolebinding/windrow-operator")]
    names += ["clusterrole/windrow-operator", "clusterrolebinding/windrow-operator"]
    names += ["serviceaccount/windrow-operator"]
    subprocess.run([*kubectl, *names], check=True, capture_output=True)


def review(kube, verb, group, resource, namespace, name):
    resource, _, sub = resource.partition("/")
    about = {"verb": verb, "group": group, "resource": resource, "subresource": sub}
    about |= {"namespace": namespace, "name": name}
    body = {"spec": {"user": USER, "groups": GROUPS, "resourceAttributes": about}}
    return client.AuthorizationV1Api(kube).create_subject_access_review(body).status.allowed


GROUPS = ["system:serviceaccounts", f"system:serviceaccounts:{NAMESPACE}", "system:authenticated"]


def test_the_operator_may_do_what_it_calls_and_nothing_else(allowed):
    may = allowed()
    assert [call for call in CALLS if not may(call)] == []
    assert [call for call in OTHERS if may(call)] == []


def test_the_form_sidecar_adds_the_right_to_try_a_pod_and_no_other(allowed):
    may = allowed(NATIVE)
    assert [call for call in OTHERS if may(call)] == [("create", "", "pods", "", "")]


def test_secrets_may_be_read_where_the_values_say_so_and_nowhere_else(allowed):
    may = allowed(("--set", "secrets.namespaces={default}"))
    # The API server's authorizer hears of a new role a moment later.
    wait_until(lambda: may(("get", "", "secrets", "default", "team-s3")), "the right is there")
    asked = [(verb, "default", "") for verb in ("list", "watch", "create", "patch")]
    asked += [("get", "kube-system", "any"), ("get", NAMESPACE, "any")]
    assert not [a for a in asked if may((a[0], "", "secrets", a[1], a[2]))]


def _in(body, namespace):
    if "namespace" in body["metadata"]:
        body["metadata"]["namespace"] = namespace
    return body
