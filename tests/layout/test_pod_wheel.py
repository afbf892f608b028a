"""The wheel that a pod's image installs: what it leaves out, and what works without that."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from windrow.wheel import DISTRIBUTION, installed_version

ROOT = Path(__file__).resolve().parents[2]
BUILD = """
import sys
from scikit_build_core.build import build_wheel
build_wheel(sys.argv[1], {"wheel.cmake": "false"})
"""


def wheel(folder, **variables):
    environment = {key: value for key, value in os.environ.items() if key != "WINDROW_WITHOUT_LAB"}
    command = [sys.executable, "-c", BUILD, str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env={**environment, **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


def packages(built):
    with zipfile.ZipFile(built) as files:
        return {name.partition("/")[0] for name in files.namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def pod(tmp_path_factory):
    """The installed files of the wheel of a pod."""
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(wheel(folder, WINDROW_WITHOUT_LAB="1")) as files:
        files.extractall(folder / "installed")
    return folder / "installed"


def windrow(pod, *arguments):
    # Without `site` nothing of this checkout is found: not the editable installation either.
    path = f"{pod}{os.pathsep}{sysconfig.get_path('purelib')}"
    program = "import sys; from windrow_cli import run; sys.exit(run(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-S", "-c", program, *arguments],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": path, "HOME": str(pod)},
        cwd=pod,
        capture_output=True,
        text=True,
    )


def test_a_pods_wheel_holds_neither_the_laptop_nor_the_simulator(pod):
    held = {path.name for path in pod.iterdir() if not path.name.endswith(".dist-info")}
    assert held == {"windrow", "windrow_cli", "windrow_operator", "windrow_sidecar"}


def test_the_wheel_of_a_laptop_holds_all_packages(tmp_path):
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]
    named = {Path(folder).name for folder in build["wheel"]["packages"]}
    assert {"windrow_lab", "windrow_simulator"} < named
    assert packages(wheel(tmp_path)) == named


def test_each_image_is_built_without_the_laptop():
    built = [
        line
        for file in [*(ROOT / "deploy" / "images").glob("*/Dockerfile"), ROOT / "Makefile"]
        for line in file.read_text().splitlines()
        if " build " in line and "--wheel" in line
    ]
    assert len(built) == 3
    assert all("WINDROW_WITHOUT_LAB=1 " in line for line in built)


def test_a_command_runs_in_a_pod_without_the_laptop(pod):
    done = windrow(pod, "run", "--", "sh", "-c", "echo served; exit 7")
    assert (done.stdout, done.returncode) == ("served\n", 7), done.stderr


def test_a_pod_is_shown_with_its_injection_without_the_laptop(pod, tmp_path):
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "decode", "labels": {"windrow.dev/role": "decode"}},
        "spec": {"containers": [{"name": "main", "command": ["python", "-m", "sglang"]}]},
    }
    file = tmp_path / "pod.json"
    file.write_text(json.dumps(body))
    done = windrow(pod, "inject", "--file", str(file), "--json")
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout), dict)


@pytest.mark.parametrize("command", ["plan", "explain", "memory", "profile", "top", "submit"])
def test_help_of_a_command_needs_no_laptop(pod, command):
    done = windrow(pod, command, "--help")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (["up", "--json"], "windrow_lab"),
        (["down", "--json"], "windrow_lab"),
        (["demo", "--json"], "windrow_lab"),
        (["monitor", "--json"], "windrow_lab"),
        (["finetune", "job.yaml", "--json"], "windrow_lab"),
        (["simulate", "--json"], "windrow_simulator"),
    ],
)
def test_a_command_that_needs_the_laptop_says_how_to_install_it(pod, words, missing):
    done = windrow(pod, *words)
    assert done.returncode == 2, done.stderr
    said = json.loads(done.stdout)
    assert missing in said["error"]
    assert "pip install '.[local]'" in said["remedy"]
    assert "Traceback" not in done.stderr


# `windrow` on package indexes is another project.
_ANOTHERS = re.compile(
    r"\bwindrow\[[a-z0-9,]+\]|\b(?:pip|uv|pipx)\s+(?:install|add|tool install)\b[^\n#]*?"
    r"(?<=[\s'\"])windrow(?=[\s'\"=<>~!]|$)"
)


def test_nothing_asks_for_the_distribution_of_another_project():
    for bad in ("pip install 'windrow[s3]'", "Install windrow[s3]", "uv pip install -q windrow"):
        assert _ANOTHERS.search(bad), bad
    for good in ("pip install ./windrow_harvest-0.1.0.whl[s3]", "pip install -e . # windrow"):
        assert not _ANOTHERS.search(good), good
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    asked = [
        f"{name}:{number}"
        for name in listed.stdout.splitlines()
        if name.endswith((".py", ".md", ".sh", ".yaml", ".yml", ".toml", "Dockerfile", "Makefile"))
        and name != "tests/layout/test_pod_wheel.py"
        and (ROOT / name).is_file()
        for number, line in enumerate((ROOT / name).read_text().splitlines(), start=1)
        if _ANOTHERS.search(line)
    ]
    assert asked == []


def test_the_distribution_has_a_name_of_its_own_and_is_what_is_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION == "windrow-harvest"
    assert installed_version() == project["version"]
