"""A Hub on this machine: models and datasets that are folders, over the few calls that we make.

Below a root: `models/OWNER/NAME/...` and `datasets/OWNER/NAME/...`. It knows one revision of each,
and has no pages. What it does not know it answers as the Hub does, 404
and a code. A file `refuses` below the root holds a status that everything is answered with; while
there is a file `waits`, nothing is answered. Who has the token in a file `token` may write: large
files go by the LFS protocol, all others within a commit.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "1" * 40


@contextmanager
def served(root: Path) -> Iterator[str]:
    """Serve the folders below `root` while it is open; yields the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, root))
    server.daemon_threads = True  # one that waits for ever holds nobody up
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, root: Path, *args: Any) -> None:
        self._root = root
        super().__init__(*args)

    def do_GET(self) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        while (self._root / "waits").exists():
            time.sleep(0.02)
        if (refuses := self._root / "refuses").is_file():
            self._refuse(int(refuses.read_text()))
            return
        private = self._root / "private"  # holds the token by which everything is read
        if private.is_file() and self.headers["Authorization"] != f"Bearer {private.read_text()}":
            self._refuse(401)
        elif parts[0] == "api":
            self._describe(parts[1:])
        else:
            self._send_file(parts)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        content = self.rfile.read(int(self.headers["Content-Length"]))
        token = self._root / "token"
        if (refuses := self._root / "refuses").is_file():
            self._refuse(int(refuses.read_text()))
        elif parts == ["api", "validate-yaml"]:
            self._send_json({"errors": [], "warnings": []})
        elif self.headers["Authorization"] != f"Bearer {token.read_text()}":
            self._refuse(401)
        elif parts == ["api", "repos", "create"]:
            asked = json.loads(content)
            name = f"{asked['organization']}/{asked['name']}"
            repository = self._root / "models" / name
            repository.mkdir(parents=True, exist_ok=True)
            (self._root / "visibility").write_text(str(asked.get("visibility")))
            self._send_json({"url": f"{self._address}/{name}"})
        elif parts[-1] == "batch":
            self._send_json(
                {"objects": [self._upload_of(o) for o in json.loads(content)["objects"]]}
            )
        elif parts[4] == "preupload":
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(content)["files"]
            ]
            self._send_json({"files": files})
        else:
            self._commit(self._root / "models" / parts[2] / parts[3], content)

    def do_PUT(self) -> None:
        large = self._root / "large"
        large.mkdir(exist_ok=True)
        content = b"".join(self._pieces())
        (large / self.path.rpartition("/")[2]).write_bytes(content)
        self._send(b"", "text/plain")

    def _pieces(self) -> Iterator[bytes]:
        """Yield a body that comes as a whole, or in chunks."""
        if "Content-Length" in self.headers:
            yield self.rfile.read(int(self.headers["Content-Length"]))
            return
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    @property
    def _address(self) -> str:
        return f"http://{self.headers['Host']}"

    def _upload_of(self, wanted: dict[str, Any]) -> dict[str, Any]:
        upload = {"href": f"{self._address}/large/{wanted['oid']}", "header": {}}
        return {**wanted, "actions": {"upload": upload}}

    def _commit(self, repository: Path, content: bytes) -> None:
        for line in map(json.loads, content.splitlines()):
            about = line["value"]
            if line["key"] == "file":
                made = base64.b64decode(about["content"])
            elif line["key"] == "lfsFile":
                made = (self._root / "large" / about["oid"]).read_bytes()
            else:
                continue
            (repository / about["path"]).write_bytes(made)
        url = f"{self._address}/{repository.parent.name}/{repository.name}/commit/{COMMIT}"
        self._send_json({"commitUrl": url, "commitOid": COMMIT, "success": True})

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Say nothing."""
        del format, args

    def _describe(self, parts: list[str]) -> None:
        """`KIND/OWNER/NAME[/revision/R]`, or `.../tree/R[/FOLDER]`."""
        repository = self._root.joinpath(*parts[:3])
        if len(parts) < 3 or not repository.is_dir():
            self._missing("RepoNotFound")
            return
        files = [f for f in sorted(repository.rglob("*")) if f.is_file()]
        names = {str(f.relative_to(repository)): f.stat().st_size for f in files}
        if parts[3:4] == ["tree"]:
            below = "".join(f"{part}/" for part in parts[5:])
            found = {name: n for name, n in names.items() if name.startswith(below)}
            self._send_json(
                [{"type": "file", "path": p, "size": n, "oid": COMMIT} for p, n in found.items()]
            )
        else:
            files_there = [{"rfilename": name} for name in names]
            self._send_json({"id": "/".join(parts[1:3]), "sha": COMMIT, "siblings": files_there})

    def _send_file(self, parts: list[str]) -> None:
        """`[datasets/]OWNER/NAME/resolve/R/PATH`."""
        kind, rest = ("datasets", parts[1:]) if parts[0] == "datasets" else ("models", parts)
        file = self._root.joinpath(kind, *rest[:2], *rest[4:])
        if rest[2:3] != ["resolve"] or not file.is_file():
            self._missing("EntryNotFound")
            return
        self._send(file.read_bytes(), "application/octet-stream")

    def _send_json(self, value: Any) -> None:
        self._send(json.dumps(value).encode(), "application/json")

    def _send(self, content: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _missing(self, code: str) -> None:
        self._refuse(404, code)

    def _refuse(self, status: int, code: str = "") -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()
