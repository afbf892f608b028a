"""Check what a job beside decode may read: its volumes, no link out of them, and allowed hosts."""

from __future__ import annotations

import errno
import gzip
import http.server
import json
import os
import socket
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyarrow import parquet

from windrow.access import NetworkAccess
from windrow.errors import UserError, WindrowError
from windrow_sidecar.engines.weight_files import weight_files
from windrow_sidecar.finetune.data import held_models, network_guard, store
from windrow_sidecar.finetune.data.confined_files import ConfinedFiles, open_beneath
from windrow_sidecar.finetune.data.confined_models import check_model
from windrow_sidecar.finetune.data.held_models import HeldModel
from windrow_sidecar.finetune.data.network_guard import NetworkGuard, SourceRefused
from windrow_sidecar.finetune.data.places import find_files
from windrow_sidecar.finetune.data.reading_memory import bounded_memory
from windrow_sidecar.finetune.data.records import read_records
from windrow_sidecar.finetune.data.source_access import NO_ACCESS, SourceAccess
from windrow_sidecar.finetune.data.split import Example

ROW = '{"text": "card 4111"}\n'


@pytest.fixture
def volume(tmp_path):
    """Two tenants beside each other; the job is of the second."""
    (tmp_path / "bank").mkdir()
    (tmp_path / "bank" / "private.jsonl").write_text(ROW)
    mine = tmp_path / "mine"
    (mine / "sub").mkdir(parents=True)
    (mine / "rows.jsonl").write_text(ROW)
    return mine


def rows(source, access):
    return [r.fields() for f in find_files(str(source), access=access) for r in read_records(f)]


def access_to(*trees, never=()):
    return SourceAccess(tuple(trees), never=tuple(never), network=NetworkAccess(sources=()))


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize(
    ("target", "is_below"),
    [
        ("rows.jsonl", True),
        ("sub/../rows.jsonl", True),
        ("../bank/private.jsonl", False),
        ("sub/../../bank/private.jsonl", False),
        ("/etc/hostname", False),
        ("loop", False),
    ],
)
def test_a_link_is_followed_while_it_stays_below_its_volume(volume, target, is_below, by_hand):
    (volume / "loop").symlink_to("loop")
    (volume / "link").symlink_to(target)
    tree = os.open(volume, os.O_PATH | os.O_DIRECTORY)
    try:
        if is_below:
            os.close(open_beneath(tree, "link", os.O_RDONLY, by_hand=by_hand))
            return
        with pytest.raises(OSError, match=r".") as refused:
            open_beneath(tree, "link", os.O_RDONLY, by_hand=by_hand)
        assert refused.value.errno in (errno.EXDEV, errno.ELOOP)
    finally:
        os.close(tree)


@pytest.mark.parametrize(
    "place",
    [
        "{volume}/../bank/private.jsonl",
        "{volume}/link.jsonl",
        "{volume}/folder",
        "{root}/bank",
        "{root}/bank/private.jsonl",
        "file://{root}/bank/private.jsonl",
        "local://{root}/bank/private.jsonl",
        "simplecache::file://{root}/bank/private.jsonl",
        "/proc/self/root{root}/bank/private.jsonl",
        "/proc/self/environ",
        "memory://rows.jsonl",
        "bank/private.jsonl",
    ],
)
def test_rows_of_another_tenant_are_refused_by_every_name(volume, place, monkeypatch):
    root = volume.parent
    (volume / "link.jsonl").symlink_to(root / "bank" / "private.jsonl")
    (volume / "folder").mkdir()
    (volume / "folder" / "rows.jsonl").symlink_to("../../bank/private.jsonl")
    monkeypatch.chdir(root)
    with pytest.raises(WindrowError) as refused:
        rows(place.format(volume=volume, root=root), access_to(volume))
    assert "4111" not in str(refused.value)


def test_a_whole_machine_as_a_volume_does_not_offer_processes_or_the_run_directory(tmp_path):
    (tmp_path / "rows.jsonl").write_text(ROW)
    with pytest.raises(UserError):
        rows(tmp_path / "rows.jsonl", access_to(Path("/"), never=[tmp_path]))
    with pytest.raises(UserError):
        rows("/proc/self/environ", access_to(Path("/proc")))


