"""A kubeconfig counts as it does for kubectl, or is refused before anything is sent."""

from __future__ import annotations

import http.server
import importlib.util
import json
import os
import pwd
import threading

import pytest
import yaml

from windrow.client import WindrowClient, managers_of_spec
from windrow.errors import UserError
from windrow.kubeconfig import Kubeconfig, impersonation_headers
from windrow.outputs import place_here


class Seen(http.server.BaseHTTPRequestHandler):
    """Answers that there are no jobs, and keeps the headers."""

    def do_GET(self):
        self.server.seen.append(self.headers)
        body = {"apiVersion": "v1", "kind": "Any", "items": [], "metadata": {"name": "team-a"}}
        text = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture
def server():
    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Seen)
    found.seen = []
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


def config_of(tmp_path, port, name="config", **user):
    body = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "contexts": [
            {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "team-a"}}
        ],
        "users": [{"name": "u", "user": user}],
    }
    path = tmp_path / name
    path.write_text(yaml.safe_dump(body))
    return path


def test_requests_are_made_as_the_user_and_in_each_of_the_groups(tmp_path, server):
    path = config_of(
        tmp_path,
        server.server_port,
        token="t",
        **{"as": "auditor", "as-groups": ["readers", "team a"], "as-uid": "7"},
        **{"as-user-extra": {"example.com/why": ["audit", "twice"]}},
    )
    assert WindrowClient(path).jobs() == []
    assert server.seen
    for headers in server.seen:
        assert headers.get_all("Impersonate-User") == ["auditor"]
        assert headers.get_all("Impersonate-Group") == ["readers", "team a"]
        assert headers.get_all("Impersonate-Uid") == ["7"]
        assert headers.get_all("Impersonate-Extra-example.com%2Fwhy") == ["audit", "twice"]
        assert headers["Authorization"] == "Bearer t"


def test_a_user_without_as_is_himself(tmp_path, server):
    WindrowClient(config_of(tmp_path, server.server_port, token="t")).jobs()
    assert not any(name.startswith("Impersonate") for seen in server.seen for name in seen)


@pytest.mark.parametrize(
    ("user", "problem", "remedy"),
    [
        ({"as-groups": ["readers"]}, "no user", "as: NAME"),
        (
            {"exec": {"command": "no-such-plugin", "apiVersion": "v1", "installHint": "Get it."}},
            "'no-such-plugin', which is not installed",
            "Get it.",
        ),
        ({"exec": {"command": "./beside", "apiVersion": "v1"}}, "'./beside'", "PATH"),
        ({"auth-provider": {"name": "azure"}}, "auth-provider 'azure'", "exec"),
    ],
)
def test_what_cannot_be_done_as_it_says_is_refused_before_a_call(
    tmp_path, server, user, problem, remedy
):
    with pytest.raises(UserError) as caught:
        WindrowClient(config_of(tmp_path, server.server_port, **user))
    assert problem in str(caught.value)
    assert remedy in caught.value.remedy
    assert server.seen == []


def test_a_plugin_that_fails_ends_the_command_before_a_call(tmp_path, server):
    plugin = {"command": "false", "apiVersion": "client.authentication.k8s.io/v1"}
    with pytest.raises(UserError, match="plugin gave no credentials"):
        WindrowClient(config_of(tmp_path, server.server_port, exec=plugin))
    assert server.seen == []


@pytest.mark.parametrize("ends", ["exit 1", "echo '{answer}'"])
def test_what_a_plugin_says_to_its_user_is_shown_where_output_is_piped(
    tmp_path, server, capfd, ends
):
    """A login by a code would wait for somebody who does not know of it."""
    version = "client.authentication.k8s.io/v1"
    answer = {"apiVersion": version, "kind": "ExecCredential", "status": {"token": "t"}}
    script = tmp_path / "plugin"
    said = ends.format(answer=json.dumps(answer))
    script.write_text(f"#!/bin/sh\necho 'enter the code 1234' >&2\n{said}\n")
    script.chmod(0o755)
    plugin = {"command": str(script), "apiVersion": version}
    path = config_of(tmp_path, server.server_port, exec=plugin)
    if ends == "exit 1":
        with pytest.raises(UserError, match="plugin gave no credentials"):
            WindrowClient(path)
    else:
        assert WindrowClient(path).jobs() == []
        assert server.seen[0]["Authorization"] == "Bearer t"
    assert "enter the code 1234" in capfd.readouterr().err


def test_of_several_files_the_first_that_names_a_user_counts(tmp_path):
    first = tmp_path / "first"
    first.write_text(yaml.safe_dump({"current-context": "here", "users": []}))
    second = config_of(tmp_path, 1, "second", token="t", **{"as": "one"})
    third = config_of(tmp_path, 1, "third", token="t", **{"as": "two"})
    files = os.pathsep.join(map(str, (first, tmp_path / "gone", second, third)))
    found = Kubeconfig(files).user()
    assert found.file == second
    assert impersonation_headers(found) == [("Impersonate-User", "one")]
    assert Kubeconfig(files, "nowhere").user() is None


def test_who_manages_a_spec_is_read_from_its_fields():
    fields = [
        {"manager": "kubectl-client-side-apply", "fieldsV1": {"f:spec": {"f:objective": {}}}},
        {"manager": "windrow-operator", "subresource": "status", "fieldsV1": {"f:spec": {}}},
        {"manager": "labeller", "fieldsV1": {"f:metadata": {}}},
    ]
    assert managers_of_spec({"metadata": {"managedFields": fields}}) == {
        "kubectl-client-side-apply"
    }


