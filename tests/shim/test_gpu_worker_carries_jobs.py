"""Several jobs in one worker beside decode on a GPU, all of whose memory is in lent chunks."""

from __future__ import annotations

import json

import pytest
from worker_pod import UID, Pod, started_on_gpu, until

from windrow.protocol import Ending
from windrow.rundir import WORKER_LOG

pytestmark = [pytest.mark.paired, pytest.mark.long, pytest.mark.timeout(900)]
# Triton compiles, and what a GPU computes in a moment is computed by cores.
WITHIN_S = 300.0


def goes_on(pod: Pod, worker, *uids: str) -> None:
    """Wait until each of these jobs has written a further checkpoint."""
    seen = {uid: len(pod.agent.of[uid]) for uid in uids}
    for uid in uids:
        until(
            lambda uid=uid: "CHECKPOINTED" in [e.kind for e in pod.agent.of[uid][seen[uid] :]],
            within=WITHIN_S,
            pod=pod,
            worker=worker,
        )


def test_jobs_are_joined_leave_every_chunk_come_back_and_end_each_for_itself(pod):
    worker, arena = (
        started_on_gpu(pod, within=WITHIN_S, maxSteps=100_000, packing=False),
        pod.decode.arena,
    )
    ends = lambda uid, kind: until(  # noqa: E731
        lambda: kind in pod.agent.kinds(uid), within=WITHIN_S, pod=pod, worker=worker
    )
    goes_on(pod, worker, UID)
    out = pod.write_job("second", maxSteps=3, packing=False)
    pod.write_job("third", maxSteps=100_000, packing=False)
    for uid in ("second", "third"):
        pod.take(uid)
    ends("second", "SUCCEEDED")
    assert (out / "adapter_model.safetensors").is_file()
    goes_on(pod, worker, UID, "third")
    log = (pod.run_dir.job_dir("third") / WORKER_LOG).read_text()
    assert "pass in the same tasklets as those of 1 more" in log
    assert {told.joined_with for told in pod.agent.progress} >= {0, 1}

    arena.revoke(arena.geometry.chunks)
    empty = lambda: not (arena.counts()[2] or arena.counts()[4])  # noqa: E731
    until(empty, within=WITHIN_S, pod=pod, worker=worker)
    arena.check()
    arena.lend(arena.geometry.chunks - 1, owner=1)
    goes_on(pod, worker, UID, "third")

    pod.agent.command("STOP", to=UID)
    ends(UID, "STOPPED")
    goes_on(pod, worker, "third")
    pod.agent.command("STOP", to="third")
    until(lambda: worker.poll() is not None, within=WITHIN_S, pod=pod)
    assert worker.returncode == Ending.STOPPED, pod.logs()  # the worst of its ends
    assert "rule broken" not in pod.logs()
    assert arena.counts()[2] == arena.reclaim(1)
    arena.check()
    lines = [json.loads(line) for line in (pod.root / "counts").read_text().splitlines()]
    (counts,) = [line for line in lines if line["pid"] == worker.pid]
    assert counts["most_device_bytes"] == 0, "torch has memory of its own"
