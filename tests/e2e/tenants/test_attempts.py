"""Check what one tenant tries on another, on a real API server: none of it succeeds."""

from __future__ import annotations

import contextlib
import copy
import json
import ssl
import threading
import urllib.error
import urllib.request
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import pytest
from kubernetes import client
from operator_process import OWN_NAMESPACE
from two_tenants import EVERYBODY, SHARED, await_sidecar, make_ready
from waiting import wait_until

from windrow.proto import attach_pb2 as pb
from windrow.rundir import MOST_SLOTS

pytestmark = pytest.mark.extended

# --- with the operator's stolen token -------------------------------------------------------------


@pytest.fixture(scope="module")
def sidecar(blue):
    """The container that the operator has added to a decode pod of blue's."""
    blue.policy("observed", mode="observe", selector={"matchLabels": {"app": "observed"}})

    def prepared():
        made = blue.create_pod("probe", {"app": "observed"}, dry_run="All")
        return any(volume.name == "windrow-run" for volume in made.spec.volumes or ())

    wait_until(prepared, "decode pods of blue are prepared")
    blue.create_pod("observed-0", {"app": "observed"})
    make_ready(blue, "observed-0")
    made = await_sidecar(blue, "observed-0")
    return client.ApiClient().sanitize_for_serialization(made)


@pytest.fixture(scope="module")
def prey(blue, sidecar):
    """A prepared decode pod of blue's that has no sidecar yet, since it does not serve."""
    body = {
        "metadata": {"name": "prey", "labels": {"app": "observed"}},
        "spec": {
            "containers": [
                {
                    "name": "decode",
                    "image": "none",
                    "command": ["python", "-m", "engine", "--disaggregation-mode", "decode"],
                    "args": ["--model-path", "/m"],
                    "volumeMounts": [{"name": "data", "mountPath": "/data", "readOnly": True}],
                    "env": [
                        {
                            "name": "HF_TOKEN",
                            "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}},
                        },
                        {"name": "HF_ENDPOINT", "value": "https://hub.example"},
                        {"name": "SSL_CERT_FILE", "value": "$(CERTIFICATES)/ca.pem"},
                    ],
                }
            ],
            "volumes": [{"name": "data", "emptyDir": {}}, {"name": "hidden", "emptyDir": {}}],
        },
    }
    blue.core.create_namespaced_pod(blue.namespace, body)
    make_ready(blue, "prey", ready=False)
    return "prey"


def add(thief, namespace, pod, *containers):
    """Add containers to a pod; return the refusal, None: it was taken."""
    patch = {"spec": {"ephemeralContainers": list(containers)}}
    try:
        client.CoreV1Api(thief).patch_namespaced_pod_ephemeralcontainers(pod, namespace, patch)
    except client.ApiException as error:
        return json.loads(error.body)["message"] if error.status in (403, 422) else None
    return None


def with_env(container, **entry):
    return container | {"env": [*container["env"], entry]}


def with_mount(container, **mount):
    return container | {"volumeMounts": [*container["volumeMounts"], mount]}


def secured(container, **changes):
    return container | {"securityContext": container["securityContext"] | changes}


def secret_of(name, key="token"):
    return {"secretKeyRef": {"name": name, "key": key}}


