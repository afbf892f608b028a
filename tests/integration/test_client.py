"""WindrowClient on a real API server: what callers write, and what they are told."""

import json
from datetime import timedelta
from pathlib import Path

import pytest
import yaml
from kubernetes import client
from operator_process import install_crds
from waiting import wait_until

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
    with pytest.raises(UserError, match=r"within: .* is no length of time"):
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
