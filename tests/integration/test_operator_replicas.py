"""Two replicas of the operator on a real API server: one acts, whatever is done to either."""

import asyncio
import os
import signal
import ssl
import time
import urllib.request
from datetime import UTC, datetime

import grpc
import pytest
from kubernetes import client
from operator_process import OWN_NAMESPACE, Cluster, OperatorProcess, install_crds, running
from waiting import wait_until

from windrow.rundir import LEADER_METADATA
from windrow_operator.kube import Kube, ObjectNotFound
from windrow_operator.lease import LEASE, LeaderLease, LeaseTimes

TAKEN_OVER_WITHIN_S = 15.0
PATIENCE = ("--backoff-base-seconds", "0.2")


class Replicas:
    """Two operators; `leader` and `other` are looked up again each time."""

    def __init__(self, kubeconfig, directory, kube):
        self.kube = kube
        self.both = []
        for name in ("a", "b"):
            (directory / name).mkdir()
            self.both.append(
                OperatorProcess(kubeconfig, directory / name, *PATIENCE, identity=f"replica-{name}")
            )

    def start(self):
        self.both[0].start()
        self.both[1].begin()
        wait_until(self.both[1].stands_by, "the second stands by")

    @property
    def leader(self):
        return next(one for one in self.both if one.process.poll() is None and one.leads())

    @property
    def other(self):
        leader = self.leader
        return next(one for one in self.both if one is not leader)

    def lease(self):
        return client.CoordinationV1Api(self.kube).read_namespaced_lease(
            "windrow-operator", OWN_NAMESPACE
        )

    def end(self):
        for one in self.both:
            if one.process is not None and one.process.poll() is None:
                one.process.send_signal(signal.SIGCONT)
                one.process.terminate()
        for one in self.both:
            one.process.wait(30)
            print(one.log.read_text()[-8000:])


@pytest.fixture
def replicas(control_plane, kube, tmp_path):
    install_crds(kube)
    replicas = Replicas(control_plane.kubeconfig, tmp_path, kube)
    replicas.start()
    yield replicas
    replicas.end()
    client.AdmissionregistrationV1Api(kube).delete_mutating_webhook_configuration(
        "windrow-operator"
    )


@pytest.fixture
def cluster(replicas, kube, namespace):
    cluster = Cluster(kube, namespace, replicas.leader)
    yield cluster
    cluster.close()


def run_a_job(cluster):
    """Return the sidecar, the assignment and the pod of a job that runs."""
    cluster.policy()
    pod = cluster.pod()
    sidecar = cluster.attach(pod)
    sidecar.beat()
    cluster.job()
    assigned = sidecar.next("assign")
    sidecar.report(assigned, "STARTED")
    sidecar.beat(running(assigned, step=1, total_steps=100, loss=3.0))
    cluster.await_state("Running")
    return sidecar, assigned, pod


def goes_on(cluster, sidecar, assigned, steps):
    """Let the job take these steps, each seen in its status under the epoch that it had."""
    for step in steps:
        sidecar.beat(running(assigned, step=step, total_steps=100, loss=2.0))
        wait_until(lambda s=step: cluster.status().get("step") == f"{s}/100", f"step {step}")
        status = cluster.status()
        assert (status["epoch"], status["state"]) == (assigned.epoch, "Running")


def taken_over_by(replicas, one, since):
    wait_until(one.leads, "the other replica leads")
    assert time.monotonic() - since < TAKEN_OVER_WITHIN_S
    assert replicas.lease().spec.holder_identity == one.identity


def test_one_acts_and_the_other_names_it(replicas, cluster):
    leader, other = replicas.leader, replicas.other
    sidecar, assigned, _ = run_a_job(cluster)
    assert assigned.leader_term == leader.state["term"]
    refused = cluster.attach(cluster.pod("decode-1"), to=other)
    assert refused.refusal() == grpc.StatusCode.UNAVAILABLE
    named = dict(refused.error.trailing_metadata())[LEADER_METADATA]
    assert named == f"127.0.0.1:{leader.state['attachPort']}"
    goes_on(cluster, sidecar, assigned, range(2, 8))
    events = cluster.core.list_namespaced_event(cluster.namespace).items
    assert [e.reason for e in events].count("Placed") == 1
    for one in (leader, other):
        assert ready(one)
        assert reviews(one, cluster)


def ready(operator):
    url = f"http://127.0.0.1:{operator.state['metricsPort']}/readyz"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.status == 200


