"""Copy what a library writes into a private folder to a job's folder, through no link.

Libraries that write figures (W&B's client, TensorBoard's) make files by path, under names that can
be guessed. Who writes to the job's volume could place links there that lead to files of others. So
they write where nobody else does, and each file is made at the volume by directory descriptors.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from windrow.outputs import HELD_DIRECTORIES, folder_below

# Files that only grow; all others are small, and are written again when they have changed.
_GROWING: Final = ("tfevents", ".wandb", ".log")
_PIECE_BYTES: Final = 1 << 20
_MADE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class MirroredFiles:
    """Keeps a folder like another one that this process alone writes to.

    Args:
        source: the folder that is written to.
        target: descriptor of the folder that gets the files; this object closes it.
    """

    def __init__(self, source: Path, target: int) -> None:
        self._source, self._target = source, target
        self._seen: dict[Path, tuple[int, int]] = {}  # size and time of change, as copied
        self._growing: dict[Path, int] = {}  # descriptors

    def sync(self) -> None:
        """Copy what has changed.

        Raises:
            OSError: a file cannot be written, or a folder of the target is a link.
        """
        for file in sorted(self._source.rglob("*")):
            about = file.lstat()
            found = (about.st_size, about.st_mtime_ns)
            if not stat.S_ISREG(about.st_mode) or self._seen.get(file) == found:
                continue
            if any(mark in file.name for mark in _GROWING):
                self._append(file)
            else:
                self._replace(file)
            self._seen[file] = found

    def close(self) -> None:
        """Close all files of the target, and the target."""
        for descriptor in (*self._growing.values(), self._target):
            os.close(descriptor)
        self._growing.clear()

    def _append(self, file: Path) -> None:
        if file not in self._growing:
            with self._folder_of(file) as folder:
                # Names are of one process at one time: what is there is not an earlier one of it.
                self._growing[file] = _made(file.name, folder)
        written = self._growing[file]
        with file.open("rb") as source:
            source.seek(os.lseek(written, 0, os.SEEK_END))
            while piece := source.read(_PIECE_BYTES):
                _write(written, piece)

    def _replace(self, file: Path) -> None:
        draft = f".{file.name}.draft"
        with self._folder_of(file) as folder:
            written = _made(draft, folder)
            try:
                _write(written, file.read_bytes())
            finally:
                os.close(written)
            os.rename(draft, file.name, src_dir_fd=folder, dst_dir_fd=folder)

    @contextmanager
    def _folder_of(self, file: Path) -> Iterator[int]:
        parts = file.relative_to(self._source).parent.parts
        folder = folder_below(Path(HELD_DIRECTORIES, str(self._target)), parts, make=True)
        try:
            yield folder
        finally:
            os.close(folder)


def _made(name: str, folder: int) -> int:
    """Return a descriptor of a file that was not there before; a link of that name is removed."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
    return os.open(name, _MADE, 0o644, dir_fd=folder)


def _write(descriptor: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]
