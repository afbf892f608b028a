"""The interface over which a job reports, and takes commands."""

from __future__ import annotations

from typing import Protocol

from windrow.protocol import Action, WorkerEvent


class JobReporter(Protocol):
    """Takes a worker's reports, and gives it commands."""

    def event(self, event: WorkerEvent) -> None:
        """Tell that something happened; never waits."""

    def take_command(self) -> Action | None:
        """Return the oldest command that was not picked up yet."""
