"""A job whose torch allocates from lent chunks leaves them when decode asks, whatever lies there.

The allocator is the real one, over the host's arena and over CUDA's on the stand-in; the job is a
small one that holds addresses of it as a job's tensors do.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.lending_decode import LendingDecode
from support.lent_allocations import LentAllocations

from windrow.errors import Transient
from windrow.protocol import WorkerEvent
from windrow_sidecar._core import Arena, DeviceAllocator
from windrow_sidecar.compute.host_device import HostDevice
from windrow_sidecar.compute.sharing import Sharing
from windrow_sidecar.compute.whole_device import WholeDevice
from windrow_sidecar.finetune.colocated import slot as slot_module
from windrow_sidecar.finetune.colocated.slot import WorkerSlot
from windrow_sidecar.finetune.colocated.slot_device import SlotDevice
from windrow_sidecar.finetune.job.assembly import read_job
from windrow_sidecar.finetune.job.ledger import JobState
from windrow_sidecar.finetune.memory.allocated import chunks_for
from windrow_sidecar.finetune.memory.training_memory import NoRoom
from windrow_sidecar.finetune.model.loading import find_model, load_base
from windrow_sidecar.finetune.training.health import LOADING_AFTER_S, StallWatch
from windrow_sidecar.memory.allocator import LentBudget
from windrow_sidecar.testing.tinyjob import tiny_job

MIB = 1 << 20
WORKER = 7
ROOT = Path(__file__).parents[2]


class HoldsMemory:
    """Job as memory knows it: activations and state, each an allocation."""

    def __init__(self, allocator: DeviceAllocator) -> None:
        self._allocator = allocator
        self.state = allocator.allocate(6 * MIB)
        self.activations = 0
        self.graphs = 0
        self.log: list[str] = []
        self.other = allocator.allocate(100)  # buffers of the model
        self.movable = True
        self.device = torch.device("cpu")
        self.tokens_to_begin = self.away_bytes = self.graph_bytes = 0
        self.between_micro_batches = True

    def begin(self, n_bytes: int, graph_bytes: int = 0) -> None:
        self.activations = self._allocator.allocate(n_bytes)
        if graph_bytes:
            self.graphs = self._allocator.allocate(graph_bytes)

    def forget(self) -> None:
        if self.graphs:
            self.log.append("forget")
            self._allocator.free(self.graphs)
            self.graphs = 0

    def spill(self, room_bytes: int) -> None:
        del room_bytes
        self.log.append("spill")
        self._free_activations()

    def drop(self) -> None:
        self.log.append("drop")
        self._free_activations()

    def replan(self) -> None:
        self.log.append("replan")

    def offload(self, home, room_bytes: int) -> None:
        del home
        if self.away_bytes:
            return
        self.spill(room_bytes)
        if self.movable:
            self._allocator.free(self.state)
            self.state, self.away_bytes = 0, 6 * MIB
        self.log.append("out")

    def bring_back(self, home) -> None:
        del home
        if self.movable:
            self.state, self.away_bytes = self._allocator.allocate(6 * MIB), 0
        self.log.append("in")

    def move_buffers(self, *, to_host: bool) -> None:
        self.log.append("buffers out" if to_host else "buffers back")
        if to_host and self.movable:
            self._allocator.free(self.other)
            self.other = 0
        elif not self.other:
            self.other = self._allocator.allocate(100)

    def close(self) -> None:
        self.movable = True
        self._free_activations()
        for address in (self.state, self.other):
            if address:
                self._allocator.free(address)

    def _free_activations(self) -> None:
        self.forget()
        if self.activations:
            self._allocator.free(self.activations)
            self.activations = 0


class Budget:
    """Stand-in for `ActivationBudget`."""

    def peak_bytes(self, tokens: int) -> int:
        return tokens * 1000

    def __init__(self, budget: LentBudget) -> None:
        self._budget = budget

    def fits(self, tokens: int, beside: int = 0) -> bool:
        return tokens * 1000 + beside <= self._budget.free_bytes()


@pytest.fixture(scope="module")
def forward():
    stream = tiny_job().stream
    while (tasklet := stream.peek()).micro.evaluation:
        stream.run(tasklet)
    return tasklet


class Beside(LentAllocations):
    """A worker's memory, and a job that takes from it."""

    def load(self) -> HoldsMemory:
        job = HoldsMemory(self.allocator)
        self.tenancy = self.memory.tenancy()
        self.of_job = self.tenancy.serve(job, Budget(self.budget))
        return job


