"""Servers of MLflow and of Weights & Biases on this machine, over the few calls that clients make.

What was reported is kept as the clients sent it. With `refuses` a server answers that status.
"""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass
class Trackers:
    """Reports that both servers have got."""

    url: str = ""
    refuses: int = 0
    experiments: dict[str, str] = field(default_factory=dict)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    wandb_runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    authorizations: set[str | None] = field(default_factory=set)
    exit_codes: list[int] = field(default_factory=list)


@contextmanager
def served() -> Iterator[Trackers]:
    """Serve both while it holds."""
    trackers = Trackers()
    handler = type("Handler", (_Handler,), {"trackers": trackers})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    trackers.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield trackers
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    trackers: Trackers
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        content = self._content()
        if self.headers["Content-Encoding"] == "gzip":
            content = gzip.decompress(content)
        is_call = "json" in (self.headers["Content-Type"] or "")
        self._answer(json.loads(content or "{}") if is_call else {})

    do_PUT = do_POST

    def _content(self) -> bytes:
        """Return a body that comes as a whole, or in chunks."""
        if self.headers["Transfer-Encoding"] != "chunked":
            return self.rfile.read(int(self.headers["Content-Length"] or 0))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Say nothing."""
        del format, args

    def _answer(self, asked: dict[str, Any]) -> None:
        held, url = self.trackers, urlsplit(self.path)
        held.authorizations.add(self.headers["Authorization"])
        if held.refuses:
            self._send({"error_code": "PERMISSION_DENIED", "message": "no"}, held.refuses)
        elif url.path == "/graphql":
            self._send({"data": self._graphql(asked["query"], asked["variables"])})
        elif url.path.endswith("/file_stream"):
            files = asked.get("files") or {}
            lines = (files.get("wandb-history.jsonl") or {}).get("content", [])
            held.history += map(json.loads, lines)
            if "exitcode" in asked:
                held.exit_codes.append(asked["exitcode"])
            self._send({})
        else:
            self._mlflow(url.path.rpartition("/mlflow/")[2], asked, parse_qs(url.query))

    def _graphql(self, query: str, said: dict[str, Any]) -> dict[str, Any]:
        if "createRunFiles" in query:
            files = [
                {"name": name, "uploadUrl": f"{self.trackers.url}/f"} for name in said["files"]
            ]
            return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}
        if "upsertBucket" not in query:
            return {"model": None, "serverInfo": None}
        run = self.trackers.wandb_runs.setdefault(said["name"], {})
        run.update({name: value for name, value in said.items() if value is not None})
        project = {"id": "p", "name": said["project"], "entity": {"id": "e", "name": "team"}}
        bucket = {
            "id": "1",
            "name": said["name"],
            "displayName": said["displayName"],
            "config": "{}",
            "project": project,
            "historyLineCount": 0,
        }
        return {"upsertBucket": {"bucket": bucket, "inserted": True}}

    def _mlflow(self, call: str, asked: dict[str, Any], query: dict[str, list[str]]) -> None:
        held = self.trackers
        if call == "experiments/get-by-name":
            name = query["experiment_name"][0]
            if name not in held.experiments:
                self._send({"error_code": "RESOURCE_DOES_NOT_EXIST", "message": name}, 404)
                return
            about = {"experiment_id": "1", "name": name, "lifecycle_stage": "active"}
            self._send({"experiment": about})
        elif call == "experiments/create":
            held.experiments[asked["name"]] = "1"
            self._send({"experiment_id": "1"})
        elif call == "runs/search":
            found = [r for r in held.runs.values() if r["uid"] in asked.get("filter", "")]
            self._send({"runs": [_run(each) for each in found]})
        elif call == "runs/create":
            tags = {tag["key"]: tag["value"] for tag in asked["tags"]}
            run = {"id": f"run-{len(held.runs)}", "uid": tags["windrow.job_uid"], "metrics": []}
            held.runs[run["id"]] = {**run, "params": [], "status": "RUNNING", "statuses": []}
            self._send({"run": _run(held.runs[run["id"]])})
        elif call == "runs/log-batch":
            held.runs[asked["run_id"]]["metrics"] += asked.get("metrics", [])
            held.runs[asked["run_id"]]["params"] += asked.get("params", [])
            self._send({})
        elif call == "runs/update":
            held.runs[asked["run_id"]]["statuses"].append(asked["status"])
            self._send({"run_info": _run(held.runs[asked["run_id"]])["info"]})
        elif call == "runs/get":
            self._send({"run": _run(held.runs[query["run_id"][0]])})
        else:
            self._send({}, 404)

    def _send(self, answer: dict[str, Any], status: int = 200) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _run(held: dict[str, Any]) -> dict[str, Any]:
    info = {"run_id": held["id"], "run_uuid": held["id"], "experiment_id": "1", "status": "RUNNING"}
    return {"info": {**info, "lifecycle_stage": "active"}, "data": {"params": held["params"]}}