def test_a_context_is_taken_by_its_name_where_none_is_current(tmp_path, server):
    # The library wants one that is current first; kubectl does not.
    path = config_of(tmp_path, server.server_port, token="abc")
    body = yaml.safe_load(path.read_text()) | {"current-context": ""}
    path.write_text(yaml.safe_dump(body))
    client = WindrowClient(kubeconfig=path, context="here")
    assert client.namespace == "team-a"
    assert client.jobs() == []
    assert server.seen[-1]["Authorization"] == "Bearer abc"
    with pytest.raises(UserError, match="there is no current context") as caught:
        WindrowClient(kubeconfig=path)
    assert "--context" in caught.value.remedy


def test_an_empty_file_says_nothing(tmp_path, server, monkeypatch):
    empty = tmp_path / "empty"
    empty.write_text("")
    path = config_of(tmp_path, server.server_port, token="abc")
    monkeypatch.setenv("KUBECONFIG", os.pathsep.join([str(empty), str(path)]))
    assert WindrowClient().jobs() == []
    monkeypatch.setenv("KUBECONFIG", str(empty))
    with pytest.raises(UserError, match="no cluster to talk to"):
        WindrowClient()


def test_a_user_whom_no_file_has_is_refused_before_a_call(tmp_path, server):
    path = config_of(tmp_path, server.server_port, token="abc")
    path.write_text(path.read_text().replace("name: u", "name: other"))
    with pytest.raises(UserError, match="user 'u', whom context 'here' names"):
        WindrowClient(kubeconfig=path)
    assert not server.seen


@pytest.mark.skipif(importlib.util.find_spec("socks") is not None, reason="PySocks is installed")
def test_a_proxy_of_socks_says_what_to_install(tmp_path, server):
    path = config_of(tmp_path, server.server_port, token="abc")
    body = yaml.safe_load(path.read_text())
    body["clusters"][0]["cluster"]["proxy-url"] = "socks5://127.0.0.1:1"
    path.write_text(yaml.safe_dump(body))
    with pytest.raises(UserError, match="by a SOCKS proxy") as caught:
        WindrowClient(kubeconfig=path)
    assert "PySocks" in caught.value.remedy


@pytest.mark.parametrize("text", ["- a\n", "only words\n", "5\n"])
def test_a_file_that_is_something_else_is_refused(tmp_path, text):
    file = tmp_path / "config"
    file.write_text(text)
    with pytest.raises(UserError, match="is not a kubeconfig") as refused:
        WindrowClient(kubeconfig=str(file))
    assert refused.value.field == "--kubeconfig"


def test_a_file_that_lacks_a_part_is_to_be_corrected(tmp_path):
    file = config_of(tmp_path, 1, token="t")
    body = yaml.safe_load(file.read_text())
    cluster = {"server": "https://127.0.0.1:1", "certificate-authority": "/is/not/there"}
    body["clusters"][0]["cluster"] = cluster
    file.write_text(yaml.safe_dump(body))
    with pytest.raises(UserError, match="/is/not/there") as refused:
        WindrowClient(kubeconfig=str(file))
    assert refused.value.remedy.startswith(f"Correct {file}")


def test_a_file_in_utf16_or_with_broken_data_is_to_be_corrected(tmp_path):
    """PowerShell writes UTF-16; an authority that was cut is no base64."""
    file = config_of(tmp_path, 1, token="t")
    utf16 = tmp_path / "utf16"
    utf16.write_bytes(file.read_text().encode("utf-16"))
    body = yaml.safe_load(file.read_text())
    body["clusters"][0]["cluster"] = {
        "server": "https://127.0.0.1:1",
        "certificate-authority-data": "notbase64",
    }
    file.write_text(yaml.safe_dump(body))
    for broken in (file, utf16):
        with pytest.raises(UserError, match="no cluster to talk to") as refused:
            WindrowClient(kubeconfig=str(broken))
        assert refused.value.remedy.startswith(f"Correct {broken}")


def test_a_user_without_a_home_has_no_kubeconfig(monkeypatch):
    """A container may run as a number that nobody has named."""

    def unknown(uid):
        raise KeyError(uid)

    for name in ("HOME", "KUBECONFIG", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(UserError, match="there is no cluster to talk to"):
        WindrowClient()
    assert place_here("s3://b/k").is_absolute()


def test_a_token_in_a_file_is_read_for_each_request_without_its_line_end(tmp_path, server):
    (tmp_path / "token").write_text("first\n")
    path = config_of(tmp_path, server.server_port, token="in the file", tokenFile="token")
    client = WindrowClient(kubeconfig=path)
    client.jobs()
    (tmp_path / "token").write_text("  second  \n\n")
    client.jobs()
    said = [headers["Authorization"] for headers in server.seen]
    assert said[0] == "Bearer first"
    assert said[-1] == "Bearer second"


@pytest.mark.parametrize(
    ("content", "problem"), [(None, "cannot be read"), ("\n", "holds no"), ("a b", "holds no")]
)
def test_a_file_without_a_token_is_refused_before_a_call(tmp_path, server, content, problem):
    if content is not None:
        (tmp_path / "token").write_text(content)
    with pytest.raises(UserError, match=problem) as refused:
        WindrowClient(kubeconfig=config_of(tmp_path, server.server_port, tokenFile="token"))
    assert refused.value.field == "tokenFile"
    assert not server.seen


def test_a_clusters_proxy_counts_whatever_the_environment_excepts(tmp_path, server, monkeypatch):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "api.invalid")
    path = config_of(tmp_path, server.server_port, token="t")
    body = yaml.safe_load(path.read_text())
    proxy = body["clusters"][0]["cluster"]["server"]
    body["clusters"][0]["cluster"] = {"server": "http://api.invalid", "proxy-url": proxy}
    path.write_text(yaml.safe_dump(body))
    WindrowClient(kubeconfig=path).jobs()
    assert server.seen[0]["Host"] == "api.invalid"
