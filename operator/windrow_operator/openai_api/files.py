"""Files of keys: uploads, listings and deletions, each within the folder of one key.

A file is two objects in a folder of its own: `rows.jsonl`, then `file.json`. It is there once the
second is, so an upload that breaks off leaves nothing that a listing shows, and no draft.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

from windrow.errors import UserError
from windrow_operator.openai_api.keyring import ApiKey
from windrow_operator.openai_api.refusals import CallRefused, invalid, missing, wrong_rows
from windrow_operator.openai_api.rows_check import RowsCheck
from windrow_operator.openai_api.stores import ObjectStore

_ROWS, _ABOUT = "rows.jsonl", "file.json"
_ID: Final = re.compile(r"file-[0-9a-f]{24}")
_MOST_ABOUT_BYTES: Final = 64 << 10
_READS_AT_ONCE: Final = 16
_MOST_KNOWN: Final = 10_000
PURPOSE: Final = "fine-tune"


@dataclass(frozen=True, slots=True)
class StorageLimits:
    """Limits of one key.

    Attributes:
        file_bytes: of one file.
        key_bytes: of all files of a key.
        files: how many a key has.
    """

    file_bytes: int = 512 << 20
    key_bytes: int = 8 << 30
    files: int = 1000


@dataclass(frozen=True, slots=True)
class UploadedFile:
    """One file that is there.

    Attributes:
        id: `file-` and 24 digits.
        filename: as it was uploaded.
        bytes: its size.
        created_at: Unix seconds.
        rows: how many it has.
        form: their format.
    """

    id: str
    filename: str
    bytes: int
    created_at: int
    rows: int
    form: str

    @property
    def body(self) -> dict[str, Any]:
        """The answer of the API."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "filename": self.filename,
            "purpose": PURPOSE,
            "status": "processed",
            "status_details": None,
        }


class KeyFiles:
    """The files of all keys.

    Args:
        store: where they are.
        limits: what a key may keep.
        now_s: returns Unix seconds.
    """

    def __init__(
        self, store: ObjectStore, limits: StorageLimits, now_s: Callable[[], float]
    ) -> None:
        self.store, self._limits, self._now_s = store, limits, now_s
        self._known: dict[str, UploadedFile] = {}  # by path; what is written does not change
        self._reads = asyncio.Semaphore(_READS_AT_ONCE)
        self._under_way: dict[str, int] = {}  # uploads by the folder of their key

    async def begin(self, key: ApiKey, announced_bytes: int) -> None:
        """Refuse an upload for which the key has no room.

        Args:
            key: whose.
            announced_bytes: of the request.
        """
        there = await self.list(key)
        if len(there) + self._under_way.get(key.folder, 0) >= self._limits.files:
            raise CallRefused(
                400,
                f"There are {len(there)} files, which is the most of one key. Delete some.",
                param="file",
                code="too_many_files",
            )
        held = sum(each.bytes for each in there)
        if held + announced_bytes > self._limits.key_bytes:
            raise CallRefused(
                400,
                f"The files of this key hold {held} bytes, and may hold {self._limits.key_bytes}. "
                "Delete some.",
                param="file",
                code="storage_limit_exceeded",
            )

    async def upload(
        self, key: ApiKey, filename: str, pieces: AsyncIterator[bytes]
    ) -> PendingUpload:
        """Take a file's bytes, checked row by row; the caller commits or drops it.

        Raises:
            CallRefused: a row is wrong, or the file is too large; nothing of it stays.
        """
        folder = key.folder
        upload = PendingUpload(self, f"{folder}/files/file-{secrets.token_hex(12)}", filename)
        self._under_way[folder] = self._under_way.get(folder, 0) + 1
        try:
            await upload.take(pieces, self._limits.file_bytes)
        except BaseException:
            await asyncio.shield(upload.drop())
            raise
        finally:
            self._under_way[folder] -= 1
            if not self._under_way[folder]:
                del self._under_way[folder]
        return upload

    def now(self) -> int:
        """Return Unix seconds."""
        return int(self._now_s())

    async def get(self, key: ApiKey, name: str, param: str = "id") -> UploadedFile:
        """Return a file of a key; a file of another key is not there."""
        found = await self._about(f"{key.folder}/files/{name}") if _ID.fullmatch(name) else None
        if found is None:
            raise missing("file", name, param)
        return found

    async def _about(self, folder: str) -> UploadedFile | None:
        path = f"{folder}/{_ABOUT}"
        async with self._reads:
            found = await asyncio.to_thread(self.store.read, path, _MOST_ABOUT_BYTES)
        if found is None:
            self._known.pop(path, None)
            return None
        about = _about_of(found)
        if about is None:
            return None
        self._known[path] = about
        while len(self._known) > _MOST_KNOWN:
            self._known.pop(next(iter(self._known)))
        return about

    async def list(self, key: ApiKey) -> list[UploadedFile]:
        """Return the files of a key, newest first."""
        names = await asyncio.to_thread(self.store.names, f"{key.folder}/files")
        folders = [f"{key.folder}/files/{name}" for name in names if _ID.fullmatch(name)]
        found = await asyncio.gather(*map(self._listed, folders))
        there = [each for each in found if each is not None]
        return sorted(there, key=lambda each: (each.created_at, each.id), reverse=True)

    async def _listed(self, folder: str) -> UploadedFile | None:
        known = self._known.get(f"{folder}/{_ABOUT}")
        return known if known is not None else await self._about(folder)

    def rows_path(self, key: ApiKey, name: str) -> str:
        """Return the path of a file's rows in the store."""
        return f"{key.folder}/files/{name}/{_ROWS}"

    async def delete(self, key: ApiKey, name: str) -> None:
        """Remove a file; it is gone with the first of its two objects."""
        folder = f"{key.folder}/files/{name}"
        self._known.pop(f"{folder}/{_ABOUT}", None)
        for part in (_ABOUT, _ROWS):
            await asyncio.to_thread(self.store.remove, f"{folder}/{part}")


