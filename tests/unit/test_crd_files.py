"""crds/ and docs/conditions.md are what the models and the table say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]


def schemas():
    for path in sorted((ROOT / "crds").glob("*.yaml")):
        definition = yaml.safe_load(path.read_text())
        yield path.name, definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def fields(path, node):
    for name, child in node.get("properties", {}).items():
        yield f"{path}.{name}", child
        yield from fields(f"{path}.{name}", child)
    if "items" in node:
        yield from fields(f"{path}[]", node["items"])


def test_the_committed_files_are_fresh():
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "generate_crds.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_field_has_a_description():
    bare = [
        path
        for name, schema in schemas()
        for path, node in fields(name, schema)
        if not node.get("description") and not path.endswith(".metadata")
    ]
    assert bare == []


def test_no_schema_holds_what_a_structural_one_may_not():
    for name, schema in schemas():
        text = yaml.safe_dump(schema)
        for word in ("$ref", "anyOf", "title:", "exclusiveMinimum: 0", "type: 'null'"):
            assert word not in text, f"{name} holds {word}"
