"""The switch of a cluster: set and removed beside a running operator, and what proves it."""

from __future__ import annotations

import json

import pytest
from operator_process import running
from waiting import wait_until

import windrow_cli as cli
from windrow.client import WindrowClient
from windrow.conditions import get_condition
from windrow.off import ClusterSwitch, quiet_of
from windrow.proto import attach_pb2 as pb
from windrow_operator import uninstall

NAMESPACE = "windrow-system"


@pytest.fixture
def switch(control_plane, cluster):
    """The cluster's switch, which is on again at the end."""
    switch = ClusterSwitch(WindrowClient(control_plane.kubeconfig), NAMESPACE)
    yield switch
    switch.turn_on()


def of(switch, cluster):
    return [slot for slot in switch.slots() if slot.name.startswith(f"{cluster.namespace}/")]


def test_a_cluster_is_turned_off_proven_off_and_on_again(switch, cluster, control_plane, capsys):
    cluster.policy(lease="2s")
    sidecar = cluster.attach(cluster.pod())
    sidecar.beat()
    cluster.job()
    assigned = sidecar.next("assign")
    sidecar.report(assigned, "STARTED")
    sidecar.beat(running(assigned, step=1, total_steps=100))
    cluster.await_state("Running")
    # Its policy is renewed several times in each lease, so that nothing stops unasked.
    for _ in range(3):
        sidecar.next("renewal")

    assert switch.turn_off("latency incident")
    assert not switch.turn_off(), "it is off already"
    off = sidecar.next("policy", what=lambda policy: policy.mode == "off")
    assert off.lease_seconds == 2
    stop = sidecar.next("command", what=lambda command: command.action == pb.JobCommand.STOP)
    assert stop.reason.endswith("turns the whole cluster off: latency incident)")
    (slot,) = of(switch, cluster)
    assert not slot.quiet
    sidecar.report(assigned, "STOPPED", progress=pb.Progress(step=1, checkpoint_step=1))
    wait_until(lambda: all(slot.quiet for slot in of(switch, cluster)), "it is proven off")
    wait_until(
        lambda: "latency incident" in cluster.condition("Placed").get("message", ""),
        "the job says why it waits",
    )
    capsys.readouterr()
    given = ["off", "--wait", "--json", "--within=30", f"--kubeconfig={control_plane.kubeconfig}"]
    assert cli.run(given) == 0
    assert json.loads(capsys.readouterr().out)["quiet"] is True

    assert switch.turn_on()
    sidecar.next("policy", what=lambda policy: policy.mode == "harvest")
    again = sidecar.next("assign")
    sidecar.report(again, "STARTED")
    sidecar.beat(running(again, step=2, total_steps=100))
    cluster.await_state("Running")

    # The chart's hook does the same, and does not call it done before it is proven.
    arguments = [f"--namespace={NAMESPACE}", f"--kubeconfig={control_plane.kubeconfig}"]
    assert uninstall.main([*arguments, "--within=0.5"]) == 1
    assert "not every slot was proven off" in capsys.readouterr().err
    sidecar.next("command", what=lambda command: command.action == pb.JobCommand.STOP)
    sidecar.report(again, "STOPPED", progress=pb.Progress(step=2, checkpoint_step=2))
    assert uninstall.main([*arguments, "--within=60"]) == 0
    assert uninstall.main([*arguments, "--clear"]) == 0
    sidecar.next("policy", what=lambda policy: policy.mode == "harvest")


def test_an_engine_that_is_refused_is_counted_and_the_job_is_told_the_plugins_reason(cluster):
    cluster.policy()
    pod = cluster.pod()
    why = "not started: --tp-size: 2 is not supported yet. Use --tp-size 1."
    sidecar = cluster.attach(pod, facts=False)
    hello = pb.SidecarHello(
        protocol_version=1,
        pod_uid=pod.metadata.uid,
        windrow_version="0.0.9",
        slots=[pb.SlotFacts(index=0, refused=why, max_jobs=1)],
    )
    sidecar.say(hello=hello)
    sidecar.beat(engine_state="starting")

    def refused():
        status = next((found.get("status") or {} for found in cluster.list("harvestslots")), {})
        ready = get_condition(status.get("conditions"), "Ready") or {}
        return (status, ready) if ready.get("reason") == "EngineRefused" else None

    status, ready = wait_until(refused, "the slot says that its engine is refused")
    assert ready["status"] == "False"
    assert why in ready["message"]
    assert status["sidecarVersion"] == "0.0.9"

    def counted():
        # The slot may be written before the policy has a status at all.
        status = cluster.get("harvestpolicies", "chat").get("status", {})
        return status if status.get("refused") == 1 else None

    held = wait_until(counted, "the policy counts a refused engine")["conditions"]
    selects = next(c for c in held if c["type"] == "SelectsPods")
    assert selects["message"].endswith(f"the first: decode-0: {why}")
    cluster.job()
    wait_until(lambda: why in cluster.condition("Placed").get("message", ""), "the job says why")


def slot(*, attached="True", mode="off", jobs=(), ready="PolicyOff"):
    conditions = [
        {"type": "Attached", "status": attached, "reason": "X", "message": ""},
        {"type": "Ready", "status": "False", "reason": ready, "message": "why"},
    ]
    status = {"conditions": conditions, "mode": mode, "jobs": list(jobs)}
    return {"metadata": {"namespace": "a", "name": "s"}, "status": status}


@pytest.mark.parametrize(
    ("found", "quiet", "words"),
    [
        (slot(), True, "off, no job"),
        (slot(mode="observe"), True, "off, no job"),
        (slot(mode="harvest"), False, "it may get one"),
        (slot(mode="harvest", ready="EngineRefused"), True, "off, no job"),
        (slot(jobs=[{"name": "x"}]), False, "runs"),
        (slot(attached="False"), False, "not connected"),
        ({"metadata": {"namespace": "a", "name": "s"}}, False, "not connected"),
    ],
)
def test_a_slot_is_quiet_only_where_that_is_proven(found, quiet, words):
    said = quiet_of(found)
    assert said.quiet is quiet
    assert words in said.state