CONTAINERS = {
    "another_image": (lambda c: c | {"image": "evil"}, "image"),
    "beside_no_container": (
        lambda c: {key: value for key, value in c.items() if key != "targetContainerName"},
        "image",
    ),
    "another_command": (lambda c: c | {"command": ["sh", "-c", "id"]}, "command"),
    "more_arguments": (lambda c: c | {"args": ["--run-dir", "/data"]}, "command"),
    "another_working_directory": (lambda c: c | {"workingDir": "/data"}, "working directory"),
    "may_escalate": (lambda c: secured(c, allowPrivilegeEscalation=True), "security context"),
    "more_capabilities": (
        lambda c: secured(c, capabilities={"drop": ["ALL"], "add": ["SYS_ADMIN"]}),
        "security context",
    ),
    "no_seccomp": (
        lambda c: secured(c, seccompProfile={"type": "Unconfined"}),
        "security context",
    ),
    "as_root": (lambda c: secured(c, runAsUser=0), "user or group"),
    "in_another_group": (lambda c: secured(c, runAsGroup=0), "user or group"),
    "another_name": (lambda c: c | {"name": "debugger"}, "windrow-NUMBER"),
    "a_preloaded_library": (
        lambda c: with_env(c, name="LD_PRELOAD", value="/data/x.so"),
        "none of the sidecar's",
    ),
    "a_python_path": (lambda c: with_env(c, name="PYTHONPATH", value="/data"), "none of the"),
    "all_of_a_secret": (
        lambda c: c | {"envFrom": [{"secretRef": {"name": "database"}}]},
        "none of the sidecar's",
    ),
    "a_secret_that_decode_does_not_use": (
        lambda c: with_env(c, name="HF_TOKEN", valueFrom=secret_of("database")),
        "no container of the pod takes it",
    ),
    "another_key_of_a_secret_that_decode_uses": (
        lambda c: with_env(c, name="HF_TOKEN", valueFrom=secret_of("hub", "admin")),
        "no container of the pod takes it",
    ),
    "another_hub_for_the_token_of_decode": (
        lambda c: with_env(c, name="HF_ENDPOINT", value="https://evil.example"),
        "says otherwise than decode's",
    ),
    "another_proxy": (
        lambda c: with_env(c, name="https_proxy", value="http://evil.example:3128"),
        "says otherwise than decode's",
    ),
    "another_authority": (
        lambda c: with_env(c, name="REQUESTS_CA_BUNDLE", value="/data/ca.pem"),
        "says otherwise than decode's",
    ),
    "another_operator": (
        lambda c: (
            c
            | {"env": [e | ({"value": "evil:1"} if "ADDR" in e["name"] else {}) for e in c["env"]]}
        ),
        "operator's address",
    ),
    "a_volume_over_the_programs": (
        lambda c: with_mount(c, name="windrow-profiles", mountPath="/usr/lib"),
        "mount",
    ),
    "a_volume_that_decode_does_not_mount": (
        lambda c: with_mount(c, name="hidden", mountPath="/hidden"),
        "mount",
    ),
    "a_volume_of_decodes_elsewhere": (
        lambda c: with_mount(c, name="data", mountPath="/etc", readOnly=True),
        "mount",
    ),
    "a_volume_that_decode_only_reads_to_write": (
        lambda c: with_mount(c, name="data", mountPath="/data"),
        "mount",
    ),
    "the_run_directory_elsewhere": (
        lambda c: c | {"volumeMounts": [{"name": "windrow-run", "mountPath": "/opt"}]},
        "mount",
    ),
}


def test_the_operators_own_sidecar_is_admitted(thief, blue, prey, sidecar):
    core = client.CoreV1Api(thief)
    patch = {"spec": {"ephemeralContainers": [sidecar]}}
    made = core.patch_namespaced_pod_ephemeralcontainers(prey, blue.namespace, patch, dry_run="All")
    assert [c.name for c in made.spec.ephemeral_containers] == ["windrow-1"]
    # What decode uses, its sidecar may use.
    more = with_env(sidecar, name="HF_TOKEN", valueFrom=secret_of("hub"))
    more = with_env(more, name="HF_ENDPOINT", value="https://hub.example")
    more = with_env(more, name="SSL_CERT_FILE", value="/etc/ca.pem")  # as it is expanded
    more = with_mount(more, name="data", mountPath="/data", readOnly=True)
    patch = {"spec": {"ephemeralContainers": [more]}}
    core.patch_namespaced_pod_ephemeralcontainers(prey, blue.namespace, patch, dry_run="All")


@pytest.mark.parametrize("attempt", CONTAINERS)
def test_no_container_but_a_sidecar_is_added_by_the_stolen_token(
    thief, blue, prey, sidecar, attempt
):
    change, said = CONTAINERS[attempt]
    refused = add(thief, blue.namespace, prey, change(copy.deepcopy(sidecar)))
    assert refused is not None
    assert said in refused


def test_the_stolen_token_adds_no_two_containers_at_once(thief, blue, prey, sidecar):
    second = sidecar | {"name": "windrow-2"}
    assert "one container at a time" in add(thief, blue.namespace, prey, sidecar, second)


