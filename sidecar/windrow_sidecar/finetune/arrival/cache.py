"""Keep copies of adapters in a folder that servers load from, each under its digest.

A copy is made in a draft and renamed when it is whole and has the digest that was asked for, so a
server sees all of it or nothing. Copies that nobody uses go when another one needs their room, the
one that was asked for longest ago first.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import time
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, Protocol

from windrow.adapter_files import (
    CONFIG_FILE,
    SERVED_FILES,
    WEIGHTS_FILE,
    digest_of,
    is_digest,
    sum_of,
)
from windrow.conditions import Reason
from windrow.errors import UserError
from windrow.outputs import HELD_DIRECTORIES

_MOST_CONFIG_BYTES: Final = 2**20
_MOST_HEADER_BYTES: Final = 8 * 2**20  # of thousands of tensors; it is parsed as a whole
_PIECE_BYTES: Final = 2**20
_DRAFT: Final = ".draft-"
# Longer than any copy takes: such a draft is of a process that was killed.
_STALE_AFTER_S: Final = 3600.0


class AdapterFiles(Protocol):
    """A folder with an adapter (see `sources.AdapterSource`)."""

    place: str

    def open(self, name: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        """Yield one of its files, open for reading."""


class AdapterCache:
    """Copies of adapters of one namespace.

    Args:
        folder: an existing directory that holds nothing else.
        most_bytes: of all copies together.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder, self._most_bytes = folder, most_bytes

    def has(self, digest: str) -> bool:
        """Return whether a whole copy is there; one that was damaged is removed."""
        copy = self._folder / digest
        try:
            with _opened(copy) as held:
                if self._digest_of(held) == digest:
                    os.utime(held)  # it is used
                    return True
        except FileNotFoundError:
            if not copy.is_symlink():
                return False
        except OSError:
            pass
        self._remove(copy)
        return False

    def _digest_of(self, copy: Path) -> str:
        """Return the digest of a copy; "": its files cannot be those of one.

        Raises:
            OSError: one is missing, or is a link.
        """
        sums = {}
        for name in SERVED_FILES:
            # Who writes to the volume may have put a pipe there, or a file of terabytes.
            found = os.open(copy / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(found, "rb") as file:
                about = os.fstat(found)
                if not stat.S_ISREG(about.st_mode) or about.st_size > self._most_bytes:
                    return ""
                sums[name] = sum_of(file)
        return digest_of(sums)

    def forget(self, digest: str) -> None:
        """Remove a copy, if it is there: SGLang would load it again by a name that it has kept."""
        if is_digest(digest):
            self._remove(self._folder / digest)

    def store(self, source: AdapterFiles, digest: str, keep: Collection[str]) -> None:
        """Copy an adapter, unless it is there.

        Args:
            source: its folder.
            digest: that its files have to have.
            keep: digests of copies that stay.

        Raises:
            UserError: it is not the adapter that was asked for, or too large for the cache.
            OSError: it cannot be read or written; nothing of it is left.
        """
        if not is_digest(digest):
            raise _refusal(f"{digest!r} is not a digest of an adapter", "Deploy a newer job.")
        self._remove_stale()
        if self.has(digest):
            return
        with self._draft() as (name_of_draft, draft):
            room = self._most_bytes - self._bytes_of(set(keep) - {digest})
            sums, taken = {}, 0
            for name in SERVED_FILES:
                most = min(room - taken, _MOST_CONFIG_BYTES if name == CONFIG_FILE else room)
                sums[name], size = _copy(source, name, draft / name, most)
                taken += size
            if (found := digest_of(sums)) != digest:
                raise _refusal(
                    f"the files in {source.place} are not those that the job wrote: their digest "
                    f"is {found}, not {digest}",
                    "Put the job's own files back, or run the job again.",
                )
            _check_config(draft / CONFIG_FILE, source.place)
            _check_weights(draft / WEIGHTS_FILE, source.place)
            self._make_room(taken, {*keep, digest})
            draft.chmod(0o755)
            copy = self._folder / digest
            try:
                name_of_draft.rename(copy)
            except OSError as error:
                # Another pod on the volume may have been first; its copy has the same digest.
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                return
            if not os.path.samestat(os.lstat(copy), draft.stat()):
                self._remove(copy)
                raise _refusal(
                    "what was copied was exchanged meanwhile", "Look who writes to the volume."
                )

    @contextmanager
    def _draft(self) -> Iterator[tuple[Path, Path]]:
        """Yield a draft's name, and a path that stays the same folder whatever has its name."""
        draft = self._folder / f"{_DRAFT}{uuid.uuid4().hex}"
        draft.mkdir()
        try:
            with _opened(draft) as held:
                yield draft, held
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def _copies(self) -> list[Path]:
        """Return all copies, the one that was used longest ago first."""
        copies = [path for path in self._folder.iterdir() if is_digest(path.name)]
        return sorted(copies, key=lambda path: path.stat().st_mtime)

    def _bytes_of(self, digests: Collection[str]) -> int:
        return sum(_size(path) for path in self._copies() if path.name in digests)

    def _make_room(self, n_bytes: int, keep: Collection[str]) -> None:
        copies = self._copies()
        used = sum(map(_size, copies))
        for copy in copies:
            if used + n_bytes <= self._most_bytes:
                return
            if copy.name not in keep:
                used -= _size(copy)
                self._remove(copy)

    def _remove(self, copy: Path) -> None:
        """Remove a copy: under its name at once, so that no server finds a half."""
        gone = self._folder / f"{_DRAFT}{uuid.uuid4().hex}"
        with contextlib.suppress(FileNotFoundError):
            copy.rename(gone)
            if gone.is_symlink() or not gone.is_dir():
                gone.unlink()
            shutil.rmtree(gone, ignore_errors=True)

    def _remove_stale(self) -> None:
        for path in self._folder.glob(f"{_DRAFT}*"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _STALE_AFTER_S:
                    shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _opened(folder: Path) -> Iterator[Path]:
    """Yield a path that stays the same folder whatever has its name meanwhile.

    Raises:
        OSError: it is not a folder, or a link.
    """
    found = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield Path(HELD_DIRECTORIES, str(found))
    finally:
        os.close(found)


def _size(copy: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return sum(file.stat().st_size for file in copy.iterdir())
    return 0


def _copy(source: AdapterFiles, name: str, target: Path, most_bytes: int) -> tuple[str, int]:
    """Copy a file of at most so many bytes; return its SHA-256 and size."""
    import hashlib

    found, size = hashlib.sha256(), 0
    made = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with source.open(name) as file, os.fdopen(os.open(target, made, 0o644), "wb") as written:
        while piece := file.read(_PIECE_BYTES):
            size += len(piece)
            if size > most_bytes:
                raise _refusal(
                    f"{name} in {source.place} has more than the {max(0, most_bytes)} bytes that "
                    "the cache has for it beside the versions in use",
                    "Who keeps the HarvestPolicy raises spec.sidecar.adapterCache.size, or delete "
                    "jobs whose adapters are not used.",
                )
            found.update(piece)
            written.write(piece)
        written.flush()
        os.fsync(written.fileno())
        os.fchmod(written.fileno(), 0o644)
    return found.hexdigest(), size


def _check_config(path: Path, place: str) -> None:
    """Refuse a configuration that is none of a LoRA adapter."""
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise _refusal(f"{CONFIG_FILE} in {place} is not of a LoRA adapter", "Run the job again.")


def _check_weights(path: Path, place: str) -> None:
    """Refuse a file whose header is not that of safetensors, or whose tensors are not all there."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length <= min(size - 8, _MOST_HEADER_BYTES) else b""
    try:
        tensors = json.loads(header)
        ends = [tensor["data_offsets"][1] for key, tensor in tensors.items() if key[:2] != "__"]
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError, IndexError):
        ends = []
    if not ends or max(ends) != size - 8 - length:
        raise _refusal(f"{WEIGHTS_FILE} in {place} is not a safetensors file", "Run the job again.")


def _refusal(problem: str, remedy: str) -> UserError:
    return UserError(problem, field="spec.output", remedy=remedy, reason=Reason.NOT_LOADED)
