"""Lock a folder for one process, until that process ends."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

# Locks of this process, by their file. They belong to the process as a whole: taking one a second
# time changes nothing, and closing any other descriptor of the file would lose it (fcntl(2)).
_HELD: Final[dict[Path, int]] = {}
# What the files are called in the folder of a job; the epoch follows.
HOLDER: Final = "holder-"
_LOOK_AGAIN_S: Final = 0.2


class AlreadyHeld(Exception):
    """Another process has it; the text says which.

    Attributes:
        orphan: who started that process is gone: it writes its last checkpoint and ends.
    """

    def __init__(self, who: str, *, orphan: bool = False) -> None:
        self.orphan = orphan
        super().__init__(who)


def hold(file: Path, *, parent: int = 0) -> None:
    """Take the lock until this process ends, and write down who has it.

    `parent`: the process with whose end this one ends; 0: there is none.

    Raises:
        Held: another process has it.
        OSError: the file cannot be written.
    """
    file = file.parent.resolve() / file.name
    if file in _HELD:
        return
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        held = _held(descriptor)
        os.close(descriptor)
        raise held from error
    except OSError:
        os.close(descriptor)
        raise
    _HELD[file] = descriptor
    os.ftruncate(descriptor, 0)
    note = {"pid": os.getpid(), "host": socket.gethostname(), "parent": parent}
    os.pwrite(descriptor, json.dumps(note).encode(), 0)


def check_free(file: Path) -> None:
    """Look whether a lock could be taken, without taking it.

    Raises:
        Held: another process has it.
    """
    file = file.resolve()
    if file in _HELD:
        return
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _held(descriptor) from error
    finally:
        os.close(descriptor)


def wait_for_orphan(
    file: Path, tell: Callable[[str], None], alive: Callable[[], None] = lambda: None
) -> None:
    """Wait until an orphan that has the lock has ended.

    Args:
        file: as for `hold`.
        tell: called once with its description, where there is one.
        alive: called now and then while it waits.
    """
    told = False
    while True:
        try:
            check_free(file)
        except AlreadyHeld as held:
            if not held.orphan:
                return
            if not told:
                tell(str(held))
            told = True
            alive()
            time.sleep(_LOOK_AGAIN_S)
        else:
            return


def _held(descriptor: int) -> AlreadyHeld:
    try:
        said = json.loads(os.pread(descriptor, 4096, 0))
        who = f"process {said['pid']} on {said['host']}"
        here, parent = said["host"] == socket.gethostname(), int(said.get("parent", 0))
    except (ValueError, KeyError, TypeError):  # it has it, and has not said so yet
        return AlreadyHeld("another process")
    return AlreadyHeld(who, orphan=here and parent > 0 and not _lives(parent))


def _lives(pid: int) -> bool:
    """Return whether a process of this machine runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return stat[stat.rindex(")") + 2] != "Z"