@pytest.fixture(params=["host", "standin", "standin token-major"])
def beside(request, run_dir) -> Iterator[Beside]:
    if request.param != "host":
        request.getfixturevalue("cuda_standin")
    driver = "host" if request.param == "host" else "cuda"
    layout = "token-major" if "token-major" in request.param else "per-layer"
    made = Beside(run_dir, WORKER, driver=driver, layout=layout)
    yield made
    made.close()


def test_what_is_free_is_what_is_lent_and_not_taken(beside):
    assert beside.budget.free_bytes() == 0
    beside.lend(3)
    assert beside.budget.free_bytes() == 3 * 8 * MIB
    job = beside.load()
    assert beside.budget.used_bytes() == 8 * MIB  # a block of the small pool with it
    assert beside.budget.free_bytes() == 3 * 8 * MIB - 8 * MIB
    beside.of_job.release()
    assert job.log == ["drop"]
    job.close()


def test_a_chunk_that_is_empty_goes_back_and_the_job_is_not_touched(beside):
    beside.lend(3)
    job = beside.load()
    beside.decode.revoke(2)
    beside.of_job.settle()
    assert beside.decode.draining(WORKER) == []
    assert len(beside.decode.held(WORKER)) == 1
    assert job.log == ["replan"]
    job.close()


class CountsLists:
    """The worker's arena, which counts how often it lists chunks."""

    def __init__(self, arena: Arena) -> None:
        self._arena, self.lists = arena, 0

    def held(self, owner: int) -> list[int]:
        self.lists += 1
        return self._arena.held(owner)

    def __getattr__(self, name: str) -> object:
        return getattr(self._arena, name)


def test_chunks_are_listed_again_only_where_the_table_has_changed(beside):
    arena = CountsLists(beside.worker)
    budget = LentBudget(arena, WORKER, beside.allocator)

    def settled() -> tuple[bool, int, int]:
        before = arena.lists
        changed = budget.settle()
        return changed, budget.chunks, arena.lists - before

    beside.decode.lend(2, owner=WORKER)
    assert settled() == (True, 2, 1)
    assert [settled() for _ in range(2)] == [(False, 2, 0)] * 2
    beside.decode.lend(1, owner=WORKER)
    assert settled() == (True, 3, 1)
    # As many are lent as before, another is asked back: that one counts.
    beside.decode.revoke(1)
    beside.decode.lend(1, owner=WORKER)
    assert settled() == (True, 3, 1)
    assert beside.decode.draining(WORKER) == []
    assert set(beside.decode.held(WORKER)) == budget._chunks
    settled()
    assert settled() == (False, 3, 0)
    # What another worker has counts as lent too.
    beside.decode.lend(1, owner=WORKER + 1)
    assert [settled() for _ in range(2)] == [(False, 3, 1)] * 2
    beside.decode.reclaim(WORKER + 1)
    beside.decode.lend(1, owner=WORKER)
    assert settled() == (True, 4, 1)
    budget.give_back()
    assert (budget.chunks, beside.decode.held(WORKER)) == (0, [])


class HoldsWorkspaces(HostDevice):
    """A device whose libraries keep memory of the allocator's."""

    def __init__(self, allocator: DeviceAllocator) -> None:
        super().__init__()
        self._allocator, self.workspace = allocator, allocator.allocate(6 * MIB)

    def release_caches(self) -> None:
        if self.workspace:
            self._allocator.free(self.workspace)
            self.workspace = 0


def test_workspaces_of_libraries_leave_before_anything_of_the_job_is_moved(beside):
    beside.lend(3)
    job = beside.load()
    device = beside.memory.device = HoldsWorkspaces(beside.allocator)
    beside.decode.revoke(2)
    beside.of_job.settle()
    assert beside.decode.draining(WORKER) == []
    assert not device.workspace
    assert job.log == ["replan"], "nothing of it was moved"
    job.close()


