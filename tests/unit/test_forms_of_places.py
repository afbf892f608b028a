"""Forms in which a hostile job writes an address or a path: none of them reaches more."""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path

import pytest

from windrow.access import NetworkAccess
from windrow.errors import UserError, WindrowError
from windrow.outputs import is_below, path_of
from windrow_sidecar.finetune.data.confined_files import ConfinedFiles, ConfinedFileSystem
from windrow_sidecar.finetune.data.places import find_files
from windrow_sidecar.finetune.data.source_access import SourceAccess

OTHERS = SourceAccess((), network=NetworkAccess(private=False), pod_credentials=False)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/x.jsonl",
        "HTTP://10.0.0.1/x.jsonl",
        "http://user@10.0.0.1/x.jsonl",
        "http://example.com@10.0.0.1/x.jsonl",
        "http://example.com:80@10.0.0.1/x.jsonl",
        "http://0x0a000001/x.jsonl",
        "http://167772161/x.jsonl",
        "http://012.0.0.1/x.jsonl",
        "http://10.1/x.jsonl",
        "http://0/x.jsonl",
        "http://100.64.0.1/x.jsonl",
        "http://198.18.0.1/x.jsonl",
        "http://255.255.255.255/x.jsonl",
        "http://[::1]/x.jsonl",
        "http://[0:0:0:0:0:0:0:1]/x.jsonl",
        "http://[0:0:0:0:0:ffff:a00:1]/x.jsonl",
        "http://[fe80:0:0:0:0:0:0:1%25eth0]/x.jsonl",
        "http://[fd00:ec2:0:0:0:0:0:254]/x.jsonl",
        "https://10.0.0.1:99999/x.jsonl",
        "http:10.0.0.1/x.jsonl",
        "http:///10.0.0.1/x.jsonl",
        "ftp://10.0.0.1/x.jsonl",
        "gs://bucket/x.jsonl",
        "github://owner:repo@/x.jsonl",
        "zip://x.jsonl::http://10.0.0.1/a.zip",
        "filecache::http://10.0.0.1/x.jsonl",
        "reference://::http://10.0.0.1/x.jsonl",
        "data:text/plain,x",
        "s3://bucket/x.jsonl",
    ],
)
def test_no_form_of_a_url_reaches_a_private_host_or_another_client(url):
    with pytest.raises(UserError):
        find_files(url, access=OTHERS)


@pytest.fixture
def volume(tmp_path):
    """A volume with a folder for each of two tenants; the job is of the first."""
    for tenant in ("red", "blue"):
        (tmp_path / tenant).mkdir()
        (tmp_path / tenant / "rows.jsonl").write_text('{"text": "x"}\n')
    return tmp_path


FORMS = (
    "{root}/red/../blue/rows.jsonl",
    "{root}/red/./../blue/rows.jsonl",
    "{root}//blue//rows.jsonl",
    "//{root}/blue/rows.jsonl",
    "{root}/RED/../blue/rows.jsonl",
    "{root}/red/\u2025/blue/rows.jsonl",  # two dots in one letter
    "{root}/red/%2e%2e/blue/rows.jsonl",
    "file://{root}/red/%2e%2e/blue/rows.jsonl",
    "file://localhost{root}/blue/rows.jsonl",
    "FILE://{root}/blue/rows.jsonl",
    "file:{root}/blue/rows.jsonl",
    "{root}/red\\..\\blue\\rows.jsonl",
    "{root}/red/rows.jsonl/../../blue/rows.jsonl",
    "{root}/redder/rows.jsonl",
    "/proc/self/cwd{root}/blue/rows.jsonl",
    "/proc/1/root{root}/blue/rows.jsonl",
    "/dev/fd/0",
    "/dev/stdin",
)


@pytest.mark.parametrize("form", FORMS)
def test_no_form_of_a_path_reaches_anothers_folder(volume, form):
    (volume / "redder").mkdir()
    (volume / "redder" / "rows.jsonl").write_text('{"text": "x"}\n')
    access = SourceAccess((volume / "red",), network=NetworkAccess(()))
    with pytest.raises(WindrowError):
        find_files(form.format(root=volume), access=access)


@pytest.mark.parametrize(
    "place",
    [
        "/out/red/../blue",
        "/out//blue",
        "//out/blue",
        "file:///out/red/%2e%2e/blue",
        "file://localhost/out/blue",
        "/out/redder",
        "/out/red/../../out/blue",
        "/OUT/red",
        unicodedata.normalize("NFD", "/out/r\u00e9d"),
    ],
)
def test_no_form_of_a_destination_is_below_a_folder_that_it_is_not_in(place):
    assert not is_below(["/out/red", unicodedata.normalize("NFC", "/out/r\u00e9d")], place)
    assert path_of(place) == path_of(path_of(place))


def test_a_folder_of_pipes_devices_and_sockets_holds_nobody(volume):
    os.mkfifo(volume / "red" / "a.jsonl")
    (volume / "red" / "null.jsonl").symlink_to("/dev/zero")
    files = ConfinedFiles((volume / "red",))
    system = ConfinedFileSystem(files)
    assert system.info(str(volume / "red" / "a.jsonl"))["type"] == "other"
    with pytest.raises(UserError, match="leads by a link out"):
        files.open(volume / "red" / "null.jsonl")
    with pytest.raises(OSError, match="Read-only"):
        system.open(str(volume / "red" / "rows.jsonl"), "wb")


def test_a_tree_below_what_is_never_read_offers_nothing():
    for tree in ("/proc", "/proc/self/cwd", "/sys", "/dev/shm", "/dev/../proc"):
        assert ConfinedFiles((Path(tree),)).trees == ()
