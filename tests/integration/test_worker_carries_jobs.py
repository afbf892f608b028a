"""A worker process with several jobs in its slot: they share it, and each ends for itself."""

from __future__ import annotations

import itertools
import json
import signal
from pathlib import Path

import pytest
from support.filehub import served
from worker_pod import ROOT, UID, Lending, Pod, until

from windrow.protocol import Ending
from windrow.rundir import WORKER_LOG

EXAMPLE_ROWS = ROOT / "examples" / "support-tone" / "train.jsonl"

pytestmark = [pytest.mark.alone, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """The root of a Hub that a worker asks, with all the patience in the world."""
    root = tmp_path_factory.mktemp("hub")
    with served(root) as address, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", address)
        patch.setenv("HF_HUB_ETAG_TIMEOUT", "1000")
        yield root


@pytest.fixture(scope="module")
def carrying(tmp_path_factory, hub):
    """A pod whose worker has a job without an end; decode grants and lends."""
    pod = Pod(tmp_path_factory.mktemp("p"))
    pod.worker = pod.start(maxSteps=100_000)
    pod.lending = Lending(pod)
    pod.lending.start()
    try:  # where the worker does not get ready, it has to end all the same
        until(lambda: pod.decode.offer.job_epoch == 1, pod=pod, worker=pod.worker)
        pod.decode.go()
        until(lambda: pod.decode.offer.tokens_done, pod=pod, worker=pod.worker)
        yield pod
    finally:
        pod.lending.stop()
        pod.close()


def take(pod: Pod, uid: str, **training) -> Path:
    """Have the worker carry a further job; returns where its adapter goes."""
    out = pod.write_job(uid, **training)
    pod.take(uid)
    until(lambda: pod.agent.kinds(uid), pod=pod, worker=pod.worker)
    return out


def take_from(pod: Pod, uid: str, source: str, **training) -> None:
    """Have the worker carry a further job with these rows; returns once its stream is open."""
    pod.write_job(uid, **training)
    file = pod.run_dir.job_dir(uid) / "job.json"
    job = json.loads(file.read_text())
    job["spec"]["dataset"]["source"] = source
    file.write_text(json.dumps(job))
    pod.take(uid)
    calls = lambda: uid in {hello.job_uid for hello in pod.agent.hellos}  # noqa: E731
    until(calls, pod=pod, worker=pod.worker)


@pytest.fixture
def silent(hub):
    """The folder of a dataset on a Hub that answers nothing while a file `waits` is there."""
    (hub / "waits").touch()
    rows = hub / "datasets" / "team" / "rows"
    rows.mkdir(parents=True, exist_ok=True)
    yield rows
    (hub / "waits").unlink(missing_ok=True)


def answer(rows: Path, lines: str) -> None:
    """Have the Hub answer, with these rows."""
    (rows / "train.jsonl").write_text(lines)
    (rows.parents[2] / "waits").unlink()


def first_goes_on(pod: Pod) -> None:
    """Wait until the first job has come further."""
    seen = len(pod.agent.of[UID])
    until(
        lambda: "CHECKPOINTED" in [e.kind for e in pod.agent.of[UID][seen:]],
        pod=pod,
        worker=pod.worker,
    )


def test_a_job_that_is_taken_reaches_its_adapter_beside_the_first(carrying):
    pod = carrying
    done = [pod.decode.offer.tokens_done]
    out = take(pod, "second")
    assert pod.agent.kinds("second")[0] == "STARTED"
    while "SUCCEEDED" not in pod.agent.kinds("second"):
        first_goes_on(pod)
        offer = pod.decode.offer
        if offer.job_epoch:  # an offer of nothing, while jobs are joined, counts nothing
            done.append(offer.tokens_done)
    (hello,) = [h for h in pod.agent.hellos if h.job_uid == "second"]
    assert (hello.epoch, hello.pid) == (1, pod.worker.pid)
    assert (out / "adapter_model.safetensors").is_file()
    assert pod.decode.offer.job_epoch == 1
    # Of both jobs together, so it never falls; decode takes its growth for a rate.
    assert all(before <= after for before, after in itertools.pairwise(done))
    # While the second was loaded decode had the device and its chunks.
    assert pod.lending.offered_nothing
    joined = "pass in the same tasklets as those of 1 more"
    logs = [pod.run_dir.job_dir(uid) / WORKER_LOG for uid in (UID, "second")]
    assert all(joined in log.read_text() for log in logs)
    assert 1 in {told.joined_with for told in pod.agent.progress}
    first_goes_on(pod)


def test_a_job_with_bad_rows_ends_alone(carrying):
    pod = carrying
    (pod.root / "rows.jsonl").write_text('{"messages": []}\n')
    take_from(pod, "bad", str(pod.root / "rows.jsonl"))
    until(lambda: pod.agent.kinds("bad"), pod=pod, worker=pod.worker)
    (event,) = pod.agent.of["bad"]
    assert event.user_error
    assert event.reason == "DatasetInvalid"
    first_goes_on(pod)


def test_rows_that_do_not_come_hold_up_no_other_job_and_are_taken_when_they_do(carrying, silent):
    pod = carrying
    take_from(pod, "late", "team/rows")
    for _ in range(3):
        first_goes_on(pod)
    assert pod.agent.kinds("late") == []
    answer(silent, EXAMPLE_ROWS.read_text())
    until(lambda: "SUCCEEDED" in pod.agent.kinds("late"), pod=pod, worker=pod.worker)
    first_goes_on(pod)


def test_a_job_that_waits_for_its_rows_can_end_in_every_way_and_joins_again(carrying, silent):
    pod = carrying
    for uid, action in (("waits", "STOP"), ("waits-too", "ABORT")):
        take_from(pod, uid, "team/rows")
        first_goes_on(pod)
        pod.agent.command(action, to=uid)
        until(lambda uid=uid: pod.agent.kinds(uid) == ["STOPPED"], pod=pod, worker=pod.worker)
    assert pod.agent.of["waits"][0].detail == "asked to stop; it had not begun"
    take_from(pod, "wrong", "team/rows")
    answer(silent, '{"messages": []}\n')
    until(lambda: pod.agent.kinds("wrong"), pod=pod, worker=pod.worker)
    assert pod.agent.of["wrong"][0].reason == "DatasetInvalid"
    pod.write_job("waits", maxSteps=2)
    pod.agent.of["waits"].clear()
    pod.take("waits")
    until(lambda: "SUCCEEDED" in pod.agent.kinds("waits"), pod=pod, worker=pod.worker)
    first_goes_on(pod)


def test_a_job_that_is_deleted_while_it_waits_for_rows_leaves_no_checkpoint(carrying, silent):
    pod = carrying
    root = pod.out / "deleted" / ".windrow" / "deleted"
    (root / "checkpoints" / "step-00000005").mkdir(parents=True)
    take_from(pod, "deleted", "team/rows")
    first_goes_on(pod)
    pod.agent.command("STOP", to="deleted", reason="Deleted")
    until(lambda: pod.agent.kinds("deleted") == ["STOPPED"], pod=pod, worker=pod.worker)
    assert "its checkpoints are removed" in pod.agent.of["deleted"][0].detail
    assert not (root / "checkpoints").exists()
    assert root.is_dir()
    first_goes_on(pod)


def test_a_job_over_another_base_is_sent_elsewhere(carrying):
    pod = carrying
    take(pod, "other", precision="bf16")
    (event,) = pod.agent.of["other"]
    assert (event.kind, event.user_error) == ("FAILED", False)
    assert "bf16" in event.detail
    first_goes_on(pod)


def test_an_aborted_job_leaves_the_others_going(carrying):
    pod = carrying
    take(pod, "aborted", maxSteps=100_000)
    first_goes_on(pod)
    pod.agent.command("ABORT", to="aborted")
    until(lambda: pod.agent.kinds("aborted")[-1] == "STOPPED", pod=pod, worker=pod.worker)
    first_goes_on(pod)


def test_the_first_job_may_stop_before_the_others_and_a_signal_ends_all(carrying):
    pod = carrying
    take(pod, "last", maxSteps=100_000)
    pod.agent.command("STOP")
    until(lambda: "STOPPED" in pod.agent.kinds(UID), pod=pod, worker=pod.worker)
    seen = len(pod.agent.of["last"])
    until(
        lambda: "CHECKPOINTED" in [e.kind for e in pod.agent.of["last"][seen:]],
        pod=pod,
        worker=pod.worker,
    )
    assert pod.decode.offer.job_epoch == 1
    # A further one may be sent over any of the streams.
    pod.write_job("later", maxSteps=100_000)
    pod.take("later", to="last")
    until(lambda: "CHECKPOINTED" in pod.agent.kinds("later"), pod=pod, worker=pod.worker)
    pod.worker.send_signal(signal.SIGTERM)
    # The job with bad rows is the worst of its endings.
    assert pod.worker.wait(60) == Ending.USER_ERROR, pod.logs()
    for uid in ("last", "later"):
        assert pod.agent.of[uid][-1].kind == "STOPPED"
        assert "SIGTERM" in pod.agent.of[uid][-1].detail
    assert pod.decode.arena.counts()[2] == 0
    pod.decode.arena.check()
