"""WindrowClient on a real API server: what callers write, and what they are told."""

import json
from datetime import timedelta
from pathlib import Path

import pytest
import yaml
from kubernetes import client
from operator_process import install_crds
from waiting import wait_until

import windrow_cli as cli
from windrow.client import WindrowClient
from windrow.errors import UserError

JOB = {
    "apiVersion": "windrow.dev/v1alpha1",
    "kind": "FinetuneJob",
    "metadata": {"name": "tone"},
    "spec": {
        "model": {"name": "/m"},
        "dataset": {"source": "/d/rows.jsonl"},
        "training": {"maxSteps": 100, "learningRate": "2e-4"},
        "output": {"destination": "/out/tone"},
    },
}
POLICY = {
    "apiVersion": "windrow.dev/v1alpha1",
    "kind": "HarvestPolicy",
    "metadata": {"name": "chat"},
    "spec": {"selector": {}, "objective": {"tpot": "40ms"}},
}


@pytest.fixture
def talk(kube, namespace, control_plane):
    """A WindrowClient; no operator is at work."""
    install_crds(kube)
    talk = WindrowClient(str(control_plane.kubeconfig))
    wait_until(lambda: is_served(talk, namespace), "the kinds are served")
    return talk


def is_served(talk, namespace):
    try:
        talk.jobs(namespace=namespace)
    except UserError:
        return False
    return True


@pytest.fixture
def set_status(kube, namespace):
    """Writes the conditions of job `tone`, as the operator would."""

    def set_status(*conditions):
        held = [
            {"lastTransitionTime": "2025-01-01T00:00:00Z", **condition} for condition in conditions
        ]
        client.CustomObjectsApi(kube).patch_namespaced_custom_object_status(
            "windrow.dev",
            "v1alpha1",
            namespace,
            "finetunejobs",
            "tone",
            {"status": {"conditions": held}},
        )

    return set_status


def condition(type_, status, reason, message=""):
    return {"type": type_, "status": status, "reason": reason, "message": message}


def written(tmp_path, body):
    path = tmp_path / "manifest.yaml"
    path.write_text(yaml.safe_dump(body))
    return path


@pytest.mark.parametrize("as_path", [str, Path, lambda path: yaml.safe_load(path.read_text())])
def test_a_manifest_is_a_path_a_string_or_a_mapping(talk, namespace, tmp_path, as_path):
    talk.apply_policy(as_path(written(tmp_path, POLICY)), namespace=namespace)
    job = talk.submit(as_path(written(tmp_path, JOB)), namespace=namespace)
    assert (job.name, job.namespace, job.state) == ("tone", namespace, "Pending")


def test_a_path_that_holds_no_manifest_is_named(talk, tmp_path):
    with pytest.raises(UserError, match=r"nothing.yaml: cannot be read"):
        talk.submit(str(tmp_path / "nothing.yaml"))


@pytest.mark.parametrize("within", [0, 0.1, timedelta(seconds=0.1)])
def test_waiting_takes_seconds_or_a_timedelta(talk, namespace, within):
    talk.submit(JOB, namespace=namespace)
    with pytest.raises(TimeoutError, match=f"{namespace}/tone is Pending after 0"):
        talk.wait("tone", namespace=namespace, within=within)


@pytest.mark.parametrize("within", ["5", True, float("nan")])
def test_what_is_no_length_of_time_is_refused(talk, namespace, within):
    with pytest.raises(UserError, match=r"within: .* is not a length of time"):
        talk.wait("tone", namespace=namespace, within=within)


def test_a_job_that_has_ended_is_returned(talk, namespace, set_status):
    talk.submit(JOB, namespace=namespace)
    set_status(condition("Succeeded", "True", "Completed"))
    assert talk.wait("tone", namespace=namespace, within=60).state == "Succeeded"


def test_waiting_for_a_suspended_job_says_that_it_does_not_end(talk, namespace, set_status):
    talk.submit({**JOB, "spec": {**JOB["spec"], "suspend": True}}, namespace=namespace)
    set_status(condition("Suspended", "True", "Suspended"))
    with pytest.raises(UserError, match=r"tone: is suspended.* Resume it"):
        talk.wait("tone", namespace=namespace, within=60)


def test_waiting_for_a_job_that_was_just_resumed_goes_on(talk, namespace, set_status):
    talk.submit(JOB, namespace=namespace)
    set_status(condition("Suspended", "True", "Suspended"))
    with pytest.raises(TimeoutError):
        talk.wait("tone", namespace=namespace, within=0)