CHANGES = {
    "by_its_name": {"spec": {"ephemeralContainers": [{"name": "windrow-1", "image": "evil"}]}},
    "image_by_its_place": [
        {"op": "replace", "path": "/spec/ephemeralContainers/0/image", "value": "evil"}
    ],
    "command_by_its_place": [
        {"op": "add", "path": "/spec/ephemeralContainers/0/args", "value": ["-c", "id"]}
    ],
    "away": [{"op": "remove", "path": "/spec/ephemeralContainers/0"}],
    "all_away": {"spec": {"ephemeralContainers": None}},
    "decode_itself": [{"op": "replace", "path": "/spec/containers/0/image", "value": "evil"}],
    "the_pods_label": [
        {"op": "replace", "path": "/metadata/labels/app", "value": "another"},
    ],
}


@pytest.mark.parametrize("how", CHANGES)
def test_the_stolen_token_changes_no_sidecar_that_is_there(thief, blue, sidecar, how):
    """The API server refuses it, or ignores what this path cannot change."""
    before = blue.core.read_namespaced_pod("observed-0", blue.namespace)
    with contextlib.suppress(client.ApiException):
        client.CoreV1Api(thief).patch_namespaced_pod_ephemeralcontainers(
            "observed-0", blue.namespace, CHANGES[how]
        )
    after = blue.core.read_namespaced_pod("observed-0", blue.namespace)
    assert after.spec == before.spec
    assert after.metadata.labels == before.metadata.labels


def test_the_stolen_token_adds_nothing_to_a_pod_that_was_not_prepared(thief, blue, sidecar):
    spec = {"containers": [{"name": "decode", "image": "none"}]}
    body = {"metadata": {"name": "web", "labels": {"windrow.dev/decode": "true"}}, "spec": spec}
    blue.core.create_namespaced_pod(blue.namespace, body)
    bare = {key: sidecar[key] for key in ("name", "image", "command", "env", "securityContext")}
    refused = add(thief, blue.namespace, "web", bare | {"targetContainerName": "decode"})
    assert "not a decode pod" in refused


def test_the_stolen_token_adds_nothing_to_a_pod_of_the_system(thief, kube, sidecar):
    core = client.CoreV1Api(kube)
    spec = {
        "containers": [{"name": "decode", "image": "none"}],
        "volumes": [{"name": "windrow-run", "emptyDir": {}}],
    }
    name = f"dns-{uuid.uuid4().hex[:6]}"
    body = {"metadata": {"name": name, "labels": {"windrow.dev/decode": "true"}}, "spec": spec}
    core.create_namespaced_pod("kube-system", body)
    bare = {key: sidecar[key] for key in ("name", "image", "command", "env", "securityContext")}
    try:
        refused = add(thief, "kube-system", name, bare | {"targetContainerName": "decode"})
        assert "this namespace has no sidecars" in refused
    finally:
        core.delete_namespaced_pod(name, "kube-system", grace_period_seconds=0)


POD = {"metadata": {"name": "x"}, "spec": {"containers": [{"name": "x", "image": "x"}]}}
REFUSED_CALLS = {
    "create_a_pod": lambda api, ns: client.CoreV1Api(api).create_namespaced_pod(ns, POD),
    "delete_a_pod": lambda api, ns: client.CoreV1Api(api).delete_namespaced_pod("prey", ns),
    "change_a_pod": lambda api, ns: client.CoreV1Api(api).patch_namespaced_pod(
        "prey", ns, {"metadata": {"labels": {"windrow.dev/decode": "true"}}}
    ),
    "read_a_secret_of_a_tenant": lambda api, ns: client.CoreV1Api(api).read_namespaced_secret(
        "keys", ns
    ),
    "list_secrets": lambda api, ns: client.CoreV1Api(api).list_namespaced_secret(ns),
    "make_a_token_of_another_account": lambda api, ns: client.CoreV1Api(
        api
    ).create_namespaced_service_account_token("default", ns, {"spec": {"audiences": []}}),
    "make_a_secret_that_becomes_a_token": lambda api, ns: client.CoreV1Api(
        api
    ).create_namespaced_secret(
        OWN_NAMESPACE,
        {
            "type": "kubernetes.io/service-account-token",
            "metadata": {
                "name": "stolen",
                "annotations": {"kubernetes.io/service-account.name": "default"},
            },
        },
    ),
    "give_itself_more_rights": lambda api, ns: client.RbacAuthorizationV1Api(
        api
    ).patch_cluster_role("windrow-operator", {"rules": []}),
    "drop_the_admission_policy": lambda api, ns: client.AdmissionregistrationV1Api(
        api
    ).delete_validating_admission_policy("windrow-operator-sidecars"),
    "write_another_config_map": lambda api, ns: client.CoreV1Api(api).patch_namespaced_config_map(
        "kube-root-ca.crt", ns, {"data": {"ca.crt": ""}}
    ),
}