def test_activations_leave_first_and_adapter_and_moments_only_where_they_must(beside):
    beside.lend(3)
    job = beside.load()
    job.begin(10 * MIB)
    beside.decode.revoke(2)
    beside.of_job.settle()
    assert beside.decode.draining(WORKER) == []
    assert job.log[0] == "spill"
    assert "out" not in job.log
    job.close()


def test_what_layers_can_compute_again_leaves_before_anything_is_copied(beside):
    beside.lend(3)
    job = beside.load()
    job.begin(6 * MIB, graph_bytes=10 * MIB)
    beside.decode.revoke(1)
    beside.of_job.settle()
    assert beside.decode.draining(WORKER) == []
    assert job.log == ["forget", "replan"], "its boundaries stay where they are"
    job.close()


class CopyStream:
    """A stream of the process beside those that tasklets run on, with work that nobody awaits."""

    def __init__(self, libcuda: Path) -> None:
        self._calls, context = ctypes.CDLL(str(libcuda)), ctypes.c_void_p()
        self._stream = ctypes.c_void_p()
        self._calls.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
        self._calls.cuCtxPushCurrent(context)
        self._calls.cuStreamCreate(ctypes.byref(self._stream), 1)

    def fill(self, address: int, n_bytes: int) -> None:
        done = self._calls.cuMemsetD8Async(
            ctypes.c_uint64(address), 0, ctypes.c_size_t(n_bytes), self._stream
        )
        assert done == 0

    def close(self) -> None:
        self._calls.cuStreamDestroy(self._stream)
        self._calls.cuCtxPopCurrent(ctypes.byref(ctypes.c_void_p()))
        self._calls.cuDevicePrimaryCtxRelease(0)


@pytest.mark.parametrize("beside", ["standin", "standin token-major"], indirect=True)
def test_copies_beside_the_tasklets_are_waited_for_before_more_is_moved(beside, cuda_standin):
    """Those of a checkpoint have a stream of their own, and hold what was freed meanwhile."""
    beside.lend(3)
    job, copies = beside.load(), CopyStream(cuda_standin)
    job.begin(10 * MIB)
    copies.fill(job.state, 6 * MIB)
    beside.decode.revoke(2)
    beside.of_job.settle()
    assert beside.decode.draining(WORKER) == []
    assert job.log == ["spill", "replan"]
    copies.close()
    job.close()


def test_a_job_leaves_every_chunk_and_comes_back_when_there_is_room(beside, forward):
    beside.lend(1)
    job = beside.load()
    home = beside.decode.held(WORKER)
    beside.decode.revoke(1)
    beside.of_job.settle()
    assert beside.decode.draining(WORKER) == beside.decode.held(WORKER) == []
    assert (job.state, job.other) == (0, 0), "nothing is left on the device"
    assert beside.of_job.starving(forward)
    assert beside.tenancy.chunks_for(0) >= 1, "what it needs is still asked for"
    left = list(job.log)
    with pytest.raises(NoRoom):
        beside.of_job.restore()
    assert job.log == left, "nothing of it has come back"

    beside.decode.take_kv()  # another chunk is lent next time
    beside.lend(1)
    assert not beside.of_job.starving(forward)
    assert beside.of_job.restore()
    assert job.state
    assert job.other
    assert job.log[-2:] == ["buffers back", "in"]
    assert len(beside.decode.held(WORKER)) == len(home) == 1
    job.close()


def test_what_cannot_be_left_ends_the_job_as_transient(beside):
    beside.lend(2)
    job = beside.load()
    job.movable = False
    beside.decode.revoke(2)
    with pytest.raises(Transient, match="goes on from its checkpoint"):
        beside.of_job.settle()
    assert job.log == ["spill", "spill", "out", "buffers out"]
    job.close()
    beside.of_job.release()
    assert beside.decode.draining(WORKER) == beside.decode.held(WORKER) == []


def test_a_job_asks_for_what_is_there_and_its_next_group():
    assert chunks_for(used_bytes=10 * MIB, group_bytes=0, chunk_bytes=8 * MIB) == 2
    # A group may take half of what is free, and the rest is for tensors that live for an instant.
    assert chunks_for(used_bytes=0, group_bytes=16 * MIB, chunk_bytes=8 * MIB) == 4


