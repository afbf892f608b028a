"""Two tenants on a real API server, with what the chart gives the operator.

`blue` minds its own business. `red` has a policy that would attract everybody, decode pods, a
sidecar that says what it likes, and in some tests the operator's own token.
"""

from __future__ import annotations

import uuid

import yaml
from kubernetes import client
from operator_process import OWN_NAMESPACE, Cluster
from support.chart import ACCOUNT, admission_policies, rules_of
from waiting import wait_until

NAME = "kubernetes.io/metadata.name"
EVERYBODY = {"matchExpressions": [{"key": NAME, "operator": "Exists"}]}
RBAC = "rbac.authorization.k8s.io"
SHARED = {"name": "out", "mountPath": "/out", "persistentVolumeClaim": {"claimName": "out"}}


def operators_kubeconfig(kube, control_plane, directory, namespace=OWN_NAMESPACE):
    """Give the operator's account what the chart gives it; return a kubeconfig with its token."""
    core = client.CoreV1Api(kube)
    if namespace not in {item.metadata.name for item in core.list_namespace().items}:
        core.create_namespace({"metadata": {"name": namespace}})
    core.create_namespaced_service_account(namespace, {"metadata": {"name": ACCOUNT}})
    rbac = client.RbacAuthorizationV1Api(kube)
    named = {"name": ACCOUNT}
    subject = {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": namespace}
    rbac.create_cluster_role({"metadata": named, "rules": rules_of("ClusterRole")})
    rbac.create_namespaced_role(namespace, {"metadata": named, "rules": rules_of("Role")})
    for kind, create in (
        ("ClusterRole", rbac.create_cluster_role_binding),
        ("Role", lambda body: rbac.create_namespaced_role_binding(namespace, body)),
    ):
        role = {"apiGroup": RBAC, "kind": kind, "name": ACCOUNT}
        create({"metadata": named, "roleRef": role, "subjects": [subject]})
    # The chart makes it empty: the operator has no right to create it.
    hooks = client.AdmissionregistrationV1Api(kube)
    hooks.create_mutating_webhook_configuration({"metadata": named})
    spec = {"spec": {"audiences": [], "expirationSeconds": 7200}}
    review = core.create_namespaced_service_account_token(ACCOUNT, namespace, spec)
    config = yaml.safe_load(control_plane.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": review.status.token}
    path = directory / "operator-kubeconfig"
    path.write_text(yaml.safe_dump(config))
    path.chmod(0o600)
    return path


def take_back(kube, namespace=OWN_NAMESPACE):
    """Remove what the chart gives: other tests of the session make it their own way."""
    rbac = client.RbacAuthorizationV1Api(kube)
    rbac.delete_cluster_role_binding(ACCOUNT)
    rbac.delete_cluster_role(ACCOUNT)
    rbac.delete_namespaced_role_binding(ACCOUNT, namespace)
    rbac.delete_namespaced_role(ACCOUNT, namespace)
    client.CoreV1Api(kube).delete_namespaced_service_account(ACCOUNT, namespace)
    hooks = client.AdmissionregistrationV1Api(kube)
    hooks.delete_mutating_webhook_configuration(ACCOUNT)
    there = {each.metadata.name for each in hooks.list_validating_admission_policy().items}
    for body in admission_policies(namespace):
        if body["metadata"]["name"] not in there:
            continue
        name = body["metadata"]["name"]
        if body["kind"].endswith("Binding"):
            hooks.delete_validating_admission_policy_binding(name)
        else:
            hooks.delete_validating_admission_policy(name)


def hold_operator(kube, **changes):
    """Make the chart's admission policies."""
    hooks = client.AdmissionregistrationV1Api(kube)
    for body in admission_policies(OWN_NAMESPACE, **changes):
        if body["kind"].endswith("Binding"):
            hooks.create_validating_admission_policy_binding(body)
        else:
            hooks.create_validating_admission_policy(body)


def tenant(kube, operator, color):
    core = client.CoreV1Api(kube)
    name = f"{color}-{uuid.uuid4().hex[:6]}"
    core.create_namespace({"metadata": {"name": name}})
    return Cluster(kube, name, operator)


def make_ready(tenant_, pod, ip="10.0.0.9", *, ready=True):
    """Have a pod serve, as a kubelet would say it."""
    state = {"running": {"startedAt": "2025-01-01T00:00:00Z"}}
    user = {"linux": {"uid": 1000, "gid": 1000, "supplementalGroups": []}}
    container = {"name": "decode", "ready": ready, "restartCount": 0, "image": "none"}
    container |= {"imageID": "", "state": state, "user": user}
    status = {"containerStatuses": [container], "podIP": ip, "podIPs": [{"ip": ip}]}
    status["conditions"] = [{"type": "Ready", "status": str(ready)}]
    tenant_.core.patch_namespaced_pod_status(pod, tenant_.namespace, {"status": status})


def sidecars_of(tenant_, pod):
    body = tenant_.core.read_namespaced_pod(pod, tenant_.namespace)
    return body.spec.ephemeral_containers or []


def await_sidecar(tenant_, pod):
    (made,) = wait_until(lambda: sidecars_of(tenant_, pod), "a sidecar is attached")
    return made
