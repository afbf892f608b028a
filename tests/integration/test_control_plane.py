"""The local control plane is a real one, and leaves nothing behind."""

import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from kubernetes import client
from waiting import processes_below, wait_until

from windrow.errors import UserError
from windrow_lab.controlplane.server import ControlPlane, ControlPlaneError, ControlPlaneSettings
from windrow_lab.machine.child_processes import descendants
from windrow_lab.machine.tools import Tools


def test_pods_can_be_created_as_soon_as_it_has_started(kube, namespace):
    core = client.CoreV1Api(kube)
    wait_until(
        lambda: core.list_namespaced_service_account(namespace).items, "a default service account"
    )
    pod = {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "none"}]}}
    created = core.create_namespaced_pod(namespace, pod)
    assert created.status.phase == "Pending"


def test_the_kubeconfig_is_readable_by_its_owner_only(control_plane):
    assert stat.S_IMODE(control_plane.kubeconfig.stat().st_mode) == 0o600


def test_objects_of_a_deleted_owner_are_collected(kube, namespace):
    core = client.CoreV1Api(kube)
    owner = core.create_namespaced_config_map(namespace, {"metadata": {"name": "owner"}})
    reference = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "name": "owner",
        "uid": owner.metadata.uid,
    }
    core.create_namespaced_config_map(
        namespace, {"metadata": {"name": "owned", "ownerReferences": [reference]}}
    )
    core.delete_namespaced_config_map("owner", namespace)

    def names():
        return {item.metadata.name for item in core.list_namespaced_config_map(namespace).items}

    wait_until(lambda: "owned" not in names(), "the owned object is gone")


def test_a_token_for_the_sidecars_audience_is_reviewed_and_no_use_elsewhere(
    control_plane, kube, namespace
):
    core = client.CoreV1Api(kube)
    wait_until(
        lambda: core.list_namespaced_service_account(namespace).items, "a default service account"
    )
    token = core.create_namespaced_service_account_token(
        "default", namespace, {"spec": {"audiences": ["windrow"], "expirationSeconds": 600}}
    ).status.token
    review = client.AuthenticationV1Api(kube).create_token_review(
        {"spec": {"token": token, "audiences": ["windrow"]}}
    )
    assert review.status.authenticated
    assert review.status.user.username == f"system:serviceaccount:{namespace}:default"

    settings = client.Configuration(host=control_plane.server)
    settings.ssl_ca_cert = kube.configuration.ssl_ca_cert
    settings.api_key = {"authorization": f"Bearer {token}"}
    with (
        client.ApiClient(settings) as bearer,
        pytest.raises(client.ApiException) as refused,
    ):
        client.CoreV1Api(bearer).list_namespace()
    assert refused.value.status == 401


def test_stopping_it_leaves_neither_process_nor_file(tools, tmp_path):
    directory = tmp_path / "cp"
    before = processes_below()
    with ControlPlane(ControlPlaneSettings(tools, directory=directory)):
        assert len(processes_below() - before) >= 4
    assert processes_below() <= before
    assert not directory.exists()


OWNER = """
import sys
from pathlib import Path
from windrow_lab.controlplane.server import ControlPlane, ControlPlaneSettings
from windrow_lab.machine.tools import Tools
tools = Tools.in_directory(Path(sys.argv[1]), origin="test")
with ControlPlane(ControlPlaneSettings(tools, directory=Path(sys.argv[2]))) as running:
    print(running.server, flush=True)
    sys.stdin.read()
"""


def test_killing_its_owner_leaves_neither_process_nor_file(tools, tmp_path):
    directory = tmp_path / "cp"
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tools.etcd.parent), str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with owner:
        assert owner.stdout.readline().startswith(b"https://")
        kept = descendants(owner.pid)
        assert len(kept) >= 4
        owner.kill()
        wait_until(lambda: not any(is_running(pid) for pid in kept), "all processes are gone")
        wait_until(lambda: not directory.exists(), "the files are gone")


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as status:
            return status.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_stopping_it_after_its_supervisor_was_killed_leaves_nothing_either(tools, tmp_path):
    directory = tmp_path / "cp"
    before = processes_below()
    with ControlPlane(ControlPlaneSettings(tools, directory=directory)):
        (supervisor,) = (
            pid
            for pid in processes_below() - before
            if b"windrow_lab.machine.child_processes"
            in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        )
        os.kill(supervisor, signal.SIGKILL)
        wait_until(lambda: processes_below() <= before, "all processes are gone")
    assert not directory.exists()


def test_a_wanted_port_that_is_in_use_is_named_before_anything_runs(tools, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        directory = tmp_path / "cp"
        plane = ControlPlane(ControlPlaneSettings(tools, directory=directory, port=port))
        with pytest.raises(UserError, match=f"port {port} .* cannot be used"):
            plane.start()
    assert not directory.exists()


def test_a_component_that_fails_shows_the_end_of_its_log(tools, tmp_path):
    broken = tmp_path / "kube-apiserver"
    broken.write_text("#!/bin/sh\necho flag provided but not defined: --of-the-future\nexit 2\n")
    broken.chmod(0o755)
    mixed = Tools(tools.etcd, broken, tools.kube_controller_manager, origin="test")
    before = processes_below()
    plane = ControlPlane(ControlPlaneSettings(mixed, directory=tmp_path / "cp"))
    with pytest.raises(ControlPlaneError, match="status 2") as failed:
        plane.start()
    assert "--of-the-future" in str(failed.value)
    assert str(plane.log_dir) in str(failed.value)
    assert (plane.log_dir / "kube-apiserver.log").exists()
    assert not (tmp_path / "cp" / "tokens.csv").exists()
    assert processes_below() <= before
