"""Open files below given directories only, whatever links lead elsewhere.

A path is opened from a descriptor of its directory and cannot leave it: by `openat2` with
`RESOLVE_BENEATH` where the kernel and the container's seccomp profile allow that call (Linux 5.6),
else component by component with the same rules. A check of a path's name followed by an open of the
name could be outrun by somebody who replaces a directory by a link.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

from fsspec.implementations.local import LocalFileSystem

from windrow.conditions import Reason
from windrow.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

_SYS_OPENAT2 = 437  # the same number on x86-64 and arm64
_RESOLVE_NO_MAGICLINKS, _RESOLVE_BENEATH = 0x02, 0x08
_LINKS_MOST = 40  # as the kernel's own limit
# What a path inside a container may name although no volume is mounted there.
_NEVER = tuple(map(Path, ("/proc", "/sys", "/dev")))
_LEAVES = {errno.EXDEV: "leads by a link out of", errno.ELOOP: "has links without end below"}

_libc = ctypes.CDLL(None, use_errno=True)


def open_beneath(tree: int, path: str, flags: int, *, by_hand: bool = False) -> int:
    """Return a descriptor of a file below a directory.

    Args:
        tree: descriptor of the directory.
        path: relative to it; links are followed as long as they are relative and stay below.
        flags: of `open`; O_CLOEXEC is added.
        by_hand: do without `openat2`.

    Raises:
        OSError: EXDEV where the path leaves the directory, else what `open` raises.
    """
    flags |= os.O_CLOEXEC
    if not by_hand:
        how = struct.pack("QQQ", flags, 0, _RESOLVE_BENEATH | _RESOLVE_NO_MAGICLINKS)
        found = _libc.syscall(_SYS_OPENAT2, tree, os.fsencode(path or "."), how, len(how))
        if found >= 0:
            return int(found)
        # ENOSYS and EPERM: an older kernel, or a seccomp profile that does not know the call.
        if (number := ctypes.get_errno()) not in (errno.ENOSYS, errno.EPERM):
            raise OSError(number, os.strerror(number), path)
    with closing(_Walk(tree)) as walk:
        walk.go(path)
        return os.open(f"/proc/self/fd/{walk.at}", flags)


class _Walk:
    """A walk from a directory downwards that never leaves it."""

    def __init__(self, tree: int) -> None:
        self._stack = [os.open(".", os.O_PATH | os.O_DIRECTORY, dir_fd=tree)]
        self._links = 0

    @property
    def at(self) -> int:
        """A descriptor (O_PATH) of where the walk is."""
        return self._stack[-1]

    def go(self, path: str) -> None:
        """Walk a path, links included.

        Raises:
            OSError: EXDEV where it leaves the directory that the walk began in.
        """
        left = path.split("/")[::-1]
        if path.startswith("/"):
            raise OSError(errno.EXDEV, "leaves its directory", path)
        while left:
            part = left.pop()
            if part in ("", "."):
                continue
            if part == "..":
                if len(self._stack) == 1:
                    raise OSError(errno.EXDEV, "leaves its directory", path)
                os.close(self._stack.pop())
                continue
            found = os.open(part, os.O_PATH | os.O_NOFOLLOW, dir_fd=self.at)
            if not stat.S_ISLNK(os.fstat(found).st_mode):
                self._stack.append(found)
                continue
            target = os.readlink("", dir_fd=found)
            os.close(found)
            self._links += 1
            if target.startswith("/"):
                raise OSError(errno.EXDEV, "leaves its directory", path)
            if self._links > _LINKS_MOST:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            left += target.split("/")[::-1]

    def close(self) -> None:
        """Close all descriptors of the walk."""
        while self._stack:
            os.close(self._stack.pop())


class ConfinedFiles:
    """The directories that a job may read, and nothing else of the machine.

    Args:
        trees: absolute paths of directories; those below /proc, /sys and /dev do not count.
        never: further directories that are not read although a tree holds them, like the pod's
            run directory.
    """

    def __init__(self, trees: Sequence[Path], never: Sequence[Path] = ()) -> None:
        self._never = (*_NEVER, *never)
        self.trees = tuple(
            tree for tree in map(_plain, trees) if not any(map(tree.is_relative_to, self._never))
        )

    def open(self, path: Path, flags: int = os.O_RDONLY) -> int:
        """Return a descriptor of a file or directory. The caller closes it.

        Raises:
            UserError: the path is in no tree, or leads out of its tree by a link.
            OSError: what `open` raises.
        """
        place = _plain(path)
        around = [tree for tree in self.trees if place.is_relative_to(tree)]
        if not around or any(place.is_relative_to(never) for never in self._never):
            raise self._refusal(path, "is not on a volume that this job may read")
        tree = max(around, key=lambda tree: len(tree.parts))
        root = os.open(tree, os.O_PATH | os.O_DIRECTORY)
        try:
            return open_beneath(root, str(place.relative_to(tree)), flags)
        except OSError as error:
            if error.errno in _LEAVES:
                raise self._refusal(path, f"{_LEAVES[error.errno]} {tree}") from error
            error.filename = str(path)
            raise
        finally:
            os.close(root)

    def resolve(self, path: Path) -> Path:
        """Return the place of a file or directory without links, for a library that takes paths.

        Raises:
            UserError, OSError: see `open`.
        """
        with self.opened(path, os.O_PATH) as found:
            return Path(os.readlink(f"/proc/self/fd/{found}"))

    @contextmanager
    def opened(self, path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
        """Yield a descriptor, which is closed at the end; see `open`."""
        found = self.open(path, flags)
        try:
            yield found
        finally:
            os.close(found)

    def _refusal(self, path: Path, problem: str) -> UserError:
        given = ", ".join(map(str, self.trees)) or "none"
        return UserError(
            f"{path} {problem}",
            field="spec.dataset.source",
            remedy=f"Name a file below what this job may read ({given}), without links that lead "
            "out of it. Who keeps the HarvestPolicy can add a volume in spec.sidecar.volumes.",
            reason=Reason.DATASET_UNREADABLE,
        )


def _plain(path: Path) -> Path:
    """Return an absolute path without `.` and `..`, by its name alone."""
    return Path(os.path.abspath(path))


class ConfinedFileSystem(LocalFileSystem):  # type: ignore[misc] # fsspec has no types
    """fsspec's local files, below the directories of a `ConfinedFiles` only.

    Args:
        files: what may be read.
    """

    cachable: ClassVar[bool] = False

    def __init__(self, files: ConfinedFiles) -> None:
        super().__init__(skip_instance_cache=True)
        self._files = files

    def info(self, path: str, **_: Any) -> dict[str, Any]:  # noqa: ANN401
        """Return name, size, type and time of a file or directory."""
        name = self._strip_protocol(path)
        with self._files.opened(Path(name), os.O_PATH) as found:
            about = os.fstat(found)
        kind = "other"
        if stat.S_ISDIR(about.st_mode):
            kind = "directory"
        elif stat.S_ISREG(about.st_mode):
            kind = "file"
        return {"name": name, "size": about.st_size, "type": kind, "mtime": about.st_mtime}

    def ls(self, path: str, detail: bool = False, **_: Any) -> list[Any]:  # noqa: ANN401
        """Return the entries of a directory."""
        name = self._strip_protocol(path)
        about = self.info(name)
        found = [about]
        if about["type"] == "directory":
            with self._files.opened(Path(name), os.O_RDONLY | os.O_DIRECTORY) as folder:
                names = sorted(os.listdir(folder))
            found = [self.info(f"{name}/{each}") for each in names]
        return found if detail else [each["name"] for each in found]

    def exists(self, path: str, **_: Any) -> bool:  # noqa: ANN401
        """Return whether a file or directory can be seen there."""
        try:
            self.info(path)
        except OSError:
            return False
        return True

    def isdir(self, path: str) -> bool:
        """Return whether a directory is there."""
        return self.exists(path) and self.info(path)["type"] == "directory"

    def isfile(self, path: str) -> bool:
        """Return whether a regular file is there."""
        return self.exists(path) and self.info(path)["type"] == "file"

    def _open(self, path: str, mode: str = "rb", *_: Any, **__: Any) -> IO[bytes]:  # noqa: ANN401
        if mode != "rb":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        # A pipe would hold the open itself until somebody writes.
        found = self._files.open(Path(self._strip_protocol(path)), os.O_RDONLY | os.O_NONBLOCK)
        return os.fdopen(found, "rb")
