"""Check when the next heartbeat of a pod is due: of each slot its own, at rest or not."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from windrow.proto import attach_pb2 as pb
from windrow_operator import reports
from windrow_operator.attach import AttachServer
from windrow_operator.cluster_state import ClusterState
from windrow_operator.model import STALE_AFTER, Pod
from windrow_operator.session import MISSED_HEARTBEATS, Session

NOW = datetime(2025, 1, 1, 12, 0, tzinfo=UTC)
INTERVAL, REST = timedelta(seconds=1), timedelta(seconds=20)
BUSY = (pb.RunningJob(job_uid="u", epoch=1),)


class Listener:
    def on_heartbeat(self) -> None:
        pass


@pytest.fixture
def attached():
    cluster = ClusterState(NOW)
    pod = Pod("team", "decode-0", "pod-0")
    cluster.pods[pod.uid] = pod
    server = AttachServer(cluster, None, None, clock=lambda: NOW)
    session = Session(pod, 1, INTERVAL, REST)
    session.command = lambda _: None
    server._end_stale = lambda *_: None
    slots = [pb.SlotFacts(index=index) for index in (0, 1)]
    reports.take_hello(cluster, pod, pb.SidecarHello(slots=slots), NOW, first=True)

    def beat(slot: int, jobs=()) -> None:
        heartbeat = pb.SlotHeartbeat(slot=slot, engine_state="serving", jobs=jobs)
        server._take(session, pb.SidecarMessage(heartbeat=heartbeat), Listener())

    return cluster, session, beat


def test_a_pod_whose_slots_all_rest_may_be_silent_for_as_long_as_one_that_rests(attached):
    cluster, session, beat = attached
    beat(0)
    beat(1)
    assert session.due == NOW + MISSED_HEARTBEATS * REST
    assert {live.stale_after for live in cluster.slots.values()} == {2 * REST}


def test_a_slot_at_rest_does_not_count_as_silent_beside_one_with_a_job(attached):
    cluster, session, beat = attached
    beat(0, BUSY)
    beat(1)
    assert session.due == NOW + MISSED_HEARTBEATS * INTERVAL, "soon, for the busy one"
    busy, resting = cluster.slots["team/decode-0"], cluster.slots["team/decode-0.1"]
    assert (busy.stale_after, resting.stale_after) == (STALE_AFTER, 2 * REST)
    later = NOW + REST
    assert busy.is_silent(later)
    assert not resting.is_silent(later)
