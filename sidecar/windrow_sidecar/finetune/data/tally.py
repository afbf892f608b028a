"""Count rows of which a job has something to say, and keep the place of the first."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """Number of what was counted, and the row of the first; false while there is none."""

    count: int = 0
    first: str = ""

    def add(self, where: str) -> None:
        """Count one, of a row at that place."""
        self.count += 1
        self.first = self.first or where

    def __bool__(self) -> bool:
        """Return whether anything was counted."""
        return self.count > 0
