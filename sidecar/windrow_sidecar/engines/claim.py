"""Settle which slot of its pod an engine is: one engine a slot, one slot a GPU.

A pod with several GPUs may run an engine on each. Their processes need not know of each other: each
takes the first number that no live one has, by a lock that ends with the process, so that an engine
which starts again gets the number of the one before it.
"""

from __future__ import annotations

import fcntl
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from windrow.errors import UserError
from windrow.rundir import ENV_SLOT, MOST_SLOTS, RunDir


@dataclass(frozen=True, slots=True)
class SlotClaim:
    """A slot that this process has until it ends, or closes the claim.

    Attributes:
        run_dir: as the slot sees it.
    """

    run_dir: RunDir
    _lock: FileIO

    def close(self) -> None:
        """Let another engine have the slot."""
        self._lock.close()


def claim_slot(run_dir: RunDir, environment: Mapping[str, str]) -> SlotClaim:
    """Take a slot for the engine in this process: the one that its environment names, or any.

    Raises:
        UserError: another engine has that slot, or all of them are taken.
        OSError: the run directory cannot be written.
    """
    named = _named(environment.get(ENV_SLOT, ""))
    for slot in range(MOST_SLOTS) if named is None else (named,):
        mine = run_dir.of_slot(slot)
        if (lock := _locked(mine.claim())) is not None:
            return SlotClaim(mine, lock)
    if named is None:
        raise UserError(f"the {MOST_SLOTS} slots of {run_dir.root} have engines")
    raise UserError(
        f"another engine of this pod is slot {named}",
        field=ENV_SLOT,
        remedy="Give each engine of the pod a number of its own, or leave the variable away.",
    )


def _named(said: str) -> int | None:
    if not said:
        return None
    if not said.isdecimal() or int(said) >= MOST_SLOTS:
        raise UserError(
            f"{said!r} is not a slot of a pod",
            field=ENV_SLOT,
            remedy=f"Give 0 to {MOST_SLOTS - 1}, another one to each engine of the pod.",
        )
    return int(said)


def _locked(path: Path) -> FileIO | None:
    """Return the file, locked by this process; None: another process has it."""
    file = FileIO(path, "a")
    try:
        # Not flock: a lock that a child inherits would outlive the engine.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.close()
        return None
    return file
