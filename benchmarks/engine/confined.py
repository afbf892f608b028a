"""A limit on what a process keeps in memory, pages of files included: a control group of its own.

The resident set alone says little about a model on disk: what one process does not hold, the page
cache holds for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from windrow_sidecar.cgroup import groups


class CannotConfine(RuntimeError):
    """Error of a process that may not make control groups; says why."""


@contextmanager
def confined(n_bytes: int) -> Iterator[list[str]]:
    """Yield a prefix for the command of one process, which then gets `n_bytes` at most.

    Raises:
        CannotConfine: no right, or no memory controller.
    """
    parent, limit = _controller()
    group = parent / f"windrow-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        raise CannotConfine(f"{group} cannot be made: {error.strerror}") from error
    try:
        try:
            (group / limit).write_text(str(n_bytes))
        except OSError as error:
            raise CannotConfine(f"{group / limit} cannot be set: {error.strerror}") from error
        join = 'echo $$ > "$0" && exec "$@"'
        yield ["sh", "-c", join, str(group / "cgroup.procs")]
    finally:
        group.rmdir()


def forget_cached(folder: Path) -> None:
    """Drop a folder's files from the page cache: who reads them next pays for it."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _controller() -> tuple[Path, str]:
    """Return a group that can have children with a limit, and the limit's file in a child."""
    for controllers, group in groups():
        if "memory" in controllers.split(",") and group.is_dir():
            return group, "memory.limit_in_bytes"
        delegated = group / "cgroup.subtree_control"
        if not controllers and delegated.is_file() and "memory" in delegated.read_text().split():
            return group, "memory.max"
    raise CannotConfine("there is no memory controller for groups below this process's own")