def test_rows_on_the_jobs_volume_are_read_packed_or_not(volume):
    (volume / "sub" / "more.jsonl.gz").write_bytes(gzip.compress(ROW.encode()))
    (volume / "again.jsonl").symlink_to("rows.jsonl")
    assert rows(volume / "rows.jsonl", access_to(volume)) == [json.loads(ROW)]
    assert rows(f"file://{volume}", access_to(volume)) == [json.loads(ROW)] * 3


def test_a_pipe_on_the_volume_holds_nobody(volume):
    os.mkfifo(volume / "pipe.jsonl")
    with pytest.raises(UserError, match="neither a file nor a directory"):
        rows(volume / "pipe.jsonl", access_to(volume))


def test_a_refusal_says_what_may_be_read_and_who_can_allow_more(volume):
    with pytest.raises(UserError) as refused:
        rows(volume.parent / "bank" / "private.jsonl", access_to(volume))
    assert str(volume) in refused.value.remedy
    assert "HarvestPolicy" in refused.value.remedy
    assert refused.value.field == "spec.dataset.source"


def test_without_an_access_nothing_is_read(volume):
    for source in (volume, "http://127.0.0.1:1/rows.jsonl", "s3://bucket/rows.jsonl"):
        with pytest.raises(UserError):
            rows(source, NO_ACCESS)


def test_a_bucket_without_a_secret_needs_the_policys_word():
    with pytest.raises(UserError) as refused:
        rows(
            "s3://bucket/rows.jsonl",
            SourceAccess((), network=NetworkAccess(private=True), pod_credentials=False),
        )
    assert refused.value.field == "spec.dataset.secretRef"
    assert "podCredentials" in refused.value.remedy


@contextmanager
def server(handle):
    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_HEAD(self):
            handle(self)

        do_GET = do_HEAD

    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        found.shutdown()
        found.server_close()
        thread.join()


def answer(handler):
    body = ROW.encode()
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    if handler.command == "GET":
        handler.wfile.write(body)


@contextmanager
def admitted(job, network):
    network_guard.install().admit(job, network)
    try:
        yield
    finally:
        network_guard.forget(job)


def test_a_redirect_to_an_address_that_is_not_allowed_is_refused():
    asked = []

    def inner(handler):
        asked.append(handler.path)
        answer(handler)

    with server(inner) as private:

        def outer(handler):
            handler.send_response(302)
            handler.send_header("Location", f"http://127.0.0.1:{private.server_port}/x.jsonl")
            handler.end_headers()

        with server(outer) as public:
            port = public.server_port
            network = NetworkAccess(sources=(f"127.0.0.1:{port}",))
            with admitted("job", network), pytest.raises(WindrowError):
                rows(f"http://127.0.0.1:{port}/rows.jsonl", SourceAccess((), network=network))
    assert asked == []


def test_a_host_that_the_policy_lists_is_read():
    with server(answer) as found:
        network = NetworkAccess(sources=(f"127.0.0.1:{found.server_port}",))
        with admitted("job", network):
            url = f"http://127.0.0.1:{found.server_port}/rows.jsonl"
            assert rows(url, SourceAccess((), network=network)) == [json.loads(ROW)]


def test_a_name_that_resolves_to_a_private_address_is_refused():
    guard = NetworkGuard({})
    assert guard.resolve("localhost", 80)
    guard.admit("job", NetworkAccess())
    with pytest.raises(SourceRefused, match="private address"):
        guard.resolve("localhost", 80)
    guard.forget("job")
    assert guard.resolve("localhost", 80)


def test_what_a_listed_name_resolved_to_may_be_dialled_and_nothing_else():
    guard = NetworkGuard({})
    guard.admit("job", NetworkAccess(sources=("localhost",)))
    guard.resolve("localhost", 80, type=socket.SOCK_STREAM)
    guard.check(("127.0.0.1", 80))
    with pytest.raises(SourceRefused):
        guard.check(("127.0.0.2", 80))
    with pytest.raises(SourceRefused):
        guard.check(("169.254.169.254", 80))


def test_a_proxy_of_the_process_may_be_dialled():
    guard = NetworkGuard({"HTTPS_PROXY": "http://localhost:3128"})
    guard.admit("job", NetworkAccess())
    guard.resolve("localhost", 3128, type=socket.SOCK_STREAM)
    guard.check(("127.0.0.1", 3128))


