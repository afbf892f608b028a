"""Map the chunks of an arena to their owners, and draw that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

# Shape and colour both tell the states apart.
CELLS = {
    "KV": ("█", "cyan"),
    "LENT": ("▒", "yellow"),
    "DRAINING": ("▚", "red"),
    "RESERVED": ("░", "blue"),
    "FREE": ("·", "dim"),
}
ROW_CELLS = 64
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk. `owner` is the job epoch of the worker that holds it; 0: none.

    `epoch` counts its transitions; `age_s` is how long it has been as it is.
    """

    id: int
    state: str
    owner: int
    epoch: int
    age_s: float


@dataclass(frozen=True, slots=True)
class ChunkMap:
    """All chunks of one arena, in the order of their ids."""

    socket: str
    pid: int
    chunk_bytes: int
    slots_per_chunk: int
    heartbeat_age_s: Mapping[str, float | None]  # None: it never gave a sign of life
    chunks: Sequence[Chunk]

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> ChunkMap:
        """Read what `windrow_sidecar.memory.dump` prints."""
        geometry = found["geometry"]
        return cls(
            socket=found["socket"],
            pid=found["pid"],
            chunk_bytes=geometry["chunk_bytes"],
            slots_per_chunk=geometry["slots_per_chunk"],
            heartbeat_age_s=found["heartbeat_age_s"],
            chunks=[Chunk(**chunk) for chunk in found["chunks"]],
        )


def draw(found: ChunkMap) -> RenderableType:
    """Return the grid, one cell a chunk, with what each state and owner holds below it."""
    head = Text(f"process {found.pid}, {found.socket}")
    sizes = Text(
        f"{len(found.chunks)} chunks of {found.chunk_bytes / _MIB:,.1f} MiB, "
        f"{found.slots_per_chunk} tokens each"
    )
    beats = ", ".join(
        f"{who} never" if seconds is None else f"{who} {age(seconds)} ago"
        for who, seconds in found.heartbeat_age_s.items()
    )
    return Group(
        head, sizes, *_rows(found.chunks), _holdings(found), Text(f"last heartbeat: {beats}")
    )


def age(seconds: float) -> str:
    """Return `3 ms`, `4.2 s`, `12 min` or `5.0 h`."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _rows(chunks: Sequence[Chunk]) -> list[Text]:
    width = len(str(max(0, len(chunks) - 1)))
    rows = []
    for first in range(0, len(chunks), ROW_CELLS):
        row = Text(f"{first:>{width}} ", style="dim")
        for chunk in chunks[first : first + ROW_CELLS]:
            row.append(*CELLS[chunk.state])
        rows.append(row)
    return rows


def _holdings(found: ChunkMap) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("", "STATE", "OWNER", "CHUNKS", "MIB", "YOUNGEST", "OLDEST"):
        table.add_column(title, justify="left" if title in ("", "STATE", "OWNER") else "right")
    groups: dict[tuple[str, int], list[Chunk]] = {}
    for chunk in found.chunks:
        groups.setdefault((chunk.state, chunk.owner), []).append(chunk)
    for state, (cell, style) in CELLS.items():
        for (_, owner), held in sorted(g for g in groups.items() if g[0][0] == state):
            ages = [chunk.age_s for chunk in held]
            table.add_row(
                Text(cell, style=style),
                state,
                owner_of(state, owner),
                str(len(held)),
                f"{len(held) * found.chunk_bytes / _MIB:,.1f}",
                age(min(ages)),
                age(max(ages)),
            )
    return table


def owner_of(state: str, owner: int) -> str:
    """Return the owner of a chunk: decode, the worker of a job epoch, or nobody."""
    if owner:
        return f"worker of epoch {owner}"
    return "decode" if state in ("KV", "RESERVED") else "-"
