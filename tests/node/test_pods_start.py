"""Decode pods become ready exactly as they do without Windrow, whatever goes wrong around them."""

from __future__ import annotations

import contextlib
import http.server
import ssl
import threading
import uuid
from datetime import UTC, datetime

import pytest
from kubernetes import client
from support.node_pods import (
    apply_policy,
    await_registered,
    note_start,
    ready_pod,
    start,
    still_serves,
)
from support.pod_forms import AMOUNTS, CASES, NATIVE, WITHOUT_IMAGE, Case, decode_pod
from waiting import wait_until

from windrow_lab.realnode.node import NODE_ADDRESS
from windrow_operator.pki import make_authority, make_server, server_context
from windrow_operator.webhook import webhook_configuration

MISSING_IMAGE = "127.0.0.1:9/windrow/sidecar:1"  # nothing listens there


@pytest.fixture
def place(node, kube):
    """Return a function that makes a namespace for a case, and what the case finds there."""
    core, custom = client.CoreV1Api(kube), client.CustomObjectsApi(kube)
    made = []

    def make(case):
        name = f"start-{uuid.uuid4().hex[:8]}"
        labels = {"pod-security.kubernetes.io/enforce": case.level}
        core.create_namespace({"metadata": {"name": name, "labels": labels}})
        made.append(name)
        wait_until(
            lambda: core.list_namespaced_service_account(name).items, "the default service account"
        )
        if case.quota:
            hard = {"requests.cpu": "50m", "requests.memory": "64Mi", "pods": "1"}
            quota = {"metadata": {"name": "exact"}, "spec": {"hard": hard}}
            core.create_namespaced_resource_quota(name, quota)
        if case.limits:
            exact = {"type": "Container", "max": AMOUNTS, "defaultRequest": AMOUNTS}
            body = {"metadata": {"name": "exact"}, "spec": {"limits": [exact]}}
            core.create_namespaced_limit_range(name, body)
        if case.policy is not None:
            apply_policy(custom, name, case.policy)
        return name

    yield make
    for name in made:  # the node has room for a few of them at a time
        core.delete_namespace(name)


def compare(kube, image, place, name, case):
    """Run the pod without Windrow and with it; return the latter once both are ready."""
    core = client.CoreV1Api(kube)
    plain = place(Case(policy=None, level=case.level, quota=case.quota, limits=case.limits))
    ours = place(case)
    if case.policy is not None and not case.webhook:
        await_registered(kube, ours)
    # One after the other: a pod's start takes time from another's.
    opted_out = decode_pod(case, image, {"windrow.dev/inject": "disabled"})
    starts = start(core, plain, opted_out), start(core, ours, decode_pod(case, image))
    note_start(name, *starts)
    (without, _), (with_, _) = starts
    assert with_.status.qos_class == without.status.qos_class
    assert [c.image for c in with_.spec.containers] == [c.image for c in without.spec.containers]
    assert with_.spec.containers[0].resources == without.spec.containers[0].resources
    return with_


@pytest.fixture(scope="module")
def operator(start_operator):
    # The image's own program in the agent's place: here it only has to start.
    return start_operator(
        *("--sidecar-command", "/pause", "--sidecar-cpu", "50m", "--sidecar-memory", "64Mi")
    )


@pytest.fixture
def answers(kube, operator):
    """Return a function that lets something else answer in the operator's place."""
    with contextlib.ExitStack() as stack:
        yield lambda what, namespace: stack.enter_context(impostor(kube, what, namespace))


@contextlib.contextmanager
def impostor(kube, what, namespace):
    """Register a webhook of the operator's own shape at a server that does `what`."""
    now = datetime.now(UTC)
    authority = make_authority(now)
    trusted = make_authority(now) if what == "untrusted" else authority
    made_at = now.replace(year=now.year - 3) if what == "expired" else now
    server = ImpostorServer((NODE_ADDRESS, 0), Impostor)
    server.hold = threading.Event()
    server.what, server.asked = what, threading.Event()
    context: ssl.SSLContext = server_context(make_server(authority, [NODE_ADDRESS], made_at))
    # Handshakes on the threads of the connections: one that fails ends no other.
    server.context = context
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f"https://{NODE_ADDRESS}:{server.server_port}/mutate-pods"
    body = webhook_configuration({"url": url}, trusted.certificate, "none", [namespace])
    body["metadata"]["name"] = f"impostor-{namespace}"
    hooks = client.AdmissionregistrationV1Api(kube)
    hooks.create_mutating_webhook_configuration(body)
    if what == "down":
        server.shutdown()
        server.server_close()
    try:
        yield server
    finally:
        server.hold.set()
        hooks.delete_mutating_webhook_configuration(body["metadata"]["name"])
        if what != "down":
            server.shutdown()
            server.server_close()