@pytest.mark.parametrize("attempt", REFUSED_CALLS)
def test_the_stolen_token_is_good_for_no_other_call(thief, blue, prey, attempt):
    with pytest.raises(client.ApiException) as refused:
        REFUSED_CALLS[attempt](thief, blue.namespace)
    assert refused.value.status in (403, 422)


def test_the_stolen_token_changes_no_jobs_spec(thief, blue, prey):
    blue.job("kept", suspend=True)
    api = client.CustomObjectsApi(thief)
    where = ("windrow.dev", "v1alpha1", blue.namespace, "finetunejobs", "kept")
    with pytest.raises(client.ApiException, match="changes no job's spec"):
        api.patch_namespaced_custom_object(
            *where, {"spec": {"output": {"destination": "s3://evil/x"}}}
        )
    api.patch_namespaced_custom_object(*where, {"metadata": {"labels": {"a": "b"}}})


# --- as the owner of jobs and policies ------------------------------------------------------------

# Clients of the API resolve dots in a path.
BY_DOTS = "../../BLUE/secrets/store"
# What red's jobs ask for under a policy of blue's that admits them, and what is said of it.
SHARED_JOBS = {
    "write_in_anothers_folder": ({"destination": "/out/BLUE/tone"}, "write only below /out/RED"),
    "write_there_by_dots": ({"destination": "/out/RED/../BLUE/tone"}, "write only below"),
    "write_to_the_root_of_the_volume": ({"destination": "/out/tone"}, "write only below /out/RED"),
    "write_over_the_run_directory": ({"destination": "/run/windrow/jobs"}, "write only below"),
    "read_anothers_rows": ({"source": "/out/BLUE/rows.jsonl"}, "there is /out/RED"),
    "read_them_by_dots": ({"source": "/out/RED/../BLUE/rows.jsonl"}, "there is /out/RED"),
    "read_all_of_the_volume": ({"source": "/out"}, "there is /out/RED"),
    "read_the_nodes_credentials": ({"source": "http://169.254.169.254/rows.jsonl"}, "link-local"),
    "read_them_by_ipv6": ({"source": "http://[fd00:ec2::254]/rows.jsonl"}, "link-local"),
    "read_a_private_host": ({"source": "http://10.96.0.1/rows.jsonl"}, "private address"),
    "read_the_pod_itself": ({"source": "http://127.0.0.1:8000/rows.jsonl"}, "private address"),
    "read_the_pod_by_a_number": ({"source": "http://2130706433/rows.jsonl"}, "private address"),
    "read_a_bucket_as_the_node": ({"source": "s3://blue/rows.jsonl"}, "no credentials"),
    "write_a_bucket_as_the_node": ({"destination": "s3://blue/tone"}, "no credentials"),
    "use_anothers_secret_by_dots": (
        {"dataset": {"source": "s3://red/rows.jsonl", "secretRef": {"name": BY_DOTS}}},
        "spec.dataset.secretRef.name",
    ),
    "use_anothers_token_by_dots": (
        {"model": {"name": "red/base", "secretRef": {"name": BY_DOTS}}},
        "spec.model.secretRef.name",
    ),
    "use_a_class_of_the_clusters_own": (
        {"priorityClassName": "system-cluster-critical"},
        "spec.priorityClassName",
    ),
    "use_a_policy_that_does_not_admit": ({"policies": ["BLUE/closed"]}, "does not name"),
    "use_a_policy_that_is_not_there": ({"policies": ["BLUE/none"]}, "does not name"),
}