def test_a_job_of_a_shared_worker_does_not_close_what_another_may_reach():
    guard = NetworkGuard({})
    guard.admit("public", NetworkAccess())
    guard.admit("own", NetworkAccess(private=True))
    guard.resolve("localhost", 80, type=socket.SOCK_STREAM)
    guard.check(("127.0.0.1", 80))


def test_confined_files_resolve_to_a_place_without_links(volume):
    (volume / "latest").symlink_to("sub")
    assert ConfinedFiles((volume,)).resolve(volume / "latest") == (volume / "sub").resolve()


@pytest.mark.parametrize(
    "url", ["http://[2606:4700::1111]/rows.jsonl", "http://[a::file:///etc/hostname]/rows.jsonl"]
)
def test_an_address_that_clients_would_take_for_two_sources_is_refused_as_that(volume, url):
    with pytest.raises(UserError, match="by which clients join two sources"):
        rows(url, access_to(volume))


def test_links_without_end_are_said_to_be_that(volume):
    (volume / "sub" / "again").symlink_to(".")
    with pytest.raises(UserError, match="has links without end below"):
        rows(volume / "sub", access_to(volume))


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_rows_that_unpack_to_gigabytes_are_refused_before_they_are_in_memory(tmp_path, kind):
    if kind == "json":
        file = tmp_path / "rows.json.gz"
        file.write_bytes(gzip.compress(b"[" + b"[]," * (8 << 20) + b"[]]", compresslevel=1))
    else:
        file = tmp_path / "rows.parquet"
        same = pa.DictionaryArray.from_arrays(pa.array([0] * 4096, pa.int32()), ["x" * (1 << 20)])
        parquet.write_table(pa.table({"text": same}), file, compression="zstd")
    assert file.stat().st_size < 1 << 20
    (found,) = find_files(str(file), access=access_to(tmp_path))
    with (
        pytest.raises(UserError, match="more than 256 MiB of memory") as refused,
        bounded_memory(256 << 20),
    ):
        list(read_records(found))
    assert refused.value.field == "spec.dataset.source"
    assert len(bytearray(512 << 20))  # the limit ends with the reading


def test_rows_without_end_leave_a_part_of_the_disk_free(monkeypatch):
    roomy, full = (SimpleNamespace(f_bavail=free, f_blocks=100) for free in (21, 19))
    monkeypatch.setattr(store.os, "fstatvfs", lambda _: roomy)
    monkeypatch.setattr(store, "_LOOK_EVERY_BYTES", 64)  # at each row
    monkeypatch.setattr(store, "_ALWAYS_BYTES", 10_000)
    rows = store.TokenFile()
    row = Example((1,) * 16, (1,) * 16, "rows.jsonl:1")
    for _ in range(200):
        rows.add(row)  # as long as there is room
    monkeypatch.setattr(store.os, "fstatvfs", lambda _: full)
    with pytest.raises(UserError, match="less than 20% of the disk") as refused:
        rows.add(row)
    assert refused.value.field == "spec.dataset.source"
    few = store.TokenFile()
    for _ in range(20):
        few.add(row)  # so many in any case


@pytest.fixture
def models(tmp_path, monkeypatch):
    """A folder with a model of each of two tenants; the working directory is where both are."""
    for tenant in ("bank", "mine"):
        model = tmp_path / tenant / "model"
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "name", ["bank/model", "./bank/model", "mine/../bank/model", "{root}/bank/model", "bank"]
)
def test_a_model_of_another_tenant_is_refused_by_every_name(models, name):
    with pytest.raises(UserError) as refused:
        check_model(Path(name.format(root=models)), access_to(models / "mine"))
    assert refused.value.field == "spec.model.name"
    assert "config" not in str(refused.value)


