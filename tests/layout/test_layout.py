"""The tree is the architecture: what must lie where, and what must never exist."""

from __future__ import annotations

import importlib.util
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("folder", ["operator", "sidecar", "tests", "api"])
def test_plain_folders_hold_packages_and_are_none(folder):
    # operator/__init__.py would shadow Python's own `operator` for whoever runs from the root.
    assert not (ROOT / folder / "__init__.py").exists()


def test_no_folder_below_tests_is_a_package():
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_names_of_test_files_are_unique():
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_committed_stubs_are_those_of_the_wire(tmp_path):
    spec = importlib.util.spec_from_file_location("gen", ROOT / "tools" / "generate_proto.py")
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    fresh = {path.name: path.read_text() for path in generator.generate(tmp_path)}
    committed = ROOT / "api" / "windrow" / "proto"
    assert {name: (committed / name).read_text() for name in fresh} == fresh


def test_field_numbers_of_the_wire_are_unique_in_each_message():
    for path in (ROOT / "proto").rglob("*.proto"):
        for block in re.findall(r"message \w+ \{([^{}]*)\}", path.read_text()):
            numbers = re.findall(r"= (\d+);", block)
            assert len(numbers) == len(set(numbers)), f"{path}: {block}"


@pytest.mark.parametrize(
    "module",
    ["windrow.cli", "windrow.client", "windrow_sidecar.agent", "windrow_sidecar.qos.predictor"],
)
def test_light_parts_import_without_torch(module):
    # The command line and the agent must start in a moment; torch alone takes seconds.
    probe = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or f"{module} imports torch"


def test_dependencies_by_role_are_declared():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = {
        re.split(r"[<>=\[ ]", dependency)[0]
        for dependency in itertools.chain(project["dependencies"], *extras.values())
    }
    wanted = {"kopf", "kubernetes", "grpcio", "prometheus-client", "nvidia-ml-py", "pyyaml"}
    assert wanted | {"torch", "transformers", "peft"} <= names
    assert any(dependency.startswith("sglang") for dependency in extras["sglang"])


def test_figures_in_the_readme_are_those_of_the_committed_results():
    checked = [sys.executable, str(ROOT / "tools" / "quote_figures.py"), "--check"]
    assert subprocess.run(checked).returncode == 0, "run `python tools/quote_figures.py`"


# Notes that lie beside this repository, where no reader of it can look them up.
ELSEWHERE = re.compile(r"\b(SPECS|STYLE)\b|\b(FACTS|DESIGN)(\.md\b| \d|: )")


def test_no_file_cites_notes_that_are_not_in_this_repository():
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout
    cited = [
        f"{name}:{number}: {line.strip()}"
        for name in files.decode().split("\0")
        if name and (ROOT / name).is_file() and ROOT / name != Path(__file__).resolve()
        for number, line in enumerate((ROOT / name).read_text("utf-8", "ignore").splitlines(), 1)
        if ELSEWHERE.search(line)
    ]
    assert cited == []


# A file with its folder, as documents name it: from the root, or from a package on.
NAMED = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|pyi|h|cpp|proto|md|json|yaml|txt))`")


def test_files_that_documents_name_exist():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, check=True)
    files = listed.stdout.decode().split()
    documents = [name for name in files if name.endswith(".md") and name != "CHANGELOG.md"]
    gone = [
        f"{document}: {named}"
        for document in documents
        for named in NAMED.findall((ROOT / document).read_text())
        if "NNNN" not in named and not any(f"/{file}".endswith(f"/{named}") for file in files)
    ]
    assert gone == []
