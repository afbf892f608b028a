"""Bound what a template or tokenizer computes for one row, also within one call of C code.

Python code is ended by an exception (`cpu_limit`), and the row is an error as any other. One call
of C code (a power of large numbers, a search) can be ended with its process alone. The process that
reads rows for a worker is there for nothing else: the kernel ends it a second later, and the worker
reads from a page that both share which row it was.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from windrow.errors import UserError
from windrow.rows import DatasetRow, bad_row
from windrow_sidecar.finetune.data.cpu_limit import ComputesTooLong, cpu_limit

ENDED_BY: Final = signal.SIGPROF
# Longer than an exception takes to come to Python code.
_GRACE_S: Final = 1.0
_PAGE_BYTES: Final = mmap.PAGESIZE
_LENGTH_BYTES: Final = 4
_REMEDY: Final = "Use a model whose template and tokenizer are done with such a row in a moment."


class ProcessLimit:
    """Ends this process where a row computes for too long, and leaves on a page which one it was.

    Args:
        page: descriptor of a file that another process reads (`make_page`).
    """

    def __init__(self, page: int) -> None:
        self._page = mmap.mmap(page, _PAGE_BYTES)

    def begin(self, words: str, seconds: float) -> None:
        """Count what this process computes from now on.

        Args:
            words: for `row_of_page`, if it does not end.
            seconds: of all its threads.
        """
        content = words.encode()[: _PAGE_BYTES - _LENGTH_BYTES]
        end = _LENGTH_BYTES + len(content)
        self._page[_LENGTH_BYTES:end] = content
        self._page[:_LENGTH_BYTES] = len(content).to_bytes(_LENGTH_BYTES, "little")
        signal.setitimer(signal.ITIMER_PROF, seconds)

    def end(self) -> None:
        """Count no further."""
        signal.setitimer(signal.ITIMER_PROF, 0)
        self._page[:_LENGTH_BYTES] = bytes(_LENGTH_BYTES)


_process: ProcessLimit | None = None


def make_page() -> int:
    """Return a descriptor of a page for a `ProcessLimit`; the caller closes it."""
    page = os.memfd_create("windrow-row", os.MFD_CLOEXEC)
    os.ftruncate(page, _PAGE_BYTES)
    return page


def end_process_at_limit(page: int) -> None:
    """Let rows that take too long end this process from now on."""
    global _process
    _process = ProcessLimit(page)


def row_of_page(page: int) -> UserError | None:
    """Return the error for the row at which a process has ended; None: it was at none."""
    length = int.from_bytes(os.pread(page, _LENGTH_BYTES, 0), "little")
    if not length:
        return None
    try:
        where, problem = json.loads(os.pread(page, length, _LENGTH_BYTES))
    except ValueError:  # a path of kilobytes, of which not all was on the page
        where, problem = "spec.dataset.source", "a row computes for too long"
    return bad_row(where, problem, _REMEDY)


@contextmanager
def bounded(row: DatasetRow, what: str, seconds: float) -> Iterator[None]:
    """Hold while something is computed of a row: what takes too long is ended.

    Args:
        row: of which it is.
        what: computes.
        seconds: of computing.

    Raises:
        UserError: it took longer.
    """
    problem = f"{what} computes for more than {seconds:g} s"
    if _process is not None:
        _process.begin(json.dumps([row.where, problem]), seconds + _GRACE_S)
    try:
        with cpu_limit(seconds):
            yield
    except ComputesTooLong:
        raise bad_row(row.where, problem, _REMEDY) from None
    finally:
        if _process is not None:
            _process.end()
