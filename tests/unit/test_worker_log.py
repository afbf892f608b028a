"""What a worker writes comes out of the agent, line by line and marked with its job."""

from __future__ import annotations

import asyncio

from windrow.rundir import read_worker_line
from windrow_sidecar.agent.worker_process import WorkerLogFollower


def follower(path):
    said = []
    return WorkerLogFollower(path, "team-a/tone", said.append), said


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


def test_lines_of_a_worker_with_several_jobs_are_those_of_each(tmp_path):
    log = tmp_path / "worker.log"
    following, said = follower(log)
    with log.open("a") as more:
        for text, change, job in (
            ("one alone", following.add, "team-b/tone"),
            ("both", following.drop, "team-a/tone"),
            ("the other alone", None, ""),
        ):
            more.write(f"{text}\n")
            more.flush()
            if change is not None:
                change(job)  # before anybody has looked
    following.look()

    def of(job):
        return [text for line in said if (text := read_worker_line(line, job)) is not None]

    assert of("team-a/tone") == ["one alone", "both"]
    assert of("team-b/tone") == ["both", "the other alone"]
    assert of("team-b/ton") == []
    assert read_worker_line("2026-11-22 INFO the worker has ended", "team-a/tone") is None


async def test_the_last_words_are_told_when_the_worker_has_ended(tmp_path):
    log = tmp_path / "worker.log"
    following, said = follower(log)
    running = asyncio.create_task(following.run())
    await asyncio.sleep(0)
    log.write_text("Segmentation fault")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert said == ["worker team-a/tone | Segmentation fault"]
