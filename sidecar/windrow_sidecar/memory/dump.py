"""Print the owner of each chunk of a live arena, as JSON.

Example: python -m windrow_sidecar.memory.dump /run/windrow/arena-0.sock

It looks and borrows nothing: the table is mapped read-only, and decode does not count it as a peer.
Exit codes are those of `windrow`: 3 when the arena cannot be looked at just now.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from windrow_sidecar._core import AttachError, Inspection, monotonic_ns

STATES = ("FREE", "KV", "LENT", "RESERVED", "DRAINING")
EXIT_TRANSIENT = 3
_GEOMETRY = (
    "layers",
    "kv_heads",
    "head_dim",
    "dtype_bytes",
    "block_bytes",
    "chunks",
    "slots_per_chunk",
    "chunk_bytes",
)  # fmt: skip


def chunk_map(socket_path: str, *, timeout_s: float = 2.0) -> dict[str, Any]:
    """The map of the arena that is served at a socket; ages in seconds.

    Raises:
        AttachError: nobody serves there, or somebody of another user or release.
    """
    arena = Inspection.open(socket_path, timeout_s=timeout_s)
    chunks, now_ns = arena.chunks(), monotonic_ns()
    return {
        "socket": socket_path,
        "pid": arena.owner_pid,
        "geometry": {name: getattr(arena.geometry, name) for name in _GEOMETRY},
        "job_epoch": arena.job_epoch(),
        "heartbeat_age_s": {"decode": _silence_s(arena, 0), "worker": _silence_s(arena, 1)},
        "chunks": [
            {
                "id": i,
                "state": STATES[chunk.state],
                "owner": chunk.owner,
                "epoch": chunk.epoch,
                "age_s": max(0, now_ns - chunk.since_ns) / 1e9,
            }
            for i, chunk in enumerate(chunks)
        ],
    }


def _silence_s(arena: Inspection, writer: int) -> float | None:
    """Return the seconds since its last sign of life; None: none yet, counted from the boot."""
    since_boot_ns = monotonic_ns()
    silent_ns = arena.heartbeat_age_ns(writer)
    return None if silent_ns >= since_boot_ns else silent_ns / 1e9


def main(arguments: list[str] | None = None) -> int:
    """Print one map; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m windrow_sidecar.memory.dump")
    parser.add_argument("socket", help="of the arena, e.g. /run/windrow/arena-0.sock")
    socket_path = parser.parse_args(arguments).socket
    try:
        found = chunk_map(socket_path)
    except AttachError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_TRANSIENT
    json.dump(found, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
