"""Figures of jobs reach servers of MLflow and Weights & Biases, and nothing of these a job."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest
from support import forked_start
from support.trackers import served
from waiting import wait_until

from windrow.access import NetworkAccess
from windrow.conditions import Reason
from windrow.crd import parse_job_spec
from windrow.errors import UserError
from windrow_sidecar.finetune.data.guarded_proxy import GuardedProxy
from windrow_sidecar.finetune.data.remote import NO_CREDENTIALS, Credentials
from windrow_sidecar.finetune.data.source_access import UNCONFINED, SourceAccess
from windrow_sidecar.finetune.job import tracking
from windrow_sidecar.finetune.job.assembly import JobSpec
from windrow_sidecar.finetune.job.tracking import ClientFeed, Tracking, TrackingService, services_of
from windrow_sidecar.finetune.job.tracking_client import Inbox, deliver

CLIENTS = Path(sys.prefix) / "tracking"
SECRET = {"WANDB_API_KEY": "k" * 40, "MLFLOW_TRACKING_TOKEN": "told"}


@pytest.fixture
def installed(monkeypatch):
    """Stand for both clients: what is checked before a job needs their names alone."""
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: name)


def job_of(asked, held=None, sources=None, *, confined=True) -> JobSpec:
    spec = parse_job_spec(
        {
            "model": {"name": "owner/base"},
            "dataset": {"source": "https://user:word@host/rows.jsonl?sig=s"},
            "training": {"maxSteps": 1},
            "output": {"destination": "/out"},
            "tracking": asked,
        }
    )
    network = NetworkAccess(sources)
    access = SourceAccess((), network=network, pod_credentials=False) if confined else UNCONFINED
    secret = NO_CREDENTIALS if held is None else Credentials("tracking", held)
    outputs = (Path("/out"),) if confined else None
    return JobSpec(
        *("team", "tone", "uid-1", 1, spec, outputs), access=access, tracking_credentials=secret
    )


# Both clients at once: their processes take seconds to load what they import, and have deadlines.
@pytest.mark.alone
@pytest.mark.extended
@pytest.mark.skipif(not CLIENTS.is_dir(), reason="the clients are not here: make test brings them")
def test_both_clients_report_what_a_job_does(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(CLIENTS))
    monkeypatch.setenv(forked_start.ENV_OFF, "1")  # a forked one has other packages
    environ = {**os.environ, "PYTHONPATH": str(CLIENTS), "WANDB_API_KEY": "of-the-pod"}
    with served() as server:
        asked = {
            "mlflow": {"uri": server.url, "experiment": "tone"},
            "wandb": {"baseUrl": server.url, "project": "p", "runName": "first", "tags": ["a"]},
        }
        job = job_of(asked, SECRET, ("127.0.0.1",))
        told = Tracking(services_of(job, tmp_path, environ))
        told.begin()
        for step in (1, 2):
            told.log(step, {"loss": 1 / step, "stage": "training", "gradient_norm": None})
        wait_until(lambda: not any(feed.lacking for feed in told._feeds), "all figures", seconds=60)
        told.end("succeeded")
        run = server.runs["run-0"]
        wait_until(lambda: run["statuses"] and server.exit_codes, "both ends", seconds=60)
        assert [(m["key"], m["value"], m["step"]) for m in run["metrics"]] == [
            ("loss", 1.0, 1),
            ("loss", 0.5, 2),
        ]
        params = {each["key"]: each["value"] for each in run["params"]}
        assert params["model.name"] == "owner/base"
        assert "word" not in params["dataset.source"]
        assert run["statuses"] == ["FINISHED"]
        assert [(line["loss"], line["_step"]) for line in server.history] == [(1, 1), (0.5, 2)]
        assert server.wandb_runs["uid-1"]["project"] == "p"
        assert server.exit_codes == [0]
        assert "Bearer told" in server.authorizations
        for feed in told._feeds:
            feed._thread.join(60)
    assert not list(tmp_path.iterdir())


@pytest.mark.alone
@pytest.mark.extended
@pytest.mark.skipif(not CLIENTS.is_dir(), reason="the clients are not here: make test brings them")
def test_files_of_an_offline_run_reach_the_jobs_folder_and_no_link_of_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(CLIENTS))
    monkeypatch.setenv(forked_start.ENV_OFF, "1")
    environ = {**os.environ, "PYTHONPATH": str(CLIENTS)}
    root, bank = tmp_path / "job", tmp_path / "bank"
    root.mkdir()
    bank.mkdir()
    job = job_of({"wandb": {"mode": "offline", "project": "p"}})
    for swapped in (False, True):
        told = Tracking(services_of(job, root, environ))
        if swapped:  # after the check, by who can write to the volume
            (root / "wandb").rename(root / "before")
            (root / "wandb").symlink_to(bank)
        told.begin()
        (feed,) = told._feeds
        told.log(1, {"loss": 0.5})
        told.end("succeeded")
        feed._thread.join(60)
        assert feed.lacking == swapped
    (run,) = (root / "before").glob("offline-run-*")
    assert (run / "run-uid-1.wandb").stat().st_size > 100
    assert not list(bank.iterdir())


def test_what_cannot_be_reported_is_refused_before_anything_is_loaded(monkeypatch, installed):
    server = {"mlflow": {"uri": "https://mlflow.example"}}
    for asked, held, sources, field, said in (
        ({"mlflow": {}}, None, None, "mlflow.uri", "no address"),
        (server, None, ("hub.example",), "mlflow.uri", "not among the sources"),
        ({"mlflow": {"uri": "http://10.0.0.1"}}, None, None, "mlflow.uri", "private address"),
        (server, {"MLFLOW_TRACKING_USERNAME": "a"}, None, "secretRef", "PASSWORD"),
        ({"mlflow": {}}, {"MLFLOW_TRACKING_URI": "file:///x"}, None, "mlflow.uri", "server"),
        ({"wandb": {}}, None, None, "secretRef", "no WANDB_API_KEY"),
        ({"wandb": {}}, SECRET, ("hub.example",), "wandb.baseUrl", "api.wandb.ai"),
    ):
        with pytest.raises(UserError, match=said) as caught:
            services_of(job_of(asked, held, sources), environ={"WANDB_API_KEY": "of-the-pod"})
        assert caught.value.field == f"spec.tracking.{field}"
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"\[mlflow\]"):
        services_of(job_of(server))


def test_a_confined_job_gets_names_of_the_pods_environment_and_none_of_its_credentials(installed):
    environ = {
        "MLFLOW_TRACKING_URI": "https://of.pod",
        "MLFLOW_TRACKING_TOKEN": "hidden",
        "AWS_SECRET_ACCESS_KEY": "hidden",
        "PATH": "/bin",
        "HOME": "/home/of-pod",
    }
    (found,) = services_of(job_of({"mlflow": {}}), environ=environ)
    assert found.document["uri"] == "https://of.pod"
    assert "hidden" not in json.dumps([found.document, found.environment])
    assert found.environment["PATH"] == "/bin"
    assert "of-pod" not in found.environment["HOME"]  # ~/.mlflow/credentials
    (own,) = services_of(job_of({"mlflow": {}}, confined=False), environ=environ)
    assert own.document["variables"]["MLFLOW_TRACKING_TOKEN"] == "hidden"
    assert "hidden" not in repr(own)
    assert (found.document["uid"], own.document["uid"][:6]) == ("uid-1", "uid-1-")


def test_a_spec_names_servers_by_addresses_without_credentials():
    for wrong in ({}, {"mlflow": {"uri": "https://u:p@host"}}, {"wandb": {"project": "a/b"}}):
        with pytest.raises(UserError, match="tracking"):
            job_of(wrong)


class Run:
    """A run on a server that fails some of its calls."""

    def __init__(self, *failures, stays=False) -> None:
        self.failures, self.is_final, self.sent, self.ended = list(failures), stays, [], None

    def begin(self) -> None:
        if self.failures:
            raise self.failures.pop()

    def send(self, lines) -> None:
        self.sent += lines

    def end(self, outcome) -> None:
        self.ended = outcome

    def stays(self, error) -> bool:
        del error
        return self.is_final


def delivered(run: Run):
    lines = [{"step": 1, "at": 0.0, "figures": {}}, {"step": 2, "at": 0.0, "figures": {}}]
    text = "".join(json.dumps(line) + "\n" for line in (*lines, {"end": "failed"}))
    said, slept = [], []
    deliver(Inbox(io.StringIO(text), clock=lambda: 0.0), run, said.append, slept.append)
    return said, sum(slept)


def test_a_server_that_does_not_answer_is_asked_again_and_gets_everything():
    run = Run(OSError("no route"), OSError("no route"))
    said, slept_s = delivered(run)
    assert [line["step"] for line in run.sent] == [1, 2]
    assert (run.ended, slept_s) == ("failed", 1 + 2)
    assert said == [{"trouble": "no route"}, {"taken": 2}, {"resumed": True}]


def test_a_server_that_refuses_is_asked_once():
    run = Run(OSError("403"), stays=True)
    said, slept_s = delivered(run)
    assert (run.sent, run.ended, slept_s) == ([], None, 0)
    assert said == [{"trouble": "403"}]


def fed(program: str) -> ClientFeed:
    service = TrackingService("mlflow", {}, dict(os.environ))
    return ClientFeed(service, (sys.executable, "-I", "-S", "-c", program))


def test_a_client_that_fails_is_told_of_once_and_lost_steps_are_counted():
    failing = """
