"""The agent with several jobs in a slot: one worker, and for each job its own events and end."""

from __future__ import annotations

import os
import signal

import pytest
from agent_pod import attached_pod

from windrow.proto import attach_pb2
from windrow.rundir import read_worker_line
from windrow_sidecar.testing.attached_operator import until

pytestmark = pytest.mark.paired

Event = attach_pb2.JobEvent
Ask = attach_pb2.JobCommand


@pytest.fixture
async def pod():
    async with attached_pod("--max-jobs=2") as attached:
        yield attached


def end_of(operator, uid: str) -> attach_pb2.JobEvent | None:
    ends = (Event.STOPPED, Event.SUCCEEDED, Event.FAILED, Event.REJECTED)
    return next((e for e in operator.of(uid) if e.kind in ends), None)


async def started(operator, uid: str, behave: str, epoch: int = 1) -> None:
    """Place a job and wait for its start."""
    operator.assign({"behave": behave}, uid, epoch, name=uid)
    await until(lambda: any(e.epoch == epoch for e in operator.of(uid) if e.kind == Event.STARTED))


async def goes_on(operator, uid: str) -> None:
    """Wait until a job has come further."""
    seen = len(operator.heartbeats)

    def further() -> bool:
        jobs = (job for beat in operator.heartbeats[seen:] for job in beat.jobs)
        steps = [job.progress.step for job in jobs if job.job_uid == uid]
        return bool(steps) and steps[-1] > steps[0]

    await until(further)


async def test_jobs_share_a_worker_and_it_is_reaped_after_the_last(pod):
    operator, agent, engine = pod
    assert operator.hellos[-1].slots[0].max_jobs == 2
    await started(operator, "uid-1", "run", epoch=4)
    (pid,) = agent.worker_pids()
    await started(operator, "uid-2", "run")
    beat = await until(lambda: next((b for b in operator.heartbeats if len(b.jobs) == 2), None))
    assert [(j.job_uid, j.epoch) for j in beat.jobs] == [("uid-1", 4), ("uid-2", 1)]
    assert beat.job == beat.jobs[0]
    await goes_on(operator, "uid-2")
    for name in ("uid-1", "uid-2"):
        job = {"job_name": name, "job_namespace": "team-a"}
        assert agent.sample("windrow_job_step", **job) is not None
    assert agent.metrics().count("windrow_worker_memory_bytes{") == 3

    operator.command(Ask.STOP, "uid-1", 4)
    stopped = await until(lambda: end_of(operator, "uid-1"))
    assert "checkpoint of step" in stopped.detail
    await goes_on(operator, "uid-2")
    assert agent.worker_pids() == [pid]
    # Decode knows the worker by the job that it was started for.
    assert engine.engine.hook.live_epoch == 4

    operator.command(Ask.STOP, "uid-2", 1)
    await until(lambda: end_of(operator, "uid-2"))
    await until(lambda: engine.engine.hook.live_epoch == 0)
    assert agent.worker_pids() == []
    assert agent.sample("windrow_worker_exits_total", outcome="stopped") == 1.0
    assert operator.kinds("uid-1") == operator.kinds("uid-2") == ["STARTED", "STOPPED"]


async def test_each_job_of_a_shared_worker_has_lines_of_its_own(pod):
    operator, agent, _ = pod

    def wrote(uid: str) -> list[str]:
        lines = (agent.folder / "agent.log").read_text().splitlines()
        found = (read_worker_line(line, f"team-a/{uid}") for line in lines)
        return [text for text in found if text is not None]

    await started(operator, "uid-1", "run")
    await until(lambda: "uid-1 begins" in wrote("uid-1"))
    await started(operator, "uid-2", "run")
    await until(lambda: "uid-2 begins" in wrote("uid-2"))
    operator.command(Ask.STOP, "uid-1", 1)
    await until(lambda: end_of(operator, "uid-1"))
    await started(operator, "uid-3", "run")
    await until(lambda: "uid-3 begins" in wrote("uid-3"))
    assert wrote("uid-1") == ["uid-1 begins"]
    assert wrote("uid-2") == ["uid-2 begins"]


