"""However a run of `windrow finetune` ends, its work is kept and what happened is told."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import forked_start
from support.small_disk import fill, small_disk
from test_finetune_command import COMMAND, manifest
from waiting import is_running, wait_until

from windrow.protocol import Ending

ENDLESS = {"maxSteps": 100_000, "evalEverySteps": None}
ADAPTER = "adapter_model.safetensors"


@contextmanager
def started(path: Path, *arguments: str, **options):
    """The command in a process, ended at the latest when the test ends."""
    with subprocess.Popen(
        [*COMMAND, path, "--units", "1", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process, word: str) -> str:
    """The line that holds the word, and nothing of those before it."""
    for line in process.stdout:
        if word in line:
            return line
    pytest.fail(f"it ended without {word}: {process.stderr.read()}")


def job_folder(tmp_path) -> Path:
    return tmp_path / "out" / ".windrow" / "job"


def worker_of(tmp_path) -> int:
    return json.loads((job_folder(tmp_path) / "holder-1").read_text())["pid"]


def checkpoints(tmp_path) -> list[Path]:
    return sorted(job_folder(tmp_path).glob("checkpoints/step-*"))


def test_sigterm_stops_it_with_a_checkpoint_and_json(tmp_path):
    with started(manifest(tmp_path, **ENDLESS), "--json") as process:
        wait_until(lambda: checkpoints(tmp_path), "a checkpoint", seconds=120)
        process.terminate()
        out, _ = process.communicate(timeout=240)
    said = json.loads(out)
    assert (process.returncode, said["state"]) == (130, "Stopped")
    assert "stopped: asked to stop; step" in said["message"]
    assert said["checkpoint"] == str(checkpoints(tmp_path)[-1])


def test_sigterm_while_the_worker_is_still_being_started_stops_it_too(tmp_path, monkeypatch):
    monkeypatch.setenv(forked_start.ENV_OFF, "1")  # a forked one has started in no time
    with started(manifest(tmp_path, **ENDLESS), "--json") as process:
        wait_until(lambda: (job_folder(tmp_path) / "worker.log").exists(), "the worker")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_until(lambda: children.read_text(), "its process")
        process.terminate()
        out, _ = process.communicate(timeout=240)
    said = json.loads(out)
    assert (process.returncode, said["state"]) == (130, "Stopped")
    assert said["message"] == "stopped: asked to stop; it had not begun"


def test_a_worker_whose_command_was_killed_writes_a_checkpoint_that_an_immediate_rerun_goes_on_from(
    tmp_path,
):
    path = manifest(tmp_path, **ENDLESS)
    with started(path) as process:
        read_until(process, "checkpointed:")
        worker = worker_of(tmp_path)
        with (job_folder(tmp_path) / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # its last checkpoint takes until we say so
            process.kill()
            process.wait()
            with started(path) as again:
                waiting = read_until(again, "warned:")
                assert f"process {worker} on" in waiting
                assert "still writes to" in waiting
                fcntl.flock(lock, fcntl.LOCK_UN)
                began = read_until(again, "started:")
                assert not is_running(worker)
                assert began.startswith("started: from step ")
                again.send_signal(signal.SIGTERM)
                again.communicate(timeout=240)
                assert again.returncode == 130
    log = (job_folder(tmp_path) / "worker.log").read_text()
    assert "BrokenPipe" not in log
    assert "Traceback" not in log


@pytest.mark.extended
def test_a_worker_that_only_measures_ends_with_the_command_that_was_killed(tmp_path):
    # It says nothing until it is done, so no closed pipe ends it.
    with started(manifest(tmp_path, **ENDLESS), "--seconds=3600") as process:
        log = wait_until(
            lambda: next(job_folder(tmp_path).glob("dedicated-*.events.jsonl"), None),
            "the measurement has begun",
        )
        process.kill()
        process.wait()
    worker = int(log.name.partition("-")[2].partition(".")[0])
    wait_until(lambda: not is_running(worker), "the worker has ended")


@pytest.mark.extended
def test_a_disk_that_takes_no_checkpoint_is_told_at_the_first_one_and_leaves_no_half_adapter(
    tmp_path,
):
    """By the largest file that the user may write: nobody needs rights for that."""
    limit = 20_000  # of what it writes, only checkpoints and the adapter are larger

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    # Python would cut the bytecode that it keeps beside its sources at the same limit.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    path = manifest(tmp_path)
    with started(path, preexec_fn=small_files, env=environment) as process:
        out, _ = process.communicate(timeout=240)
    assert process.returncode == 1
    lines = out.splitlines()
    told = [line for line in lines if line.startswith("warned:")]
    assert len(told) == 1, out
    assert "the checkpoint of step 1 is not written, there is none yet" in told[0]
    assert os.strerror(errno.EFBIG) in told[0]
    failed = next(line for line in lines if line.startswith("failed:"))
    assert ADAPTER in failed
    assert "Free space there; no checkpoint yet, so the next attempt begins at step 0" in failed
    assert not [file for file in (tmp_path / "out").rglob("*") if file.name == ADAPTER]
    assert not checkpoints(tmp_path)


@pytest.fixture
def disk(tmp_path):
    """A disk of its own for what a run writes."""
    with small_disk(tmp_path / "out", mib=3) as mounted:
        yield mounted


@pytest.mark.extended
def test_a_disk_that_was_full_for_a_while_costs_checkpoints_and_no_work(tmp_path, disk):
    path = manifest(tmp_path, **ENDLESS)
    with started(path) as process:
        read_until(process, "checkpointed:")
        ballast = fill(disk)
        told = read_until(process, "warned:")
        assert "is not written, the last good one is" in told
        assert "No space left on device. Free space there" in told
        ballast.unlink()
        read_until(process, "checkpointed:")
        process.terminate()
        process.communicate(timeout=240)
    assert process.returncode == 130
    ballast = fill(disk)
    with started(path, "--json") as process:
        out, _ = process.communicate(timeout=240)
    said = json.loads(out)
    assert (process.returncode, said["state"]) == (1, "Failed")
    assert said["message"].endswith("No space left on device. Free space there")
    for line in (job_folder(tmp_path) / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line)["step"] >= 0  # whole lines only


_STOPPED_WHILE_LOADING = """
import os, signal, sys, time
from pathlib import Path
from windrow_sidecar.compute.host_device import HostDevice
from windrow_sidecar.finetune.standalone.run import JobGroup
from support.examplejob import example_job

together = JobGroup([example_job(Path(sys.argv[1]))], 1, None, HostDevice())

def base():
    os.kill(os.getpid(), signal.SIGHUP)
    time.sleep(600)

together._base = base
sys.exit(together.run())
"""


def test_a_signal_while_the_model_loads_ends_it_at_once(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _STOPPED_WHILE_LOADING, tmp_path],
        stdout=subprocess.PIPE,
        check=False,
        timeout=240,
    )
    said = [json.loads(line) for line in done.stdout.splitlines()]
    event = next(line["event"] for line in said if "event" in line)
    assert (event["kind"], event["detail"]) == ("STOPPED", "asked to stop; it had not begun")
    assert done.returncode == Ending.STOPPED


def test_a_manifest_that_is_wrong_is_told_as_json_too(tmp_path):
    with started(manifest(tmp_path, colour=1), "--json") as process:
        out, err = process.communicate(timeout=60)
    said = json.loads(out)
    assert (process.returncode, said["name"], said["state"]) == (2, "job", "Failed")
    assert "spec.training.colour" in said["message"]
    assert err.count("\n") == 1
