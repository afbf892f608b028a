"""Where tokenized rows lie: in a file without a name, mapped, so that large sets need no memory.

A row takes 8 bytes a token on disk and 20 bytes in memory, whatever its length.
"""

from __future__ import annotations

import hashlib
import mmap
import tempfile
import weakref
from array import array
from collections.abc import Sequence
from typing import overload

from windrow_sidecar.finetune.training.data import Example

_BYTES = array("i").itemsize


class TokenFile:
    """Takes rows one by one; afterwards any of them can be read, in any order.

    The file lies in the directory for temporary files and is gone with the process.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the rows
        weakref.finalize(self, self._file.close)
        self._begins = array("q", [0])
        self._mapped: mmap.mmap | None = None
        self.lengths = array("i")  # tokens of each row
        self._sha256 = hashlib.sha256()

    def add(self, example: Example) -> None:
        """Write a row."""
        place = example.where.encode()
        tokens = array("i", (*example.ids, *example.labels)).tobytes()
        self._sha256.update(len(tokens).to_bytes(8))
        self._sha256.update(tokens)
        self._file.write(tokens)
        self._file.write(place)
        self.lengths.append(example.length)
        self._begins.append(self._begins[-1] + 2 * _BYTES * example.length + len(place))

    @property
    def digest(self) -> str:
        """Of the tokens and labels of all rows in their order, wherever they came from."""
        return self._sha256.hexdigest()

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
