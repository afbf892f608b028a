"""A real worker process whose job lies in a bucket, killed on one machine and resumed on another."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import fsspec
import pytest
from safetensors.torch import load
from worker_pod import UID, Pod, lend_what_is_wanted, until

from windrow_sidecar.finetune.data.remote import Credentials, storage_options
from windrow_sidecar.finetune.job.runner import Ending

pytestmark = [pytest.mark.alone, pytest.mark.timeout(900)]
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
        worker = self.start(epoch, maxSteps=6)
        until(lambda: self.decode.offer.job_epoch == epoch, within=LOADS, pod=self, worker=worker)
        self.decode.go()
        lend_what_is_wanted(self, worker, epoch)
        return worker


def adapter_in(url: str, secret: dict):
    system = fsspec.filesystem("s3", **storage_options(url, Credentials("s3", secret)))
    return load(system.cat_file(f"{url}/adapter_model.safetensors"))


def test_a_job_goes_on_from_the_bucket_on_another_machine(bucket, tmp_path_factory):
    url, secret = bucket
    whole = BucketPod(tmp_path_factory.mktemp("p"), f"{url}/whole", secret)
    first = BucketPod(tmp_path_factory.mktemp("p"), f"{url}/torn", secret)
    pods = [whole, first]
    try:
        worker = whole.begin(1)
        until(lambda: worker.poll() is not None, within=LOADS, pod=whole)
        assert worker.returncode == Ending.SUCCEEDED, whole.logs()
        assert whole.agent.events[-1].adapter_path == f"{url}/whole"

        worker = first.begin(1)
        shown = (Path(f"/proc/{worker.pid}/cmdline"), Path(f"/proc/{worker.pid}/environ"))
        assert not [f for f in shown if secret["AWS_SECRET_ACCESS_KEY"].encode() in f.read_bytes()]
        told = until(
            lambda: [e.detail for e in first.agent.events if e.kind == "CHECKPOINTED"],
            within=LOADS,
            pod=first,
            worker=worker,
        )
        assert told[0].startswith(f"{url}/torn/.windrow/{UID}/checkpoints/step-")
        worker.send_signal(signal.SIGKILL)

        second = BucketPod(tmp_path_factory.mktemp("p"), f"{url}/torn", secret, told[-1])
        pods.append(second)
        worker = second.begin(2)
        until(lambda: worker.poll() is not None, within=LOADS, pod=second)
        assert worker.returncode == Ending.SUCCEEDED, second.logs()
        assert second.agent.events[0].reason == "Resumed"
    finally:
        for pod in pods:
            pod.close()
    before, after = adapter_in(f"{url}/whole", secret), adapter_in(f"{url}/torn", secret)
    assert all(before[name].equal(after[name]) for name in before)
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
