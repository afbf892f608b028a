"""Run a function on several ranks: forked processes of this one that meet by gloo."""

from __future__ import annotations

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import torch

from windrow_sidecar.compute.communicator import Communicator

Made = TypeVar("Made")
# A collective that takes longer has lost a rank; a machine that is shared by many is slow.
LATE_AFTER_S = 120.0


def on_ranks(ranks: int, work: Callable[[Communicator], Made]) -> list[Made]:
    """Return what `work` returns on each of so many ranks, in their order.

    It is called in forked processes with one thread each, so it may close over anything, and what
    it returns is pickled.

    Raises:
        RuntimeError: it failed on a rank; says how.
    """
    with tempfile.TemporaryDirectory() as folder:
        started = [_start(Path(folder) / "meet", rank, ranks, work) for rank in range(ranks)]
        made: list[Made] = []
        problems = []
        for rank, (process, pipe) in enumerate(started):
            try:
                is_made, found = pickle.loads(pipe.recv_bytes())
            except EOFError:
                is_made, found = False, "it ended without a word"
            os.waitpid(process, 0)
            pipe.close()
            if is_made:
                made.append(found)
            else:
                problems.append(f"rank {rank} of {ranks}: {found}")
    if problems:
        raise RuntimeError("\n".join(problems))
    return made


def _start(
    meet: Path, rank: int, ranks: int, work: Callable[[Communicator], object]
) -> tuple[int, Connection]:
    ours, theirs = Pipe(duplex=False)
    if process := os.fork():
        theirs.close()
        return process, ours
    try:
        ours.close()
        theirs.send_bytes(pickle.dumps(_made(meet, rank, ranks, work)))
    finally:
        os._exit(0)


def _made(
    meet: Path, rank: int, ranks: int, work: Callable[[Communicator], object]
) -> tuple[bool, object]:
    try:
        torch.set_num_threads(1)
        joined = Communicator.joined(
            meet, rank, ranks, device=torch.device("cpu"), late_after_s=LATE_AFTER_S
        )
        return True, work(joined)
    except Exception:  # noqa: BLE001 - whatever it is, the process that waits for it tells
        return False, traceback.format_exc()
