"""Make folders that one process has for itself, and remove those of processes that were killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path


class PrivateFolder:
    """A temporary folder of this process; it is removed with the object, or as the process exits.

    Its owner holds a lock of the folder, which ends with the process: one that nobody holds was
    left by a process that was killed, and goes when the next one of its kind is made.

    Attributes:
        path: of the folder.

    Args:
        kind: what it is for, a part of its name.

    Raises:
        OSError: there is no place for it.
    """

    def __init__(self, kind: str) -> None:
        prefix = f"windrow-{kind}-"
        _remove_leftovers(prefix)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix))
            # Another process may have taken it for a leftover before it was locked.
            with contextlib.suppress(FileNotFoundError):
                lock = _opened(self.path)
                fcntl.flock(lock, fcntl.LOCK_SH)
                if self.path.is_dir():
                    break
                os.close(lock)
        self._remove = weakref.finalize(self, _remove, self.path, lock)

    def close(self) -> None:
        """Remove it."""
        self._remove()


def _opened(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _remove_leftovers(prefix: str) -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # of another user, or gone by now
            lock = _opened(folder)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