def reviews(operator, cluster):
    """Return whether a replica answers an AdmissionReview."""
    body = (
        b'{"request": {"uid": "u", "namespace": "default", "object": {"metadata": {}, "spec": {}}}}'
    )
    context = ssl._create_unverified_context()
    request = urllib.request.Request(
        f"https://127.0.0.1:{operator.state['webhookPort']}{cluster.webhook_path()}",
        body,
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=10, context=context) as answer:
        return b'"allowed": true' in answer.read()


def test_a_leader_that_is_killed_is_followed_and_its_job_stays(replicas, cluster):
    leader, other = replicas.leader, replicas.other
    _, assigned, pod = run_a_job(cluster)
    term = leader.state["term"]
    killed_at = time.monotonic()
    leader.end(signal.SIGKILL)
    taken_over_by(replicas, other, killed_at)
    assert other.state["term"] > term
    sidecar = cluster.attach(pod, to=other, running=[running(assigned, step=5, total_steps=100)])
    sidecar.beat(running(assigned, step=5, total_steps=100, loss=2.0))
    goes_on(cluster, sidecar, assigned, range(6, 9))


def test_a_leader_that_ends_hands_over_at_once(replicas, cluster):
    leader, other = replicas.leader, replicas.other
    began = time.monotonic()
    leader.end()
    wait_until(other.leads, "the other replica leads")
    # Two looks at the Lease, not its duration.
    assert time.monotonic() - began < 8.0


@pytest.mark.extended
def test_a_leader_that_was_stopped_can_do_nothing_when_it_goes_on(replicas, cluster):
    former, other = replicas.leader, replicas.other
    _, assigned, pod = run_a_job(cluster)
    os.kill(former.process.pid, signal.SIGSTOP)
    stopped_at = time.monotonic()
    taken_over_by(replicas, other, stopped_at)
    sidecar = cluster.attach(pod, to=other, running=[running(assigned, step=5, total_steps=100)])
    sidecar.beat(running(assigned, step=5, total_steps=100, loss=2.0))
    goes_on(cluster, sidecar, assigned, [6])
    term = other.state["term"]
    os.kill(former.process.pid, signal.SIGCONT)
    # At once, before it has looked at anything: it knows by its own clock.
    late = cluster.attach(pod, to=former, leader_term=term)
    assert late.refusal() == grpc.StatusCode.UNAVAILABLE
    wait_until(former.stands_by, "the former leader stands by")
    goes_on(cluster, sidecar, assigned, range(7, 12))
    assert replicas.lease().spec.holder_identity == other.identity
    events = cluster.core.list_namespaced_event(cluster.namespace).items
    assert [e.reason for e in events].count("Placed") == 1


@pytest.mark.extended
def test_a_registration_that_somebody_changed_is_restored(replicas, kube):
    api = client.AdmissionregistrationV1Api(kube)
    name = "windrow-operator"
    ours = api.read_mutating_webhook_configuration(name).webhooks[0].client_config.url
    assert f":{replicas.leader.state['webhookPort']}/" in ours
    dead = [
        {"op": "replace", "path": "/webhooks/0/clientConfig/url", "value": "https://127.0.0.1:1/x"}
    ]
    api.patch_mutating_webhook_configuration(name, dead)
    restored = lambda: (  # noqa: E731
        api.read_mutating_webhook_configuration(name).webhooks[0].client_config.url == ours
    )
    wait_until(restored, "the registration is restored")
    api.delete_mutating_webhook_configuration(name)
    there = lambda: [  # noqa: E731
        c for c in api.list_mutating_webhook_configuration().items if c.metadata.name == name
    ]
    wait_until(there, "the registration is there again")


@pytest.mark.extended
async def test_a_lease_that_is_deleted_is_made_again_in_the_same_term(control_plane, namespace):
    server = await Kube.connect(control_plane.kubeconfig)
    lease = LeaderLease(
        server,
        namespace,
        "a",
        "127.0.0.1:1",
        clock=lambda: datetime.now(UTC),
        times=LeaseTimes(retry=0.05),
    )
    keeping = asyncio.create_task(lease.run())
    try:
        async with asyncio.timeout(10):  # long before it would give the term up
            await lease.acquired.wait()
            term = lease.term
            path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{LEASE}"
            first = await server.get(path)
            await server.delete(path)
            found = await until(lambda: _found(server, path))
        assert found["metadata"]["uid"] != first["metadata"]["uid"]
        assert found["spec"]["acquireTime"] == first["spec"]["acquireTime"]
        assert (lease.term, lease.holds()) == (term, True)
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await server.close()


async def until(read):
    while (found := await read()) is None:  # noqa: ASYNC110 - the server tells nobody
        await asyncio.sleep(0.05)
    return found


async def _found(server, path):
    try:
        return await server.get(path)
    except ObjectNotFound:
        return None
