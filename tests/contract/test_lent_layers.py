"""Frozen layers in chunks that decode has lent on the host: put there, taken out, never missed."""

from __future__ import annotations

import random

import pytest
import torch
from chunk_tensors import chunk_tensor
from support.examplejob import MODEL, example_job

from windrow_sidecar._core import Arena, Geometry
from windrow_sidecar.finetune.memory.lent import LentBoundaries
from windrow_sidecar.finetune.memory.lent_layers import LentLayers
from windrow_sidecar.finetune.model.loading import load_base
from windrow_sidecar.finetune.standalone.dedicated import open_alone
from windrow_sidecar.testing.tinyjob import adapter_of, bit_equal

MIB, WORKER, CHUNKS = 1 << 20, 3, 12
OWN = 2  # layers in the worker's own memory; each of the other four takes two chunks
FOR_GROUPS = 2

pytestmark = pytest.mark.usefixtures("one_thread")


class Slot:
    """Decode's arena, and a worker whose layers take turns."""

    def __init__(self, path: str) -> None:
        geometry = Geometry(
            layers=6, kv_heads=4, head_dim=32, dtype_bytes=4, block_bytes=MIB // 8, chunks=CHUNKS
        )
        self.decode = Arena.create(geometry, reserved_chunks=0)
        self.decode.serve(path)
        self.worker = Arena.attach(path)
        self.base = load_base(MODEL, room_bytes=7 * MIB)
        self.frozen = self.base.frozen
        assert self.frozen.capacity == OWN
        self.layers = LentLayers(self.worker, self.frozen)
        self.lent = LentBoundaries(
            self.worker, WORKER, boundaries=6, bytes_per_token=1024, layers=self.layers
        )
        self.lent.wanted_by_groups = FOR_GROUPS

    def settle(self) -> None:
        assert not self.lent.must_leave(), "no activation lies there"
        self.lent.settle()

    def close(self) -> None:
        self.lent.give_all_back()
        self.frozen.close()
        self.worker.close()
        self.decode.check()
        self.decode.close()


@pytest.fixture
def slot(run_dir):
    made = Slot(str(run_dir / "a.sock"))
    yield made
    made.close()


def test_every_layer_is_wished_for_and_groups_come_first(slot):
    assert slot.layers.wanted_chunks == 4 * 2
    slot.decode.lend(FOR_GROUPS + 1, owner=WORKER)
    slot.settle()
    assert slot.frozen.capacity == OWN, "one chunk is half of a layer"
    tokens = slot.lent.capacity_tokens()
    slot.decode.lend(7, owner=WORKER)
    slot.settle()
    assert slot.frozen.capacity == 6
    assert slot.lent.capacity_tokens() == tokens - tokens // 3, "two chunks in place of three"
    slot.lent.wanted_by_groups = FOR_GROUPS + 1
    slot.settle()
    assert slot.frozen.capacity == 5, "the layer in what a larger group wants has left"


def test_chunks_that_lie_apart_are_made_up_for_by_others(slot):
    kv = [slot.decode.take_kv() for _ in range(CHUNKS)]
    for chunk in (11, 10, 8, 7, 5):  # of groups: 11 and 10
        slot.decode.return_kv(kv[chunk])
    slot.decode.lend(5, owner=WORKER)
    slot.settle()
    assert sorted(slot.layers.chunks) == [7, 8]
    assert slot.layers.wanted_chunks == 4 * 2, "5 is the half of a layer that may yet come"
    slot.decode.return_kv(kv[3])
    slot.decode.lend(1, owner=WORKER)
    slot.settle()
    assert slot.layers.wanted_chunks == 4 * 2 + 1, "3 may be, but 5 lies apart"
    for chunk in (0, 1, 2, 4, 6, 9):
        slot.decode.return_kv(kv[chunk])


def test_what_is_asked_back_goes_at_once_and_only_its_layer_with_it(slot):
    slot.decode.lend(10, owner=WORKER)
    slot.settle()
    assert slot.frozen.capacity == 6
    asked = slot.decode.revoke(1)
    slot.settle()
    assert slot.decode.draining(WORKER) == []
    assert asked[0] not in slot.decode.held(WORKER)
    assert slot.frozen.capacity == 5
    slot.decode.revoke(CHUNKS)
    slot.settle()
    assert slot.frozen.capacity == OWN
    assert slot.decode.counts()[0] == CHUNKS


def test_what_is_learnt_is_the_same_whatever_comes_and_goes(slot, tmp_path):
    (tmp_path / "whole").mkdir()
    whole = open_alone(example_job(tmp_path / "whole", microBatchSize=1))
    while (tasklet := whole.stream.peek()) is not None:
        whole.stream.run(tasklet)

    draw, seen = random.Random(5), set()
    session = open_alone(example_job(tmp_path, microBatchSize=1), base=slot.base)
    while (tasklet := session.stream.peek()) is not None:
        if draw.random() < 0.3:
            draw.choice([slot.decode.revoke, lambda n: slot.decode.lend(n, owner=WORKER)])(
                draw.randint(1, 6)
            )
            slot.settle()
            seen.add(slot.frozen.capacity)
        session.stream.run(tasklet)
        # KV writes to what is free: a layer that stayed there would be spoilt.
        taken = [slot.decode.take_kv() for _ in range(slot.decode.counts()[0])]
        for chunk in taken:
            chunk_tensor(slot.decode, chunk, torch.uint8).fill_(255)
            slot.decode.return_kv(chunk)
    assert seen >= {OWN, OWN + 1, 6}
    assert bit_equal(adapter_of(session), adapter_of(whole))
