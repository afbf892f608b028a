"""Read the checkpoint that a job names to go on from: a directory, or objects of a bucket.

It may be of any job, so nothing of the folder is taken on trust: files are opened below what the
job may read, through no link that leads out of it, and what another namespace's job left is
refused.
"""

from __future__ import annotations

import json
import os
import posixpath
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from windrow.conditions import Reason
from windrow.errors import UserError
from windrow.outputs import OWN_FOLDER, path_of
from windrow.redaction import redacted
from windrow_sidecar.finetune.data.confined_files import ConfinedFiles
from windrow_sidecar.finetune.data.remote import answers_later
from windrow_sidecar.finetune.training.checkpoint import (
    BEGUN,
    FORMAT,
    MANIFEST,
    OWNER,
    UNREADABLE,
    Checkpoint,
    check_room,
    verify_checkpoint,
)

FIELD: Final = "spec.checkpoint.resumeFrom"
_REMEDY: Final = (
    "Name the directory of a checkpoint (DESTINATION/.windrow/UID/checkpoints/step-...), or the "
    "folder of its job (DESTINATION/.windrow/UID)."
)
# Of a manifest and of what says when a job began and whose it is.
_SMALL_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True)
class Files:
    """Access to the files of one storage.

    Attributes:
        read: returns what a file holds, at most so many bytes where a number is given.
        names: returns the names in a directory; none where there is no directory.
    """

    read: Callable[[str, int | None], bytes]
    names: Callable[[str], list[str]]


def local_files(confined: ConfinedFiles | None) -> Files:
    """Return access to files of this machine.

    Args:
        confined: what may be read; None: everything that the process can read.
    """

    def opened(path: str, flags: int) -> int:
        if confined is None:
            return os.open(path, flags | os.O_CLOEXEC)
        return confined.open(Path(path), flags)

    def read(path: str, most: int | None) -> bytes:
        # A pipe would hold the open itself until somebody writes.
        found = opened(path, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(found, "rb") as file:
            check_room(found, path)
            return file.read() if most is None else file.read(most)

    def names(path: str) -> list[str]:
        try:
            folder = opened(path, os.O_RDONLY | os.O_DIRECTORY)
        except (FileNotFoundError, NotADirectoryError):
            return []
        try:
            return os.listdir(folder)
        finally:
            os.close(folder)

    return Files(read, names)


def bucket_files(system: Any) -> Files:  # noqa: ANN401 - fsspec's
    """Return access to objects of a bucket."""

    def read(url: str, most: int | None) -> bytes:
        return bytes(system.cat_file(url, start=None if most is None else 0, end=most))

    def names(url: str) -> list[str]:
        try:
            entries = system.ls(url, detail=False)
        except FileNotFoundError:
            return []
        return [str(entry).rstrip("/").rpartition("/")[2] for entry in entries]

    return Files(read, names)


class NamedCheckpoint:
    """The checkpoint at a place that a job names.

    Args:
        place: of the checkpoint, or of its job's folder: an absolute path or a URL of a bucket.
        files: how it is read.
        namespace: of the job that names it; what a job of another one left is refused. Empty: it
            is not known whose anything is.
    """

    def __init__(self, place: str, files: Files, namespace: str = "") -> None:
        self._place, self._files, self._namespace = path_of(place), files, namespace

    def check(self) -> None:
        """Look for it, before anything is loaded.

        Raises:
            UserError: it is not there, is of another version, or the job may not read it.
            OSError: nobody can tell: the storage does not answer.
        """
        self._refuse_others()
        for folder in self._folders():
            manifest = self._manifest(folder)
            if manifest.get("format") != FORMAT:
                raise _refusal(
                    f"{folder} has format {manifest.get('format')}, this version reads {FORMAT}"
                )
            return
        raise _refusal(f"{self._place} holds no checkpoint")

    def begun(self) -> datetime | None:
        """Return when its job first was; None: nobody has noted it."""
        try:
            noted = self._files.read(f"{self._job_folder()}/{BEGUN}", _SMALL_BYTES)
            return datetime.fromisoformat(noted.decode())
        except (OSError, ValueError, UserError):
            return None

    def read(self) -> Checkpoint:
        """Read and verify it; of a job's folder the newest one that is whole.

        Raises:
            UserError: see `check`, or none is whole.
            OSError: see `check`.
        """
        self.check()
        damaged = []
        for folder in self._folders():
            try:
                found = verify_checkpoint(folder, partial(self._read_of, folder))
            except UNREADABLE as error:
                if answers_later(error):
                    raise
                why = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
                damaged.append(f"{folder}: {redacted(why)}")
                continue
            return replace(found, is_named=True)
        raise _refusal(f"no checkpoint there is whole: {'; '.join(damaged)}")

    def _folders(self) -> list[str]:
        """Return the checkpoints at the place, the newest one first."""
        if MANIFEST in self._names(self._place):
            return [self._place]
        found = self._names(f"{self._place}/checkpoints")
        steps = sorted((name for name in found if name.startswith("step-")), reverse=True)
        return [f"{self._place}/checkpoints/{name}" for name in steps]

    def _job_folder(self) -> str:
        """Return the folder of the job whose checkpoint it is."""
        above, _, name = self._place.rpartition("/")
        return posixpath.dirname(above) if name.startswith("step-") else self._place

    def _manifest(self, folder: str) -> dict[str, Any]:
        try:
            found = json.loads(self._read(f"{folder}/{MANIFEST}", _SMALL_BYTES))
        except (FileNotFoundError, ValueError, RecursionError) as error:
            raise _refusal(f"{folder}/{MANIFEST} cannot be read: {error}") from error
        if not isinstance(found, dict):
            raise _refusal(f"{folder}/{MANIFEST} is not a manifest")
        return found

    def _refuse_others(self) -> None:
        """Refuse what a job of another namespace left, as its destination says."""
        parts = self._place.split("/")
        if not self._namespace or OWN_FOLDER not in parts:
            return
        last = len(parts) - 1 - parts[::-1].index(OWN_FOLDER)
        try:
            held = json.loads(self._read("/".join([*parts[: last + 1], OWNER]), _SMALL_BYTES))
            owner = str(held["namespace"])
        except FileNotFoundError:
            return  # a copy, or of a version that kept no owner
        except (ValueError, KeyError, TypeError, RecursionError):
            owner = ""
        if owner not in ("", self._namespace):
            raise _refusal(f"{self._place} holds the work of a job of another namespace")

    def _read_of(self, folder: str, name: str) -> bytes:
        return self._read(f"{folder}/{name}")

    def _read(self, path: str, most: int | None = None) -> bytes:
        with _reading(path):
            return self._files.read(path, most)

    def _names(self, path: str) -> list[str]:
        with _reading(path):
            return self._files.names(path)


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
