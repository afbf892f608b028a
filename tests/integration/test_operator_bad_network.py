"""The operator behind a network and an API server that misbehave: nothing is lost or done twice."""

from __future__ import annotations

import pytest
from api_proxy import ApiProxy, Fault
from operator_process import HURRIED, LISTS_OFTEN, Cluster, OperatorProcess, install_crds, running
from waiting import wait_until

from windrow.crd import FINETUNE_JOB, HARVEST_POLICY


@pytest.fixture
def proxy(control_plane, tmp_path):
    made = ApiProxy(control_plane.kubeconfig, tmp_path)
    yield made
    made.close()


@pytest.fixture
def cluster(kube, namespace, proxy, tmp_path):
    """A Cluster whose operator, and nobody else, reaches the API server through the proxy."""
    install_crds(kube)
    operator = OperatorProcess(
        proxy.kubeconfig,
        tmp_path,
        *HURRIED,
        *LISTS_OFTEN,
    )
    operator.start()
    made = Cluster(kube, namespace, operator)
    yield made
    made.close()
    if operator.process.poll() is None:
        operator.end()
    print(operator.log.read_text()[-20000:])


@pytest.fixture
def slot(cluster):
    """A sidecar that takes jobs."""
    cluster.policy()
    sidecar = cluster.attach(cluster.pod())
    sidecar.beat()
    return sidecar


def writes(method, path):
    return method != "GET" and "/finetunejobs/" in path


def watches(*kinds):
    return lambda method, path: "watch=true" in path and any(kind in path for kind in kinds)


def succeeds(cluster, slot, assigned):
    """Let the job run to its end; it was placed once, and nobody was told of another placement."""
    slot.report(assigned, "STARTED")
    slot.beat(running(assigned, step=1, total_steps=100, loss=3.5))
    cluster.await_state("Running")
    slot.report(assigned, "SUCCEEDED", adapter_path="/out/tone")
    assert cluster.await_state("Succeeded")["epoch"] == assigned.epoch
    others = [m.assign.epoch for m in slot.told if m.WhichOneof("message") == "assign"]
    assert set(others) <= {assigned.epoch}
    assert not [m for m in slot.told if m.WhichOneof("message") == "command"]


@pytest.mark.parametrize(
    ("status", "retry_after"), [(409, ""), (429, "0"), (429, ""), (503, "1"), (500, "")]
)
def test_a_storm_of_refused_writes_places_a_job_once(cluster, slot, proxy, status, retry_after):
    storm = Fault(writes, "refuse", status=status, retry_after=retry_after, times=12)
    proxy.faults.append(storm)
    cluster.job()
    assigned = slot.next("assign")
    assert storm.hit == storm.times
    assert assigned.epoch == 1
    succeeds(cluster, slot, assigned)


def test_an_answer_that_never_comes_back_places_a_job_once(cluster, slot, proxy):
    """A network that is cut in one direction: the status is written, nobody hears so."""
    lost = Fault(writes, "lose", times=2)
    proxy.faults.append(lost)
    cluster.job()
    assigned = slot.next("assign")
    assert lost.hit == 2
    succeeds(cluster, slot, assigned)


@pytest.mark.extended
@pytest.mark.timeout(240)
def test_a_watch_that_tells_of_nothing_is_made_up_for_by_a_listing(cluster, slot, proxy):
    silence = Fault(watches(FINETUNE_JOB.plural, HARVEST_POLICY.plural), "mute")
    proxy.faults.append(silence)
    cluster.job()
    wait_until(lambda: silence.hit, "something that the watch does not tell")
    # The next listing waits five seconds for what a watch may still tell.
    wait_until(lambda: cluster.status().get("epoch"), "a placement", seconds=120)
    proxy.faults.clear()
    proxy.break_watches()
    succeeds(cluster, slot, slot.next("assign"))


def test_a_watch_whose_version_has_expired_begins_anew_with_what_it_missed(cluster, slot, proxy):
    cluster.job("gone")
    deleted = slot.next("assign")
    closed = Fault(watches(FINETUNE_JOB.plural), "refuse", status=503)
    proxy.faults.append(closed)
    proxy.break_watches()
    wait_until(lambda: closed.hit, "no watch is open")
    cluster.delete_job("gone")
    cluster.job()
    expired = Fault(watches(FINETUNE_JOB.plural), "expire", times=1)
    proxy.faults[:] = [expired]
    wait_until(lambda: expired.hit, "the watch is told that its version has expired")
    assert slot.next("command").job_uid == deleted.job_uid
    slot.report(deleted, "STOPPED")
    succeeds(cluster, slot, slot.next("assign"))
