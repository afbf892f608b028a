"""A Prometheus beside a local cluster: it scrapes operator and sidecars, and knows our rules.

The ports of a local cluster are any free ones, so targets are looked up again and again and written
to a file for Prometheus.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import httpx
import yaml

from windrow.errors import Transient, UserError
from windrow_lab.machine.ports import LOOPBACK, ReservedPort
from windrow_lab.machine.processes import Child, Keeper, ProcessCommand

EXECUTABLE = "prometheus"
_SCRAPE_SECONDS = 1
_READY_WITHIN = timedelta(seconds=30)


def targets(directory: Path) -> list[str]:
    """Return host:port of every metrics endpoint of the cluster whose directory this is."""
    found = []
    try:
        state = json.loads((directory / "operator.json").read_text(encoding="utf-8"))
        found.append(f"{LOOPBACK}:{state['metricsPort']}")
    except (FileNotFoundError, ValueError, KeyError):
        pass  # it starts
    # Each sidecar notes its port in the run directory that it shares with decode.
    for path in sorted(directory.rglob("metrics.port")):
        try:
            found.append(f"{LOOPBACK}:{int(path.read_text(encoding='ascii'))}")
        except (FileNotFoundError, ValueError):
            continue  # it ends
    return found


def rules_file() -> Path | None:
    """Return the rules of the source tree; None where only the package is installed."""
    path = Path(__file__).resolve().parents[3] / "deploy/helm/windrow/rules/windrow.rules.yaml"
    return path if path.is_file() else None


def configuration(targets_file: Path, rules: Path | None) -> dict[str, Any]:
    """Return Prometheus' configuration."""
    return {
        "global": {
            "scrape_interval": f"{_SCRAPE_SECONDS}s",
            "evaluation_interval": f"{_SCRAPE_SECONDS}s",
        },
        "rule_files": [str(rules)] if rules else [],
        "scrape_configs": [
            {
                "job_name": "windrow",
                # Slots name themselves.
                "honor_labels": True,
                "file_sd_configs": [
                    {"files": [str(targets_file)], "refresh_interval": f"{_SCRAPE_SECONDS}s"}
                ],
            }
        ],
    }


def find_prometheus(environment: Mapping[str, str]) -> str:
    """Return Prometheus' executable.

    Raises:
        UserError: there is none on PATH.
    """
    found = shutil.which(EXECUTABLE, path=environment.get("PATH"))
    if found is None:
        raise UserError(
            "there is no prometheus on PATH",
            remedy="Install it (Debian: apt-get install prometheus), or scrape the targets that "
            "`windrow monitor --targets` prints with your own.",
            reason="NoPrometheus",
        )
    return found


class Prometheus:
    """A running Prometheus over one local cluster; a context manager.

    Args:
        cluster: directory of the cluster.
        data: folder for its configuration, log and samples; they stay.
        port: of its API and pages; 0: any free one.
        rules: file with rules; default: those of the source tree.

    Attributes:
        url: of its API and pages.
    """

    url: str

    def __init__(self, cluster: Path, data: Path, port: int = 0, rules: Path | None = None) -> None:
        self._cluster, self._data = cluster, data.absolute()
        self._port, self._rules = port, rules or rules_file()
        self._keeper: Keeper | None = None
        self._child: Child | None = None

    def start(self) -> None:
        """Start it and wait until it answers.

        Raises:
            UserError: it is not installed.
            Transient: it did not come up; the message names its log.
        """
        executable = find_prometheus(os.environ)
        self._data.mkdir(parents=True, exist_ok=True)
        self.find_targets()
        config = self._data / "prometheus.yaml"
        config.write_text(yaml.safe_dump(configuration(self._targets_file, self._rules)))
        with ReservedPort(self._port, field="--port") as reserved:
            port = reserved.number
        self.url = f"http://{LOOPBACK}:{port}"
        self._keeper = Keeper()
        log = self._data / "prometheus.log"
        self._child = self._keeper.start(
            ProcessCommand(
                [
                    executable,
                    f"--config.file={config}",
                    f"--storage.tsdb.path={self._data / 'samples'}",
                    f"--web.listen-address={LOOPBACK}:{port}",
                ],
                log=log,
                nice=5,
            )
        )
        deadline = time.monotonic() + _READY_WITHIN.total_seconds()
        while not self._answers():
            if self._child.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise Transient(f"Prometheus did not come up; its log is {log}")
            time.sleep(0.1)

    def stop(self) -> None:
        """End it; harmless when repeated."""
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def _targets_file(self) -> Path:
        return self._data / "targets.json"

    def find_targets(self) -> list[str]:
        """Look for targets again and tell Prometheus; returns them."""
        found = targets(self._cluster)
        unfinished = self._targets_file.with_suffix(".tmp")
        unfinished.write_text(json.dumps([{"targets": found}]))
        unfinished.replace(self._targets_file)
        return found

    def follow(self, pause_s: float = 1.0) -> Iterator[list[str]]:
        """Look for targets again and again; yields them each time, ends when Prometheus does."""
        while self._child is not None and self._child.poll() is None:
            yield self.find_targets()
            time.sleep(pause_s)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/-/ready", timeout=1).status_code == 200
        except httpx.HTTPError:
            return False
