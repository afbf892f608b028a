"""Note which job runs in a worker, in a file that outlives it.

A worker that dies takes all of its jobs along, and says nothing. Who was at work is the one whose
failed attempt it was; a stream to the agent is up to a second old, mapped memory is not.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

_BYTES = 256


class TurnNote:
    """A worker's note. It outlives the process; the agent takes it away.

    Args:
        path: where (`RunDir.turn_note`).
    """

    def __init__(self, path: Path) -> None:
        with path.open("w+b") as file:
            file.truncate(_BYTES)
            self._mapped = mmap.mmap(file.fileno(), _BYTES)

    def of(self, job_uid: str, epoch: int) -> Callable[[], None]:
        """Return what notes that it is this job's turn (0.2 us: it is called at each tasklet)."""
        record = f"{job_uid} {epoch}\n".encode().ljust(_BYTES)
        if len(record) > _BYTES:
            raise ValueError(f"the UID {job_uid!r} is longer than the note")
        mapped = self._mapped

        def note() -> None:
            mapped[:] = record

        return note


def read_turn(path: Path) -> tuple[str, int] | None:
    """Return UID and epoch of the job whose turn it was; None: nobody's yet."""
    try:
        words = path.read_text(encoding="utf-8", errors="replace").split()
    except FileNotFoundError:
        return None
    # A worker that is killed as it writes may leave half of each: then nobody is found by it.
    if len(words) != 2 or not words[1].isdecimal():
        return None
    return words[0], int(words[1])


def forget_turn(path: Path) -> None:
    """Take the note away."""
    path.unlink(missing_ok=True)
