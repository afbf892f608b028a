"""A job whose adapter goes to a bucket, on a real node: its decode pod is deleted in the middle."""

from __future__ import annotations

import base64
import re
import uuid
from pathlib import Path

import fsspec
import pytest
from kubernetes import client
from safetensors.torch import load
from support.serving_node import (
    WITHIN_S,
    a_namespace_that_serves,
    ends,
    read,
    start_decode,
    status,
    submit,
)
from waiting import wait_until

from windrow_lab.realnode.pods import SIDECAR_COMMAND
from windrow_sidecar.finetune.data.remote import Credentials, storage_options
from windrow_sidecar.testing.rounding import apart

STEPS = 24
SECRET = "team-s3"


@pytest.fixture
def place(kube, image, start_operator, bucket):
    """A namespace that serves, with the Secret for the bucket. Yields its name."""
    start_operator("--sidecar-command", SIDECAR_COMMAND)
    namespace = f"bucket-{uuid.uuid4().hex[:8]}"
    with a_namespace_that_serves(kube, namespace, None):
        data = {name: base64.b64encode(text.encode()).decode() for name, text in bucket[1].items()}
        meta = {"name": SECRET, "labels": {"windrow.dev/credentials": "true"}}
        body = {"metadata": meta, "data": data}
        client.CoreV1Api(kube).create_namespaced_secret(namespace, body)
        yield namespace


def adapter(url, secret):
    system = fsspec.filesystem("s3", **storage_options(url, Credentials(SECRET, secret)))
    return load(system.cat_file(f"{url}/adapter_model.safetensors"))


@pytest.mark.timeout(900)
def test_a_job_whose_pod_is_deleted_in_the_middle_ends_with_the_same_adapter(kube, place, bucket):
    core, (url, secret) = client.CoreV1Api(kube), bucket

    def begin(name, steps):
        submit(kube, place, name, f"{url}/{name}", steps, secretRef={"name": SECRET})

    def told(reason):
        """Return what events say of the job that is cut."""
        events = core.list_namespaced_event(place, field_selector=f"reason={reason}").items
        return [event.message for event in events if event.involved_object.name == "cut"]

    def await_end(name):
        return wait_until(lambda: ends(kube, place, name), f"{name} succeeds", seconds=2 * WITHIN_S)

    for name, steps in (("whole", STEPS), ("shorter", STEPS - 1)):
        begin(name, steps)
        await_end(name)

    begin("cut", STEPS)
    wait_until(
        lambda: (status(kube, place, "cut").get("checkpoint") or {}).get("step", 0) >= 4,
        "a checkpoint is written",
        seconds=WITHIN_S,
    )
    first = read(core, place)
    placed = status(kube, place, "cut")["epoch"]
    core.delete_namespaced_pod("decode", place)

    def gone():
        names = [pod.metadata.name for pod in core.list_namespaced_pod(place).items]
        return "decode" not in names

    wait_until(gone, "the pod is gone")
    start_decode(core, place)
    assert read(core, place).metadata.uid != first.metadata.uid
    done = await_end("cut")
    assert done["epoch"] > placed, "it was placed again"
    (resumed,) = told("Resumed")
    after = int(re.search(r"after step (\d+)", resumed).group(1))
    assert 4 <= after < STEPS, "it went on from a checkpoint in the bucket"

    # One step more or less, one lost moment of the optimizer: a difference of a step's size.
    # What remains is where rounding falls, for the worker's cores change with decode's load.
    whole, shorter = adapter(f"{url}/whole", secret), adapter(f"{url}/shorter", secret)
    a_step = apart(shorter, whole).of_norm
    assert a_step > 0
    assert apart(adapter(f"{url}/cut", secret), whole).of_norm < a_step / 10


def test_the_stores_key_is_in_no_argument_environment_or_log_of_the_pod(kube, place, bucket):
    core, (url, secret) = client.CoreV1Api(kube), bucket
    submit(kube, place, "tone", f"{url}/tone", 4, secretRef={"name": SECRET})
    wait_until(lambda: ends(kube, place, "tone"), "the job succeeds", seconds=2 * WITHIN_S)
    key = secret["AWS_SECRET_ACCESS_KEY"]
    pod = read(core, place)
    assert key not in str(pod)
    assert base64.b64encode(key.encode()).decode() not in str(pod)
    for container in ("decode", *(c.name for c in pod.spec.ephemeral_containers)):
        assert key not in core.read_namespaced_pod_log("decode", place, container=container)
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and b"windrow_sidecar" in (process / "cmdline").read_bytes():
            assert key.encode() not in (process / "environ").read_bytes()