def spec_of(*, source="/data/rows.jsonl", destination="", **changes):
    own = {"output": {"destination": destination}} if destination else {}
    return {"policies": ["BLUE/shared"], "dataset": {"source": source}, **own, **changes}


def app(name):
    return {"matchLabels": {"app": name}}


@pytest.fixture(scope="module")
def scene(blue, red, sidecar):
    """Slots of both, jobs of red's that ask for what is blue's, and a job of blue's."""
    everybody = {"namespaceSelector": EVERYBODY}
    blue.policy("shared", selector=app("shared"), access=everybody, sidecar={"volumes": [SHARED]})
    blue.policy("closed", selector=app("closed"))
    red.policy("trap", selector=app("trap"), access={**everybody, "adapters": True})
    slots = {}
    for owner, name in ((blue, "shared"), (blue, "closed"), (red, "trap")):
        pod = owner.create_pod(f"{name}-0", {"app": name, "windrow.dev/inject": "enabled"})
        slots[name] = owner.attach(pod, outputs=("/out/{namespace}",))
        slots[name].pod = pod
    names = {"BLUE": blue.namespace, "RED": red.namespace}
    slots["refused"] = set()
    for name, (job, _) in SHARED_JOBS.items():
        text = json.dumps(spec_of(**job))
        for word, namespace in names.items():
            text = text.replace(word, namespace)
        try:
            red.job(name.replace("_", "-"), **json.loads(text))
        except client.ApiException as error:
            if error.status != 422:
                raise
            slots["refused"].add(name)
    slots["shared"].beat()
    # Far more than blue's own, for everybody who would believe it.
    slots["trap"].beat(predicted_tokens_per_second=1e30)
    return slots


def why_not_placed(owner, job):
    """Return what a job says that has no slot."""
    conditions = owner.status(job).get("conditions") or []
    found = [c for c in conditions if c["type"] in ("Placed", "Accepted")]
    assert not owner.status(job).get("slot")
    return " ".join(c["message"] for c in found if c["status"] == "False")


@pytest.mark.parametrize("attempt", SHARED_JOBS)
def test_a_job_reaches_nothing_of_another_tenant(scene, blue, red, attempt):
    if attempt in scene["refused"]:
        return  # by the API server
    name, words = attempt.replace("_", "-"), SHARED_JOBS[attempt][1].replace("RED", red.namespace)
    # Until its sidecar has spoken, the slot has an engine that is starting.
    wait_until(lambda: words in why_not_placed(red, name), f"{name} says: {words}")
    assert "closed-0" not in why_not_placed(red, name)


def test_a_policy_that_selects_everybody_attracts_no_job_of_another_tenant(scene, blue):
    blue.job("own")
    slot = wait_until(lambda: blue.status("own").get("slot"), "a slot for blue's job")
    assert slot.startswith(f"{blue.namespace}/")


@pytest.fixture(scope="module")
def placed(scene, blue, red):
    """A job of each, on a slot of its own: what each sidecar was told, `blue` and `red`."""
    red.job("own", output={"destination": f"/out/{red.namespace}/own"})
    scene["closed"].beat()
    wait_until(lambda: blue.status("own").get("slot"), "a slot for blue's job")
    name = blue.status("own")["slot"].rpartition("/")[2].removesuffix("-0")
    return {"blue": scene[name].next("assign"), "red": scene["trap"].next("assign")}


# --- as a sidecar ---------------------------------------------------------------------------------


def settled(sidecar, red, marker):
    """Have the operator read all that the sidecar has said so far."""
    sidecar.beat(engine_state=marker)
    wait_until(lambda: slot_of(red).get("engineState") == marker, "the operator has read it all")


def slot_of(red, name="trap-0"):
    return red.get("harvestslots", name).get("status") or {}


def test_a_rate_that_no_hardware_has_is_cut(scene, red):
    rate = wait_until(lambda: slot_of(red).get("predictedTokensPerSecond"), "a rate of red's slot")
    assert 0 < rate < 1e9


