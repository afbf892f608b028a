"""The chart: what it renders, what it refuses, and which rights it gives."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from kubernetes import client
from operator_process import install_crds
from support.chart import admission_policies
from waiting import wait_until

from windrow_operator.prerequisites import RIGHTS

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "windrow"
RELEASES = sorted((Path(__file__).parent / "releases").glob("*.yaml"))
NAMESPACE = "windrow-system"
NATIVE = ("--set", "sidecar.native.enabled=true")
ALL = (
    *NATIVE,
    *("--set", "sidecar.image=windrow/sidecar:1", "--set", "sidecar.native.prePull=true"),
    *("--set", "networkPolicy.enabled=true", "--set", "metrics.podMonitor=true"),
    *("--set", "metrics.rules=true", "--set", "metrics.dashboards.enabled=true"),
    *("--set", "metrics.runbooks=https://runbooks.example/"),
    *("--set", "api.enabled=true", "--set", "api.storage.claim=files"),
    *("--set", "api.keySecrets={keys}", "--set", "api.tlsSecret=api-tls"),
)


IMAGE = ("--set", "image.repository=registry.example/windrow/operator")


def render(node, *arguments):
    command = [f"{node.bin}/helm", "template", "windrow", CHART, "--namespace", NAMESPACE]
    return subprocess.run(
        [*command, *IMAGE, *arguments], capture_output=True, text=True, check=False
    )


def objects(node, *arguments):
    done = render(node, *arguments)
    assert done.returncode == 0, done.stderr
    return [body for body in yaml.safe_load_all(done.stdout) if body]


def test_the_chart_passes_helms_own_checks(node):
    done = subprocess.run(
        [f"{node.bin}/helm", "lint", "--strict", CHART], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def chart_with(tmp_path, values):
    """Return a copy of the chart whose values.yaml is that of another release."""
    copied = tmp_path / "chart"
    shutil.copytree(CHART, copied)
    (copied / "values.yaml").write_text(values)
    return copied


def rendered(node, chart, *arguments):
    command = [f"{node.bin}/helm", "template", "windrow", chart, "--namespace", NAMESPACE]
    done = subprocess.run(
        [*command, *IMAGE, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.stem)
def test_the_chart_renders_with_the_values_of_each_older_release(node, tmp_path, release):
    older = chart_with(tmp_path, release.read_text())
    assert rendered(node, older, *ALL) == rendered(node, CHART, *ALL)


def test_a_value_that_an_older_release_did_not_have_is_the_charts(node, tmp_path):
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    nothing = chart_with(tmp_path, "{}")
    assert rendered(node, nothing, *ALL) == rendered(node, CHART, *ALL)
    assert rendered(node, nothing) == rendered(node, CHART)
    one_of_each = {name: {} for name, value in values.items() if isinstance(value, dict)}
    (nothing / "values.yaml").write_text(yaml.safe_dump(one_of_each | {"podSecurityContext": {}}))
    assert rendered(node, nothing, "--set", "crds.install=false").count("\nkind: ")


def test_what_a_user_empties_stays_empty(node):
    for value in ("operator.resources.limits=null", "podSecurityContext.runAsUser=null"):
        (operator,) = (o for o in objects(node, "--set", value) if o["kind"] == "Deployment")
        pod = operator["spec"]["template"]["spec"]
        if "limits" in value:
            assert "limits" not in pod["containers"][0]["resources"]
        else:
            assert "runAsUser" not in pod["securityContext"]


def test_on_openshift_no_pod_names_a_user(node):
    seen = ("--api-versions", "security.openshift.io/v1")
    kinds = ("Deployment", "DaemonSet", "Pod")
    found = [o for o in objects(node, *ALL, *seen) if o["kind"] in kinds]
    assert len(found) == 4
    for body in found:
        spec = body["spec"].get("template", body)["spec"]
        for context in (
            spec["securityContext"],
            *(c["securityContext"] for c in spec["containers"]),
        ):
            assert not {"runAsUser", "runAsGroup", "fsGroup"} & context.keys()
        assert spec["securityContext"]["runAsNonRoot"] is True


def test_another_chart_can_depend_on_it_by_a_condition_an_alias_and_tags(node, tmp_path):
    for name in ("windrow", "harvest"):
        parent = tmp_path / name
        shutil.copytree(CHART, parent / "charts" / "windrow")
        needs = {"name": "windrow", "version": "0.1.0", "condition": f"{name}.enabled"}
        needs |= {"tags": ["training"]} | ({"alias": name} if name != "windrow" else {})
        chart = {
            "apiVersion": "v2",
            "name": "platform",
            "version": "1.0.0",
            "dependencies": [needs],
        }
        (parent / "Chart.yaml").write_text(yaml.safe_dump(chart))
        for wanted in (True, False):
            ours = {"enabled": wanted, "replicas": 1, "image": {"repository": "windrow/operator"}}
            around = {"imageRegistry": "r", "imagePullSecrets": ["a", {"name": "b"}]}
            values = {"global": around, name: ours}
            (parent / "values.yaml").write_text(yaml.safe_dump(values))
            text = rendered(node, parent)
            assert ("kind: Deployment" in text) is wanted
            assert ("image: r/windrow/operator:" in text) is wanted
            assert ("imagePullSecrets:\n        - name: a\n        - name: b\n" in text) is wanted


def test_an_alert_links_to_its_runbook_where_they_are_served_and_nowhere_else(node):
    def annotations(*more):
        (rules,) = (
            o
            for o in objects(node, "--set", "metrics.rules=true", *more)
            if o["kind"] == "PrometheusRule"
        )
        alerts = [r for g in rules["spec"]["groups"] for r in g["rules"] if "alert" in r]
        return [alert["annotations"] for alert in alerts]

    for said in annotations():
        assert "runbook_url" not in said
        assert (ROOT / said["runbook"]).is_file()
    for base in ("https://wiki.example/w", "https://wiki.example/w/"):
        for said in annotations("--set", f"metrics.runbooks={base}"):
            assert said["runbook_url"].startswith("https://wiki.example/w/")
            assert "//" not in said["runbook_url"].removeprefix("https://")
    refused = render(node, "--set", "metrics.runbooks=runbooks/")
    assert refused.returncode != 0
    assert "/metrics/runbooks" in refused.stderr


def test_monitors_and_rules_have_the_labels_by_which_a_prometheus_selects_them(node):
    """kube-prometheus-stack takes up what has the name of its own release, and nothing else."""
    every = ("--set", "metrics.rules=true,metrics.podMonitor=true")
    selected = ("--set", "metrics.labels.release=kube-prometheus-stack")
    for more, release in (((), None), (selected, "kube-prometheus-stack")):
        found = [o for o in objects(node, *every, *more) if "monitoring" in o["apiVersion"]]
        assert len(found) == 3
        assert {o["metadata"]["labels"].get("release") for o in found} == {release}


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
        # Helm makes a boolean of it, which no node has as a label.
        ("operator.nodeSelector.gpu=true", "/operator/nodeSelector/gpu"),
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


def test_the_endpoint_of_openais_calls_is_off_and_asks_for_one_place(node):
    assert "windrow-api" not in render(node).stdout
    for values in ((), ("--set", "api.storage.claim=x", "--set", "api.storage.bucket=s3://a/b")):
        refused = render(node, "--set", "api.enabled=true", *values)
        assert refused.returncode != 0
        assert "api.storage: name a bucket" in refused.stderr


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
    # Dry, so a release that is installed there may keep what it manages.
    command += ["--dry-run=server", "--force-conflicts", "--validate=strict", "-f", "-"]
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


def test_the_admission_policies_are_those_that_other_tests_hold_the_operator_by(node):
    values = ("--set", "sidecar.image=registry/windrow:1", "--set", "operator.namespaces={a,b}")
    values += ("--set", "operator.advertiseAddress=operator.example")
    made = [
        {**body, "metadata": {"name": body["metadata"]["name"]}}
        for body in objects(node, *values)
        if body["kind"].startswith("ValidatingAdmissionPolicy")
    ]
    ours = admission_policies(
        NAMESPACE,
        image="registry/windrow:1",
        namespaces=("a", "b"),
        address="operator.example:8443",
    )
    assert sorted(made, key=str) == sorted(ours, key=str)
    off = objects(node, "--set", "admissionPolicy.enabled=false")
    assert not [body for body in off if body["kind"].startswith("ValidatingAdmissionPolicy")]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("operator.arguments={--sidecar-image=x}", "sidecar.image"),
        ("sidecar.command=sh -c 'id'", "without quotes"),
    ],
)
def test_what_the_admission_policies_cannot_hold_is_refused_with_what_to_do(node, wrong, told):
    done = render(node, "--set", wrong)
    assert done.returncode != 0
    assert told in done.stderr
    assert render(node, "--set", f"{wrong},admissionPolicy.enabled=false").returncode == 0


def test_an_operator_of_some_namespaces_has_roles_in_them_and_says_so(node):
    values = ("--set", "operator.namespaces={a,b}", "--set", "operator.offeringNamespaces={b}")
    values += ("--set-string", "webhook.clientCA=-----BEGIN CERTIFICATE-----x")
    made = objects(node, *values, "--set", "webhook.clientNames={kube-apiserver}")
    served = {
        (body["kind"], body["metadata"]["namespace"])
        for body in made
        if body["metadata"]["name"] == "windrow-operator-served"
    }
    assert served == {(k, n) for k in ("Role", "RoleBinding") for n in ("a", "b")}
    hook = {
        (body["kind"], body["metadata"]["namespace"])
        for body in made
        if body["metadata"]["name"] == "windrow-uninstall-served"
    }
    assert hook == served
    (job,) = (b for b in made if (b["kind"], b["metadata"]["name"]) == ("Job", "windrow-uninstall"))
    assert "--namespace-scope=a,b" in job["spec"]["template"]["spec"]["containers"][0]["args"]
    (cluster,) = (body for body in made if body["kind"] == "ClusterRole")
    assert not {"pods", "finetunejobs"} & {
        r for rule in cluster["rules"] for r in rule["resources"]
    }
    (operator,) = (body for body in made if body["kind"] == "Deployment")
    arguments = operator["spec"]["template"]["spec"]["containers"][0]["args"]
    wanted = {"--namespace-scope=a,b", "--offering-namespaces=b"}
    wanted |= {"--webhook-client-names=kube-apiserver"}
    wanted |= {"--webhook-client-ca=/etc/windrow/webhook-client/ca.crt"}
    assert wanted <= set(arguments)
    (kept,) = (b for b in made if b["metadata"]["name"] == "windrow-webhook-client")
    assert kept["data"] == {"ca.crt": "-----BEGIN CERTIFICATE-----x"}


def test_secrets_may_be_given_by_name(node):
    values = ("--set", "secrets.namespaces[0]=one", "--set", "secrets.namespaces[1].namespace=two")
    roles = {
        body["metadata"]["namespace"]: body["rules"][0]
        for body in objects(node, *values, "--set", "secrets.namespaces[1].names={s3}")
        if body["kind"] == "Role" and body["metadata"]["name"] == "windrow-operator-secrets"
    }
    assert "resourceNames" not in roles["one"]
    assert roles["two"]["resourceNames"] == ["s3"]


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
    ("list", "kueue.x-k8s.io", "workloads", "", ""),  # without kueue.enabled
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


def test_an_image_that_nobody_has_named_is_refused_with_what_to_do(node):
    done = render(node, "--set", "image.repository=")
    assert done.returncode != 0
    assert "image.repository: name the operator's image as you have pushed it" in done.stderr


def test_what_platforms_add_reaches_the_operators_pods(node):
    added = {
        "global": {"imageRegistry": "mirror.example/"},
        "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn"}},
        "operator": {
            "podLabels": {"team": "ml"},
            "podAnnotations": {"sidecar.istio.io/inject": "false"},
            "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
            "logFormat": "text",
            "topologySpreadConstraints": [
                {
                    "maxSkew": 1,
                    "topologyKey": "topology.kubernetes.io/zone",
                    "whenUnsatisfiable": "DoNotSchedule",
                }
            ],
        },
    }
    arguments = [f"--set-json={key}={json.dumps(value)}" for key, value in added.items()]
    found = objects(node, *arguments)
    (deployment,) = [body for body in found if body["kind"] == "Deployment"]
    template = deployment["spec"]["template"]
    (container,) = template["spec"]["containers"]
    assert container["image"].startswith("mirror.example/registry.example/windrow/operator:")
    assert template["metadata"]["labels"]["team"] == "ml"
    assert template["metadata"]["labels"]["windrow.dev/inject"] == "disabled"
    assert template["metadata"]["annotations"] == {"sidecar.istio.io/inject": "false"}
    assert added["operator"]["env"][0] in container["env"]
    assert "--log-json" not in container["args"]
    spread = template["spec"]["topologySpreadConstraints"]
    assert [each["topologyKey"] for each in spread] == ["topology.kubernetes.io/zone"]
    accounts = {b["metadata"]["name"]: b for b in found if b["kind"] == "ServiceAccount"}
    assert accounts["windrow-operator"]["metadata"]["annotations"]


def test_uninstalling_turns_everything_off_before_the_operator_goes(node):
    hooks = {
        body["metadata"]["name"]: body
        for body in objects(node)
        if body["kind"] == "Job" and "uninstall" in body["metadata"]["name"]
    }
    off, after = hooks["windrow-uninstall"], hooks["windrow-uninstalled"]
    assert off["metadata"]["annotations"]["helm.sh/hook"] == "pre-delete"
    assert after["metadata"]["annotations"]["helm.sh/hook"] == "post-delete"
    arguments = off["spec"]["template"]["spec"]["containers"][0]["args"]
    assert arguments == [f"--namespace={NAMESPACE}", "--within=300"]
    assert "--clear" in after["spec"]["template"]["spec"]["containers"][0]["args"]


def test_the_charts_folder_alone_is_a_whole_chart(node, tmp_path):
    copied = shutil.copytree(CHART, tmp_path / "windrow", symlinks=True)
    command = [f"{node.bin}/helm", "template", "windrow", str(copied)]
    command += ["--set", "image.repository=registry.example/windrow/operator"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("kind: CustomResourceDefinition") == 4
