"""Rows and models that lie elsewhere: on the Hub, on a web server; and what is said if not."""

from __future__ import annotations

import functools
import gzip
import http.server
import shutil
import threading

import pytest
from huggingface_hub import constants
from support.filehub import COMMIT, served

from windrow.crd import DatasetSpec, parse_job_spec
from windrow.errors import Transient, UserError
from windrow_sidecar.finetune.colocated.slot import held_model
from windrow_sidecar.finetune.data.places import DatasetSilent, find_files
from windrow_sidecar.finetune.data.records import read_records
from windrow_sidecar.finetune.data.remote import Credentials
from windrow_sidecar.finetune.data.source_access import UNCONFINED, SourceAccess
from windrow_sidecar.finetune.job.assembly import JobSpec
from windrow_sidecar.finetune.job.failures import failure
from windrow_sidecar.finetune.model.hub_models import HubReader
from windrow_sidecar.finetune.model.loading import find_model

find_files_anywhere = functools.partial(find_files, access=UNCONFINED)


def lines_of(source, split="train") -> list[str]:
    return [r.where for f in find_files_anywhere(source, split) for r in read_records(f)]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The root of a Hub that every client of this process asks."""
    root = tmp_path / "hub"
    with served(root) as address:
        template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield root


def write(path, text) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_model_of_the_hub_is_brought_here_without_what_it_does_not_need(hub):
    write(hub / "models/team/tiny/config.json", "{}")
    write(hub / "models/team/tiny/weights.bin", "pickled")
    write(hub / "models/team/tiny/merges.txt", "")
    write(hub / "models/team/tiny/chat_template.jinja", "{{ messages }}")
    found = find_model("team/tiny", "main")
    assert found.name == COMMIT
    names = sorted(file.name for file in found.iterdir())
    assert names == ["chat_template.jinja", "config.json", "merges.txt"]


def test_a_model_that_the_hub_has_not_is_told_in_one_line(hub):
    with pytest.raises(UserError, match=r"the Hub has no 'team/none' at main, or hides it") as no:
        find_model("team/none", "main")
    assert (no.value.field, no.value.reason) == ("spec.model.name", "ModelNotFound")
    assert "\n" not in str(no.value)


@pytest.fixture
def at_once(monkeypatch):
    """Clients do not wait before they ask again."""
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)


def ask(kind):
    return find_model("team/tiny", "main") if kind == "model" else lines_of("team/rows")


def told(error) -> tuple[str, bool]:
    event, _ = failure(error, "")
    return event.reason, event.user_error


@pytest.mark.parametrize("status", [429, 500, 503])
@pytest.mark.parametrize(
    ("kind", "reason"), [("model", "ModelUnreachable"), ("rows", "DataStarved")]
)
def test_a_hub_that_is_busy_or_broken_is_asked_again_later(hub, at_once, kind, reason, status):
    write(hub / "refuses", str(status))
    with pytest.raises(Transient) as later:
        ask(kind)
    assert told(later.value) == (reason, False)
    assert "\n" not in str(later.value)


@pytest.mark.parametrize("status", [401, 403, 404])
@pytest.mark.parametrize(
    ("kind", "reason"), [("model", "ModelNotFound"), ("rows", "DatasetUnreadable")]
)
def test_a_hub_that_refuses_or_has_not_is_the_jobs_mistake(hub, at_once, kind, reason, status):
    write(hub / "refuses", str(status))
    with pytest.raises(UserError) as refused:
        ask(kind)
    assert told(refused.value) == (reason, True)
    assert refused.value.remedy


@pytest.mark.parametrize(
    ("kind", "reason"), [("model", "ModelUnreachable"), ("rows", "DataStarved")]
)
def test_a_hub_that_is_not_there_is_asked_again_later(hub, at_once, monkeypatch, kind, reason):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(Transient) as later:
        ask(kind)
    assert told(later.value) == (reason, False)


def test_a_model_that_is_here_needs_no_hub(hub, at_once):
    write(hub / "models/team/tiny/config.json", "{}")
    found = find_model("team/tiny", "main")
    write(hub / "refuses", "503")
    assert find_model("team/tiny", "main") == found


def test_a_worker_that_may_not_ask_the_hub_is_told_so_once(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"):
        find_model("team/tiny", "main")


def test_rows_of_the_hub_are_read_by_split_and_by_file(hub):
    write(hub / "datasets/team/rows/data/train-0.jsonl", '{"text": "a"}\n{"text": "b"}\n')
    write(hub / "datasets/team/rows/data/test-0.jsonl", '{"text": "c"}\n')
    name = "hf://datasets/team/rows"
    assert lines_of("team/rows") == [f"{name}/data/train-0.jsonl:{n}" for n in (1, 2)]
    assert lines_of("team/rows", "test") == [f"{name}/data/test-0.jsonl:1"]
    pinned = f"{name}@main/data/test-0.jsonl"
    assert lines_of(pinned) == [f"{pinned}:1"]
    with pytest.raises(UserError, match="cannot be read") as refused:
        find_files_anywhere("team/none")
    assert refused.value.field == "spec.dataset.source"


OWN = HubReader(is_process=False, token="of-job")
NONE = HubReader(is_process=False)


@pytest.mark.parametrize("own_credentials", [True, False])
def test_the_pods_own_token_of_the_hub_is_lent_to_no_job_that_may_not_use_it(
    hub, monkeypatch, own_credentials
):
    monkeypatch.setenv("HF_TOKEN", "of-decode")
    write(hub / "private", "of-decode")
    write(hub / "models/team/tiny/config.json", "{}")
    write(hub / "datasets/team/rows/data/train-0.jsonl", '{"text": "card 4111"}\n')
    access = SourceAccess(pod_credentials=own_credentials)
    if own_credentials:
        assert len(find_files("team/rows", access=access)) == 1
        assert find_model("team/tiny", "main").name == COMMIT
        return
    with pytest.raises(UserError):
        find_files("team/rows", access=access)
    with pytest.raises(UserError, match="401"):
        find_model("team/tiny", "main", NONE)


TOKEN = {"HF_TOKEN": "of-job"}


@pytest.mark.parametrize("pod_credentials", [True, False])
@pytest.mark.parametrize("named", ["model", "dataset"])
@pytest.mark.parametrize("serves_model", [True, False])
def test_a_gated_model_is_read_with_the_token_of_the_models_own_secret(
    hub, monkeypatch, tmp_path, pod_credentials, named, serves_model
):
    """The dataset's stands in for it, unless the pod's own may be used."""
    monkeypatch.setenv("HF_TOKEN", "of-decode")
    write(hub / "models/team/tiny/config.json", "{}")
    access = SourceAccess(
        (tmp_path / "own",), pod_credentials=pod_credentials, serves_model=serves_model
    )
    spec = parse_job_spec(
        {
            "model": {"name": "team/tiny", "secretRef": {"name": "hub"}},
            "dataset": {"source": "/rows.jsonl"},
            "training": {"maxSteps": 1},
            "output": {"destination": "/out"},
        }
    )
    credentials = {f"{named}_credentials": Credentials("hub", TOKEN)}
    job = JobSpec("team", "tone", "uid", 1, spec, access=access, **credentials)
    as_pod = serves_model or (pod_credentials and named == "dataset")
    write(hub / "private", "of-decode" if as_pod else "of-job")
    held_model(job).close()
    write(hub / "private", "of-job" if as_pod else "of-decode")
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(UserError, match="401") as refused:
        held_model(job)
    assert as_pod or "spec.model.secretRef" in refused.value.remedy


@pytest.mark.parametrize("revision", ["main", COMMIT])
def test_a_private_model_in_the_pods_cache_is_given_to_no_job_that_the_hub_refuses(
    hub, at_once, monkeypatch, revision
):
    monkeypatch.setenv("HF_TOKEN", "of-decode")
    write(hub / "models/team/tiny/config.json", "{}")
    write(hub / "private", "of-decode")
    cached = find_model("team/tiny", "main")  # as decode reads it
    for reader in (OWN, NONE):
        with pytest.raises(UserError, match="401") as refused:
            find_model("team/tiny", revision, reader)
        assert "HF_TOKEN" in refused.value.remedy
        assert "podCredentials" in refused.value.remedy
        assert str(cached) not in str(refused.value)
    write(hub / "private", "of-job")
    assert find_model("team/tiny", revision, OWN) == cached
    write(hub / "refuses", "503")
    with pytest.raises(Transient):
        find_model("team/tiny", revision, OWN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_model("team/tiny", revision) == cached
    with pytest.raises(UserError, match="HF_HUB_OFFLINE") as refused:
        find_model("team/tiny", revision, OWN)
    assert "decode serves" in refused.value.remedy


@pytest.fixture
def web(tmp_path):
    """(folder, address) of a plain web server."""
    folder = tmp_path / "web"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_) -> None:
            pass

        def send_header(self, name, value) -> None:
            if name == "Content-Length" and "cut" in self.path:
                value = str(int(value) + 100)  # the connection ends before all has come
            super().send_header(name, value)

    handler = functools.partial(Quiet, directory=folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_rows_of_a_web_server_are_read_with_their_places(web):
    folder, address = web
    write(folder / "rows.jsonl", '{"text": "a"}\n\n{"text": "b"}\n')
    source = DatasetSpec(source=f"{address}/rows.jsonl").source
    assert lines_of(source) == [f"{address}/rows.jsonl:{n}" for n in (1, 3)]


@pytest.fixture
def proxy(monkeypatch):
    """The requests that a proxy of the environment is asked for; it answers with a row each."""
    asked = []

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            row = b'{"text": "a"}\n'
            self.send_response(200)
            self.send_header("Content-Length", str(len(row)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(row)

        do_HEAD = do_GET

        def log_message(self, *_) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{server.server_port}")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.0/8, .svc")
    yield asked
    server.shutdown()
    server.server_close()
    thread.join()


def test_rows_of_a_web_server_come_by_the_proxy_of_the_environment(proxy):
    assert lines_of("http://rows.invalid/rows.jsonl") == ["http://rows.invalid/rows.jsonl:1"]
    assert proxy
    assert set(proxy) == {"http://rows.invalid/rows.jsonl"}


def test_an_address_in_a_range_of_no_proxy_is_dialled_without_it(proxy, web):
    folder, address = web
    write(folder / "rows.jsonl", '{"text": "b"}\n')
    assert len(lines_of(f"{address}/rows.jsonl")) == 1
    assert proxy == []


SIGNED = (
    "?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Signature=secret",
    "?sv=2022-11-02&st=2024-01-01T00%3A00%3A00Z&sr=b&sp=r&sig=secret%2Bx%3D",
    "?X-Goog-Algorithm=GOOG4-RSA-SHA256&X-Goog-Expires=900&X-Goog-Signature=secret",
)


@pytest.mark.parametrize("query", SIGNED)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.JSONL", "rows.Jsonl.GZ", "my%20rows.jsonl"])
def test_a_signed_url_is_read_by_the_name_in_its_path(web, query, name):
    folder, address = web
    lines = b'{"text": "a"}\n{"text": "b"}\n'
    content = gzip.compress(lines) if name.endswith("GZ") else lines
    (folder / name.replace("%20", " ")).write_bytes(content)
    found = lines_of(f"{address}/{name}{query}")
    assert len(found) == 2
    assert all(name in where and "secret" not in where for where in found)


def test_a_signed_url_may_say_under_which_name_its_file_is_served(web):
    folder, address = web
    write(folder / "3f2a", '{"text": "a"}\n')
    saved = "response-content-disposition=attachment%3B%20filename%3D%22rows.jsonl%22"
    assert len(lines_of(f"{address}/3f2a?{saved}&X-Amz-Signature=secret")) == 1


@pytest.mark.parametrize("name", ["none.jsonl", "rows.csv", "empty.jsonl"])
def test_what_is_said_of_a_signed_url_holds_no_signature(web, name):
    folder, address = web
    write(folder / "rows.csv", "text")
    with pytest.raises(UserError) as refused:
        lines_of(f"{address}/{name}{SIGNED[0]}") or find_files(f"{address}/none{SIGNED[0]}")
    assert "secret" not in str(refused.value)


def test_a_signature_reaches_the_server_as_it_was_written(web, monkeypatch):
    folder, address = web
    write(folder / "rows.jsonl", '{"text": "a"}\n')
    asked = []
    monkeypatch.setattr(
        http.server.SimpleHTTPRequestHandler,
        "translate_path",
        lambda handler, path: asked.append(path) or str(folder / "rows.jsonl"),
    )
    query = "?X-Amz-Credential=AK%2F2024%2Fs3&X-Amz-Signature=a%2Bb%3D~"
    lines_of(f"{address}/rows.jsonl{query}")
    assert set(asked) == {f"/rows.jsonl{query}"}


def test_a_file_that_a_web_server_has_not_is_the_jobs_mistake(web):
    _, address = web
    with pytest.raises(UserError, match="cannot be read") as refused:
        find_files_anywhere(f"{address}/none.jsonl")
    assert refused.value.reason == "DatasetUnreadable"


def test_a_server_that_breaks_off_in_a_file_is_asked_again_later(web):
    folder, address = web
    write(folder / "cut.jsonl", '{"text": "a"}\n' * 5)
    with pytest.raises(DatasetSilent, match=r"cut\.jsonl does not answer"):
        lines_of(f"{address}/cut.jsonl")


def test_a_hub_that_is_gone_while_a_file_is_read_is_asked_again_later(hub, monkeypatch):
    write(hub / "datasets/team/rows/train.jsonl", '{"text": "a"}\n')
    files = find_files_anywhere("team/rows")
    dead = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", dead)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    shutil.rmtree(hub)
    with pytest.raises(DatasetSilent, match=r"train\.jsonl does not answer"):
        list(read_records(files[0]))
