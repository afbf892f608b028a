"""Holders of keys of `windrow serve-api` who try to reach what another key has."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from urllib.parse import urlsplit

import openai
import pytest
from support.openai_endpoint import GROUP, HeldObjects, served
from test_openai_api import BLUE, OTHER, RED, ROWS, TEMPLATE, held_objects, upload

HIDDEN = ("of-blue", "card 4111")


class Scene:
    """An endpoint on which the key of blue has a file and a job; others try."""

    def __init__(self, url: str, held: HeldObjects, root) -> None:
        self.address, self.held, self.root = urlsplit(url).netloc, held, root
        with openai.OpenAI(base_url=url, api_key=BLUE, max_retries=0) as blue:
            rows = (
                ROWS
                + json.dumps(
                    {
                        "messages": [
                            {"role": r, "content": "card 4111"} for r in ("user", "assistant")
                        ]
                    }
                ).encode()
            )
            self.file = upload(blue, rows, "of-blue.jsonl").id
            self.job = blue.fine_tuning.jobs.create(
                model="chat", training_file=self.file, suffix="of-blue"
            ).id
        self.before = self.state()

    def state(self) -> object:
        files = sorted(str(f) for f in self.root.rglob("*") if f.is_file())
        return files, json.dumps(self.held.job("blue", "of-blue")["spec"], sort_keys=True)

    def call(self, key, method, path, body=None, **headers):
        connection = http.client.HTTPConnection(self.address, timeout=30)
        sent = {"Authorization": f"Bearer {key}", **headers}
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, content, sent)
        answer = connection.getresponse()
        said = answer.read().decode(errors="replace")
        connection.close()
        return answer.status, said


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    held, root = held_objects(), tmp_path_factory.mktemp("store")
    with served(held, str(root), template=TEMPLATE) as url:
        yield Scene(url, held, root)


def attempts(scene):
    """Yield (what, key, method, path, body, headers) of calls that name what is blue's."""
    file, job = scene.file, scene.job
    about = {"model": "chat", "training_file": file}
    for key, who in ((RED, "another namespace"), (OTHER, "another key")):
        yield f"{who}: file", key, "GET", f"/v1/files/{file}", None, {}
        yield f"{who}: rows", key, "GET", f"/v1/files/{file}/content", None, {}
        yield f"{who}: deletion", key, "DELETE", f"/v1/files/{file}", None, {}
        yield f"{who}: training on them", key, "POST", "/v1/fine_tuning/jobs", about, {}
        yield f"{who}: job", key, "GET", f"/v1/fine_tuning/jobs/{job}", None, {}
        yield f"{who}: events", key, "GET", f"/v1/fine_tuning/jobs/{job}/events", None, {}
        yield f"{who}: checkpoints", key, "GET", f"/v1/fine_tuning/jobs/{job}/checkpoints", None, {}
        for verb in ("cancel", "pause", "resume"):
            yield f"{who}: {verb}", key, "POST", f"/v1/fine_tuning/jobs/{job}/{verb}", None, {}
        yield f"{who}: results", key, "GET", "/v1/files/file-results.of-blue", None, {}
        yield f"{who}: model", key, "DELETE", "/v1/models/%2Fmodels%2Fchat:blue.of-blue", None, {}
    name = file.removeprefix("file-")
    for path in (
        f"/v1/files/..%2f..%2f..%2fblue%2fopenai%2fkey-keys.blue%2ffiles%2f{file}",
        f"/v1/files/../../blue/openai/key-keys.blue/files/{file}/content",
        f"/v1/files/{file}%00/content",
        f"/v1/files/{file}%2f..%2f{file}",
        f"/v1/files/FILE-{name.upper()}",
        "/v1/files/file-results.of-blue%2f..%2f..",
        "/v1/fine_tuning/jobs/ftjob-of-blue%3fx=1",
        "/v1/fine_tuning/jobs/ftjob-..%2f..%2fblue%2ffinetunejobs%2fof-blue",
        "/v1/fine_tuning/jobs/ftjob-of-blue%0a",
    ):
        yield f"path {path}", RED, "GET", path, None, {}
    for after in (file, job, "../of-blue", "%00", "a" * 4000):
        yield f"cursor {after[:20]}", RED, "GET", f"/v1/files?after={after}", None, {}
        yield f"cursor {after[:20]}", RED, "GET", f"/v1/fine_tuning/jobs?after={after}", None, {}
    for limit in ("-1", "0", "1e9", "9" * 400):
        yield f"limit {limit[:8]}", RED, "GET", f"/v1/files?limit={limit}", None, {}
    for name, value in (
        ("X-Forwarded-User", "blue"),
        ("X-Remote-Namespace", "blue"),
        ("OpenAI-Organization", "blue"),
        ("OpenAI-Project", "blue"),
        ("X-HTTP-Method-Override", "DELETE"),
    ):
        headers = {name: value}
        yield f"header {name}", RED, "GET", f"/v1/files/{file}", None, headers
    for suffix in ("../of-blue", "of-blue/x", "a: b", "a\nlabels: {}", "A", "a" * 64, "-a", "é"):
        asked = {**about, "suffix": suffix}
        yield f"suffix {suffix[:10]!r}", RED, "POST", "/v1/fine_tuning/jobs", asked, {}
    for more in (
        {"namespace": "blue"},
        {"spec": {"output": {"destination": "/"}}},
        {"metadata": {"a": {"b": "c"}}},
        {"metadata": [1]},
        {"metadata": dict.fromkeys(map(str, range(100)), "x")},
        {"integrations": [{"type": "wandb", "wandb": {"project": "p", "entity": "a/b"}}]},
        {"training_file": f"{file}/../{file}"},
        {"training_file": ["file"]},
        {"hyperparameters": {"n_epochs": 1e400}},
        {"seed": 10**30},
    ):
        asked = {**about, **more}
        yield f"body {str(more)[:40]}", RED, "POST", "/v1/fine_tuning/jobs", asked, {}
    yield "a body of 2 MiB", RED, "POST", "/v1/fine_tuning/jobs", b" " * (2 << 20), {}
    yield "deep JSON", RED, "POST", "/v1/fine_tuning/jobs", b"[" * 100_000, {}
    for token in ("", "sk-blue,sk-red", "sk-blue\x00", "x" * 100_000, "a.b.c", "é"):
        sent = token.encode().decode("latin-1")
        yield f"token {token[:8]!r}", sent, "GET", f"/v1/files/{file}", None, {}


