"""State of a container: waiting, running or terminated; plain data."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

Json = dict[str, Any]


def timestamp(at: datetime) -> str:
    """Write a time as Kubernetes does."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class Waiting:
    """State of a container that does not run, for `reason`."""

    reason: str
    message: str = ""

    def as_json(self) -> Json:
        """Return the `state` of a container status."""
        found = {"reason": self.reason}
        return {"waiting": found | ({"message": self.message} if self.message else {})}


@dataclass(frozen=True)
class Running:
    """A process is there."""

    started_at: datetime
    pid: int

    def as_json(self) -> Json:
        """Return the `state` of a container status."""
        return {"running": {"startedAt": timestamp(self.started_at)}}


@dataclass(frozen=True)
class Terminated:
    """The process ended; `exit_code` is 128 + n when signal n ended it."""

    exit_code: int
    started_at: datetime
    finished_at: datetime
    reason: str
    pid: int = 0

    @classmethod
    def of_status(cls, status: int, running: Running, now: datetime) -> Terminated:
        """Describe the end of a process; a negative status is the signal that ended it."""
        code = status if status >= 0 else 128 - status
        reason = "Completed" if code == 0 else "Error"
        if status < 0:
            reason = signal.Signals(-status).name
        return cls(code, running.started_at, now, reason, running.pid)

    def as_json(self) -> Json:
        """Return the `state` of a container status."""
        found: Json = {
            "exitCode": self.exit_code,
            "reason": self.reason,
            "startedAt": timestamp(self.started_at),
            "finishedAt": timestamp(self.finished_at),
        }
        if self.exit_code > 128:
            found["signal"] = self.exit_code - 128
        return {"terminated": found}


@dataclass(frozen=True)
class ContainerRecord:
    """A container between its first start and its last end."""

    state: Waiting | Running | Terminated = Waiting("PodInitializing")
    last: Terminated | None = None
    restarts: int = 0
    started: bool = False
    ready: bool = False


def resumed(status: Json | None, now: datetime) -> ContainerRecord:
    """Return the record of a container that an earlier node process ran.

    What was running then has ended with it, so it counts as killed.
    """
    if status is None:
        return ContainerRecord()
    restarts = status.get("restartCount", 0)
    state = status.get("state") or {}
    if "running" in state:
        started = datetime.fromisoformat(state["running"]["startedAt"])
        killed = 128 + signal.SIGKILL
        return ContainerRecord(Terminated(killed, started, now, "NodeRestarted"), None, restarts)
    if ended := state.get("terminated"):
        return ContainerRecord(_terminated(ended), None, restarts)
    last = (status.get("lastState") or {}).get("terminated")
    return ContainerRecord(_terminated(last), None, restarts) if last else ContainerRecord()


def _terminated(ended: Json) -> Terminated:
    return Terminated(
        ended["exitCode"],
        datetime.fromisoformat(ended["startedAt"]),
        datetime.fromisoformat(ended["finishedAt"]),
        ended.get("reason", ""),
    )
