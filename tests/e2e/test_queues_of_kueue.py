"""Jobs in queues of Kueue: the operator with its chart's rights, and Kueue's own controller."""

import os

import pytest
from operator_process import HURRIED, Cluster, OperatorProcess, install_crds, running
from support import kueue
from two_tenants import operators_kubeconfig, take_back
from waiting import wait_until

from windrow.proto import attach_pb2 as pb
from windrow_lab.machine.build import build_tools
from windrow_lab.machine.progress import LineProgress
from windrow_lab.machine.tools import KUEUE

# The build takes minutes; nothing else does.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

SLOTS = "windrow.dev/harvest-slots"


@pytest.fixture(scope="module")
def operator(control_plane, kube, tmp_path_factory):
    """The operator with its chart's rights, where Kueue's controller is at work."""
    module = kueue.sources(os.environ)
    if module is None:
        pytest.skip("no Go, or no network for Kueue's module")
    built = build_tools(LineProgress(print), os.environ, KUEUE)
    install_crds(kube)
    kueue.install(kube, module)
    controller = kueue.KueueProcess(
        built / "kueue", module, kube, control_plane.kubeconfig, tmp_path_factory.mktemp("kueue")
    )
    controller.start()
    account = operators_kubeconfig(kube, control_plane, tmp_path_factory.mktemp("account"))
    process = OperatorProcess(account, tmp_path_factory.mktemp("operator"), *HURRIED)
    process.start()
    yield process
    process.end()
    take_back(kube)
    kueue.remove(kube, module)
    controller.end()
    print(process.log.read_text()[-10000:])
    print(controller.log.read_text()[-20000:])


@pytest.fixture
def cluster(kube, namespace, operator):
    cluster = Cluster(kube, namespace, operator)
    yield cluster
    cluster.close()


@pytest.fixture
def queues(kube, namespace):
    """A LocalQueue `tuning` with quota for one job, and room for checks."""
    return kueue.Queues(kube, namespace)


def make_queue(queues, *, quota="1", checks=(), preemption=None):
    """Make a flavor, a ClusterQueue with so many slots, and the LocalQueue `tuning` on it."""
    name = queues.namespace
    queues.create("resourceflavors", "ResourceFlavor", name, {})
    resource = {"name": SLOTS, "nominalQuota": quota}
    spec = {
        "namespaceSelector": {},
        "resourceGroups": [
            {"coveredResources": [SLOTS], "flavors": [{"name": name, "resources": [resource]}]}
        ],
    }
    if preemption:
        spec["preemption"] = preemption
    if checks:
        spec["admissionChecksStrategy"] = {"admissionChecks": [{"name": each} for each in checks]}
    queues.create("clusterqueues", "ClusterQueue", name, spec)
    queues.create("localqueues", "LocalQueue", "tuning", {"clusterQueue": name}, everywhere=False)


def slot(cluster, name="decode-0"):
    sidecar = cluster.attach(cluster.pod(name))
    sidecar.beat()
    return sidecar


def run(sidecar, assigned, **progress):
    sidecar.report(assigned, "STARTED")
    sidecar.beat(running(assigned, **{"step": 10, "total_steps": 100, **progress}))


def stop(sidecar):
    """Obey a STOP as a worker does: a checkpoint, then the end."""
    told = sidecar.next("command", what=lambda command: command.action == pb.JobCommand.STOP)
    written = pb.Progress(step=10, checkpoint_step=10, checkpoint_path="/x/step-00000010-00000")
    sidecar.report(told, "STOPPED", progress=written)
    return told


def test_one_of_two_jobs_runs_at_a_time_and_the_second_follows(cluster, queues):
    make_queue(queues)
    cluster.policy()
    first, second = slot(cluster), slot(cluster, "decode-1")
    cluster.job("one", labels={"kueue.x-k8s.io/queue-name": "tuning"})
    cluster.await_state("Placed", "one")
    assert "ClusterQueue" in cluster.condition("Admitted", "one")["message"]
    cluster.job("two", labels={"kueue.x-k8s.io/queue-name": "tuning"})
    cluster.await_state("Queued", "two")
    wait_until(
        lambda: "insufficient" in cluster.condition("Placed", "two")["message"],
        "the job says what Kueue says",
    )
    at = first if cluster.status("one")["slot"].endswith("decode-0") else second
    assigned = at.next("assign")
    run(at, assigned)
    cluster.await_state("Running", "one")
    wait_until(
        lambda: queues.condition("one", "PodsReady").get("status") == "True", "the job is ready"
    )
    at.report(assigned, "SUCCEEDED", adapter_path="/out/one")
    cluster.await_state("Succeeded", "one")
    finished = wait_until(lambda: queues.condition("one", "Finished"), "the Workload is finished")
    assert (finished["status"], finished["reason"]) == ("True", "Succeeded")
    cluster.await_state("Placed", "two")


