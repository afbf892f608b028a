"""The commands of the cluster's quick start run on the node as they stand on the page."""

from __future__ import annotations

import re
import subprocess

import pytest
from kubernetes import client
from pod_cases import Case, decode_pod
from served_pod import OPERATOR_ARCHIVE, ROOT, SYSTEM, forget_jobs, import_image, print_logs
from waiting import wait_until

PAGE = ROOT / "docs" / "quickstart" / "cluster.md"
NAMESPACE = "serving"
IMAGES, INSTALL, OBSERVE, HARVEST, LEAVE = range(5)


def blocks():
    return re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def run(number):
    """Run a block of the page; a reader's registry is the one that the image was loaded as."""
    text = blocks()[number].replace("REGISTRY", "docker.io")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture
def serving(node, kube):
    """What a reader has before: the image on the node, and a namespace with decode pods."""
    if not OPERATOR_ARCHIVE.exists():
        pytest.skip("no image of the operator: `make images` builds it")
    import_image(node, OPERATOR_ARCHIVE)
    core = client.CoreV1Api(kube)
    wait_until(lambda: NAMESPACE not in names(core), "no earlier test's namespace is left")
    core.create_namespace({"metadata": {"name": NAMESPACE}})
    yield core
    forget_jobs(kube)
    core.delete_namespace(NAMESPACE)


def names(core):
    return {found.metadata.name for found in core.list_namespace().items}


def is_ready(core, name):
    conditions = core.read_namespaced_pod(name, NAMESPACE).status.conditions or ()
    return any(c.type == "Ready" and c.status == "True" for c in conditions)


@pytest.mark.timeout(400)
def test_a_reader_gets_from_the_first_command_to_a_job_and_back(serving, kube, image):
    core, custom = serving, client.CustomObjectsApi(kube)
    assert blocks()[IMAGES] == "make images NAMES=operator\n"
    try:
        run(INSTALL)
    except AssertionError:
        print_logs(kube)
        raise
    assert "windrow-dashboard-harvest" in {
        found.metadata.name for found in core.list_namespaced_config_map(SYSTEM).items
    }
    run(OBSERVE)

    pod = decode_pod(Case(), image, {"app": "chat"})
    wait_until(
        lambda: (
            "windrow-run"
            in {
                volume.name
                for volume in core.create_namespaced_pod(NAMESPACE, pod, dry_run="All").spec.volumes
            }
        ),
        "new decode pods are prepared",
    )
    core.create_namespaced_pod(NAMESPACE, pod)
    wait_until(lambda: is_ready(core, "decode"), "decode is ready")
    # Its sidecar comes, for the policy observes. (This pod's image waits, and has no Python in it.)
    wait_until(
        lambda: core.read_namespaced_pod("decode", NAMESPACE).spec.ephemeral_containers,
        "a sidecar is attached",
    )

    assert "support-tone" in run(HARVEST)
    where = ("windrow.dev", "v1alpha1", NAMESPACE, "finetunejobs", "support-tone")

    def accepted():
        found = custom.get_namespaced_custom_object(*where).get("status") or {}
        held = {c["type"]: c["status"] for c in found.get("conditions") or ()}
        return held.get("Accepted") == "True"

    wait_until(accepted, "the job is accepted")
    run(LEAVE)
    assert is_ready(core, "decode")
    assert "support-tone" in {
        item["metadata"]["name"]
        for item in custom.list_namespaced_custom_object(*where[:4])["items"]
    }
