"""Two jobs never write to one directory, also where policies change while pods and jobs live."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from windrow.crd import SIDECAR_CONTAINER
from windrow.proto import attach_pb2 as pb
from windrow_operator.cluster_state import ClusterState, LiveSlot

NOW = datetime(2025, 1, 1, 12, 0, tzinfo=UTC)
SELECTOR = {"selector": {"matchLabels": {"app": "chat"}}, "objective": {"tpot": "40ms"}}


def policy(name, claim, path, version=1):
    source = {"persistentVolumeClaim": {"claimName": claim}}
    volumes = [{"name": "adapters", "mountPath": path, **source}]
    return {
        "metadata": {
            "namespace": "team",
            "name": name,
            "uid": name,
            "generation": version,
            "resourceVersion": str(version),
        },
        "spec": {**SELECTOR, "sidecar": {"volumes": volumes}},
    }


def pod(claim, path, form):
    mounts = [{"name": "windrow-adapters", "mountPath": path}]
    sidecar = {
        "native": {"initContainers": [{"name": SIDECAR_CONTAINER, "volumeMounts": mounts}]},
        "attached": {
            "ephemeralContainers": [
                {"name": f"{SIDECAR_CONTAINER}-10", "volumeMounts": mounts},
                {"name": f"{SIDECAR_CONTAINER}-9", "volumeMounts": []},
            ]
        },
        "none yet": {},
    }[form]
    volume = {"name": "windrow-adapters", "persistentVolumeClaim": {"claimName": claim}}
    return {
        "metadata": {
            "namespace": "team",
            "name": "decode-0",
            "uid": "pod-0",
            "labels": {"app": "chat"},
            "resourceVersion": "1",
        },
        "spec": {"containers": [{"name": "decode"}], "volumes": [volume], **sidecar},
    }


def job(name, destination, *, created=0, slot=""):
    return {
        "metadata": {
            "namespace": "team",
            "name": name,
            "uid": name,
            "generation": 1,
            "creationTimestamp": f"2025-01-01T00:00:0{created}Z",
        },
        "spec": {
            "model": {"name": "/m"},
            "dataset": {"source": "/d"},
            "training": {"maxSteps": 1},
            "output": {"destination": destination},
        },
        "status": {"epoch": 1, "slot": slot} if slot else {},
    }


def cluster(form="native"):
    state = ClusterState(NOW)
    state.put_policy(policy("chat", "old", "/out"))
    state.put_pod(pod("old", "/out", form))
    facts = pb.SlotFacts(model="/m")
    live = LiveSlot("team/decode-0", "team", "decode-0", "decode-0", "pod-0", facts=facts)
    live.attached = True
    state.slots[live.key] = live
    return state


def outputs(state):
    return state.slot_views(NOW)["team/decode-0"].outputs


@pytest.mark.parametrize("form", ["native", "attached"])
@pytest.mark.parametrize(
    ("claim", "path", "writes"),
    [("old", "/out", ("/out",)), ("new", "/out", ()), ("old", "/b", ())],
)
def test_a_pod_writes_to_what_it_has_mounted_whatever_its_policy_says_now(
    form, claim, path, writes
):
    state = cluster(form)
    state.put_policy(policy("chat", claim, path, version=2))
    assert outputs(state) == writes


def test_a_pod_whose_sidecar_is_not_there_yet_goes_by_its_volumes():
    assert outputs(cluster("none yet")) == ("/out",)


@pytest.mark.parametrize("form", ["native", "attached"])
def test_a_job_keeps_the_directory_that_its_pod_writes_to_when_its_policy_is_edited(form):
    state = cluster(form)
    state.put_job(job("first", "/out/tone", slot="team/decode-0"))
    state.put_policy(policy("chat", "new", "/out", version=2))
    state.put_policy(policy("other", "old", "/elsewhere"))
    state.put_job(job("second", "/elsewhere/tone", created=1))
    assert (
        state.job_view("second").destination_owner
        == "job team/first, which reaches it by '/out/tone'"
    )
    assert state.job_view("first").destination_owner == ""


def test_running_jobs_whose_directories_an_edit_makes_one_are_noticed():
    state = cluster()
    state.put_job(job("first", "/out/tone", slot="team/decode-0"))
    state.put_policy(policy("other", "apart", "/elsewhere"))
    state.put_job(job("second", "/elsewhere/tone", created=1, slot="team/decode-1"))
    assert state.job_view("second").destination_owner == ""
    state.put_policy(policy("other", "old", "/elsewhere", version=2))
    assert state.job_view("second").destination_owner.startswith("job team/first")
    assert state.job_view("first").destination_owner == ""
