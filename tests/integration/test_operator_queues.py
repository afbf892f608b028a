"""Jobs with a queue label, by the operator with its chart's rights, on Kueue's own definitions.

What Kueue's controller writes is written by the tests here; tests/e2e/test_queues_of_kueue.py has
the controller itself.
"""

import os
import re
from datetime import UTC, datetime, timedelta

import pytest
import yaml
from kubernetes import client
from operator_process import HURRIED, ROOT, Cluster, OperatorProcess, install_crds, running
from support import kueue
from support.chart import ACCOUNT, rules_of
from two_tenants import operators_kubeconfig, take_back
from waiting import wait_until

from windrow.proto import attach_pb2 as pb

QUEUED = {"kueue.x-k8s.io/queue-name": "tuning"}
CHECK = "harvest-headroom"


@pytest.fixture(scope="module")
def operator(control_plane, kube, tmp_path_factory):
    """The operator with its chart's rights, on a cluster without Kueue."""
    install_crds(kube)
    account = operators_kubeconfig(kube, control_plane, tmp_path_factory.mktemp("account"))
    process = OperatorProcess(account, tmp_path_factory.mktemp("operator"), *HURRIED)
    process.start()
    yield process
    process.end()
    take_back(kube)
    print(process.log.read_text()[-20000:])


@pytest.fixture(scope="module")
def definitions(operator, kube):
    """Kueue's definitions, from here to the end of the module."""
    module = kueue.sources(os.environ)
    if module is None:
        pytest.skip("no Go, or no network for Kueue's module")
    kueue.install(kube, module)
    yield
    kueue.remove(kube, module)


@pytest.fixture
def cluster(kube, namespace, operator):
    cluster = Cluster(kube, namespace, operator)
    yield cluster
    cluster.close()


@pytest.fixture
def queues(kube, namespace, definitions):
    return kueue.Queues(kube, namespace)


def now(minus=timedelta(0)):
    return (datetime.now(UTC) - minus).strftime("%Y-%m-%dT%H:%M:%SZ")


def fact(type_, status, reason, message="", *, at=None):
    return {
        "type": type_,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": at or now(),
    }


def reserved(*, at=None, checks=()):
    """Return the status of a Workload that has quota, as Kueue's scheduler writes it."""
    usage = {"windrow.dev/harvest-slots": "1"}
    flavors = {"windrow.dev/harvest-slots": "harvested"}
    assignment = {"name": "main", "count": 1, "flavors": flavors, "resourceUsage": usage}
    status = {
        "admission": {"clusterQueue": "all", "podSetAssignments": [assignment]},
        "conditions": [fact("QuotaReserved", "True", "QuotaReserved", at=at)],
    }
    if checks:
        pending = {"state": "Pending", "message": "", "lastTransitionTime": at or now()}
        status["admissionChecks"] = [{"name": name, **pending} for name in checks]
    return status


def admit(queues, job):
    status = reserved()
    status["conditions"].append(fact("Admitted", "True", "Admitted"))
    queues.write_status(job, status)


def evict(queues, job, reason="Preempted", message="Preempted to accommodate a workload"):
    held = queues.workload_of(job)["status"]["conditions"]
    queues.write_status(job, {"conditions": [*held, fact("Evicted", "True", reason, message)]})


def slot(cluster):
    cluster.policy()
    sidecar = cluster.attach(cluster.pod())
    sidecar.beat()
    return sidecar


def run(sidecar, cluster):
    """Start what is assigned."""
    assigned = sidecar.next("assign")
    sidecar.report(assigned, "STARTED")
    sidecar.beat(running(assigned, step=10, total_steps=100))
    cluster.await_state("Running")
    return assigned


def stop(sidecar):
    """Obey a STOP as a worker does: a checkpoint, then the end."""
    told = sidecar.next("command", what=lambda command: command.action == pb.JobCommand.STOP)
    written = pb.Progress(step=12, checkpoint_step=12, checkpoint_path="/x/step-00000012-00000")
    sidecar.report(told, "STOPPED", progress=written)
    return told


def test_without_kueue_a_job_with_a_queue_says_so_and_does_not_run(cluster):
    sidecar = slot(cluster)
    cluster.job(labels=QUEUED)
    wait_until(
        lambda: cluster.condition("Admitted").get("reason") == "QueueUnavailable", "it says so"
    )
    placed = cluster.condition("Placed")
    assert placed["reason"] == "QueueUnavailable"
    assert "serves no kueue.x-k8s.io/v1beta2: install Kueue 0.15" in placed["message"]
    assert not cluster.status().get("slot")
    # The remedy that the message names.
    cluster.label_job(**{"kueue.x-k8s.io/queue-name": None})
    assert sidecar.next("assign").job_name == "tone"
    assert not cluster.condition("Admitted")


