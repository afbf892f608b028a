"""A real worker process whose job lies in a bucket: killed on one machine, resumed on another."""

from __future__ import annotations

import hashlib
import json
import re
import signal
from pathlib import Path

import fsspec
import pytest
from safetensors.torch import load
from support import forked_start
from worker_pod import UID, Pod, lend_what_is_wanted, until

from windrow.adapter_files import SERVED_FILES, digest_of
from windrow.eventlog import TaskletEvent, read_events
from windrow.protocol import Ending
from windrow_sidecar.finetune.data.remote import (
    Credentials,
    open_file_system,
    storage_options,
)

STEPS = 4
pytestmark = [pytest.mark.paired, pytest.mark.extended, pytest.mark.timeout(900)]
LOADS = 240.0  # seconds, on a machine that others use


class BucketPod(Pod):
    """A decode pod whose job writes to a bucket."""

    def __init__(self, root: Path, url: str, secret: dict, checkpoint: str = "") -> None:
        super().__init__(root)
        self._url, self._secret, self._checkpoint = url, secret, checkpoint

    def write_job(self, uid: str = UID, epoch: int = 1, **training) -> Path:
        out = super().write_job(uid, epoch, **training)
        file = self.run_dir.job_dir(uid) / "job.json"
        job = json.loads(file.read_text())
        job["spec"]["output"] = {"destination": self._url, "secretRef": {"name": "s3"}}
        file.write_text(json.dumps(job | {"checkpoint": self._checkpoint, "outputs": []}))
        self.agent.command("CREDENTIALS", to=uid, output_secret=self._secret)
        return out

    def begin(self, epoch: int):
        worker = self.start(epoch, maxSteps=STEPS)
        until(lambda: self.decode.offer.job_epoch == epoch, within=LOADS, pod=self, worker=worker)
        self.decode.go()
        lend_what_is_wanted(self, worker, epoch)
        return worker


def adapter_in(url: str, secret: dict):
    system = fsspec.filesystem("s3", **storage_options(url, Credentials("s3", secret)))
    return load(system.cat_file(f"{url}/adapter_model.safetensors"))


def test_a_job_goes_on_from_the_bucket_on_another_machine(bucket, tmp_path_factory, monkeypatch):
    monkeypatch.setenv(forked_start.ENV_OFF, "1")  # /proc shows the environment of an exec
    url, secret = bucket
    first = BucketPod(tmp_path_factory.mktemp("p"), url, secret)
    pods = [first]
    try:
        worker = first.begin(1)
        shown = (Path(f"/proc/{worker.pid}/cmdline"), Path(f"/proc/{worker.pid}/environ"))
        assert not [f for f in shown if secret["AWS_SECRET_ACCESS_KEY"].encode() in f.read_bytes()]
        told = until(
            lambda: [e.detail for e in first.agent.events if e.kind == "CHECKPOINTED"],
            within=LOADS,
            pod=first,
            worker=worker,
        )
        assert told[0].startswith(f"{url}/.windrow/{UID}/checkpoints/step-")
        worker.send_signal(signal.SIGKILL)

        second = BucketPod(tmp_path_factory.mktemp("p"), url, secret, told[-1])
        pods.append(second)
        worker = second.begin(2)
        until(lambda: worker.poll() is not None, within=LOADS, pod=second)
        assert worker.returncode == Ending.SUCCEEDED, second.logs()
    finally:
        for pod in pods:
            pod.close()
    began = second.agent.events[0]
    assert began.reason == "Resumed"
    from_step = int(re.search(r"/step-(\d+)-", began.detail).group(1))
    assert from_step >= 1
    tasklets = [e for _, e in read_events(second.root) if isinstance(e, TaskletEvent)]
    assert [e.step for e in tasklets if e.phase == "opt"] == list(range(from_step, STEPS))
    assert second.agent.events[-1].adapter_path == url
    system = open_file_system(url, Credentials("s3", secret))
    sums = {n: hashlib.sha256(system.cat_file(f"{url}/{n}")).hexdigest() for n in SERVED_FILES}
    assert second.agent.events[-1].adapter_digest == digest_of(sums)
    assert any(tensor.any() for name, tensor in adapter_in(url, secret).items() if "lora_B" in name)
    written = [p for pod in pods for p in pod.root.rglob("*") if p.is_file()]
    assert not [p for p in written if secret["AWS_SECRET_ACCESS_KEY"].encode() in p.read_bytes()]


def test_a_checkpoint_that_this_pod_does_not_see_is_no_reason_to_begin_anew(bucket, tmp_path):
    url, secret = bucket
    pod = BucketPod(tmp_path, url, secret, "/elsewhere/checkpoints/step-00000007-00000")
    try:
        worker = pod.start(2)
        until(lambda: worker.poll() is not None, within=LOADS, pod=pod)
    finally:
        pod.close()
    last = pod.agent.events[-1]
    assert (last.kind, last.reason, last.user_error) == ("FAILED", "CheckpointUnreachable", False)
    assert "/elsewhere/checkpoints/step-00000007-00000 is not there" in last.detail