class ImpostorServer(http.server.ThreadingHTTPServer):
    """Serves on threads that end with it."""

    daemon_threads = False

    def handle_error(self, *_):
        """A handshake that the API server breaks off is what some cases are about."""


class Impostor(http.server.BaseHTTPRequestHandler):
    """Answers late, or with what is not an AdmissionReview."""

    def setup(self):
        self.server.asked.set()
        self.request = self.server.context.wrap_socket(self.request, server_side=True)
        super().setup()

    def finish(self):
        with contextlib.suppress(OSError):
            super().finish()
        self.request.close()

    def do_POST(self):
        if self.server.what == "slow":
            self.server.hold.wait(30)
        body = b"not a review"
        with contextlib.suppress(OSError):  # who asked has long gone on
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("name", [name for name in CASES if not CASES[name].webhook])
def test_a_decode_pod_is_ready_with_the_qos_class_that_it_has_without_windrow(
    kube, image, place, operator, name
):
    case, core = CASES[name], client.CoreV1Api(kube)
    pod = compare(kube, image, place, name, case)
    namespace = pod.metadata.namespace
    prepared = "windrow-run" in {volume.name for volume in pod.spec.volumes}
    native = case.policy is not None and case.policy.get("sidecar", {}).get("form") == "sidecar"
    # A native sidecar does not fit into an exact quota: then nothing at all is changed.
    refused = native and case.quota
    assert prepared == ((case.policy is not None or case.asks) and not refused)
    assert bool(pod.spec.init_containers) == (native and not refused)

    def sidecar_runs():
        status = core.read_namespaced_pod("decode", namespace).status
        found = status.ephemeral_container_statuses or status.init_container_statuses
        return found and found[0].state.running

    if (case.policy or {}).get("mode") == "observe" or (native and not refused):
        wait_until(sidecar_runs, "the sidecar runs")
    assert still_serves(core, namespace)


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].webhook])
def test_a_decode_pod_is_ready_whatever_answers_for_the_webhook(
    kube, image, place, operator, answers, name
):
    case = CASES[name]
    core = client.CoreV1Api(kube)
    plain = place(Case(policy=None))
    ours = place(Case(policy=None))
    server = answers(case.webhook, ours)
    first = start(core, plain, decode_pod(case, image))

    def asked():
        # The API server takes up a registration after a moment.
        core.create_namespaced_pod(ours, decode_pod(case, image), dry_run="All")
        return server.asked.is_set() or case.webhook == "down"

    wait_until(asked, "the API server asks the impostor")
    second = start(core, ours, decode_pod(case, image))
    note_start(name, first, second)
    (without, _), (with_, _) = first, second
    assert with_.status.qos_class == without.status.qos_class
    assert with_.metadata.labels == without.metadata.labels
    assert still_serves(core, ours)


@pytest.mark.parametrize("name", WITHOUT_IMAGE)
def test_a_decode_pod_is_ready_where_the_sidecars_image_is_not_to_be_had(
    kube, image, place, start_operator, name
):
    start_operator("--sidecar-image", MISSING_IMAGE)
    case, core = WITHOUT_IMAGE[name], client.CoreV1Api(kube)
    pod = compare(kube, image, place, name, case)
    namespace = pod.metadata.namespace
    if case.policy == NATIVE:
        assert pod.spec.init_containers is None
        assert "windrow-run" not in {volume.name for volume in pod.spec.volumes}
        return

    def pulling_fails():
        statuses = core.read_namespaced_pod("decode", namespace).status.ephemeral_container_statuses
        waiting = statuses and statuses[0].state.waiting
        return waiting and "Image" in waiting.reason

    wait_until(pulling_fails, "the sidecar's image is not pulled")
    ready_pod(core, namespace)
    assert still_serves(core, namespace)