def job_file(folder: Path) -> Path:
    path = folder / "job.json"
    path.write_text(
        json.dumps(
            {
                "metadata": {"name": "j", "uid": "u"},
                "epoch": WORKER,
                "spec": {
                    "model": {"name": str(ROOT / "models" / "windrow-tiny")},
                    "dataset": {"source": str(ROOT / "examples" / "support-tone" / "train.jsonl")},
                    "adapter": {"lora": {"rank": 2, "alpha": 4}},
                    "training": {"maxSteps": 2, "batchSize": 2, "maxSequenceLength": 256},
                    "output": {"destination": str(folder / "out")},
                },
            }
        )
    )
    return path


@pytest.mark.usefixtures("one_thread")
def test_a_slot_whose_torch_allocates_from_chunks_asks_for_memory_before_it_loads(beside, run_dir):
    with LendingDecode(beside.decode, limit=4) as decode:
        job = read_job(job_file(run_dir))
        loaded_with: list[int] = []
        now_s, noticed = [0.0], []
        watch = StallWatch(clock=lambda: now_s[0])

        def load(of):
            assert of is job
            loaded_with.append(beside.budget.chunks)
            for _ in range(2):
                noticed.append(watch.stalled())
                now_s[0] += LOADING_AFTER_S
            return load_base(find_model(job.spec.model.name, "main"))

        slot_device = SlotDevice(
            HostDevice(),
            WholeDevice("finetune", 2),
            Sharing("temporal", "a test"),
            beside.memory,
        )
        slot = WorkerSlot(WORKER, beside.worker, slot_device, load)
        context = slot.take(job, JobState(stall=watch))
        assert watch.stalled() is None, "it is loaded"
        assert noticed[0] is None
        assert "loading the model has not ended" in str(noticed[1])
        assert loaded_with == [4], "all that decode lends, before anything is loaded"
        model = job.spec.model.model_copy(update={"revision": "other"})
        spec = job.spec.model_copy(update={"model": model})
        elsewhere = replace(job, name="other", uid="v", spec=spec)
        with pytest.raises(Transient, match="cannot carry other beside it"):
            slot.rows_for(elsewhere)
        stream, memory, ran = context.session.stream, context.memory, 0
        while (tasklet := stream.peek()) is not None:
            memory.settle()
            tasklet = stream.peek() or tasklet
            if not memory.starving(tasklet) and slot.gate.launch(tasklet):
                stream.run(tasklet)
                slot.gate.landed(tasklet)
                ran += 1
            else:
                slot.gate.quiet(tasklet)
                slot.gate.wait()
        assert stream.position.step == 2
        assert ran == len(slot.gate.take_ran())
        slot.leave(context)
        slot.close()
        assert beside.budget.chunks == 0
    assert decode.most_wanted >= 6


@pytest.mark.usefixtures("one_thread")
def test_a_job_that_waits_for_its_first_memory_says_so_and_when_it_is_over(
    beside, run_dir, monkeypatch
):
    monkeypatch.setattr(slot_module, "TELL_OF_WAIT_S", 0.0)
    monkeypatch.setattr(slot_module, "LENDING_SETTLES_S", 0.0)
    monkeypatch.setattr(slot_module.GrantGate, "wait", lambda gate: None)
    told: list[WorkerEvent] = []

    def hear(event: WorkerEvent) -> None:
        told.append(event)
        if event.kind == "PAUSED":
            beside.lend(2)

    def loads_nothing(of):
        raise Transient("it was about to load")

    slot_device = SlotDevice(
        HostDevice(),
        WholeDevice("finetune", 2),
        Sharing("temporal", "a test"),
        beside.memory,
    )
    slot = WorkerSlot(WORKER, beside.worker, slot_device, loads_nothing)
    with pytest.raises(Transient, match="about to load"):
        slot.take(read_job(job_file(run_dir)), JobState(), tell=hear)
    assert [event.kind for event in told] == ["PAUSED", "RESUMED"]
    assert "raise spec.limits.maxMemoryPercent" in told[0].detail
    slot.close()
