"""A tasklet that never ends, in a worker of several jobs: what each is told, and what goes on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from worker_pod import UID, Lending, Pod, until

from windrow.protocol import Ending
from windrow_sidecar.turn import read_turn

pytestmark = [pytest.mark.alone, pytest.mark.extended, pytest.mark.timeout(240)]

HANGING = Path(__file__).with_name("hanging_worker.py")


def test_it_costs_its_own_job_an_attempt_and_every_job_goes_on_from_its_checkpoint(
    tmp_path_factory,
):
    pod = Pod(tmp_path_factory.mktemp("p"))
    lending = Lending(pod)
    lending.start()
    try:
        jobs = (UID, "hangs")
        worker = pod.start_by([sys.executable, str(HANGING), str(pod.root), UID, "1"], maxSteps=999)
        until(lambda: pod.decode.offer.job_epoch == 1, pod=pod, worker=worker)
        pod.decode.go()
        pod.write_job("hangs", maxSteps=999)
        pod.take("hangs")
        for uid in jobs:
            until(lambda uid=uid: "CHECKPOINTED" in pod.agent.kinds(uid), pod=pod, worker=worker)

        (pod.root / "hang").write_text("hangs")
        until(lambda: worker.poll() is not None, pod=pod)

        assert worker.returncode == Ending.FAILED
        assert read_turn(pod.run_dir.turn_note()) == ("hangs", 1)
        ends = {uid: pod.agent.of[uid][-1] for uid in jobs}
        assert (ends["hangs"].kind, ends["hangs"].reason) == ("FAILED", "NoProgress")
        assert "a tasklet has not ended" in ends["hangs"].detail
        assert "the last good checkpoint is" in ends["hangs"].detail
        # No failed attempt of this one: the operator places it again at once.
        assert (ends[UID].kind, ends[UID].reason) == ("STOPPED", "SlotLost")
        # Nothing of it computes any more, and decode takes back what it held.
        lending.stop()
        pod.decode.arena.reclaim(1)
        assert pod.decode.arena.counts()[2] == 0
        pod.decode.arena.check()

        kept = {uid: _steps_kept(pod, uid) for uid in jobs}
        for uid in jobs:
            pod.agent.of[uid].clear()
        pod.write_job("hangs", epoch=2, maxSteps=999)
        following = pod.start(epoch=2, maxSteps=999)
        until(lambda: pod.agent.kinds(UID), pod=pod, worker=following)
        pod.take("hangs", epoch=2)
        for uid in jobs:
            until(lambda uid=uid: pod.agent.kinds(uid), pod=pod, worker=following)
            began = pod.agent.of[uid][0]
            assert (began.kind, began.reason) == ("STARTED", "Resumed")
            assert f"from step {kept[uid]}," in began.detail
    finally:
        lending.stop()
        pod.close()


def _steps_kept(pod: Pod, uid: str) -> int:
    """Step of the newest checkpoint."""
    newest = max((pod.out / uid / ".windrow" / uid / "checkpoints").glob("step-*"))
    return int(newest.name.split("-")[1])
