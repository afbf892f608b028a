"""Activations of every rank are in chunks of its own arena, and training stays what it is.

Decode's ranks lend and ask back at random, and never at the same moment. The first rank of the
worker waits for all of them, and a group leaves its chunks on every rank at one tasklet boundary.
"""

from __future__ import annotations

import copy
import random
import tempfile
from pathlib import Path

import pytest

from windrow_sidecar._core import Arena, Geometry, Inspection
from windrow_sidecar.finetune.adapter.adapters import trainable
from windrow_sidecar.finetune.engine.sharded_stream import FollowChunks
from windrow_sidecar.finetune.engine.stages import StepDone
from windrow_sidecar.finetune.memory.ranked import (
    AgreedChunks,
    FollowingMemory,
    LedBoundaries,
    RankTables,
)
from windrow_sidecar.finetune.recompute.activation_budget import ActivationBudget, JobMemory
from windrow_sidecar.finetune.tasklets import MicroLimits
from windrow_sidecar.testing.architectures import random_model
from windrow_sidecar.testing.equality import (
    Cut,
    pefts_training,
    small_rows,
    small_spec,
    stream_of,
    training_of,
    tuned_model,
)
from windrow_sidecar.testing.ranks import broadcast, on_ranks, shard_of, told
from windrow_sidecar.testing.rounding import apart, in_type_of

pytestmark = pytest.mark.usefixtures("one_thread")

ADAPTER = {"lora": {"rank": 4, "alpha": 8}}
OWNER, CHUNKS = 7, 16
GEOMETRY = Geometry(
    layers=1, kv_heads=1, head_dim=16, dtype_bytes=8, block_bytes=4096, chunks=CHUNKS
)


class Decode:
    """A rank of decode, reduced to its arena: it lends and asks back what it is told."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.arena = Arena.create(GEOMETRY, reserved_chunks=0)
        self.arena.serve(str(folder / f"arena-{rank}.sock"))
        self.worker = Arena.attach(str(folder / f"arena-{rank}.sock"))
        self._late: tuple[str, int] | None = None

    def do(self, act: tuple[str, int] | None) -> None:
        """Do what was told before; the newest comes later."""
        if self._late is not None:
            what, chunk = self._late
            if what == "lend" and self.arena.chunk(chunk).state == 0:
                self.arena.lend_chunk(chunk, owner=OWNER)
            elif what == "revoke":
                self.arena.revoke_chunk(chunk)
        self._late = act


def budget_of(stream) -> ActivationBudget:
    return ActivationBudget(
        stream.parts.stack,
        None,
        JobMemory(longest=32, adapter_bytes=1, own_boundaries=False),
        least=False,
        free_bytes=lambda: 1 << 30,
    )


def sizes_of(base) -> dict[str, int]:
    return {
        "boundaries": base.config.num_hidden_layers,
        "bytes_per_token": base.config.hidden_size * 8,
    }


def follow(stream, decode: Decode, base) -> dict:
    """Be a rank that follows; returns how often chunks were told, and what is held at the end."""
    memory = FollowingMemory(decode.worker, OWNER, **sizes_of(base))
    stream._boundaries = memory.tenancy
    memory.serve(stream, budget_of(stream))
    seen: list[FollowChunks] = []

    def follow_chunks(word: FollowChunks) -> None:
        seen.append(word)
        memory.follow(word)

    def acts():
        for word in told():
            if isinstance(word, tuple):
                decode.do(word)
            else:
                yield word

    stream.follow_chunks, stream._own_limits = follow_chunks, lambda: MicroLimits(1)
    stream.follow(acts())
    return {"left": sum(len(word.leave) for word in seen), "vacated": seen[-1].vacated}


def lead(stream, decode: Decode, base, folder: Path, ranks: int, draw: random.Random) -> dict:
    """Train on the first rank; decode asks for chunks back in the middle of groups."""
    tables = [Inspection.open(str(folder / f"arena-{n}.sock")) for n in range(1, ranks)]
    own = AgreedChunks(decode.worker)
    lent = LedBoundaries(
        own, RankTables([decode.worker, *tables], OWNER), OWNER, broadcast, **sizes_of(base)
    )
    tenancy = lent.tenancy()
    stream._boundaries, stream.tell = tenancy, broadcast
    memory = tenancy.serve(stream, budget_of(stream))
    memory.restore()
    stream._own_limits = lambda: MicroLimits(max(1, min(64, lent.capacity_tokens(1))))
    steps, spilled, used, ran = [], 0, set(), 0
    while (tasklet := stream.peek()) is not None:
        chunk = draw.randrange(CHUNKS)
        act = (draw.choice(["lend", "lend", "revoke"]), chunk)
        broadcast(act)
        decode.do(act)
        before = set(lent._used)
        memory.settle()
        spilled += bool(before) and not lent._used
        tasklet = stream.peek() or tasklet
        if memory.starving(tasklet):
            continue
        if isinstance(done := stream.run(tasklet), StepDone):
            steps.append(done)
        ran += 1
        used |= lent._used
    lent.give_all_back()
    return {"steps": steps, "spilled": spilled, "used": used, "ran": ran}


def train(base, values, folder: Path, ranks):
    """Return what a rank ends with."""
    decode = Decode(folder, ranks.rank)
    sharding, tuned, parts = shard_of(base, ADAPTER, values, ranks)
    draw = random.Random(5)
    with in_type_of(tuned):
        stream = stream_of(tuned, small_rows(), Cut(), sharded=(sharding, parts))
        if ranks.rank:
            found = follow(stream, decode, base)
            parts.assemble(stream.tensors())
        else:
            found = lead(stream, decode, base, folder, ranks.ranks, draw)
            broadcast(None)
            found["held"] = training_of(parts.assemble(stream.tensors()), found.pop("steps"))
    return {**found, "borrowed": decode.arena.counts()[2] + decode.arena.counts()[4]}


@pytest.fixture(scope="module")
def reference():
    base = random_model("Llama").double()
    tuned = tuned_model(copy.deepcopy(base), small_spec(ADAPTER))
    values = {n: p.detach().clone() for n, p in trainable(tuned).items()}
    return base, values, pefts_training(tuned, small_rows())


@pytest.fixture(scope="module", params=[2, 4])
def ranked(reference, request):
    base, values, _ = reference
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        return on_ranks(request.param, lambda ranks: train(base, values, folder, ranks))


def test_five_steps_equal_those_of_peft_while_chunks_come_and_go(ranked, reference):
    ours, theirs = ranked[0]["held"], reference[2]
    assert ours.keys() == theirs.keys()
    for kind in theirs:
        assert apart(ours[kind], theirs[kind]).by_rounding, kind


def test_groups_were_in_chunks_and_had_to_leave_them_on_their_way(ranked):
    assert len(ranked[0]["used"]) > 2
    assert ranked[0]["spilled"] > 2
    assert all(rank["left"] > 5 for rank in ranked[1:])


def test_at_the_end_every_rank_has_given_all_back(ranked):
    assert all(rank["vacated"] for rank in ranked[1:])
    assert [rank["borrowed"] for rank in ranked] == [0] * len(ranked)
