"""`windrow memory dump` shows a live arena as it is, and leaves it alone."""

from __future__ import annotations

import json
import os
import socket

import pytest

from windrow_cli import run
from windrow_sidecar import _core
from windrow_sidecar._core import Arena, Inspection
from windrow_sidecar.memory.dump import STATES


def test_the_states_of_the_dump_are_those_of_the_core():
    assert [STATES[getattr(_core, name)] for name in STATES] == list(STATES)


@pytest.fixture
def busy(served):
    """An arena with chunks in every state."""
    owner, path = served
    for _ in range(3):
        owner.take_kv()
    owner.lend(5, owner=7)
    owner.revoke(2)
    return owner, path


@pytest.mark.parametrize("by", ["socket", "pid"])
def test_the_map_of_a_live_arena_is_what_its_owner_sees(busy, by, capfd):
    owner, path = busy
    before = [owner.chunk(i) for i in range(16)]
    assert run(["memory", "dump", path if by == "socket" else str(os.getpid()), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["pid"] == os.getpid()
    assert found["geometry"]["chunk_bytes"] == owner.geometry.chunk_bytes
    for chunk, info in zip(found["chunks"], before, strict=True):
        assert STATES.index(chunk["state"]) == info.state
        assert (chunk["owner"], chunk["epoch"]) == (info.owner, info.epoch)
        assert 0 < chunk["age_s"] < 300
    assert owner.peers() == []
    assert [owner.chunk(i).epoch for i in range(16)] == [info.epoch for info in before]


def test_the_picture_has_a_cell_for_every_chunk(busy, capfd):
    _, path = busy
    assert run(["memory", "dump", path]) == 0
    text = capfd.readouterr().out
    assert "███······▚▚▒▒▒░░" in text
    assert "worker of epoch 7" in text


def test_what_serves_no_arena_is_named(served, run_dir, capfd):
    assert run(["memory", "dump", str(run_dir / "none.sock")]) == 2
    assert "is not a socket" in capfd.readouterr().err
    assert run(["memory", "dump", str(os.getppid())]) == 2
    assert "serves no arena" in capfd.readouterr().err
    assert run(["memory", "dump", "999999999"]) == 2
    assert "no process 999999999" in capfd.readouterr().err


def test_a_socket_that_nobody_serves_is_worth_another_try(run_dir, capfd):
    path = str(run_dir / "left.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(path)
    assert run(["memory", "dump", path]) == 3
    assert "no arena is served" in capfd.readouterr().err


def test_an_inspection_sees_what_happens_meanwhile_and_the_end(arena, run_dir):
    owner, path = Arena.create(arena.geometry, reserved_chunks=2), str(run_dir / "own.sock")
    owner.serve(path)
    look = Inspection.open(path)
    owner.lend(4, owner=9)
    assert look.counts() == owner.counts()
    assert [chunk.owner for chunk in look.chunks()].count(9) == 4
    assert look.owner_lives()
    owner.close()
    assert not look.owner_lives()
    assert look.counts() == (10, 0, 4, 2, 0)