def test_what_another_key_has_is_reached_by_no_call(scene):
    """Try all of them on one endpoint: each is refused, and none shows or changes anything."""
    succeeded, answered = [], 0
    for what, key, method, path, body, headers in attempts(scene):
        try:
            status, said = scene.call(key, method, path, body, **headers)
        except (http.client.HTTPException, ConnectionError, ValueError):
            continue  # it does not even leave, or is hung up on
        answered += 1
        # What the caller itself has written may be repeated.
        shown = [word for word in HIDDEN if word in said and word not in f"{path}{body}"]
        if status == 429 or 200 <= status < 300 or status >= 500 or shown:
            succeeded.append((what, status, said[:200]))
    assert answered > 60
    assert succeeded == []
    assert scene.state() == scene.before
    assert asyncio.run(scene.held.list(f"{GROUP}/namespaces/red/finetunejobs")) == []


@pytest.mark.parametrize(
    "head",
    [
        "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
        "Transfer-Encoding: xchunked",
        "Content-Length: 5\r\nContent-Length: 60",
        "Content-Length: +5",
        "Content-Length : 5",
    ],
)
def test_a_request_hides_no_second_one_in_its_body(scene, head):
    """Send two requests that a proxy and the server could part at different places."""
    hidden = f"DELETE /v1/files/{scene.file} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {RED}\r\n"
    first = f"POST /v1/fine_tuning/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {RED}\r\n"
    host, _, port = scene.address.partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(f"{first}{head}\r\n\r\n0\r\n\r\n{hidden}\r\n".encode())
        connection.shutdown(socket.SHUT_WR)
        said = b""
        while piece := connection.recv(65536):
            said += piece
    assert said.count(b"HTTP/1.1 ") <= 1
    assert b" 200 " not in said
    assert scene.state() == scene.before
