"""A sidecar that says something else a hundred times a second fills neither events nor statuses."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from windrow.conditions import Reason
from windrow.proto import attach_pb2 as pb
from windrow_operator import metrics as exported
from windrow_operator.events import Recorder
from windrow_operator.job_steps import JobSteps
from windrow_operator.metrics import Metrics
from windrow_operator.profiles import Profiles
from windrow_operator.reconcile import Event

PROFILE = {
    "key": "k",
    "device": "host:2-cores",
    "engine": "builtin",
    "solo": [{"units": 2, "c0Us": 1.0, "b0Us": 10.0, "k0NsPerToken": 5.0}],
}
NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Clock:
    """A time that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> datetime:
        return self.now


def about(uid, namespace="red"):
    return {"metadata": {"namespace": namespace, "name": uid, "uid": uid}}


def test_events_of_one_object_leave_room_for_those_of_others():
    clock = Clock()
    recorder = Recorder(None, clock)
    for number in range(20_000):
        recorder.put(about("noisy"), Event("WorkerError", f"words {number}"))
    recorder.put(about("quiet"), Event("Placed", "on slot a"))
    waiting = [recorder._queue.get_nowait() for _ in range(recorder._queue.qsize())]
    said = [body["metadata"]["uid"] for body, _ in waiting]
    assert said.count("noisy") == 50
    assert said[-1] == "quiet"
    recorder.put(about("noisy", "blue"), Event("WorkerError", "words"))  # anybody names its UID
    assert recorder._queue.get_nowait()[0]["metadata"]["namespace"] == "blue"
    clock.now += timedelta(minutes=1)
    for number in range(100):
        recorder.put(about("noisy"), Event("WorkerError", f"more {number}"))
    assert recorder._queue.qsize() == 6  # one in ten seconds


def test_a_job_that_changes_its_state_without_end_is_written_once_a_second():
    clock, again = Clock(), []
    cluster = SimpleNamespace(runs={}, index=SimpleNamespace(waiting={}))
    steps = JobSteps(
        *(cluster, None, None, None, None, None),
        look_again=lambda uid, after: again.append((uid, after)),
        timeouts=None,
        clock=clock,
    )

    def due(uid, number, *, acts=False):
        job = SimpleNamespace(uid=uid, status={"state": f"{number}"})
        return steps._due(job, {"state": f"{number + 1}"}, clock.now, acts=acts)

    written = sum(due("noisy", number) for number in range(1000))
    assert written == 30
    assert again[-1] == ("noisy", timedelta(seconds=1))  # the last state is not lost
    assert due("quiet", 0)
    assert due("noisy", 0, acts=True)  # what a command hangs on
    clock.now += timedelta(seconds=10)
    assert sum(due("noisy", number) for number in range(1000)) in (9, 10)
    steps.forget("noisy")
    assert not steps._turns.keys() & {"noisy"}


def test_profiles_that_are_each_newer_than_the_last_are_stored_so_many_times():
    stored = []

    async def apply(path, body):
        stored.append(body)
        return {"metadata": {"uid": "u"}, "spec": body["spec"]}

    now_s = [0.0]
    profiles = Profiles(SimpleNamespace(apply=apply), clock=lambda: now_s[0])

    async def tell(namespace, minute):
        spec = PROFILE | {"takenAt": f"2026-01-01T{minute // 60:02}:{minute % 60:02}:00Z"}
        report = pb.ProfileReport(slot=1, key=spec["key"], profile_json=json.dumps(spec))
        await profiles.store(SimpleNamespace(namespace=namespace, name="decode-0"), report)

    async def scene():
        for minute in range(600):
            await tell("red", minute)
        noisy = len(stored)
        await tell("blue", 0)
        now_s[0] += 60.0
        for minute in range(600, 700):
            await tell("red", minute)
        return noisy

    assert asyncio.run(scene()) == 128
    assert len(stored) == 128 + 1 + 6  # one in ten seconds


@pytest.mark.parametrize("reason", [f"X{n}" for n in range(3)] + ["", "Stopped"])
def test_a_reason_that_a_sidecar_makes_up_is_no_series_of_its_own(reason):
    metrics = Metrics()
    job = SimpleNamespace(
        namespace="red",
        status={"conditions": [{"type": "Placed", "status": "True", "reason": "Placed"}]},
    )
    after = {"conditions": [{"type": "Placed", "status": "False", "reason": reason}]}
    metrics.status_written(job, after, NOW)
    (family,) = metrics._placement_ends.collect()
    labels = {sample.labels["reason"] for sample in family.samples}
    assert labels <= {*map(str, Reason), "Other"}
    assert exported._known(reason) == ("Stopped" if reason == "Stopped" else "Other")
