"""What `windrow up` notes about the cluster that it leaves running, and whether it still runs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class ClusterInfo:
    """A cluster that `windrow up` started.

    Attributes:
        pid: of the process that holds it.
        start_ticks: when that process started (clock ticks after boot), since pids are used again.
        kubeconfig: of a cluster administrator.
        server: URL of the API server.
        version: of Kubernetes.
        log_dir: logs of all its processes.
        directory: sockets and files of its processes and pods.
    """

    pid: int
    start_ticks: int
    kubeconfig: str
    server: str
    version: str
    log_dir: str
    directory: str

    @property
    def is_running(self) -> bool:
        """Whether the process that holds the cluster is still that process."""
        return start_ticks(self.pid) == self.start_ticks


def state_directory(environment: Mapping[str, str]) -> Path:
    """Return where the state of `windrow up` is kept; it need not exist."""
    base = environment.get("XDG_STATE_HOME") or Path(environment.get("HOME", "~"), ".local/state")
    return Path(base).expanduser() / "windrow"


def state_file(environment: Mapping[str, str]) -> Path:
    """Return the file that describes the running cluster."""
    return state_directory(environment) / "cluster.json"


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks after boot; None: there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def write_state(info: ClusterInfo, environment: Mapping[str, str]) -> None:
    """Note a running cluster; a reader never sees half of it."""
    path = state_file(environment)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(asdict(info), indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path)


def running_cluster(environment: Mapping[str, str] | None = None) -> ClusterInfo | None:
    """Return the cluster that `windrow up` left running, None when there is none."""
    path = state_file(os.environ if environment is None else environment)
    try:
        info = ClusterInfo(**json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return info if info.is_running else None


def running_kubeconfig(environment: Mapping[str, str] | None = None) -> Path | None:
    """Return the kubeconfig of the cluster that `windrow up` left running, if any."""
    info = running_cluster(environment)
    return Path(info.kubeconfig) if info else None
