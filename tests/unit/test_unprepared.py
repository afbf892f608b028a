"""Pods that a policy selects and that nobody prepared: what the policy and its events say."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from windrow.crd import LabelSelector
from windrow_operator.cluster_state import ClusterState
from windrow_operator.metrics import Metrics
from windrow_operator.policies import policy_of
from windrow_operator.policy_status import PolicyStatus
from windrow_operator.unprepared import NOT_PREPARED, sentence, unprepared

NOW = datetime(2025, 1, 1, 12, 0, tzinfo=UTC)
SGLANG = ["python", "-m", "sglang.launch_server"]
DECODE = ["--disaggregation-mode", "decode"]


def policy(selector):
    return {
        "kind": "HarvestPolicy",
        "apiVersion": "windrow.dev/v1alpha1",
        "metadata": {
            "namespace": "team",
            "name": "chat",
            "uid": "p",
            "resourceVersion": "1",
            "generation": 1,
            "creationTimestamp": "2025-01-01T00:00:00Z",
        },
        "spec": {"selector": selector, "objective": {"tpot": "1s"}},
    }


CHAT = {"matchLabels": {"app": "chat"}}


def pod(command=(), *, labels=None, owner=("ReplicaSet", "chat-5d4f"), image="x", name="chat-1"):
    metadata = {
        "namespace": "team",
        "name": name,
        "uid": name,
        "resourceVersion": "1",
        "labels": {"app": "chat", "pod-template-hash": "5d4f", **(labels or {})},
    }
    if owner:
        kind, of = owner
        reference = {"apiVersion": "apps/v1", "kind": kind, "name": of, "uid": "o"}
        metadata["ownerReferences"] = [{**reference, "controller": True}]
    container = {"name": "engine", "image": image, "command": list(command)}
    return {"metadata": metadata, "spec": {"containers": [container]}}


def words_of(*pods, selector=CHAT):
    return sentence(unprepared(policy_of(policy(selector)), pods))


def test_a_deployment_without_the_label_is_named_with_the_label():
    said = words_of(pod(SGLANG), pod(SGLANG, name="chat-2"))
    assert said.startswith("Deployment chat is selected and left as it is")
    assert "windrow.dev/inject: enabled in its pod template" in said
    assert said.count("Deployment") == 1


def test_a_pod_older_than_its_policy_is_named_with_its_restart():
    said = words_of(pod([*SGLANG, *DECODE]))
    assert said.endswith("kubectl rollout restart deployment/chat")
    assert words_of(pod([*SGLANG, *DECODE], owner=None)).endswith("create it again")
    said = words_of(pod([*SGLANG, *DECODE], owner=("RoleInstance", "a")))
    assert said.startswith("RoleInstance a is selected")
    assert said.endswith("created again")


@pytest.mark.parametrize(
    "left",
    [
        pod([*SGLANG, "--disaggregation-mode", "prefill"]),
        pod(SGLANG, labels={"windrow.dev/inject": "disabled"}),
        pod(SGLANG, labels={"windrow.dev/decode": "true"}),
        pod(SGLANG, labels={"app": "other"}),
        pod(["vllm", "serve"]),
    ],
)
def test_what_is_meant_to_be_left_alone_is_not_named(left):
    assert words_of(left) == ""


def test_an_empty_selector_names_those_alone_that_run_sglang():
    assert words_of(pod(["postgres"]), selector={}) == ""
    assert "Deployment chat" in words_of(pod(SGLANG), selector={})
    assert "Deployment chat" in words_of(pod(["./serve.sh"]))


def test_a_message_names_three_and_counts_the_others():
    pods = [pod(SGLANG, name=f"p{n}", owner=("StatefulSet", f"s{n}")) for n in range(5)]
    said = words_of(*pods)
    assert said.count("StatefulSet") == 3
    assert said.endswith("and 2 more")


def test_every_part_of_a_selector_is_asked_for():
    selector = LabelSelector.model_validate(
        {
            "matchLabels": {"app": "chat"},
            "matchExpressions": [
                {"key": "tier", "operator": "In", "values": ["a", "b"]},
                {"key": "zone", "operator": "NotIn", "values": ["c"]},
                {"key": "gpu", "operator": "Exists"},
                {"key": "old", "operator": "DoesNotExist"},
            ],
        }
    )
    assert selector.query(*NOT_PREPARED) == (
        "app=chat,tier in (a,b),zone notin (c),gpu,!old,"
        "windrow.dev/decode!=true,windrow.dev/inject!=disabled"
    )


class Listing:
    """An API server with pods, as far as a policy's status asks it."""

    def __init__(self, pods):
        self.pods, self.calls, self.status = pods, 0, None

    async def first(self, path, *, labels, limit):
        assert (path, limit) == ("/api/v1/namespaces/team/pods", 50)
        assert labels.startswith("app=chat,")
        self.calls += 1
        return self.pods

    async def replace(self, path, body):
        self.status = body["status"]
        return body


class Events:
    def __init__(self):
        self.told = []

    def put(self, about, event):
        self.told.append((about["kind"], about["metadata"]["name"], event.reason))


def test_the_policy_says_it_and_events_say_it_of_policy_and_controller():
    cluster, kube, events = ClusterState(NOW), Listing([pod(SGLANG)]), Events()
    cluster.put_policy(policy(CHAT))
    status = PolicyStatus(cluster, kube, events, Metrics())
    for seconds in (0, 10, 59):
        asyncio.run(status.write(NOW + timedelta(seconds=seconds)))
    selects = next(c for c in kube.status["conditions"] if c["type"] == "SelectsPods")
    assert selects["reason"] == "NoPods"
    assert "windrow.dev/inject: enabled" in selects["message"]
    assert events.told == [
        ("HarvestPolicy", "chat", "NotPrepared"),
        ("ReplicaSet", "chat-5d4f", "NotPrepared"),
    ]
    assert kube.calls == 1
    kube.pods = []
    asyncio.run(status.write(NOW + timedelta(seconds=61)))
    selects = next(c for c in kube.status["conditions"] if c["type"] == "SelectsPods")
    assert selects["message"].startswith("No decode pod of namespace team matches")
    assert len(events.told) == 2