async def test_more_jobs_than_it_said_are_rejected_and_come_when_there_is_room(pod):
    operator, agent, _ = pod
    await started(operator, "uid-1", "run")
    await started(operator, "uid-2", "succeed")
    operator.assign({"behave": "run"}, "uid-3", name="third")
    rejected = await until(lambda: end_of(operator, "uid-3"))
    assert (rejected.kind, rejected.reason) == (Event.REJECTED, "Busy")
    assert rejected.detail == "slot 0 runs jobs uid-1 and uid-2"
    assert (await until(lambda: end_of(operator, "uid-2"))).kind == Event.SUCCEEDED
    await started(operator, "uid-3", "run", epoch=2)
    assert len(agent.worker_pids()) == 1


async def test_one_that_fails_or_is_aborted_leaves_the_other_going(pod):
    operator, agent, _ = pod
    await started(operator, "uid-1", "run")
    (pid,) = agent.worker_pids()
    await started(operator, "uid-2", "fail")
    failed = await until(lambda: end_of(operator, "uid-2"))
    assert (failed.reason, failed.user_error) == ("DatasetInvalid", True)
    await started(operator, "uid-3", "run")
    operator.command(Ask.ABORT, "uid-3", 1)
    assert (await until(lambda: end_of(operator, "uid-3"))).detail == "aborted"
    await goes_on(operator, "uid-1")
    assert agent.worker_pids() == [pid]


async def test_a_newer_epoch_of_a_job_joins_the_same_worker_again(pod):
    operator, agent, _ = pod
    await started(operator, "uid-1", "run")
    (pid,) = agent.worker_pids()
    await started(operator, "uid-2", "run")
    await started(operator, "uid-2", "run", epoch=2)
    assert operator.kinds("uid-2") == ["STARTED", "STOPPED", "STARTED"]
    await goes_on(operator, "uid-1")
    assert agent.worker_pids() == [pid]


async def test_one_that_must_be_killed_costs_the_other_its_slot_but_is_no_failure_of_it(pod):
    operator, agent, _ = pod
    await started(operator, "uid-1", "run")
    await started(operator, "uid-2", "stubborn")
    operator.command(Ask.ABORT, "uid-2", 1)
    await goes_on(operator, "uid-1")  # the command first; the kill after the grace
    lost = await until(lambda: end_of(operator, "uid-1"))
    assert (lost.kind, lost.reason) == (Event.STOPPED, "SlotLost")
    assert "uid-2" in lost.detail
    assert (await until(lambda: end_of(operator, "uid-2"))).kind == Event.STOPPED
    await until(lambda: not agent.worker_pids())


async def test_a_worker_that_dies_is_a_failure_of_the_job_whose_turn_it_was(pod):
    operator, agent, engine = pod
    await started(operator, "uid-1", "run")
    await started(operator, "uid-2", "at-work")
    os.kill(agent.worker_pids()[0], signal.SIGKILL)
    failed = await until(lambda: end_of(operator, "uid-2"))
    assert (failed.kind, failed.reason) == (Event.FAILED, "WorkerDied")
    lost = await until(lambda: end_of(operator, "uid-1"))
    assert (lost.kind, lost.reason) == (Event.STOPPED, "SlotLost")
    assert lost.detail == "its worker has ended with job uid-2"
    # Decode knows that nobody holds its memory or waits for its cores any more.
    await until(lambda: engine.engine.hook.live_epoch == 0)
    # What the dead one noted is not held against the next.
    await started(operator, "uid-1", "run", epoch=2)
    await started(operator, "uid-2", "run", epoch=2)
    os.kill(agent.worker_pids()[0], signal.SIGKILL)
    for uid in ("uid-1", "uid-2"):
        ends = lambda uid=uid: [e for e in operator.of(uid) if e.kind == Event.FAILED]  # noqa: E731
        await until(lambda ends=ends: any(e.epoch == 2 for e in ends()))


