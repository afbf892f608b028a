"""The tree is the architecture: what must lie where, and what must never exist."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks import harvest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "folder", ["operator", "sidecar", "simulator", "tests", "api", "cli", "lab"]
)
def test_plain_folders_hold_packages_and_are_none(folder):
    # operator/__init__.py would shadow Python's own `operator` for programs run from the root.
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


@pytest.mark.parametrize(
    ("dependency", "made_with", "stubs"),
    [
        ("grpcio", r"GRPC_GENERATED_VERSION = '([\d.]+)'", "*_pb2_grpc.py"),
        ("protobuf", r"# Protobuf Python Version: ([\d.]+)", "*_pb2.py"),
    ],
)
def test_dependencies_are_as_new_as_the_stubs_of_the_wire_want_them(dependency, made_with, stubs):
    """Stubs refuse to be imported beside older libraries than those that they were made with."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    committed = (ROOT / "api" / "windrow" / "proto").glob(stubs)
    wanted = {re.search(made_with, stub.read_text())[1] for stub in committed}
    assert [d for d in project["dependencies"] if d.startswith(f"{dependency}>=")] == [
        f"{dependency}>={version}" for version in wanted
    ]


def test_field_numbers_of_the_wire_are_unique_in_each_message():
    for path in (ROOT / "proto").rglob("*.proto"):
        for block in re.findall(r"message \w+ \{([^{}]*)\}", path.read_text()):
            numbers = re.findall(r"= (\d+);", block)
            assert len(numbers) == len(set(numbers)), f"{path}: {block}"


@pytest.mark.parametrize(
    "module",
    [
        "windrow_cli",
        "windrow.client",
        "windrow_sidecar.agent",
        "windrow_sidecar.qos.predictor",
        "windrow_simulator.run",
    ],
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


def test_the_page_of_loads_is_that_of_the_committed_results(tmp_path):
    (tmp_path / "images").mkdir()
    written = shutil.copy(ROOT / "docs" / "comparison.md", tmp_path)
    harvest.document(Path(written), ROOT / "benchmarks" / "results")
    names = ["comparison.md", *(f"images/{file.name}" for file in (tmp_path / "images").iterdir())]
    assert len(names) > 1
    for name in names:
        committed = (ROOT / "docs" / name).read_text()
        assert (tmp_path / name).read_text() == committed, "run `make figures`"


PACKAGES = {
    "windrow": ROOT / "api" / "windrow",
    "windrow_cli": ROOT / "cli" / "windrow_cli",
    "windrow_lab": ROOT / "lab" / "windrow_lab",
    "windrow_operator": ROOT / "operator" / "windrow_operator",
    "windrow_sidecar": ROOT / "sidecar" / "windrow_sidecar",
    "windrow_simulator": ROOT / "simulator" / "windrow_simulator",
}


def product_modules():
    for name, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            if "_pb2" not in path.name:
                yield name, path, ast.parse(path.read_text())


def find(reference):
    """Return the node that `package.module:Class.method` names, None where there is none."""
    module, _, qualified = reference.partition(":")
    package, _, rest = module.partition(".")
    base = PACKAGES[package] / Path(*rest.split("."))
    path = base.with_suffix(".py") if base.with_suffix(".py").exists() else base / "__init__.py"
    if not path.exists():
        return None
    node = ast.parse(path.read_text())
    for part in filter(None, qualified.split(".")):
        inside = (n for n in ast.walk(node) if getattr(n, "name", None) == part)
        node = next(inside, None)
        if node is None:
            return None
    return node


@pytest.mark.parametrize("page", ["architecture.md", "glossary.md"])
def test_what_a_page_names_in_the_code_exists(page):
    text = (ROOT / "docs" / page).read_text()
    named = re.findall(r"`(windrow(?:_\w+)?\.[\w.]+(?::[\w.]+)?)`", text)
    native = [name for name in named if name.startswith("windrow_sidecar._core.")]
    stub = (PACKAGES["windrow_sidecar"] / "_core.pyi").read_text()
    lost = [name for name in named if name not in native and find(name) is None]
    known = set(re.findall(r"^(?:class|def) (\w+)", stub, re.MULTILINE))
    lost += [name for name in native if name.rpartition(".")[2] not in known]
    assert len(named) > 20
    assert lost == []


def test_the_glossary_has_at_most_sixty_words_each_once():
    rows = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    words = [row for row in rows if row not in ("word", "---")]
    assert len(words) == len(set(words))
    assert len(words) <= 60


def test_no_public_class_name_stands_for_two_things():
    # A class of the stubs' words (crd and wire) and one of the code count as two as well.
    places = {}
    for _, path, tree in product_modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


# What decides a step is compiled; it touches neither the arena nor the page.
DECIDING = {"DECISION_FIGURES", "Decider", "Guard", "POLICIES", "Predictor", "ask_policy"}


def test_what_decides_a_step_knows_only_what_decides_of_the_native_module():
    for _, path, tree in product_modules():
        if path.is_relative_to(PACKAGES["windrow_sidecar"] / "qos"):
            used = {
                node.attr
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "_core"
            }
            taken = {
                name.name
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom) and node.module == "windrow_sidecar._core"
                for name in node.names
            }
            assert used | taken <= DECIDING, path


def public_functions(body, prefix=""):
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node.body, f"{node.name}.")
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (
            not node.name.startswith("_") or node.name == "__call__"
        ):
            yield f"{prefix}{node.name}", node


def test_public_functions_over_tensors_say_their_shapes():
    """As `[rows, tokens]` in the docstring of their own; `[...]` is a tensor of any shape."""
    over_tensors, silent = 0, []
    for _, path, tree in product_modules():
        for name, node in public_functions(tree.body):
            arguments = [n for n in ast.walk(node.args) if isinstance(n, ast.arg)]
            written = [each.annotation for each in arguments] + [node.returns]
            if any(re.search(r"\bTensor\b", ast.unparse(each)) for each in written if each):
                over_tensors += 1
                if not re.search(r"\[[^\]]*\]", ast.get_docstring(node) or ""):
                    silent.append(f"{path.relative_to(ROOT)}:{node.lineno} {name}")
    assert over_tensors > 100
    assert silent == []


def described(docstring):
    """Return the names under `Args:`."""
    _, begun, text = docstring.partition("\nArgs:\n")
    part = re.split(r"\n\S", text)[0] if begun else ""
    found = re.findall(r"^    (\*{0,2}\w[\w, *]*):", part, re.MULTILINE)
    return {name.strip("* ") for names in found for name in names.split(",")}


def taken(node):
    """Return the parameters of a function or of a class."""
    fields = set()
    if isinstance(node, ast.ClassDef):
        fields = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign)}
        node = next((n for n in node.body if getattr(n, "name", "") == "__init__"), None)
    arguments = [n for n in ast.walk(node.args) if isinstance(n, ast.arg)] if node else []
    return fields | {argument.arg for argument in arguments}


def test_arguments_that_a_docstring_describes_are_there():
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    count, stale = 0, []
    for _, path, tree in product_modules():
        for node in (n for n in ast.walk(tree) if isinstance(n, kinds)):
            names = described(ast.get_docstring(node) or "")
            count += len(names)
            gone = names - taken(node)
            stale += [f"{path.relative_to(ROOT)}:{node.lineno} {name}" for name in gone]
    assert count > 500
    assert stale == []


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


def test_make_help_names_every_target_that_a_person_may_ask_for():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(" ".join(re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)).split())
    shown = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    assert targets - set(re.findall(r"[\w-]+", shown)) == {"help", "locks"}  # locks: a part of lint
