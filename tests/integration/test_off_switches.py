"""Harvesting is turned off without an operator: by the lease of a policy, and in the pod."""

from __future__ import annotations

import json
import signal

import pytest
from agent_pod import attached_pod

from windrow.proto import attach_pb2
from windrow.rundir import RunDir
from windrow_sidecar.testing.attached_operator import until

pytestmark = pytest.mark.paired

Event = attach_pb2.JobEvent
LEASE_S = 2.0


def harvests(operator, engine, uid="uid-1", epoch=1, lease_s=LEASE_S):
    """Let a job run under a policy."""
    operator.set_policy(
        name="chat",
        policy="windrow",
        mode="harvest",
        objective_seconds=0.012,
        lease_seconds=lease_s,
    )
    operator.assign({"behave": "run"}, uid=uid, epoch=epoch)


def mode_of(engine):
    terms = engine.engine.hook.controller.terms
    return terms.mode if terms else None


@pytest.fixture
async def pod():
    async with attached_pod() as attached:
        attached[0].renews = True
        yield attached


async def test_jobs_stop_with_a_checkpoint_when_the_operator_is_frozen_or_gone(pod):
    operator, agent, engine = pod
    # Frozen: the stream stays open and says nothing more. The first hello announced no renewals.
    await operator.stop()
    await operator.start()
    await until(lambda: operator.hellos[-1].slots and len(operator.tokens) > 1)
    harvests(operator, engine)
    await until(lambda: agent.worker_pids())
    await until(lambda: operator.event(Event.STARTED))
    stopped = await until(lambda: operator.event(Event.STOPPED))
    assert "not heard for 2 s" in stopped.detail
    assert stopped.reason == "PolicyChanged"
    assert stopped.progress.checkpoint_path, "it ended with a checkpoint"
    await until(lambda: not agent.worker_pids())
    await until(lambda: mode_of(engine) == "off")
    assert "not heard" in operator.heartbeats[-1].off

    # Heard again: the same policy holds at once, and renewals keep a job going.
    operator.renew_every_s = 0.3
    operator.renew()
    await until(lambda: mode_of(engine) == "harvest")
    operator.assign({"behave": "run"}, uid="uid-2", epoch=1)
    await until(lambda: agent.worker_pids())
    steps = await until(lambda: next((b.job.progress.step for b in operator.heartbeats[-1:]), 0))
    await until(lambda: operator.heartbeats[-1].job.progress.step > steps + 30)
    assert agent.worker_pids()

    # Gone: nobody listens any more.
    await operator.stop()
    await until(lambda: not agent.worker_pids())
    await until(lambda: mode_of(engine) == "off")


async def test_the_switch_of_a_pod_needs_no_operator(pod):
    operator, agent, engine = pod
    harvests(operator, engine, lease_s=600.0)
    await until(lambda: operator.event(Event.STARTED))
    await operator.stop()
    switch = RunDir(agent.folder).off_switch
    switch.write_text("paged at night\n")
    await until(lambda: mode_of(engine) == "off")
    await until(lambda: not agent.worker_pids())
    await operator.start()
    stopped = await until(lambda: operator.event(Event.STOPPED))
    assert "turned off in the pod" in stopped.detail
    assert stopped.detail.endswith("paged at night")
    await until(lambda: operator.heartbeats and "paged at night" in operator.heartbeats[-1].off)
    operator.assign({"behave": "run"}, uid="uid-2", epoch=1)
    await until(lambda: operator.kinds("uid-2") == ["REJECTED"])
    (refused,) = operator.of("uid-2")
    assert "turned off in the pod" in refused.detail

    # The same by signals: the file goes, and comes.
    agent.process.send_signal(signal.SIGUSR2)
    await until(lambda: mode_of(engine) == "harvest")
    assert not switch.exists()
    agent.process.send_signal(signal.SIGUSR1)
    await until(lambda: mode_of(engine) == "off")
    assert switch.exists()


async def test_an_engine_that_is_refused_or_never_calls_is_a_slot_with_the_reason(tmp_path):
    async with attached_pod("--engine-calls-within-seconds=0.5", engine_calls=False) as (
        operator,
        agent,
        engine,
    ):
        silent = await until(lambda: next((h for h in operator.hellos if h.slots), None))
        assert "has called the sidecar" in silent.slots[0].refused
        reason = "not started: --tp-size: 2 is not supported yet"
        RunDir(agent.folder).refusal().write_text(json.dumps({"reason": reason}))
        await until(lambda: operator.hellos[-1].slots[0].refused == reason)
        RunDir(agent.folder).refusal().unlink()
        engine.start()
        await until(lambda: operator.hellos[-1].slots[0].engine == "stepping")
        assert operator.hellos[-1].slots[0].refused == ""
