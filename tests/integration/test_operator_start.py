"""An operator that cannot work says in one line what is missing and who can mend it."""

from __future__ import annotations

import os
import subprocess
import sys

import yaml
from kubernetes import client
from operator_process import install_crds
from waiting import wait_until

from windrow.local.controlplane import ControlPlane, ControlPlaneSettings


def ended(kubeconfig=None, *arguments):
    environment = {key: value for key, value in os.environ.items() if key != "KUBECONFIG"}
    if kubeconfig is not None:
        environment["KUBECONFIG"] = str(kubeconfig)
    done = subprocess.run(
        [sys.executable, "-m", "windrow_operator", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return done.stderr.strip().splitlines()[-1]


def test_outside_of_a_pod_and_without_a_kubeconfig():
    said = ended()
    assert "there is no cluster to reach" in said
    assert "KUBECONFIG" in said


def test_with_a_kubeconfig_that_is_not_there(tmp_path):
    assert str(tmp_path / "none") in ended(tmp_path / "none")


def test_with_an_account_that_has_no_rights(control_plane, kube, namespace, tmp_path):
    install_crds(kube)
    core = client.CoreV1Api(kube)
    wait_until(lambda: core.list_namespaced_service_account(namespace).items, "an account")
    made = core.create_namespaced_service_account_token("default", namespace, {"spec": {}})
    config = yaml.safe_load(control_plane.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": made.status.token}
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    said = ended(path)
    assert "this account lacks rights" in said
    assert "ClusterRole windrow-operator" in said


def test_before_our_definitions_are_there_it_waits_and_says_for_what(tools, tmp_path):
    path = tmp_path / "log"
    # A control plane of its own: the others' definitions are in use.
    with ControlPlane(ControlPlaneSettings(tools)) as fresh, path.open("w") as log:
        command = [sys.executable, "-m", "windrow_operator", f"--kubeconfig={fresh.kubeconfig}"]
        with subprocess.Popen(command, stderr=log) as process:
            wanted = "has no finetunejobs, harvestpolicies, harvestslots, latencyprofiles"
            try:
                wait_until(lambda: wanted in path.read_text(), "it says what is missing")
                assert process.poll() is None
            finally:
                process.terminate()