def test_waiting_for_an_invalid_job_says_why(talk, namespace, set_status):
    talk.submit(JOB, namespace=namespace)
    set_status(condition("Accepted", "False", "InvalidSpec", "spec.model: is empty"))
    with pytest.raises(UserError, match=r"is not valid: spec\.model: is empty"):
        talk.wait("tone", namespace=namespace, within=60)


def test_waiting_for_a_destination_that_is_in_use_goes_on(talk, namespace, set_status):
    talk.submit(JOB, namespace=namespace)
    set_status(condition("Accepted", "False", "DestinationInUse", "belongs to job a/b"))
    with pytest.raises(TimeoutError):
        talk.wait("tone", namespace=namespace, within=0)


@pytest.mark.parametrize(
    "ask",
    [
        lambda talk: talk.submit(JOB, namespace="nowhere"),
        lambda talk: talk.get("tone", namespace="nowhere"),
        lambda talk: talk.jobs(namespace="nowhere"),
        lambda talk: talk.slots(namespace="nowhere"),
        lambda talk: talk.wait("tone", namespace="nowhere", within=60),
        lambda talk: talk.adapter("tone", namespace="nowhere"),
        lambda talk: talk.apply_policy(POLICY, namespace="nowhere"),
        lambda talk: list(talk.logs("tone", namespace="nowhere")),
        lambda talk: talk.suspend("tone", namespace="nowhere"),
        lambda talk: talk.delete("tone", namespace="nowhere"),
        lambda talk: talk.events("tone", namespace="nowhere"),
    ],
)
def test_a_namespace_that_does_not_exist_is_named(talk, ask):
    with pytest.raises(UserError, match="there is no namespace 'nowhere'"):
        ask(talk)


def test_a_job_that_does_not_exist_is_told_from_its_namespace(talk, namespace):
    with pytest.raises(UserError, match=f"FinetuneJob {namespace}/nobody: not found"):
        talk.get("nobody", namespace=namespace)


def test_kinds_that_are_not_installed_are_said_to_be_missing(talk, monkeypatch):
    # Another test's CRDs are not taken away: a version that no server knows is as unknown.
    monkeypatch.setattr("windrow.client.VERSION", "v0")
    with pytest.raises(UserError, match="kubectl apply -f crds/"):
        talk.jobs()


@pytest.mark.parametrize("content", [None, "{", json.dumps({"kind": "Config"})])
def test_a_kubeconfig_that_is_none_is_refused_with_a_remedy(tmp_path, content):
    path = tmp_path / "kubeconfig"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match="no cluster to talk to"):
        WindrowClient(str(path))


def test_the_environments_kubeconfig_goes_before_the_pods_account(
    control_plane, namespace, monkeypatch
):
    monkeypatch.setenv("KUBECONFIG", str(control_plane.kubeconfig))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "192.0.2.1")
    assert WindrowClient().version()


# --- the command line -----------------------------------------------------------------------------


@pytest.fixture
def kubeconfig(talk, namespace, control_plane, tmp_path):
    """A kubeconfig whose context `mine` is in this test's namespace; the current one is not."""
    body = yaml.safe_load(control_plane.kubeconfig.read_text())
    (context,) = body["contexts"]
    mine = {"name": "mine", "context": {**context["context"], "namespace": namespace}}
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump({**body, "contexts": [context, mine]}))
    return path


def windrow(capsys, kubeconfig, *words):
    """Return what a command printed; it must have succeeded."""
    assert cli.run([*words, "--kubeconfig", str(kubeconfig), "--context", "mine"]) == 0
    return capsys.readouterr().out


def test_commands_take_the_namespace_of_their_context(talk, namespace, kubeconfig, capsys):
    talk.submit(JOB, namespace=namespace)
    assert windrow(capsys, kubeconfig, "suspend", "tone") == f"{namespace}/tone will be suspended\n"
    assert talk.get("tone", namespace=namespace).suspended
    windrow(capsys, kubeconfig, "resume", "tone")
    assert not talk.get("tone", namespace=namespace).suspended
    assert "tone" in windrow(capsys, kubeconfig, "get")
    everywhere = windrow(capsys, kubeconfig, "get", "-A").splitlines()
    assert any(line.split()[:2] == [namespace, "tone"] for line in everywhere)
    windrow(capsys, kubeconfig, "delete", "tone")
    assert talk.jobs(namespace=namespace) == []


def test_a_job_without_a_worker_is_named_with_the_namespace_of_the_context(
    talk, namespace, kubeconfig, capsys
):
    talk.submit(JOB, namespace=namespace)
    words = ["logs", "tone", "--worker", "--kubeconfig", str(kubeconfig), "--context", "mine"]
    assert cli.run(words) == cli.EXIT_USAGE
    assert f"FinetuneJob {namespace}/tone has no worker" in capsys.readouterr().err