import sys, json
for _ in sys.stdin:
    print(json.dumps({"trouble": "HTTP 503 by http://u:word@host"}), flush=True)
"""
    feed = fed(failing)
    feed.start()
    for step in range(3):
        feed.put({"step": step})
    wait_until(lambda: feed.news, "the trouble", seconds=30)
    said = feed.end("succeeded")
    assert said.startswith("mlflow lacks the figures of 3 steps: HTTP 503")
    ((reason, detail),) = feed.news
    assert reason is Reason.TRACKING_FAILED
    assert "word" not in detail
    assert feed.end("failed") == ""
    feed._thread.join(30)


def test_a_client_that_ends_or_hangs_holds_up_nobody():
    feed = fed("")
    feed.start()
    for step in range(3000):  # more than wait
        feed.put({"step": step})
    wait_until(lambda: feed.news, "the trouble", seconds=30)
    assert "3000 steps" in feed.end("stopped")
    feed._thread.join(30)


def test_the_proxy_of_native_clients_asks_for_a_password_and_passes_requests_on():
    import requests

    proxy = GuardedProxy()
    try:
        with served() as server:
            server.experiments["e"] = "1"
            url = f"{server.url}/api/2.0/mlflow/experiments/get-by-name?experiment_name=e"
            passed = requests.get(url, proxies={"http": proxy.url}, timeout=10)
            assert passed.json()["experiment"]["name"] == "e"
            others = proxy.url.replace("windrow:", "windrow:x")
            assert requests.get(url, proxies={"http": others}, timeout=10).status_code == 407
    finally:
        proxy.close()
