"""Run a function on several ranks: forked processes of this one that meet by gloo."""

from __future__ import annotations

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn

from windrow_sidecar.compute.communicator import Communicator
from windrow_sidecar.finetune.adapter.adapters import trainable
from windrow_sidecar.finetune.tensor_parallel.adapter import AdapterParts
from windrow_sidecar.finetune.tensor_parallel.shard import sharded
from windrow_sidecar.finetune.tensor_parallel.sharding import Sharding
from windrow_sidecar.testing.equality import small_spec

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


def shard_of(
    base: nn.Module,
    adapter: Mapping[str, Any],
    values: Mapping[str, Tensor] | None,
    ranks: Communicator,
) -> tuple[Sharding, Any, AdapterParts]:
    """Return the cut, a rank's tuned shard in float64, and the parts of the adapter in it.

    Args:
        base: the whole model.
        adapter: as in a manifest.
        values: of the whole adapter by parameter, [...] each; None: as peft begins.
        ranks: over which it is cut, this one among them.
    """
    tensors = {name: partial(_itself, p) for name, p in base.named_parameters()}
    config: Any = base.config
    sharding = Sharding(ranks, config)
    shard = sharded(tensors, config, ranks, torch.float64)
    tuned, parts = sharding.add_adapter(shard, small_spec(adapter))
    tuned.double()
    parts.whole.double()
    if values is not None:
        with torch.no_grad():
            for name, parameter in trainable(parts.whole).items():
                parameter.copy_(values[name])
        parts.begin()
    return sharding, tuned, parts


def broadcast(word: Any) -> Any:  # noqa: ANN401 - whatever is pickled
    """Send a word of the first rank to the others; return it. What another rank passes is lost."""
    held = [word]
    distributed.broadcast_object_list(held, src=0)
    return held[0]


def told() -> Iterator[Any]:
    """Yield on another rank what the first one broadcasts, until that is None."""
    while (word := broadcast(None)) is not None:
        yield word


def _itself(tensor: Tensor) -> Tensor:
    return tensor


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