async def test_a_worker_that_dies_before_any_turn_is_a_failure_of_all_that_ran_in_it(pod):
    operator, agent, _ = pod
    await started(operator, "uid-1", "run")
    await started(operator, "uid-2", "run")
    os.kill(agent.worker_pids()[0], signal.SIGKILL)
    for uid in ("uid-1", "uid-2"):
        failed = await until(lambda uid=uid: end_of(operator, uid))
        assert (failed.kind, failed.reason) == (Event.FAILED, "WorkerDied")


async def test_a_job_that_its_worker_never_took_can_be_stopped_and_is_not_lost(pod):
    operator, agent, _ = pod
    await started(operator, "uid-1", "deaf")
    operator.assign({"behave": "run"}, "uid-2")
    await until(lambda: len(operator.heartbeats[-1].jobs) == 2)
    operator.command(Ask.STOP, "uid-2", 1)
    stopped = await until(lambda: end_of(operator, "uid-2"))
    assert (stopped.reason, stopped.detail) == ("Stopped", "it had not begun")
    operator.assign({"behave": "run"}, "uid-3")
    await until(lambda: len(operator.heartbeats[-1].jobs) == 2)
    operator.command(Ask.STOP, "uid-1", 1)
    lost = await until(lambda: end_of(operator, "uid-3"))
    assert (lost.kind, lost.reason) == (Event.STOPPED, "SlotLost")
    await until(lambda: not agent.worker_pids())
    await started(operator, "uid-3", "run", epoch=2)


async def test_a_job_that_its_busy_worker_has_not_taken_loses_its_checkpoints_when_deleted(pod):
    operator, agent, _ = pod
    await started(operator, "uid-1", "busy")
    operator.assign({"behave": "run"}, "uid-2")
    await until(lambda: len(operator.heartbeats[-1].jobs) == 2)
    operator.command(Ask.STOP, "uid-2", 1, "Deleted")
    await goes_on(operator, "uid-1")
    assert end_of(operator, "uid-2") is None  # as long as its worker may still take it
    operator.command(Ask.RESUME, "uid-1", 1)
    assert (await until(lambda: end_of(operator, "uid-2"))).detail == "its checkpoints are removed"
    await goes_on(operator, "uid-1")
    assert len(agent.worker_pids()) == 1


async def test_a_deleted_job_that_its_worker_never_takes_ends_alone_and_says_what_stays():
    async with attached_pod("--max-jobs=2", "--grace-seconds=1") as (operator, _, _):
        await started(operator, "uid-1", "deaf")
        operator.assign({"behave": "run"}, "uid-2")
        await until(lambda: len(operator.heartbeats[-1].jobs) == 2)
        operator.command(Ask.STOP, "uid-2", 1, "Deleted")
        stopped = await until(lambda: end_of(operator, "uid-2"))
        assert "checkpoints that it has stay" in stopped.detail
        await goes_on(operator, "uid-1")


async def test_ends_that_the_operator_missed_are_told_although_others_came_since(pod):
    operator, agent, _ = pod
    await started(operator, "uid-1", "run")
    await started(operator, "uid-2", "succeed")
    await operator.stop()
    await until(lambda: 'job_name="uid-2"' not in agent.metrics())
    operator.heard.clear()
    await operator.start()
    assert (await until(lambda: end_of(operator, "uid-2"))).kind == Event.SUCCEEDED
    assert {r.job_uid for r in operator.hellos[0].running} == {"uid-1", "uid-2"}
    await started(operator, "uid-3", "run")
    await operator.stop()
    operator.heard.clear()
    await operator.start()
    # It assigned the third when it may not have heard of the second's end.
    await until(lambda: end_of(operator, "uid-2"))
    await until(lambda: "STARTED" in operator.kinds("uid-3"))


async def test_the_end_of_the_agent_ends_all_of_them_with_checkpoints(pod):
    operator, agent, _ = pod
    await started(operator, "uid-1", "run")
    await started(operator, "uid-2", "run")
    assert await agent.end() == 0
    for uid in ("uid-1", "uid-2"):
        stopped = await until(lambda uid=uid: end_of(operator, uid))
        assert (stopped.reason, stopped.detail) == ("SlotLost", "the sidecar was asked to end")
