"""A worker's command line in this process, and beside it what its allocators have handed out.

`python -m benchmarks.engine.accounting FILE ARGS...` runs `worker ARGS...` and leaves JSON lines of
[seconds, bytes of the C heap in use, blocks of Python in use] in FILE, one each second. What is in
use grows by what somebody keeps; a resident set also by pages that are touched for the first time.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
import time
from pathlib import Path

from windrow_sidecar.finetune import worker

EVERY_S = 1.0


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and later."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def heap_bytes() -> int:
    """Return the bytes that the C heap has handed out; 0: this libc does not report it."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = _MallInfo
    told = mallinfo2()
    return int(told.uordblks + told.hblkhd)


def note(to: Path) -> None:
    """Note readings for as long as the process lives."""
    with to.open("w", buffering=1) as file:
        while True:
            line = (time.monotonic(), heap_bytes(), sys.getallocatedblocks())
            file.write(json.dumps(line) + "\n")
            time.sleep(EVERY_S)


if __name__ == "__main__":
    threading.Thread(target=note, args=(Path(sys.argv[1]),), daemon=True).start()
    sys.argv = ["worker", *sys.argv[2:]]
    sys.exit(worker.main())
