"""A map of chunks as a picture."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from windrow.chunkmap import Chunk, ChunkMap, age, draw, owner_of


def picture(chunks: list[Chunk]) -> list[str]:
    found = ChunkMap("/run/windrow/arena-0.sock", 7, 2**20, 256, {"decode": 0.5}, chunks)
    console = Console(file=io.StringIO(), width=100)
    console.print(draw(found))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_rows_begin_with_the_id_of_their_first_chunk():
    lines = picture([Chunk(i, "KV" if i < 70 else "FREE", 0, 1, 3.0) for i in range(100)])
    assert lines[2] == " 0 " + 64 * "█"
    assert lines[3] == "64 " + 6 * "█" + 30 * "·"


def test_what_one_owner_holds_in_one_state_is_one_line():
    lines = picture(
        [
            Chunk(0, "LENT", 3, 1, 0.002),
            Chunk(1, "LENT", 3, 5, 130.0),
            Chunk(2, "LENT", 4, 1, 1.0),
            Chunk(3, "DRAINING", 3, 2, 1.0),
        ]
    )
    held = [line.split()[1:] for line in lines if "worker of epoch" in line]
    assert held == [
        ["LENT", "worker", "of", "epoch", "3", "2", "2.0", "2", "ms", "2", "min"],
        ["LENT", "worker", "of", "epoch", "4", "1", "1.0", "1.0", "s", "1.0", "s"],
        ["DRAINING", "worker", "of", "epoch", "3", "1", "1.0", "1.0", "s", "1.0", "s"],
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0421, "42 ms"), (4.2, "4.2 s"), (720.0, "12 min"), (18_000.0, "5.0 h")],
)
def test_ages_are_told_in_their_own_unit(seconds, text):
    assert age(seconds) == text


def test_what_is_free_belongs_to_nobody():
    assert [owner_of("FREE", 0), owner_of("RESERVED", 0), owner_of("LENT", 5)] == [
        "-",
        "decode",
        "worker of epoch 5",
    ]
