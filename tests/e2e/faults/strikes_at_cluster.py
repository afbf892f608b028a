"""Faults around a job: the Lease, the API server, etcd, what is registered there, disks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from farm import CHECKPOINT_EVERY, NAMESPACE, until
from kubernetes import client as k8s
from scene import GROUP, Scene, slow, stopped_for
from support.small_disk import fill

LEASE_WITHIN_S = 15.0  # before its holder would give it up


# --- the Lease ------------------------------------------------------------------------------------


def _lease(scene: Scene) -> tuple[k8s.CoordinationV1Api, k8s.V1Lease]:
    api = k8s.CoordinationV1Api(scene.farm.client.api)
    return api, api.read_namespaced_lease("windrow-operator", "windrow-system")


def _write_lease(scene: Scene, change: Callable[[k8s.V1LeaseSpec], None]) -> None:
    """Write it before the operator renews it, however often that takes."""

    def written() -> bool:
        api, body = _lease(scene)
        change(body.spec)
        try:
            api.replace_namespaced_lease("windrow-operator", "windrow-system", body)
        except k8s.ApiException as error:
            if error.status != 409:
                raise
            return False
        return True

    until("the Lease is written", written)


def _leads_again(scene: Scene) -> None:
    until("it leads again", lambda: _lease(scene)[1].spec.holder_identity == "local")
    scene.goes_on()


def lease_deleted(scene: Scene) -> None:
    """Its holder makes it again in the same term, so that no stream ends."""
    api, before = _lease(scene)
    api.delete_namespaced_lease("windrow-operator", "windrow-system")

    def again() -> bool:
        found = api.list_namespaced_lease("windrow-system").items
        return any(
            lease.metadata.uid != before.metadata.uid
            and lease.spec.acquire_time == before.spec.acquire_time
            for lease in found
        )

    until("it is there again, of the same term", again, LEASE_WITHIN_S)
    scene.goes_on()


def lease_stolen(scene: Scene) -> None:
    """A replica that took it and died: the operator stands by until it expires."""

    def change(spec: k8s.V1LeaseSpec) -> None:
        spec.holder_identity, spec.acquire_time = "another", spec.renew_time

    _write_lease(scene, change)
    _leads_again(scene)


def lease_given_to_nobody(scene: Scene) -> None:
    def change(spec: k8s.V1LeaseSpec) -> None:
        spec.holder_identity = ""

    _write_lease(scene, change)
    _leads_again(scene)


def lease_of_a_clock_that_jumped(scene: Scene) -> None:
    def change(spec: k8s.V1LeaseSpec) -> None:
        spec.renew_time = datetime.now(UTC) + timedelta(days=1)

    _write_lease(scene, change)
    tomorrow = datetime.now(UTC) + timedelta(hours=12)
    until("it is renewed", lambda: _lease(scene)[1].spec.renew_time < tomorrow)
    _leads_again(scene)


# --- the API server and what is in it -------------------------------------------------------------


def api_server_hangs(scene: Scene) -> None:
    stopped_for(scene.part_of_control_plane("kube-apiserver").pid, 15)
    scene.goes_on()


def api_server_slow(scene: Scene) -> None:
    slow(scene.part_of_control_plane("kube-apiserver").pid)
    scene.goes_on()


def etcd_hangs(scene: Scene) -> None:
    stopped_for(scene.part_of_control_plane("etcd").pid, 12)
    scene.goes_on()


def etcd_slow(scene: Scene) -> None:
    slow(scene.part_of_control_plane("etcd").pid)
    scene.goes_on()


def crds_applied_again(scene: Scene) -> None:
    """As every upgrade of the chart does: streams of watches end with a definition that changed."""
    api = k8s.ApiextensionsV1Api(scene.farm.client.api)
    name = "finetunejobs.windrow.dev"
    right = api.api_client.sanitize_for_serialization(api.read_custom_resource_definition(name))
    versions = right["spec"]["versions"]
    fewer = copy.deepcopy(versions)
    fewer[0]["additionalPrinterColumns"].pop()
    for wanted in (fewer, versions):
        api.patch_custom_resource_definition(name, {"spec": {"versions": wanted}})
        scene.goes_on()


def webhook_registration_deleted(scene: Scene) -> None:
    api = k8s.AdmissionregistrationV1Api(scene.farm.client.api)
    api.delete_mutating_webhook_configuration("windrow-operator")
    until(
        "it is registered again",
        lambda: any(
            found.metadata.name == "windrow-operator"
            for found in api.list_mutating_webhook_configuration().items
        ),
    )


def webhook_registration_points_elsewhere(scene: Scene) -> None:
    api = k8s.AdmissionregistrationV1Api(scene.farm.client.api)
    body = api.read_mutating_webhook_configuration("windrow-operator")
    right = body.webhooks[0].client_config.url
    body.webhooks[0].client_config.url = "https://127.0.0.1:9/mutate-pods"
    api.replace_mutating_webhook_configuration("windrow-operator", body)

    def now() -> str:
        found = api.read_mutating_webhook_configuration("windrow-operator")
        return str(found.webhooks[0].client_config.url)

    until("it is right again", lambda: now() == right)


def slot_deleted(scene: Scene) -> None:
    name = scene.job.slot.rpartition("/")[2]
    where = (*GROUP, NAMESPACE, "harvestslots", name)
    before = scene.objects().get_namespaced_custom_object(*where)["metadata"]["uid"]
    scene.objects().delete_namespaced_custom_object(*where)

    def again() -> bool:
        found = scene.objects().list_namespaced_custom_object(*GROUP, NAMESPACE, "harvestslots")
        uids = {body["metadata"]["name"]: body["metadata"]["uid"] for body in found["items"]}
        return uids.get(name, before) != before

    until("it is there again", again)
    scene.goes_on()


def status_wiped(scene: Scene) -> None:
    """Somebody wrote another status: progress comes again, the job does not."""
    where = (*GROUP, NAMESPACE, "finetunejobs", scene.job.name)
    wiped = {"status": {"step": None, "progress": None}}
    scene.objects().patch_namespaced_custom_object_status(*where, wiped)
    scene.goes_on()


# --- disks ----------------------------------------------------------------------------------------


def disk_full_at_a_checkpoint(scene: Scene) -> None:
    """It costs checkpoints and no work: once there is room again they come again."""
    ballast = fill(scene.destination)
    until("it is told", lambda: "DiskFull" in scene.told())
    before = scene.farm.job(scene.job.name).checkpoint_step
    ballast.unlink()
    until(
        "a later checkpoint is written",
        lambda: scene.farm.job(scene.job.name).checkpoint_step > before,
    )


def disk_full_at_the_adapter(scene: Scene) -> None:
    """No half of one is left: the next attempt goes on from the last checkpoint and writes it."""
    total, root = scene.job.total_steps, scene.destination / ".windrow" / scene.job.uid
    assert total % CHECKPOINT_EVERY, "the last step has no checkpoint but that of the end"
    last = total // CHECKPOINT_EVERY * CHECKPOINT_EVERY
    until(
        "the last checkpoint before the end",
        lambda: list(root.glob(f"checkpoints/step-{last:08d}-*")),
    )
    ballast = fill(scene.destination)
    until("the attempt has failed", lambda: scene.body()["status"].get("attempts"))
    assert not list(scene.destination.glob("adapter_*"))
    ballast.unlink()
    scene.resumes()


def rows_deleted(scene: Scene) -> None:
    """A worker reads them once, when it begins."""
    scene.farm.rows_of(scene.job.name).unlink()
    scene.goes_on()
