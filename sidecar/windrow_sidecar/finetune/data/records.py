"""Objects in a dataset's file, one by one, each with its place."""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedIOBase, BufferedReader, BytesIO
from typing import Any, BinaryIO, cast

from windrow.conditions import Reason
from windrow.errors import UserError
from windrow.rows import MOST_ROW_BYTES, DatasetRecord, WrittenTwice, once_each
from windrow_sidecar.finetune.data.places import DataFile, reaching

# The whole of a .json file is in memory, several times its size once it is parsed.
MOST_JSON_BYTES = 1 << 30
# Rows of a Parquet file that are in memory at once.
_BATCH_ROWS = 1024
# How plain OSErrors of bz2 and pyarrow begin that tell of a damaged file.
_DAMAGE = (
    "Invalid data stream",
    "Truncated compressed stream",
    "ZSTD decompress",
    "Corrupt",
    "Couldn't deserialize",
)

# fsspec's names of them.
_CODECS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz"}


def read_records(file: DataFile) -> Iterator[DatasetRecord]:
    """Yield the records of a file as they are read; the whole is in memory for .json only.

    Raises:
        UserError: the file is not what its suffix says, is damaged, or cannot be read.
        DatasetSilent: the place does not answer.
    """
    with reaching(file.name), _unpacking(file.name), _opened(file) as source:
        yield from _READERS[file.suffix](source, file.name)


@contextmanager
def _opened(file: DataFile) -> Iterator[BinaryIO]:
    """Yield the content of a file, unpacked; fsspec knows no zstd, pyarrow does."""
    if file.packed != ".zst":
        from fsspec.core import compr

        with file.system.open(file.path, "rb") as packed:
            if not file.packed:
                yield packed
                return
            # fsspec's own `compression=` leaves the packed file open.
            with compr[_CODECS[file.packed]](packed, mode="r") as source:
                yield source
        return
    import pyarrow

    with (
        file.system.open(file.path, "rb") as packed,
        pyarrow.CompressedInputStream(packed, "zstd") as unpacked,
    ):
        yield cast("BinaryIO", BufferedReader(unpacked))


@contextmanager
def _unpacking(name: str) -> Iterator[None]:
    """Hold while a file is read; what unpackers raise of a damaged one is the file's fault."""
    try:
        yield
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        damaged = not isinstance(error, OSError) or isinstance(error, gzip.BadGzipFile)
        if not damaged and not str(error).startswith(_DAMAGE):
            raise  # of a disk or a network
        raise UserError(
            f"{name} is damaged or cut off ({error})",
            field="spec.dataset.source",
            remedy="Write it again; its suffix has to say how it is packed.",
            reason=Reason.DATASET_UNREADABLE,
        ) from error


def _lines(source: BinaryIO, name: str) -> Iterator[DatasetRecord]:
    # A packed file of a few kilobytes can hold a line of gigabytes.
    if isinstance(source, BufferedIOBase):
        yield from _sized_lines(source, name)
        return
    sized = BufferedReader(cast("Any", source))
    try:
        yield from _sized_lines(sized, name)
    finally:
        sized.detach()  # who opened the file closes it


def _sized_lines(source: BufferedIOBase, name: str) -> Iterator[DatasetRecord]:
    lines, blank_bytes = iter(lambda: source.readline(MOST_ROW_BYTES + 1), b""), 0
    for number, line in enumerate(lines, start=1):
        if len(line) > MOST_ROW_BYTES:
            raise UserError(
                f"a row is longer than {MOST_ROW_BYTES >> 20} MiB",
                field=f"{name}:{number}",
                remedy="Cut the row: no model takes so many tokens.",
                reason=Reason.DATASET_INVALID,
            )
        if line.strip():
            blank_bytes = 0
            yield DatasetRecord(f"{name}:{number}", line)
            continue
        # A packed file of a megabyte can hold blank lines for hours.
        blank_bytes += len(line)
        if blank_bytes > MOST_ROW_BYTES:
            raise UserError(
                f"blank lines take more than {MOST_ROW_BYTES >> 20} MiB",
                field=f"{name}:{number}",
                remedy="Leave them out.",
                reason=Reason.DATASET_INVALID,
            )