def test_describe_shows_conditions(talk, namespace, kubeconfig, set_status, capsys):
    talk.submit(JOB, namespace=namespace)
    said = {"type": "Placed", "status": "False", "reason": "NoSlot", "message": "there is none"}
    set_status(said)
    shown = windrow(capsys, kubeconfig, "describe", "tone")
    assert "Placed      False    NoSlot   2025-01-01T00:00:00Z   there is none" in shown
    found = json.loads(windrow(capsys, kubeconfig, "describe", "tone", "--json"))
    assert found["job"]["metadata"]["name"] == "tone"
    assert found["events"] == []


def test_a_policy_is_submitted_as_jobs_are(talk, namespace, kubeconfig, tmp_path, capsys):
    file = tmp_path / "policy.yaml"
    for tpot in ("40ms", "50ms"):
        spec = {**POLICY["spec"], "objective": {"tpot": tpot}}
        file.write_text(yaml.safe_dump({**POLICY, "spec": spec}))
        said = windrow(capsys, kubeconfig, "submit", str(file))
        assert said.strip() == f"policy {namespace}/chat applied"
    custom = client.CustomObjectsApi(talk.api)
    where = ("windrow.dev", "v1alpha1", namespace, "harvestpolicies", "chat")
    assert custom.get_namespaced_custom_object(*where)["spec"]["objective"]["tpot"] == "50ms"
    words = ["submit", str(file), "--wait", "--kubeconfig", str(kubeconfig)]
    assert cli.run(words) == cli.EXIT_USAGE
    assert "--wait: a policy does not end" in capsys.readouterr().err


def test_a_policy_of_another_manager_is_replaced_only_when_told_to(
    talk, namespace, kubeconfig, tmp_path, capsys
):
    custom = client.CustomObjectsApi(talk.api)
    kind = ("windrow.dev", "v1alpha1", namespace, "harvestpolicies")
    more = {"access": {"adapters": True}, "limits": {"maxSmPercent": 20}}
    theirs = {**POLICY, "spec": {**POLICY["spec"], **more}}
    theirs["metadata"] = {"name": "chat", "labels": {"team": "a"}}
    custom.create_namespaced_custom_object(*kind, theirs, field_manager="argocd-controller")
    file = tmp_path / "policy.yaml"
    file.write_text(yaml.safe_dump({**POLICY, "spec": {**POLICY["spec"], "mode": "observe"}}))
    words = ["submit", str(file), "--kubeconfig", str(kubeconfig), "--context", "mine"]
    assert cli.run(words) == cli.EXIT_USAGE
    assert "is managed by argocd-controller" in capsys.readouterr().err
    assert "limits" in custom.get_namespaced_custom_object(*kind, "chat")["spec"]
    assert cli.run([*words, "--force"]) == 0
    found = custom.get_namespaced_custom_object(*kind, "chat")
    assert found["spec"]["mode"] == "observe"
    assert found["metadata"]["labels"] == {"team": "a"}
    assert found["spec"].get("limits", {}).get("maxSmPercent") != 20
    assert not found["spec"].get("access", {}).get("adapters")


def test_jobs_are_printed_as_kubectl_would(talk, namespace, kubeconfig, capsys):
    talk.submit(JOB, namespace=namespace)
    as_json = json.loads(windrow(capsys, kubeconfig, "get", "-o", "json"))
    assert as_json == json.loads(windrow(capsys, kubeconfig, "get", "--json"))
    assert yaml.safe_load(windrow(capsys, kubeconfig, "get", "-o", "yaml")) == as_json
    said = windrow(capsys, kubeconfig, "get", "tone", "-o", "name")
    assert said.strip() == "finetunejob.windrow.dev/tone"
    words = ["get", "-o", "wide", "--kubeconfig", str(kubeconfig)]
    assert cli.run(words) == cli.EXIT_USAGE
    assert "'wide' is not a form of output" in capsys.readouterr().err
    for command in (["top", "--plain", "--watch", "0"], ["report"]):
        windrow(capsys, kubeconfig, *command)
        assert cli.run([*command, "--kubeconfig", str(kubeconfig), "--context", "gone"]) != 0
        assert "context" in capsys.readouterr().err


def test_a_context_that_is_not_there_is_named(kubeconfig, capsys):
    words = ["get", "--kubeconfig", str(kubeconfig), "--context", "elsewhere"]
    assert cli.run(words) == cli.EXIT_USAGE
    assert "--context: no cluster to talk to" in capsys.readouterr().err
