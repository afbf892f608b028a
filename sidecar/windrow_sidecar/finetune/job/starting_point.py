"""Read the checkpoint that a job names to go on from: a directory, or objects of a bucket.

It may be of any job, so nothing of the folder is taken on trust: files are opened below what the
job may read, through no link that leads out of it, and what another namespace's job left is
refused.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from windrow.conditions import Reason
from windrow.errors import UserError
from windrow.outputs import path_of
from windrow.redaction import redacted
from windrow_sidecar.finetune.data.confined_files import ConfinedFiles, open_beneath
from windrow_sidecar.finetune.data.remote import answers_later
from windrow_sidecar.finetune.training.checkpoint import (
    BEGUN,
    FORMAT,
    MANIFEST,
    OWNER,
    SERVED_BY,
    UNREADABLE,
    Checkpoint,
    check_room,
    owner_of,
    verify_checkpoint,
)

FIELD: Final = "spec.checkpoint.resumeFrom"
_REMEDY: Final = (
    "Name the directory of a checkpoint (DESTINATION/.windrow/UID/checkpoints/step-...), or the "
    "folder of its job (DESTINATION/.windrow/UID)."
)
# Of a manifest and of what says when a job began and whose it is.
_SMALL_BYTES: Final = 2**20
# From a checkpoint to the folder of all jobs at its destination, which says whose they are.
_MOST_ABOVE: Final = 3
_ABOVE: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


class OpenedPlace(Protocol):
    """A directory that stays the same one while it is read, whatever has its name meanwhile."""

    def read(self, name: str, most: int | None) -> bytes:
        """Return what a file below holds, at most so many bytes where a number is given."""

    def names(self, folder: str) -> list[str]:
        """Return the names in a directory below; none where there is no directory. "": this one."""

    def read_above(self, levels: int, name: str) -> bytes:
        """Return the begin of a file in the directory so many levels above."""


# Opens a place by its path or URL.
OpenPlace = Callable[[str], AbstractContextManager[OpenedPlace]]


class _Folder:
    """A directory of this machine.

    Args:
        place: as people name it.
        at: its descriptor.
        is_confined: whether a link that leads out of it is refused.
    """

    def __init__(self, place: str, at: int, *, is_confined: bool) -> None:
        self._place, self._at, self._is_confined = place, at, is_confined

    def read(self, name: str, most: int | None) -> bytes:
        # A pipe would hold the open itself until somebody writes.
        return self._content(self._opened(name, os.O_RDONLY | os.O_NONBLOCK), name, most)

    def names(self, folder: str) -> list[str]:
        try:
            found = self._opened(folder or ".", os.O_RDONLY | os.O_DIRECTORY)
        except (FileNotFoundError, NotADirectoryError):
            return []
        try:
            return os.listdir(found)
        finally:
            os.close(found)

    def read_above(self, levels: int, name: str) -> bytes:
        # The system's own `..`: of the directory that is open, and not of a link to it.
        above = os.open("/".join([".."] * levels) or ".", _ABOVE, dir_fd=self._at)
        try:
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
            found = os.open(name, flags, dir_fd=above)
        finally:
            os.close(above)
        return self._content(found, name, _SMALL_BYTES)

    def _content(self, descriptor: int, name: str, most: int | None) -> bytes:
        with os.fdopen(descriptor, "rb") as file:
            check_room(descriptor, f"{self._place}/{name}")
            return file.read() if most is None else file.read(most)

    def _opened(self, name: str, flags: int) -> int:
        if not self._is_confined:
            return os.open(name, flags | os.O_CLOEXEC, dir_fd=self._at)
        try:
            return open_beneath(self._at, name, flags)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.ELOOP):
                raise
            raise _refusal(
                f"{self._place}/{name} leads by a link out of {self._place}",
                "Copy the checkpoint's files themselves.",
            ) from error


def local_files(confined: ConfinedFiles | None) -> OpenPlace:
    """Return what opens directories of this machine.

    Args:
        confined: what may be read; None: everything that the process can read.
    """

    @contextmanager
    def opened(place: str) -> Iterator[OpenedPlace]:
        flags = os.O_RDONLY | os.O_DIRECTORY
        if confined is None:
            at = os.open(place, flags | os.O_CLOEXEC)
        else:
            at = confined.open(Path(place), flags)
        try:
            yield _Folder(place, at, is_confined=confined is not None)
        finally:
            os.close(at)

    return opened


class _Prefix:
    """Objects of a bucket below a URL.

    Args:
        url: the URL.
        system: fsspec's.
    """

    def __init__(self, url: str, system: Any) -> None:  # noqa: ANN401 - fsspec's
        self._url, self._system = url, system

    def read(self, name: str, most: int | None) -> bytes:
        return self._content(f"{self._url}/{name}", most)

    def names(self, folder: str) -> list[str]:
        try:
            entries = self._system.ls(f"{self._url}/{folder}".rstrip("/"), detail=False)
        except FileNotFoundError:
            return []
        return [str(entry).rstrip("/").rpartition("/")[2] for entry in entries]

    def read_above(self, levels: int, name: str) -> bytes:
        scheme, _, path = self._url.partition("://")
        parts = path.split("/")
        if levels >= len(parts):
            raise FileNotFoundError(name)
        above = "/".join(parts[: len(parts) - levels])
        return self._content(f"{scheme}://{above}/{name}", _SMALL_BYTES)

    def _content(self, url: str, most: int | None) -> bytes:
        return bytes(self._system.cat_file(url, start=None if most is None else 0, end=most))


def bucket_files(system: Any) -> OpenPlace:  # noqa: ANN401 - fsspec's
    """Return what opens prefixes of a bucket."""

    def opened(url: str) -> AbstractContextManager[OpenedPlace]:
        return nullcontext(_Prefix(url, system))

    return opened


class NamedCheckpoint:
    """The checkpoint at a place that a job names.

    Args:
        place: of the checkpoint, or of its job's folder: an absolute path or a URL of a bucket.
        files: how it is read.
        namespace: of the job that names it; what a job of another one left is refused. Empty: it
            is not known whose anything is.
    """

    def __init__(self, place: str, files: OpenPlace, namespace: str = "") -> None:
        self._place, self._files, self._namespace = path_of(place), files, namespace

    def check(self) -> None:
        """Look for it, before anything is loaded.

        Raises:
            UserError: it is not there, is of another version, or the job may not read it.
            OSError: nobody can tell: the storage does not answer.
        """
        with self._opened() as place:
            self._check(place)

    def begun(self) -> datetime | None:
        """Return when its job first was; None: nobody has noted it."""
        try:
            return datetime.fromisoformat(self._noted(BEGUN))
        except (OSError, ValueError, UserError):
            return None

    def served_by(self) -> str:
        """Return the server that its rows were rendered for; "": nobody has noted it."""
        try:
            return self._noted(SERVED_BY).strip()
        except (OSError, ValueError, UserError):
            return ""

    def _noted(self, name: str) -> str:
        """Return what the folder of its job keeps in a file."""
        levels = 2 if self._place.rpartition("/")[2].startswith("step-") else 0
        with self._files(self._place) as place:
            return place.read_above(levels, name).decode()

    def read(self) -> Checkpoint:
        """Read and verify it; of a job's folder the newest one that is whole.

        Raises:
            UserError: see `check`, or none is whole.
            OSError: see `check`.
        """
        damaged = []
        with self._opened() as place:
            self._check(place)
            for below in self._folders(place):
                folder = self._named(below)
                try:
                    found = verify_checkpoint(folder, partial(self._read, place, below))
                except UNREADABLE as error:
                    if answers_later(error):
                        raise
                    why = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
                    damaged.append(f"{folder}: {redacted(why)}")
                    continue
                return replace(found, is_named=True)
        raise _refusal(f"no checkpoint there is whole: {'; '.join(damaged)}")

    @contextmanager
    def _opened(self) -> Iterator[OpenedPlace]:
        """Open the place once: whose it is and what it holds are of one directory."""
        with contextlib.ExitStack() as opened:
            try:
                with _reading(self._place):
                    place = opened.enter_context(self._files(self._place))
            except FileNotFoundError as error:
                raise _refusal(f"{self._place} holds no checkpoint") from error
            yield place

    def _check(self, place: OpenedPlace) -> None:
        self._refuse_others(place)
        for below in self._folders(place):
            manifest = self._manifest(place, below)
            if manifest.get("format") != FORMAT:
                raise _refusal(
                    f"{self._named(below)} has format {manifest.get('format')}, this version "
                    f"reads {FORMAT}"
                )
            return
        raise _refusal(f"{self._place} holds no checkpoint")

    def _folders(self, place: OpenedPlace) -> list[str]:
        """Return the checkpoints at the place by their paths below it, the newest one first."""
        with _reading(self._place):
            if MANIFEST in place.names(""):
                return [""]
            found = place.names("checkpoints")
        steps = sorted((name for name in found if name.startswith("step-")), reverse=True)
        return [f"checkpoints/{name}/" for name in steps]

    def _named(self, below: str) -> str:
        return f"{self._place}/{below}".rstrip("/")

    def _manifest(self, place: OpenedPlace, below: str) -> dict[str, Any]:
        name = f"{self._named(below)}/{MANIFEST}"
        try:
            with _reading(name):
                found = json.loads(place.read(f"{below}{MANIFEST}", _SMALL_BYTES))
        except (FileNotFoundError, ValueError, RecursionError) as error:
            raise _refusal(f"{name} cannot be read: {error}") from error
        if not isinstance(found, dict):
            raise _refusal(f"{name} is not a manifest")
        return found

    def _refuse_others(self, place: OpenedPlace) -> None:
        """Refuse what a job of another namespace left, as the directories above it say."""
        for levels in range(1, _MOST_ABOVE + 1) if self._namespace else ():
            try:
                with _reading(self._place):
                    _, owner = owner_of(place.read_above(levels, OWNER))
            except FileNotFoundError:
                continue  # a copy, or of a version that kept no owner
            if owner != self._namespace:
                raise _refusal(f"{self._place} holds the work of a job of another namespace")

    def _read(self, place: OpenedPlace, below: str, name: str) -> bytes:
        with _reading(f"{self._named(below)}/{name}"):
            return place.read(f"{below}{name}", None)


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Turn what stays refused into an error of the job's field; what may pass is raised."""
    try:
        yield
    except UserError as error:  # of what the job may read, by the name of its rows
        raise _refusal(error.problem, error.remedy) from error
    except (PermissionError, IsADirectoryError, NotADirectoryError) as error:
        raise _refusal(f"{path} cannot be read: {redacted(str(error))}") from error


def _refusal(problem: str, remedy: str = _REMEDY) -> UserError:
    return UserError(problem, field=FIELD, remedy=remedy, reason=Reason.CHECKPOINT_UNREADABLE)
