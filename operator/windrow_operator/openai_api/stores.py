"""Keep files in a directory or in a bucket: whole or not at all, through no link.

Paths are relative, of plain names. A caller on the event loop calls by `asyncio.to_thread`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self

from windrow.errors import Transient, UserError
from windrow.outputs import folder_below, is_bucket, open_without_links, path_of
from windrow.wheel import install_extra

_DRAFT: Final = ".draft-"
_PART_BYTES: Final = 8 << 20
_FOLDER: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


class StoreSilent(Transient):
    """The place of the files does not answer, or does not take what it is given."""


class FileWriter(Protocol):
    """One file that is being written; without `commit` nothing of it stays."""

    def write(self, content: bytes) -> None:
        """Add bytes."""

    def commit(self) -> None:
        """Make the file visible, whole."""

    def __enter__(self) -> Self:
        """Begin."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Drop the file unless it was committed."""


class ObjectStore(Protocol):
    """Store of the files."""

    def url(self, path: str) -> str:
        """Return the name by which a job reaches a file or folder."""

    def write(self, path: str) -> FileWriter:
        """Begin a file; the caller enters it as a context."""

    def read(self, path: str, most_bytes: int) -> bytes | None:
        """Return the first bytes of a file; None: there is none."""

    def pieces(self, path: str) -> Iterator[bytes]:
        """Yield a file's bytes.

        Raises:
            FileNotFoundError: there is none.
        """

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted; none of a folder that is not there."""

    def remove(self, path: str) -> None:
        """Remove a file; nothing happens where there is none."""


def open_store(place: str) -> ObjectStore:
    """Return the store at an absolute directory or an s3:// URL.

    Raises:
        UserError: it is neither, or there is no client for it.
    """
    if is_bucket(place):
        return BucketStore(path_of(place))
    if not place.startswith("/"):
        raise UserError(
            f"{place!r} is neither a directory from the root nor an s3:// URL",
            field="--storage",
            remedy="Write /data as the decode pods mount it, or s3://bucket/folder.",
        )
    return DirectoryStore(Path(place))


class DirectoryStore:
    """Files below a directory, which decode pods mount at the same path.

    Args:
        root: the directory; it has to exist.
    """

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise UserError(
                f"{root} is not a directory", field="--storage", remedy="Mount the volume there."
            )
        self._named, self._root = root, root.resolve()

    def url(self, path: str) -> str:
        """Return the file's path."""
        return str(self._named / path)

    def write(self, path: str) -> DirectoryWriter:
        """Begin a file under another name."""
        return DirectoryWriter(self._root, path)

    def read(self, path: str, most_bytes: int) -> bytes | None:
        """Return the first bytes of a file; None: there is none, or a link leads to it."""
        try:
            with os.fdopen(open_without_links(self._root / path, os.O_RDONLY), "rb") as source:
                return source.read(most_bytes)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return None
            raise StoreSilent(f"{path} cannot be read: {error.strerror}") from error

    def pieces(self, path: str) -> Iterator[bytes]:
        """Yield a file's bytes."""
        with os.fdopen(open_without_links(self._root / path, os.O_RDONLY), "rb") as source:
            while piece := source.read(1 << 20):
                yield piece

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder; drafts have none yet."""
        flags = os.O_RDONLY | os.O_DIRECTORY
        try:
            at = open_without_links(self._root / folder, flags)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return []
            raise StoreSilent(f"{folder} cannot be read: {error.strerror}") from error
        try:
            return sorted(name for name in os.listdir(at) if not name.startswith("."))
        finally:
            os.close(at)

    def remove(self, path: str) -> None:
        """Remove a file, and its folder where that is empty then."""
        try:
            with _held(self._root, path, make=False) as (at, name):
                os.unlink(name, dir_fd=at)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise StoreSilent(f"{path} cannot be removed: {error.strerror}") from error
            return
        folder = os.path.dirname(path)
        with contextlib.suppress(OSError), _held(self._root, folder, make=False) as (at, name):
            os.rmdir(name, dir_fd=at)

    def sweep(self, older_than_s: float, now_s: float | None = None) -> int:
        """Remove drafts that a process left when it was killed; return how many."""
        now_s = time.time() if now_s is None else now_s
        count = 0
        for draft in self._root.glob(f"*/openai/*/files/*/{_DRAFT}*"):
            with contextlib.suppress(OSError):
                if now_s - draft.lstat().st_mtime > older_than_s:
                    draft.unlink()
                    count += 1
        return count


@contextlib.contextmanager
def _held(root: Path, path: str, *, make: bool) -> Iterator[tuple[int, str]]:
    """Yield a descriptor of the folder that a path names, and the name in it."""
    folder, name = os.path.split(path)
    at = folder_below(root, folder.split("/") if folder else [], make=make)
    try:
        yield at, name
    finally:
        os.close(at)


class DirectoryWriter:
    """A file that has another name until it is whole.

    Args:
        root: the directory of the store.
        path: of the file, below it.
    """

    def __init__(self, root: Path, path: str) -> None:
        self._root, self._path = root, path
        self._draft = f"{_DRAFT}{uuid.uuid4().hex}"

    def __enter__(self) -> Self:
        """Make the folder and the draft."""
        folder, self._name = os.path.split(self._path)
        try:
            self._at = folder_below(self._root, folder.split("/"), make=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file = os.fdopen(os.open(self._draft, flags, 0o644, dir_fd=self._at), "wb")
        except OSError as error:
            raise StoreSilent(f"{self._path} cannot be written: {error.strerror}") from error
        self._whole = False
        return self

    def write(self, content: bytes) -> None:
        """Add bytes."""
        with _told(self._path):
            self._file.write(content)

    def commit(self) -> None:
        """Give the file its name, once the disk has it."""
        with _told(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
            os.rename(self._draft, self._name, src_dir_fd=self._at, dst_dir_fd=self._at)
        self._whole = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove the draft unless it was committed, and a folder that holds nothing."""
        with contextlib.suppress(OSError):  # of a full disk, which `write` has raised
            self._file.close()
        if not self._whole:
            with contextlib.suppress(OSError):
                os.unlink(self._draft, dir_fd=self._at)
            folder = os.path.dirname(self._path)
            with contextlib.suppress(OSError), _held(self._root, folder, make=False) as (at, name):
                os.rmdir(name, dir_fd=at)
        os.close(self._at)