@pytest.mark.extended
def test_the_example_is_what_kueues_definitions_take(queues):
    bodies = list(yaml.safe_load_all((ROOT / "examples" / "kueue.yaml").read_text()))
    assert len(bodies) == 5
    strict = {"field_validation": "Strict", "dry_run": "All"}
    for body in bodies:
        plural = f"{body['kind'].lower()}s".replace("classs", "classes")
        where = (kueue.GROUP, kueue.VERSION)
        if body["metadata"].get("namespace"):
            where = (*where, body["metadata"]["namespace"])
            queues.custom.create_namespaced_custom_object(*where, plural, body, **strict)
        else:
            queues.custom.create_cluster_custom_object(*where, plural, body, **strict)


def test_a_job_has_a_workload_waits_for_admission_and_ends_with_it(cluster, queues):
    sidecar = slot(cluster)
    job = cluster.job(labels=QUEUED)
    workload = queues.await_workload("tone")
    assert workload["spec"]["queueName"] == "tuning"
    (pods,) = workload["spec"]["podSets"]
    (container,) = pods["template"]["spec"]["containers"]
    assert container["resources"]["requests"] == {"windrow.dev/harvest-slots": "1"}
    (owner,) = workload["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"]) == (job["metadata"]["uid"], True)
    cluster.await_state("Queued")
    said = "couldn't assign flavors to pod set main: insufficient quota"
    queues.write_status("tone", {"conditions": [fact("QuotaReserved", "False", "Pending", said)]})
    wait_until(lambda: said in cluster.condition("Placed")["message"], "it says what Kueue says")
    assert "slot" not in cluster.status()
    admit(queues, "tone")
    assigned = run(sidecar, cluster)
    assert cluster.condition("Admitted")["message"] == "Admitted by ClusterQueue all"
    wait_until(
        lambda: queues.condition("tone", "PodsReady").get("status") == "True", "Kueue knows it runs"
    )
    sidecar.report(assigned, "SUCCEEDED", adapter_path="/out/tone")
    cluster.await_state("Succeeded")
    ended = wait_until(lambda: queues.condition("tone", "Finished"), "the Workload is finished")
    assert (ended["status"], ended["reason"]) == ("True", "Succeeded")


@pytest.mark.extended
def test_a_job_that_is_evicted_stops_with_a_checkpoint_and_gives_its_quota_back(cluster, queues):
    sidecar = slot(cluster)
    cluster.job(labels=QUEUED)
    queues.await_workload("tone")
    admit(queues, "tone")
    run(sidecar, cluster)
    evict(queues, "tone")
    told = sidecar.next("command", what=lambda command: command.action == pb.JobCommand.STOP)
    assert "LocalQueue tuning does not admit it any more" in told.reason
    # Quota stays until the worker has stopped: who follows may have the very slot.
    assert queues.condition("tone", "QuotaReserved")["status"] == "True"
    written = pb.Progress(step=12, checkpoint_step=12, checkpoint_path="/x/step-00000012-00000")
    sidecar.report(told, "STOPPED", progress=written)
    cluster.await_state("Queued")
    wait_until(
        lambda: queues.condition("tone", "QuotaReserved")["status"] == "False", "quota is back"
    )
    assert "admission" not in queues.workload_of("tone")["status"]
    assert queues.condition("tone", "Admitted")["status"] == "False"
    assert queues.condition("tone", "Requeued")["status"] == "True"
    status = cluster.status()
    assert status["evictions"] == [{"reason": "QueueEvicted", "count": 1}]
    assert status["checkpoint"]["step"] == 12
    held = queues.workload_of("tone")["status"]["conditions"]
    kept = [each for each in held if each["type"] not in ("Evicted", "QuotaReserved", "Admitted")]
    admitted = reserved()
    admitted["conditions"] += [*kept, fact("Admitted", "True", "Admitted")]
    queues.write_status("tone", admitted)
    again = sidecar.next("assign")
    assert again.epoch == 2
    assert again.checkpoint_path.endswith("step-00000012-00000")


@pytest.mark.extended
def test_a_workload_that_somebody_deletes_ends_the_admission_and_is_made_again(cluster, queues):
    sidecar = slot(cluster)
    cluster.job(labels=QUEUED)
    first = queues.await_workload("tone")
    admit(queues, "tone")
    run(sidecar, cluster)
    queues.delete_workload("tone")
    stop(sidecar)
    cluster.await_state("Queued")
    assert queues.await_workload("tone")["metadata"]["uid"] != first["metadata"]["uid"]


