"""Check what a worker writes comes out of the agent, line by line and marked with its job."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from types import SimpleNamespace

import pytest

from windrow.proto import attach_pb2
from windrow.rundir import RunDir, read_worker_line
from windrow_sidecar.agent.job_run import JobRun
from windrow_sidecar.agent.worker_process import Exit, WorkerLogFollower, WorkerLogs


def follower(path):
    said = []
    return WorkerLogFollower(path, ["team-a/tone"], said.append), said


def test_whole_lines_are_told_once_and_the_rest_when_it_is_whole(tmp_path):
    log = tmp_path / "worker.log"
    following, said = follower(log)
    following.look()  # it is not there yet
    log.write_bytes(b"loads\nst")
    following.look()
    following.look()
    assert said == ["worker team-a/tone | loads"]
    with log.open("ab") as more:
        more.write("ep 1 \xff\n".encode("latin-1"))
    following.look()
    assert said[1:] == ["worker team-a/tone | step 1 \ufffd"]


def test_what_an_earlier_worker_wrote_is_not_told_again(tmp_path):
    log = tmp_path / "worker.log"
    log.write_text("of before\n")
    following, said = follower(log)
    with log.open("a") as more:
        more.write("of now\n")
    following.look()
    assert said == ["worker team-a/tone | of now"]


def test_lines_are_marked_with_the_jobs_of_the_time_they_were_written(tmp_path):
    log = tmp_path / "worker.log"
    following, said = follower(log)
    with log.open("a") as more:
        for text, jobs in (
            ("one alone", ["team-a/tone", "team-a/other"]),
            ("both", ["team-a/other"]),
            ("the other alone", []),
            ("nobody's", []),
        ):
            more.write(f"{text}\n")
            more.flush()
            following.mark(jobs)  # before anybody has looked
    assert lines_of(said, "team-a/tone") == ["one alone", "both"]
    assert lines_of(said, "team-a/other") == ["both", "the other alone"]
    assert lines_of(said, "team-a/ton") == []
    assert said[-1].endswith("| nobody's")
    assert read_worker_line("2026-11-22 INFO the worker has ended", "team-a/tone") is None


def lines_of(said, job):
    return [text for line in said if (text := read_worker_line(line, job)) is not None]


async def test_the_last_words_are_told_when_the_worker_has_ended(tmp_path):
    said = []
    logs = WorkerLogs(RunDir(tmp_path), order("team-a", "tone"), said.append)
    running = asyncio.create_task(logs.run())
    await asyncio.sleep(0)
    write(tmp_path, "tone", "Segmentation fault")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert said == ["worker team-a/tone | Segmentation fault"]


# --- several jobs ---------------------------------------------------------------------------------


def order(namespace, name):
    return attach_pb2.Assign(job_namespace=namespace, job_name=name, job_uid=name, epoch=1)


def write(folder, uid, text):
    """Write to the log of a job, or of the process."""
    path = RunDir(folder).job_dir(uid) / "worker.log" if uid else RunDir(folder).worker_log()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as log:
        log.write(text)


@pytest.mark.parametrize("other", ["blue", "red"])
def test_of_a_worker_with_two_jobs_each_hears_its_own_and_not_what_is_of_another_namespace(
    tmp_path, other
):
    write(tmp_path, "", "of an earlier worker\n")
    said = []
    mine, theirs = order("blue", "mine"), order(other, "theirs")
    logs = WorkerLogs(RunDir(tmp_path), mine, said.append)
    write(tmp_path, "mine", "alone\n")
    logs.add(theirs)
    write(tmp_path, "mine", "my row 3\n")
    write(tmp_path, "theirs", "their row 4\n")
    write(tmp_path, "", "a library speaks\n")
    for follower in logs._all():
        follower.look()
    shared = ["a library speaks"] if other == "blue" else []
    assert lines_of(said, "blue/mine") == ["alone", "my row 3", *shared]
    assert lines_of(said, f"{other}/theirs") == ["their row 4", *shared]
    assert logs.tail_of(mine).splitlines() == ["alone", "my row 3", *shared]
    assert logs.tail_of(theirs).splitlines() == ["their row 4", *shared]
    logs.drop(theirs)
    write(tmp_path, "", "its last words\n")
    logs._of_process.look()
    last = lines_of(said, "blue/mine")[-1]
    assert (last == "its last words") == (other == "blue")


def of(uid, namespace, outbox):
    worker = SimpleNamespace(ended=lambda run: None, is_shared_by=lambda run: False)
    return JobRun(None, order(namespace, uid), outbox, worker)


@pytest.mark.parametrize(("other", "named"), [("blue", True), ("red", False)])
async def test_a_worker_that_ends_with_another_job_names_it_within_the_namespace_alone(
    other, named
):
    events = []

    async def add(event):
        events.append(event)

    outbox = SimpleNamespace(add=add)
    mine, theirs = of("mine", "blue", outbox), of("theirs", other, outbox)
    mine._hung_up.set()
    await mine.worker_ended(Exit(-9, ""), through=theirs)
    assert ("theirs" in events[0].detail) == named


def test_records_go_to_the_logs_of_their_jobs_and_the_rest_to_the_log_of_the_process(tmp_path):
    for uid in ("mine", "theirs"):
        write(tmp_path, uid, "")
    program = """
import logging, os, sys, threading
from pathlib import Path
from windrow.rundir import RunDir
from windrow_sidecar.finetune.colocated.job_logs import JobLogs
logs = JobLogs(RunDir(Path(sys.argv[1])))
logging.basicConfig(handlers=[logs], level=logging.INFO, format="%(message)s")
log = logging.getLogger("x")
logs.about("mine")
log.info("alone")
logs.separate()
logs.separate()
log.info("mine")
def load():
    log.info("of no job")
    logs.about("theirs")
    log.warning("row left out: secret")
thread = threading.Thread(target=load)
thread.start()
thread.join()
log.info("mine again")
os.write(2, b"a library\\n")
"""
    own = RunDir(tmp_path).job_dir("mine") / "worker.log"
    # A process of its own, since its standard error is moved.
    with own.open("ab") as out:
        command = [sys.executable, "-c", program, str(tmp_path)]
        subprocess.run(command, check=True, stderr=out, stdout=out)
    assert own.read_text().splitlines() == ["alone", "mine", "mine again"]
    theirs = RunDir(tmp_path).job_dir("theirs") / "worker.log"
    assert theirs.read_text().splitlines() == ["row left out: secret"]
    assert RunDir(tmp_path).worker_log().read_text().splitlines() == ["of no job", "a library"]