@pytest.mark.parametrize("name", ["chat_template.jinja", "deep/tokenizer.json", "folder"])
def test_a_models_folder_leads_nowhere_else(models, name):
    model = models / "mine" / "model"
    (model / "deep").mkdir()
    (model / "again.json").symlink_to("config.json")
    check_model(model, access_to(models / "mine"))
    (model / name).symlink_to(
        models / "bank" / "model" / ("." if name == "folder" else "config.json")
    )
    with pytest.raises(UserError, match="leads by a link out") as refused:
        check_model(model, access_to(models / "mine"))
    assert refused.value.field == "spec.model.name"
    with pytest.raises(UserError):
        HeldModel(model, access_to(models / "mine"))  # once more before rows are rendered


def test_the_model_that_decode_serves_is_read_where_decode_reads_it(models):
    snapshot = models / "cache" / "snapshot"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to(models / "bank" / "model" / "config.json")
    served = replace(access_to(models / "mine", snapshot), serves_model=True)
    check_model(snapshot, served)
    check_model(snapshot, replace(served, serves_model=None))  # as an older operator says it
    with pytest.raises(UserError):
        check_model(snapshot, replace(served, serves_model=False))
    check_model(Path("team/model"), access_to(models / "mine"))  # a name of the Hub


def swap(path, target):
    """Replace a file or folder by a link, as who can write to the volume may at any time."""
    path.rename(path.with_name(f"{path.name}-before"))
    path.symlink_to(target)


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_link_swapped_in_between_check_and_open_is_refused(models, what, monkeypatch):
    mine, bank = models / "mine" / "model", models / "bank" / "model"
    (bank / "config.json").write_text('{"secret": 4111}')

    def checked(folder, access):
        check_model(folder, access)
        swap(*((mine / "config.json", bank / "config.json") if what == "file" else (mine, bank)))

    monkeypatch.setattr(held_models, "check_model", checked)
    with pytest.raises(UserError, match="leads by a link out") as refused:
        HeldModel(mine, access_to(models / "mine"))
    assert "4111" not in str(refused.value)


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_link_swapped_in_after_the_open_changes_nothing(models, what):
    mine, bank = models / "mine" / "model", models / "bank" / "model"
    (bank / "config.json").write_text('{"secret": 4111}')
    held = HeldModel(mine, access_to(models / "mine"))
    swap(*((mine / "config.json", bank / "config.json") if what == "file" else (mine, bank)))
    assert (held.path / "config.json").read_text() == "{}"
    held.close()
    assert not held.path.exists()


def test_links_of_a_hubs_cache_on_the_jobs_volume_are_followed(models):
    cache = models / "mine" / "hub" / "models--team--tiny"
    snapshot = cache / "snapshots" / "1"
    for folder in (snapshot / "additional_chat_templates", cache / "blobs"):
        folder.mkdir(parents=True)
    for name in ("config.json", "additional_chat_templates/tool.jinja"):
        (cache / "blobs" / Path(name).name).write_text(f'"{name}"')
        up = "../" * (2 + name.count("/"))
        (snapshot / name).symlink_to(f"{up}blobs/{Path(name).name}")
        held = HeldModel(snapshot, access_to(models / "mine"))
        assert (held.path / name).read_text() == f'"{name}"'
        held.close()


def test_an_error_names_the_folder_and_not_where_its_files_are_held(models):
    model = models / "mine" / "model"
    held = HeldModel(model, access_to(models / "mine"))
    with pytest.raises(UserError) as told, held.named() as place:
        raise UserError(f"{place}/config.json is wrong", remedy=f"Look at {place}.")
    held.close()
    assert told.value.problem == f"{model}/config.json is wrong"
    assert told.value.remedy == f"Look at {model}."


@pytest.mark.parametrize(
    "name", ["{root}/bank/model/w.safetensors", "../../bank/model/w.safetensors"]
)
def test_an_index_of_shards_names_no_file_of_another_folder(models, name):
    model = models / "mine" / "model"
    (models / "bank" / "model" / "w.safetensors").write_bytes(b"card 4111")
    index = {"weight_map": {"a": name.format(root=models)}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="which is not in its folder"):
        weight_files(model)


def test_a_tokenizers_configuration_names_no_file_elsewhere(models):
    model = models / "mine" / "model"
    config = {"fast_tokenizer_files": ["../../bank/model/tokenizer.9.json"], "model_max_length": 8}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    held = HeldModel(model, access_to(models / "mine"))
    assert json.loads((held.path / "tokenizer_config.json").read_text()) == {"model_max_length": 8}
    held.close()