@pytest.mark.extended
def test_a_suspended_job_has_no_quota_and_its_queue_may_change(cluster, queues):
    sidecar = slot(cluster)
    cluster.job(labels=QUEUED)
    queues.await_workload("tone")
    admit(queues, "tone")
    run(sidecar, cluster)
    cluster.patch_job(suspend=True)
    stop(sidecar)
    cluster.await_state("Suspended")
    wait_until(lambda: not queues.workload_of("tone"), "no Workload is left")
    cluster.label_job(**{"kueue.x-k8s.io/queue-name": "night"})
    cluster.patch_job(suspend=False)
    assert queues.await_workload("tone")["spec"]["queueName"] == "night"
    cluster.label_job(**QUEUED)
    wait_until(
        lambda: (
            queues.workload_of("tone")
            and queues.workload_of("tone")["spec"]["queueName"] == "tuning"
        ),
        "the Workload moves to the other queue",
    )
    admit(queues, "tone")
    assert sidecar.next("assign").epoch == 2


@pytest.mark.extended
def test_a_workload_that_asks_for_less_than_a_slot_does_not_admit_its_job(cluster, queues):
    slot(cluster)
    cluster.job(labels=QUEUED)
    mine = queues.await_workload("tone")
    container = mine["spec"]["podSets"][0]["template"]["spec"]["containers"][0]
    container["resources"] = {"requests": {"windrow.dev/harvest-slots": "0"}}
    queues.patch_workload("tone", {"podSets": mine["spec"]["podSets"]})
    admit(queues, "tone")
    wait_until(
        lambda: queues.await_workload("tone")["metadata"]["uid"] != mine["metadata"]["uid"],
        "the Workload is made anew",
    )
    assert cluster.await_state("Queued")["state"] == "Queued"


@pytest.mark.extended
def test_a_check_of_headroom_sends_a_job_back_and_admits_it_once_a_slot_takes_it(cluster, queues):
    spec = {"controllerName": "windrow.dev/headroom"}
    least = {"windrow.dev/least-tokens-per-second": "5000"}
    queues.create("admissionchecks", "AdmissionCheck", CHECK, spec, annotations=least)
    cluster.job(labels=QUEUED)
    queues.await_workload("tone")

    def active():
        held = queues.get("admissionchecks", CHECK).get("status", {}).get("conditions", ())
        return [each["status"] for each in held if each["type"] == "Active"] == ["True"]

    wait_until(active, "the check is answered for")

    def state():
        (found,) = queues.workload_of("tone")["status"]["admissionChecks"]
        return found

    long_ago = now(minus=timedelta(minutes=2))
    queues.write_status("tone", reserved(at=long_ago, checks=[CHECK]))
    wait_until(lambda: state()["state"] == "Retry", "no slot takes it")
    assert "No slot is open to namespace" in state()["message"]
    assert state()["requeueAfterSeconds"] == 15
    evict(queues, "tone", "AdmissionCheck", "At least one admission check is false")
    wait_until(
        lambda: queues.condition("tone", "QuotaReserved")["status"] == "False", "quota is back"
    )
    assert queues.condition("tone", "Requeued")["status"] == "False"
    wait_until(
        lambda: "No headroom: No slot is open" in cluster.condition("Placed")["message"],
        "the job says why",
    )
    sidecar = slot(cluster)
    sidecar.beat(predicted_tokens_per_second=9600)
    queues.write_status("tone", {"conditions": None})
    queues.write_status("tone", reserved(at=long_ago, checks=[CHECK]))
    wait_until(lambda: state()["state"] == "Ready", "the slot takes it")
    assert "predicts 9.6k tok/s" in state()["message"]
    assert not cluster.status().get("slot")  # Kueue admits, not the check


def test_an_operator_without_rights_in_kueue_says_so_and_what_gives_them(kube, cluster, queues):
    rbac, rules = client.RbacAuthorizationV1Api(kube), rules_of("ClusterRole")
    less = [rule for rule in rules if "kueue.x-k8s.io" not in rule["apiGroups"]]
    assert len(less) < len(rules)
    rbac.patch_cluster_role(ACCOUNT, {"rules": less})
    try:
        slot(cluster)
        cluster.job(labels=QUEUED)
        wait_until(
            lambda: cluster.condition("Admitted").get("reason") == "QueueUnavailable", "it says so"
        )
        message = cluster.condition("Placed")["message"]
        # A watch that runs goes on: what is refused first is to make the Workload.
        assert re.search("cannot (list|watch|create) resource", message)
        assert "Set kueue.enabled in the chart's values" in message
        assert not cluster.status().get("slot")
    finally:
        rbac.patch_cluster_role(ACCOUNT, {"rules": rules})
    queues.await_workload("tone")
    cluster.await_state("Queued")


@pytest.mark.extended
def test_a_priority_class_that_does_not_exist_is_named(cluster, queues):
    cluster.job(labels={**QUEUED, "kueue.x-k8s.io/priority-class": "rush"})
    wait_until(
        lambda: (
            "there is no WorkloadPriorityClass 'rush'"
            in cluster.condition("Placed").get("message", "")
        ),
        "it says so",
    )
    assert queues.workloads() == []