def _array(source: BinaryIO, name: str) -> Iterator[DatasetRecord]:
    content = source.read(MOST_JSON_BYTES + 1)
    if len(content) > MOST_JSON_BYTES:
        raise _bad_file(
            name, f"is larger than {MOST_JSON_BYTES >> 30} GiB: write a row a line (.jsonl)"
        )
    try:
        found = json.loads(content, object_pairs_hook=once_each)
    except UnicodeDecodeError as error:
        raise _bad_file(name, "is not UTF-8") from error
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and error.lineno > 1:  # a row a line, as datasets reads it too
            yield from _sized_lines(BytesIO(content), name)
            return
        raise _bad_file(name, f"is not JSON ({error.msg}, line {error.lineno})") from error
    except WrittenTwice as error:
        raise _bad_file(name, f"writes {error} twice in one object") from error
    except (ValueError, RecursionError) as error:
        raise _bad_file(name, f"is beyond what is read of JSON ({error})") from error
    if isinstance(found, dict) and isinstance(found.get("data"), list):
        lists = [key for key, value in found.items() if isinstance(value, list)]
        if lists != ["data"]:
            raise _bad_file(name, f"holds several lists: {', '.join(lists)}")
        found = found["data"]
    if not isinstance(found, list):
        raise _bad_file(name, "is not a list of rows")
    for number, element in enumerate(found):
        yield DatasetRecord(f"{name}[{number}]", element)


def _parquet(source: BinaryIO, name: str) -> Iterator[DatasetRecord]:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        table = parquet.ParquetFile(source)
        columns = table.schema_arrow.names
        if twice := [column for column in columns if columns.count(column) > 1]:
            raise _bad_file(name, f"has two columns {twice[0]!r}")
        for batch in table.iter_batches(_BATCH_ROWS):
            for element in _python_of(_as_json(batch)):
                yield DatasetRecord(f"{name}[{number}]", element, of_table=True)
                number += 1
    except MemoryError:  # pyarrow's is one of its own as well
        raise
    except pyarrow.ArrowException as error:
        raise _bad_file(name, f"is not a Parquet file ({error})") from error


def _python_of(batch: Any) -> list[Any]:  # noqa: ANN401 - pyarrow's
    """Return the rows of a batch; one that Python cannot hold is its error, the others are rows."""
    try:
        return list(batch.to_pylist(maps_as_pydicts="strict"))
    except (ValueError, KeyError, OverflowError) as error:
        if batch.num_rows == 1:
            return [error]
    return [row for n in range(batch.num_rows) for row in _python_of(batch.slice(n, 1))]


def _as_json(batch: Any) -> Any:  # noqa: ANN401 - pyarrow's
    """Return a batch with what JSON can say: no format reads a time, and Python holds not all.

    A column of times becomes True where there is one. Text that a writer has stored as bytes is
    text; what cannot be converted stays as it is.
    """
    import pyarrow

    for n, column in enumerate(batch.schema):
        wanted = _json_type(column.type)
        if pyarrow.types.is_temporal(column.type):
            there = [value or None for value in batch.column(n).is_valid().to_pylist()]
            batch = batch.set_column(n, column.name, pyarrow.array(there, pyarrow.bool_()))
        elif wanted != column.type:
            with suppress(pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError):
                batch = batch.set_column(n, column.name, batch.column(n).cast(wanted))
    return batch


def _json_type(kind: Any) -> Any:  # noqa: ANN401 - pyarrow's
    """Return the type whose values are those of a type as JSON has them: a time is text."""
    import pyarrow
    from pyarrow import types

    if types.is_dictionary(kind):
        return _json_type(kind.value_type)
    if types.is_struct(kind):
        return pyarrow.struct([field.with_type(_json_type(field.type)) for field in kind])
    if types.is_list(kind) or types.is_large_list(kind):
        return pyarrow.list_(kind.value_field.with_type(_json_type(kind.value_type)))
    if types.is_temporal(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        return pyarrow.large_string()
    if types.is_binary_view(kind):
        return pyarrow.string_view()
    return pyarrow.float64() if types.is_decimal(kind) else kind


def _bad_file(name: str, problem: str) -> UserError:
    return UserError(
        f"{name} {problem}",
        field="spec.dataset.source",
        remedy="Write JSON lines (.jsonl), a JSON list of objects (.json) or Parquet (.parquet).",
        reason=Reason.DATASET_UNREADABLE,
    )


_READERS: dict[str, Callable[[BinaryIO, str], Iterator[DatasetRecord]]] = {
    ".jsonl": _lines,
    ".ndjson": _lines,
    ".json": _array,
    ".parquet": _parquet,
}
