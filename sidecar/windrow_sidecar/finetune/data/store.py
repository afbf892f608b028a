"""Storage of tokenized rows: a mapped file without a name, so that large sets need no memory.

A row takes 8 bytes a token and its place on disk, and 24 bytes in memory, whatever its length.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import tempfile
import weakref
from array import array
from collections.abc import Sequence
from typing import IO, overload

from windrow.conditions import Reason
from windrow.errors import UserError
from windrow_sidecar.finetune.data.split import Example

_BYTES = array("i").itemsize
# A kubelet evicts pods, decode's too, once less than 10 or 15% of a disk of the node is free. Rows
# that never end would fill it.
_LEFT_FREE = 0.2
_ALWAYS_BYTES = 1 << 30
_LOOK_EVERY_BYTES = 64 << 20


class TokenFile:
    """Takes rows one by one; afterwards any of them can be read, in any order.

    The file is in the directory for temporary files and is gone with the process.

    Args:
        file: empty, open for writing and reading (default: one that nobody else sees). Another
            process may have written it: pickled, all but the file goes over (see `lies_in`).
    """

    def __init__(self, file: IO[bytes] | None = None) -> None:
        self._begins = array("q", [0])
        self.lengths = array("i")  # tokens of each row
        self._sha256 = hashlib.sha256()
        self._digest = ""
        self.lies_in(file or tempfile.TemporaryFile())  # noqa: SIM115 - lives as long as the rows

    def lies_in(self, file: IO[bytes]) -> None:
        """Take the file that the rows are in; it is closed with the rows."""
        self._file = file
        self._mapped: mmap.mmap | None = None
        weakref.finalize(self, file.close)

    def flush(self) -> None:
        """Have other processes see all rows."""
        self._file.flush()

    def __getstate__(self) -> dict[str, object]:
        """All but the file; no row can be added on the other side."""
        return {"_begins": self._begins, "lengths": self.lengths, "_digest": self.digest}

    def add(self, example: Example) -> None:
        """Write a row.

        Raises:
            UserError: the rows so far leave too little of the disk.
        """
        place = example.where.encode()
        tokens = array("i", (*example.ids, *example.labels)).tobytes()
        self._sha256.update(len(tokens).to_bytes(8))
        self._sha256.update(tokens)
        self._file.write(tokens)
        self._file.write(place)
        self.lengths.append(example.length)
        before, size = self._begins[-1], 2 * _BYTES * example.length + len(place)
        self._begins.append(before + size)
        if before // _LOOK_EVERY_BYTES != (before + size) // _LOOK_EVERY_BYTES:
            self._check_disk(before + size)

    def _check_disk(self, held_bytes: int) -> None:
        self._file.flush()
        disk = os.fstatvfs(self._file.fileno())
        if held_bytes < _ALWAYS_BYTES or disk.f_bavail >= _LEFT_FREE * disk.f_blocks:
            return
        raise UserError(
            f"the tokens of {len(self)} rows take {held_bytes >> 20} MiB, which leaves less than "
            f"{_LEFT_FREE:.0%} of the disk of {tempfile.gettempdir()} free",
            field="spec.dataset.source",
            remedy="Train on fewer rows, or give the sidecar a volume at its directory for "
            "temporary files.",
            reason=Reason.DATASET_UNREADABLE,
        )

    @property
    def digest(self) -> str:
        """Digest of the tokens and labels of all rows in their order, from whatever source."""
        return self._digest or self._sha256.hexdigest()

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, row: int) -> Example:
        """Return a row."""
        if self._mapped is None:
            self._file.flush()
            self._mapped = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        begin, end = self._begins[row], self._begins[row + 1]
        size = self.lengths[row] * _BYTES
        ids, labels = array("i"), array("i")
        ids.frombytes(self._mapped[begin : begin + size])
        labels.frombytes(self._mapped[begin + size : begin + 2 * size])
        where = self._mapped[begin + 2 * size : end].decode()
        return Example(tuple(ids), tuple(labels), where)


class StoredRows(Sequence[Example]):
    """Some rows of a file, by number."""

    def __init__(self, file: TokenFile, rows: Sequence[int]) -> None:
        self._file, self._rows = file, array("q", rows)
        self.lengths: Sequence[int] = array("i", (file.lengths[row] for row in rows))

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, at: int) -> Example: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Example]: ...
    def __getitem__(self, at: int | slice) -> Example | Sequence[Example]:
        """Read a row, or pick some without reading them."""
        if isinstance(at, slice):
            return StoredRows(self._file, self._rows[at])
        return self._file.read(self._rows[at])
