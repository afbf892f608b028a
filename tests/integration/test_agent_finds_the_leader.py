"""The agent as a process between two replicas of the operator, of which one leads."""

from __future__ import annotations

import pytest
from agent_pod import attached_pod

from windrow.proto import attach_pb2
from windrow_sidecar.testing.attached_operator import AttachedOperator, until

pytestmark = pytest.mark.alone

Event = attach_pb2.JobEvent


def order(uid, term):
    assign = attach_pb2.Assign(job_uid=uid, epoch=9, spec_json="{}", leader_term=term)
    return attach_pb2.OperatorMessage(assign=assign)


async def test_the_leader_is_found_and_nobody_who_led_before_it_is_obeyed():
    async with attached_pod() as (first, agent, _):
        second = AttachedOperator((first.key, first.cert))
        second.term = 7
        await second.start()
        try:
            first.leader = f"127.0.0.1:{second.port}"
            await first.stop()  # the stream ends, and the next one is sent on
            await first.start()
            await until(lambda: second.hellos)
            second.assign({"behave": "run"})
            await until(lambda: second.event(Event.STARTED))

            second.say(order("former", term=6))
            await until(lambda: any(h.leader_term == 7 for h in second.hellos))
            assert [r.job_uid for r in second.hellos[-1].running] == ["uid-1"]
            assert second.of("former") == []

            # The leader is gone, and the one that led before takes streams: it was stopped.
            first.leader, first.term = "", 5
            first.heard.clear()
            await second.stop()
            await until(lambda: len(first.hellos) >= 2)
            first.assign({"behave": "run"}, uid="former")
            assert all(m.WhichOneof("message") == "hello" for m in first.heard)
            await second.start()
            await until(lambda: second.heartbeats[-1].job.job_uid == "uid-1")
            assert first.of("former") == []
            assert len(agent.worker_pids()) == 1
        finally:
            await second.stop()
