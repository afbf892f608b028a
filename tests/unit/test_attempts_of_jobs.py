"""Owners of jobs who try adapters, names and trackers that are not theirs."""

from __future__ import annotations

import json
import socket
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError, safe_open

from windrow.access import NetworkAccess
from windrow.crd import parse_job_spec
from windrow.errors import UserError
from windrow.outputs import path_of
from windrow_operator.adapter_versions import served_name, trial_name
from windrow_sidecar.finetune.adapter import beginning
from windrow_sidecar.finetune.arrival import cache
from windrow_sidecar.finetune.data.network_guard import NetworkGuard, SourceRefused
from windrow_sidecar.finetune.data.source_access import SourceAccess


def spec_of(**parts):
    spec = {
        "model": {"name": "owner/base"},
        "dataset": {"source": "/data/rows.jsonl"},
        "training": {"maxSteps": 1},
        "output": {"destination": "/out"},
    }
    return parse_job_spec(
        {name: {**spec.get(name, {}), **parts.get(name, {})} for name in {*spec, *parts}}
    )


def begin_with(place: str, access: SourceAccess) -> None:
    spec = spec_of(adapter={"from": place})
    beginning._config(Path(path_of(spec.adapter.start_from)), access)


@pytest.mark.parametrize(
    "place",
    [
        "{root}/bank/a",
        "file://{root}/bank/a",
        "/{root}/bank/a",
        "{root}/mine/../bank/a",
        "{root}/mine/link",
        "{root}/mine/files",
        "{root}/mine/absolute",
        "/proc/self/root{root}/bank/a",
        "/proc/self/cwd/bank/a",
        "bank/a",
        "../bank/a",
        "hf://bank/a",
        "s3://bank/a",
        "file://bank{root}/bank/a",
    ],
)
def test_a_job_begins_with_no_adapter_of_another_namespace(tmp_path, place, monkeypatch):
    theirs, mine = tmp_path / "bank" / "a", tmp_path / "mine"
    theirs.mkdir(parents=True)
    (theirs / "adapter_config.json").write_text('{"r": 4111}')
    (mine / "files").mkdir(parents=True)
    (mine / "link").symlink_to("../bank/a")
    (mine / "absolute").symlink_to(theirs)
    (mine / "files" / "adapter_config.json").symlink_to("../../bank/a/adapter_config.json")
    monkeypatch.chdir(tmp_path)
    access = SourceAccess((mine,), network=NetworkAccess(sources=()))
    with pytest.raises(UserError) as refused:
        begin_with(place.format(root=tmp_path), access)
    assert refused.value.field.startswith("spec.adapter")
    assert "4111" not in str(refused.value)


@pytest.mark.parametrize("host", ["localhost", "localhost.", "①②⑦.0.0.1", "127.0.0.1.", "0177.1"])
def test_a_server_of_figures_is_reached_by_no_name_of_an_address_inside(host, monkeypatch):
    """Names pass the check of a spec; what they resolve to is looked at before it is dialled."""
    inside = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 443))]
    monkeypatch.setattr(
        "windrow_sidecar.finetune.data.network_guard._resolve", lambda *_, **__: inside
    )
    guard = NetworkGuard({})
    guard.admit("job", NetworkAccess(None))
    with pytest.raises(SourceRefused):
        guard.resolve(host, 443)
    with pytest.raises(SourceRefused):
        guard.check(("127.0.0.1", 443))


def test_no_two_namespaces_share_a_served_name_or_that_of_a_trial():
    digest = "d" * 64
    names = ("x", "bank.x", "bank", "x-canary-" + digest[:12], "bank.x-canary-" + digest[:12])
    known: dict[str, str] = {}
    for namespace, name, own in product(("bank", "evil", "x", "bank-x"), names, (None, *names)):
        deploy = SimpleNamespace(name=own)
        job = SimpleNamespace(
            namespace=namespace,
            name=name,
            uid="u",
            spec=SimpleNamespace(output=SimpleNamespace(deploy=deploy)),
            status={"adapter": {"digest": digest}},
        )
        for made in (served_name(job), trial_name(job)):
            assert known.setdefault(made, namespace) == namespace


HEADERS = (
    {"a": {"dtype": "F32", "shape": [8], "data_offsets": [-99, 32]}},
    {"a": {"dtype": "X", "shape": [10**9], "data_offsets": [0, 32]}},
    {"a": {"dtype": "F32", "shape": [10**18, 10**18], "data_offsets": [0, 32]}},
    {"a": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32.0]}},
    {"a": {"dtype": "F32", "shape": [8], "data_offsets": [16, 32]}},
    {n: {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]} for n in "ab"},
    {"a": {"data_offsets": [0, "32"]}},
    {"a": {"data_offsets": {"1": 32}}},
    {"a": {"data_offsets": [0, 10**400]}},
    {"a": None},
    {"__x": {"data_offsets": [0, 32]}},
    [1],
)


def load(file: Path) -> None:
    """Check a file as who copies it does, then open it as servers do."""
    cache._check_weights(file, "s3://bucket/a")
    with safe_open(file, "pt"):
        pass


@pytest.mark.parametrize("header", [*map(json.dumps, HEADERS), "[" * 100_000, '{"a":' * 50_000])
def test_weights_whose_header_lies_are_refused_by_the_copy_or_by_who_loads_them(tmp_path, header):
    file = tmp_path / "adapter_model.safetensors"
    content = header.encode()
    file.write_bytes(len(content).to_bytes(8, "little") + content + bytes(32))
    with pytest.raises((UserError, SafetensorError)):
        load(file)


@pytest.mark.parametrize(
    "place",
    [
        "bank/a",
        "bank/a/.windrow/uid/adapter",
        "latest",
        "linked",
        ".windrow-adapters/bank/0123",
        "damaged",
        "bank/nothing",
        "bank/a/adapter_config.json",
    ],
)
def test_a_job_begins_with_no_adapter_of_another_namespace_where_all_share_a_folder(
    tmp_path, place
):
    """An adapter of others is refused by its owner, in the words for one that is missing."""
    theirs, mine = tmp_path / "bank" / "a", tmp_path / "mine" / "a"
    copy, damaged = tmp_path / ".windrow-adapters" / "bank" / "0123", tmp_path / "damaged"
    draft = theirs / ".windrow" / "uid" / "adapter"
    for folder, namespace in ((theirs, "bank"), (mine, "team"), (damaged, "")):
        (folder / ".windrow").mkdir(parents=True)
        words = json.dumps({"uid": "1", "namespace": namespace})
        (folder / ".windrow" / "owner.json").write_text(words[: len(words) if namespace else 9])
    (tmp_path / "linked").mkdir()
    for folder in (theirs, mine, damaged, draft, copy):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_config.json").write_text('{"r": 4111}')
    (tmp_path / "latest").symlink_to("bank/a")
    (tmp_path / "linked" / "adapter_config.json").symlink_to("../bank/a/adapter_config.json")
    access = SourceAccess((tmp_path,), network=NetworkAccess(sources=()), namespace="team")
    with pytest.raises(UserError) as refused:
        begin_with(f"{tmp_path}/{place}", access)
    assert refused.value.field == "spec.adapter.from"
    with pytest.raises(UserError) as missing:
        begin_with(f"{tmp_path}/nothing", access)
    assert refused.value.remedy == missing.value.remedy
    assert refused.value.problem == missing.value.problem.replace("nothing", place)
    begin_with(f"{tmp_path}/mine/a", access)  # and its own is read
