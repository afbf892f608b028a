"""Bound the memory that reading rows takes: a kilobyte of Parquet or gzip can hold gigabytes.

Decode's memory is the same machine's, and a sidecar that is attached has no limit of its own.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from windrow.conditions import Reason
from windrow.errors import UserError

log = logging.getLogger(__name__)

# Most of it is for a .json file of the largest size, which is in memory as a whole.
MOST_BYTES: Final = 4 << 30


@contextmanager
def bounded_memory(most_bytes: int = MOST_BYTES) -> Iterator[None]:
    """Let this process take so much memory more, and no further, while rows are read.

    Raises:
        UserError: they took more.
    """
    limit = resource.RLIMIT_DATA
    soft, hard = resource.getrlimit(limit)
    if (held_bytes := _held_bytes()) is None:
        log.warning("the system does not say how much memory is held: reading is not bounded")
        yield
        return
    most = held_bytes + most_bytes
    if soft != resource.RLIM_INFINITY:
        most = min(most, soft)
    resource.setrlimit(limit, (most, hard))
    try:
        yield
    except MemoryError as error:
        raise UserError(
            f"reading the rows takes more than {most_bytes >> 20} MiB of memory",
            field="spec.dataset.source",
            remedy="Write a row a line (.jsonl), or Parquet with smaller rows.",
            reason=Reason.DATASET_UNREADABLE,
        ) from error
    finally:
        resource.setrlimit(limit, (soft, hard))


def _held_bytes() -> int | None:
    """Return the bytes that the limit counts as of now; None: a sandbox's kernel does not say."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    lines = (line for line in status.splitlines() if line.startswith("VmData:"))
    return next((int(line.split()[1]) << 10 for line in lines), None)
