"""Who works in a folder: a lock that goes with its process, however that ends."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from pathlib import Path
from typing import Final

# Locks of this process, by their file. They belong to the process as a whole: taking one a second
# time changes nothing, and closing any other descriptor of the file would lose it (fcntl(2)).
_HELD: Final[dict[Path, int]] = {}
# What the files are called in the folder of a job; the epoch follows.
HOLDER: Final = "holder-"


class AlreadyHeld(Exception):
    """Another process has it; the text says which."""


def hold(file: Path) -> None:
    """Take the lock until this process ends, and write down who has it.

    Raises:
        Held: another process has it.
        OSError: the file cannot be written.
    """
    file = file.resolve()
    if file in _HELD:
        return
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = _holder(descriptor)
        os.close(descriptor)
        raise AlreadyHeld(holder) from error
    except OSError:
        os.close(descriptor)
        raise
    _HELD[file] = descriptor
    os.ftruncate(descriptor, 0)
    os.pwrite(
        descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0
    )


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
        raise AlreadyHeld(_holder(descriptor)) from error
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> str:
    try:
        said = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {said['pid']} on {said['host']}"
    except (ValueError, KeyError, TypeError):  # it has it, and has not said so yet
        return "another process"