@contextlib.contextmanager
def _told(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreSilent(f"{path} cannot be written: {error.strerror or error}") from error


class BucketStore:
    """Files below a folder of a bucket; credentials are those of the environment.

    Args:
        url: s3://bucket/folder.
    """

    def __init__(self, url: str) -> None:
        try:
            import s3fs
        except ImportError as error:
            raise UserError(
                f"{url} needs s3fs, which is not installed",
                field="--storage",
                remedy=f"Install it: {install_extra('s3')}.",
            ) from error
        # Stores other than Amazon's refuse bodies in chunks with a checksum behind them.
        plain = dict.fromkeys(
            ("request_checksum_calculation", "response_checksum_validation"), "when_required"
        )
        self._root = url
        self._system: Any = s3fs.S3FileSystem(
            use_listings_cache=False, skip_instance_cache=True, config_kwargs=plain
        )

    def url(self, path: str) -> str:
        """Return the object's URL."""
        return f"{self._root}/{path}"

    def write(self, path: str) -> BucketWriter:
        """Begin an upload in parts."""
        return BucketWriter(self._system, self.url(path))

    def read(self, path: str, most_bytes: int) -> bytes | None:
        """Return the first bytes of an object; None: there is none."""
        found: bytes | None = self._asked(path, lambda: self._first(path, most_bytes), None)
        return found

    def _first(self, path: str, most_bytes: int) -> bytes:
        with self._system.open(self.url(path), "rb") as source:
            return bytes(source.read(most_bytes))

    def pieces(self, path: str) -> Iterator[bytes]:
        """Yield an object's bytes."""
        with self._system.open(self.url(path), "rb", block_size=_PART_BYTES) as source:
            while piece := source.read(1 << 20):
                yield piece

    def names(self, folder: str) -> list[str]:
        """Return the names below a prefix."""
        found: list[str] = self._asked(
            folder, lambda: self._system.ls(self.url(folder), detail=False), []
        )
        return sorted({name.rstrip("/").rpartition("/")[2] for name in found})

    def remove(self, path: str) -> None:
        """Remove an object."""
        self._asked(path, lambda: self._system.rm_file(self.url(path)), None)

    def _asked(self, path: str, ask: Callable[[], Any], nothing: Any) -> Any:  # noqa: ANN401
        try:
            return ask()
        except FileNotFoundError:
            return nothing
        except Exception as error:
            if not _is_of_client(error):
                raise
            raise StoreSilent(f"{self.url(path)}: {error}") from error


class BucketWriter:
    """An object that is uploaded in parts; without `commit` the upload is aborted.

    Args:
        system: s3fs'.
        url: of the object.
    """

    def __init__(self, system: Any, url: str) -> None:  # noqa: ANN401 - s3fs has no types
        self._system, self._url = system, url

    def __enter__(self) -> Self:
        """Begin."""
        with self._told():
            self._file = self._system.open(
                self._url, "wb", block_size=_PART_BYTES, autocommit=False
            )
        self._whole = False
        return self

    def write(self, content: bytes) -> None:
        """Add bytes; a part is sent when it is full."""
        with self._told():
            self._file.write(content)

    def commit(self) -> None:
        """Send the last part and put the parts together."""
        with self._told():
            self._file.flush(force=True)
            self._file.commit()
        self._whole = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Abort the upload unless it was committed."""
        if not self._whole:
            with contextlib.suppress(StoreSilent), self._told():
                self._file.discard()
        self._file.closed = True  # else its destructor would send what is left

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not _is_of_client(error):
                raise
            raise StoreSilent(f"{self._url} cannot be written: {error}") from error


def _is_of_client(error: BaseException) -> bool:
    """Return whether a client of object storage raised it."""
    clients = ("botocore", "aiobotocore", "aiohttp")
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in clients