def test_a_job_of_higher_priority_evicts_one_which_resumes_from_its_checkpoint(cluster, queues):
    make_queue(queues, preemption={"withinClusterQueue": "LowerPriority"})
    classes = f"urgent-{queues.namespace}"
    queues.custom.create_cluster_custom_object(
        *(kueue.GROUP, kueue.VERSION, "workloadpriorityclasses"),
        {
            "apiVersion": f"{kueue.GROUP}/{kueue.VERSION}",
            "kind": "WorkloadPriorityClass",
            "metadata": {"name": classes},
            "value": 1000,
        },
    )
    cluster.policy()
    sidecar = slot(cluster)
    cluster.job("calm", labels={"kueue.x-k8s.io/queue-name": "tuning"})
    run(sidecar, sidecar.next("assign"))
    cluster.await_state("Running", "calm")
    labels = {"kueue.x-k8s.io/queue-name": "tuning", "kueue.x-k8s.io/priority-class": classes}
    cluster.job("rushed", labels=labels)
    told = stop(sidecar)
    assert "Preempted" in told.reason
    cluster.await_state("Queued", "calm")
    assert cluster.status("calm")["evictions"] == [{"reason": "QueueEvicted", "count": 1}]
    assigned = sidecar.next("assign")
    assert assigned.job_name == "rushed"
    run(sidecar, assigned)
    sidecar.report(assigned, "SUCCEEDED", adapter_path="/out/rushed")
    again = sidecar.next("assign")
    assert (again.job_name, again.epoch) == ("calm", 2)
    assert again.checkpoint_path.endswith("checkpoints/step-00000010-00000")


def test_a_workload_that_is_deactivated_stops_its_job_until_it_is_active_again(cluster, queues):
    make_queue(queues)
    cluster.policy()
    sidecar = slot(cluster)
    cluster.job(labels={"kueue.x-k8s.io/queue-name": "tuning"})
    run(sidecar, sidecar.next("assign"))
    cluster.await_state("Running")
    queues.patch_workload("tone", {"active": False})
    stop(sidecar)
    cluster.await_state("Queued")
    wait_until(
        lambda: queues.condition("tone", "QuotaReserved").get("status") == "False", "quota is back"
    )
    wait_until(
        lambda: "deactivated" in cluster.condition("Admitted")["message"], "the job says why"
    )
    queues.patch_workload("tone", {"active": True})
    assert sidecar.next("assign").epoch == 2


def test_a_check_of_headroom_admits_a_job_once_a_slot_takes_it(cluster, queues):
    check = f"headroom-{queues.namespace}"
    least = {"windrow.dev/least-tokens-per-second": "5000"}
    spec = {"controllerName": "windrow.dev/headroom"}
    queues.create("admissionchecks", "AdmissionCheck", check, spec, annotations=least)
    make_queue(queues, checks=[check])
    cluster.policy()
    cluster.job(labels={"kueue.x-k8s.io/queue-name": "tuning"})
    wait_until(
        lambda: "waits for admission checks" in cluster.condition("Placed").get("message", ""),
        "the job has quota and waits for the check",
    )
    wait_until(  # within 30 s: a sidecar might come
        lambda: "No headroom: No slot is open" in cluster.condition("Placed").get("message", ""),
        "the job gave its quota back for want of a slot",
    )
    assert queues.condition("tone", "QuotaReserved")["status"] == "False"
    sidecar = slot(cluster)
    assert sidecar.next("assign").job_name == "tone"
    (state,) = queues.workload_of("tone")["status"]["admissionChecks"]
    assert (state["state"], state["name"]) == ("Ready", check)
    assert "decode-0 predicts 9.6k tok/s" in state["message"]


def test_a_queue_that_does_not_exist_is_named_and_the_job_moves_to_one_that_does(cluster, queues):
    make_queue(queues)
    cluster.policy()
    sidecar = slot(cluster)
    cluster.job(labels={"kueue.x-k8s.io/queue-name": "nowhere"})
    cluster.await_state("Queued")
    wait_until(
        lambda: "nowhere doesn't exist" in cluster.condition("Placed")["message"],
        "the job says what Kueue says",
    )
    cluster.label_job(**{"kueue.x-k8s.io/queue-name": "tuning"})
    assert sidecar.next("assign").job_name == "tone"