@pytest.mark.parametrize("kind", ["SUCCEEDED", "FAILED", "STOPPED", "REJECTED", "CHECKPOINTED"])
def test_a_sidecar_says_nothing_of_a_job_of_another_tenant(scene, placed, blue, red, kind):
    before = blue.status("own")
    scene["trap"].report(placed["blue"], kind, detail="taken over", adapter_path="/evil")
    settled(scene["trap"], red, "serving")
    after = blue.status("own")
    assert (after["state"], after.get("slot")) == (before["state"], before["slot"])
    assert "taken over" not in json.dumps(after)


def test_a_sidecar_takes_over_no_job_by_a_higher_epoch(scene, placed, blue, red):
    forged = pb.RunningJob(slot=0, job_uid=placed["blue"].job_uid, epoch=10**9)
    hello = pb.SidecarHello(protocol_version=1, running=[forged], slots=[slot_facts()])
    scene["trap"].say(hello=hello)
    settled(scene["trap"], red, "serving")
    assert blue.status("own")["slot"].startswith(f"{blue.namespace}/")


def slot_facts(index=0, **changes):
    facts = {"model": "/m", "compute_units": 2, "chunks": 128, "tensor_parallel": 1}
    return pb.SlotFacts(index=index, output_trees=["/out/{namespace}"], **{**facts, **changes})


def test_a_sidecar_names_no_adapter_outside_of_its_jobs_destination(scene, placed, red):
    sidecar_, job = scene["trap"], placed["red"]
    sidecar_.report(job, "STARTED")
    sidecar_.report(job, "SUCCEEDED", adapter_path="/out/BLUE/adapter")
    red.await_state("Succeeded", "own")
    assert red.status("own")["adapter"]["path"] == f"/out/{red.namespace}/own"


def test_a_sidecar_has_no_more_slots_than_a_pod_can_have(scene, red):
    facts = [slot_facts(index) for index in range(1000)]
    scene["trap"].say(hello=pb.SidecarHello(protocol_version=1, slots=facts))
    settled(scene["trap"], red, "serving")
    listed = red.custom.list_namespaced_custom_object(
        "windrow.dev", "v1alpha1", red.namespace, "harvestslots"
    )["items"]
    assert len(listed) <= MOST_SLOTS


def test_a_sidecar_writes_no_slot_of_another_pod(scene, blue, red):
    before = blue.get("harvestslots", "shared-0")["spec"]["podUid"]
    assert before == scene["shared"].pod.metadata.uid
    namespaces = {
        item["metadata"]["namespace"]
        for item in red.custom.list_cluster_custom_object(
            "windrow.dev", "v1alpha1", "harvestslots"
        )["items"]
        if item["spec"]["podUid"] == scene["trap"].pod.metadata.uid
    }
    assert namespaces == {red.namespace}


def test_numbers_that_are_none_break_nothing(scene, red, operator):
    for value in (float("nan"), float("inf"), -1.0, 1e308):
        scene["trap"].beat(predicted_tokens_per_second=value, chunks_free=2**31)
    settled(scene["trap"], red, "serving")
    assert operator.process.poll() is None


def test_a_profile_stays_in_the_namespace_of_its_pod(scene, blue, red):
    scene["trap"].send_profile("x" * 5000, {"deep": "x" * 100_000})
    scene["trap"].send_profile("../blue", {})
    settled(scene["trap"], red, "serving")
    found = blue.custom.list_namespaced_custom_object(
        "windrow.dev", "v1alpha1", blue.namespace, "latencyprofiles"
    )
    assert found["items"] == []


def refusal(tenant_, pod, **how):
    sidecar_ = tenant_.attach(pod, **how)
    return sidecar_.refusal()


def test_a_token_for_another_audience_is_refused(scene, red):
    token = red.token(scene["trap"].pod, audience="https://kubernetes.default.svc")
    assert refusal(red, scene["trap"].pod, token=token) is grpc.StatusCode.UNAUTHENTICATED


def test_a_token_speaks_for_no_other_pod(scene, blue, red):
    code = refusal(red, scene["trap"].pod, pod_uid=scene["shared"].pod.metadata.uid)
    assert code is grpc.StatusCode.PERMISSION_DENIED


def test_a_token_of_a_pod_that_was_not_prepared_is_refused(red):
    spec = {"containers": [{"name": "web", "image": "none"}]}
    web = red.core.create_namespaced_pod(red.namespace, {"metadata": {"name": "web"}, "spec": spec})
    assert refusal(red, web) is grpc.StatusCode.PERMISSION_DENIED