def _about_of(content: bytes) -> UploadedFile | None:
    """Return what is noted about a file; None: a tenant's own pods can write there, and have."""
    try:
        about = UploadedFile(**json.loads(content))
    except (ValueError, TypeError, RecursionError):
        return None
    texts, numbers = (
        (about.id, about.filename, about.form),
        (about.bytes, about.created_at, about.rows),
    )
    right = all(type(text) is str for text in texts) and all(type(n) is int for n in numbers)
    return about if right and min(numbers) >= 0 and _ID.fullmatch(about.id) else None


class PendingUpload:
    """A file whose rows are stored, and that nobody sees yet.

    Args:
        files: where it will be.
        folder: of it, in the store.
        filename: as it was uploaded.
    """

    def __init__(self, files: KeyFiles, folder: str, filename: str) -> None:
        self._files, self._folder, self._filename = files, folder, filename
        self._rows, self._bytes = RowsCheck(filename), 0

    async def take(self, pieces: AsyncIterator[bytes], most_bytes: int) -> None:
        """Store the rows.

        Args:
            pieces: of the file, in their order.
            most_bytes: of the file.
        """
        with_rows = self._files.store.write(f"{self._folder}/{_ROWS}")
        writer = await asyncio.to_thread(with_rows.__enter__)
        try:
            async for piece in pieces:
                self._bytes += len(piece)
                if self._bytes > most_bytes:
                    raise CallRefused(
                        413,
                        f"file: is larger than {most_bytes >> 20} MiB. Upload it in parts, or ask "
                        "the administrator of this server to allow more.",
                        param="file",
                        code="file_too_large",
                    )
                await asyncio.to_thread(self._rows.feed, piece)
                await asyncio.to_thread(writer.write, piece)
            await asyncio.to_thread(self._rows.finish)
            await asyncio.to_thread(writer.commit)
        except UserError as error:
            raise wrong_rows(error, "file") from error
        finally:
            await asyncio.shield(asyncio.to_thread(with_rows.__exit__, None, None, None))

    async def commit(self) -> UploadedFile:
        """Make the file visible."""
        about = UploadedFile(
            id=self._folder.rpartition("/")[2],
            filename=self._filename,
            bytes=self._bytes,
            created_at=self._files.now(),
            rows=self._rows.rows,
            form=self._rows.form,
        )
        try:
            await asyncio.to_thread(self._write_about, json.dumps(asdict(about)).encode())
        except BaseException:
            await asyncio.shield(self.drop())
            raise
        return about

    def _write_about(self, content: bytes) -> None:
        with self._files.store.write(f"{self._folder}/{_ABOUT}") as writer:
            writer.write(content)
            writer.commit()

    async def drop(self) -> None:
        """Remove what is stored of it."""
        await asyncio.to_thread(self._files.store.remove, f"{self._folder}/{_ROWS}")


def checked_filename(name: str | None) -> str:
    """Return a file's name as it may be in messages; refuses what is not JSON lines by name."""
    plain = (name or "").replace("\\", "/").rpartition("/")[2]
    if not plain or len(plain) > 255 or not plain.isprintable():
        raise invalid("file", f"{plain[:64]!r} is not a file name", "Name it like rows.jsonl.")
    if not plain.lower().endswith((".jsonl", ".ndjson")):
        raise invalid(
            "file",
            f"{plain!r} is not named as JSON lines",
            "Write a JSON object a line, and name the file like rows.jsonl.",
            code="invalid_file_format",
        )
    return plain
