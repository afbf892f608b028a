"""The commands of the page for a GPU cluster, on a real API server with the operator, without pods.

Helm only asks the server here: the operator is a process. tests/node installs the chart.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from kubernetes import client
from operator_process import Cluster
from waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "quickstart"
NAMESPACE = "serving"


def find(name):
    """Return a program of PATH, or as `make node` has built it; None: there is none."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    built = sorted((cache / "windrow" / "node").glob(f"*/{name}"))
    return shutil.which(name) or (str(built[-1]) if built else None)


def blocks(page):
    text = (PAGES / page).read_text()
    return re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def serving(kube, operator):
    """The namespace of the page, with the operator at work."""
    core = client.CoreV1Api(kube)
    core.create_namespace({"metadata": {"name": NAMESPACE}})
    yield Cluster(kube, NAMESPACE, operator)
    core.delete_namespace(NAMESPACE)


@pytest.fixture
def run(control_plane, tmp_path):
    """Return a function that runs a block as a person pastes it, with kubectl and helm."""
    programs = {name: find(name) for name in ("kubectl", "helm")}
    if missing := [name for name, path in programs.items() if path is None]:
        pytest.skip(f"no {' and no '.join(missing)}: `make node` builds them")
    for name, path in programs.items():
        (tmp_path / name).symlink_to(path)
    environment = {**os.environ, "KUBECONFIG": str(control_plane.kubeconfig)}
    environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HELM_NAMESPACE": "default"}
    for folder in ("CACHE", "CONFIG", "DATA"):
        environment[f"HELM_{folder}_HOME"] = str(tmp_path / folder)

    def bash(block):
        done = subprocess.run(
            ["bash", "-euc", block], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}"
        return done.stdout

    return bash


def test_the_steps_from_helm_to_a_job_that_says_why_it_waits(run, serving):
    images, install, observe, sharing, harvest, leave = blocks("cluster.md")
    assert images == "make images NAMES=operator\n"
    assert leave == "helm uninstall windrow -n windrow-system\n"

    helm, _, rollout = install.partition("\nkubectl ")
    assert "rollout status deployment/windrow-operator" in rollout
    made = run(f"{helm} --dry-run=server --take-ownership")
    assert "name: windrow-operator\n" in made
    assert "REGISTRY/windrow/operator" in made
    assert "grafana_dashboard" in made

    run(observe)

    def policy():
        return serving.get("harvestpolicies", "chat-decode")

    wait_until(lambda: policy().get("status"), "the operator has taken the policy up")
    assert policy()["spec"]["mode"] == "observe"
    run(sharing)  # of no slot yet
    assert "support-tone" in run(harvest)
    assert policy()["spec"]["mode"] == "harvest"
    wait_until(lambda: serving.condition("Placed", "support-tone"), "a condition")
    told = run("kubectl -n serving describe ftj support-tone")
    assert "a policy has to select a decode pod" in " ".join(told.split())


@pytest.mark.parametrize("page", sorted(path.name for path in PAGES.glob("*.md")))
def test_what_a_page_asks_make_for_is_a_target(page):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for asked in re.findall(r"^(?:    )?make ([\w-]+)", (PAGES / page).read_text(), re.MULTILINE):
        assert asked in targets