def test_a_message_longer_than_any_ends_the_stream(blue, red, operator, scene):
    pod = red.create_pod("long-0", {"app": "trap", "windrow.dev/inject": "enabled"})
    sidecar_ = red.attach(pod)
    sidecar_.next("hello")
    sidecar_.say(heartbeat=pb.SlotHeartbeat(engine_state="x" * 2 * 2**20))
    assert sidecar_.refusal() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert operator.process.poll() is None


# --- from anywhere --------------------------------------------------------------------------------


def post(url, body):
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, context=context, timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@pytest.mark.parametrize("path", ["/mutate-pods", "/mutate-pods/wrong"])
def test_the_webhook_tells_a_stranger_nothing(scene, blue, operator, path):
    pod = {"metadata": {"namespace": blue.namespace, "name": "x"}, "spec": {"containers": []}}
    asked = {"uid": "u", "namespace": blue.namespace, "object": pod}
    url = f"https://127.0.0.1:{operator.state['webhookPort']}{path}"
    status, said = post(url, json.dumps({"request": asked}).encode())
    assert status == 403
    assert blue.namespace.encode() not in said


def test_the_webhook_reads_no_body_without_end(scene, blue, operator):
    url = f"https://127.0.0.1:{operator.state['webhookPort']}{blue.webhook_path()}"
    status, _ = post(url, b"[" * (3 * 2**20))
    assert status == 413


# --- as a serving pod -----------------------------------------------------------------------------


@pytest.fixture
def server():
    """Return a function that starts a server on loopback; it answers by the function given."""
    started = []

    def start(answer):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self._answer()

            def do_POST(self):
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self._answer()

            def _answer(self):
                status, headers, body = answer(self.path)
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                try:
                    self.wfile.write(body)
                except OSError:
                    self.close_connection = True

            def log_message(self, *_):
                pass

        made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=made.serve_forever, daemon=True).start()
        started.append(made)
        return made.server_port

    yield start
    for made in started:
        made.shutdown()
        made.server_close()


def load_into(red, scene, name, port):
    """Have the operator load an adapter of red's into a server of red's; return what it says."""
    command = ["python", "-m", "sglang.launch_server", "--model-path=/m"]
    command += ["--disaggregation-mode=decode", f"--port={port}"]
    pod = {
        "metadata": {"name": name, "labels": {"app": "trap", "windrow.dev/inject": "enabled"}},
        "spec": {"containers": [{"name": "decode", "image": "none", "command": command}]},
    }
    red.core.create_namespaced_pod(red.namespace, pod)
    make_ready(red, name, ip="127.0.0.1")
    destination = f"/out/{red.namespace}/{name}"
    deploy = {"enabled": True, "pinned": True}
    red.job(name, output={"destination": destination, "deploy": deploy})
    job = scene["trap"].next("assign", what=lambda assigned: assigned.job_name == name)
    scene["trap"].report(job, "STARTED")
    scene["trap"].report(job, "SUCCEEDED")
    red.await_state("Succeeded", name)
    said = wait_until(
        lambda: name in red.condition("Deployed", name).get("message", ""),
        "what became of loading the adapter",
    )
    assert said
    message = red.condition("Deployed", name)["message"]
    red.core.delete_namespaced_pod(name, red.namespace, grace_period_seconds=0)
    return message


def test_a_serving_pod_sends_the_operator_nowhere_else(scene, placed, red, server):
    inner = []

    def secret(path):
        inner.append(path)
        return 200, {}, b'{"SecretAccessKey": "inner"}'

    target = server(secret)
    moved = {"Location": f"http://127.0.0.1:{target}/latest/meta-data"}
    said = load_into(red, scene, "redirects", server(lambda path: (307, moved, b"")))
    assert inner == []
    assert "redirect" in said


def test_of_what_a_serving_pod_answers_a_short_error_is_repeated(scene, placed, red, server):
    body = json.dumps({"error_message": "x" * 10**6, "SecretAccessKey": "inner"}).encode()
    said = load_into(red, scene, "talks", server(lambda path: (400, {}, body)))
    assert "inner" not in said
    assert len(said) < 1000
