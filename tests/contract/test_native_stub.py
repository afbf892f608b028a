"""The hand-written stub and the page's records say the same as the compiled module."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest

from windrow_sidecar import _core
from windrow_sidecar.qos import view

STUB = Path(_core.__file__).with_name("_core.pyi")
if not STUB.exists():  # an editable install keeps the stub in the source tree
    STUB = Path(view.__file__).parents[1] / "_core.pyi"


def names_in_stub() -> list[str]:
    names = []
    for node in ast.parse(STUB.read_text()).body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.FunctionDef(name=name):
                names.append(name)
            case ast.ClassDef(name=name, body=body):
                names.append(name)
                for member in body:
                    match member:
                        case ast.FunctionDef(name=inner) | ast.AnnAssign(target=ast.Name(id=inner)):
                            names.append(f"{name}.{inner}")
    return names


@pytest.mark.parametrize("name", names_in_stub())
def test_every_name_of_the_stub_is_in_the_module(name: str):
    found = _core
    for part in name.split("."):
        found = getattr(found, part)


def test_every_public_name_of_the_module_is_in_the_stub():
    known = set(names_in_stub())
    assert {name for name in dir(_core) if not name.startswith("_")} <= known


@pytest.mark.parametrize(
    ("record", "fields"),
    [
        (view.View, _core.VIEW_FIELDS),
        (view.Offer, _core.OFFER_FIELDS),
        (view.Grant, _core.GRANT_FIELDS),
    ],
)
def test_the_records_of_the_page_have_the_fields_of_view_py_in_their_order(record, fields):
    assert tuple(field.name for field in dataclasses.fields(record)) == fields


def test_the_page_has_as_many_levels_as_view_py():
    assert _core.LEVELS_MAX == view.LEVELS_MAX


def stub_arguments(method: str) -> list[str]:
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == "Page":
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and member.name == method:
                    return [argument.arg for argument in member.args.args[1:]]
    raise AssertionError(method)


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("publish_view", _core.VIEW_FIELDS),
        ("publish_offer", _core.OFFER_FIELDS),
        ("publish_grant", _core.GRANT_FIELDS),
    ],
)
def test_publishing_takes_every_field_but_the_heartbeat(method, fields):
    assert tuple(stub_arguments(method)) == fields[:-1]
