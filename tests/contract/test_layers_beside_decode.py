"""Layers that take turns: how fast, in whose memory, and for how many micro-batches a visit."""

from __future__ import annotations

import ctypes
import weakref

import pytest
import torch
from support.examplejob import MODEL, example_job
from support.lending_decode import LendingDecode
from support.lent_allocations import LentAllocations

from windrow.errors import UserError
from windrow.rundir import ENV_COPY_RATE, RunDir
from windrow_sidecar._core import Arena, Geometry
from windrow_sidecar.agent.flags import parse_settings
from windrow_sidecar.agent.worker_process import worker_environment
from windrow_sidecar.compute.host_device import HostDevice
from windrow_sidecar.compute.whole_device import WholeDevice
from windrow_sidecar.finetune.adapter.adapters import trainable
from windrow_sidecar.finetune.colocated.slot import open_slot
from windrow_sidecar.finetune.engine.sizing import Estimates, most_that_fit
from windrow_sidecar.finetune.job.gate import OpenGate
from windrow_sidecar.finetune.job.ledger import JobState
from windrow_sidecar.finetune.memory.allocated import Residents
from windrow_sidecar.finetune.model import loading as base_model
from windrow_sidecar.finetune.model.loading import load_base
from windrow_sidecar.finetune.model.precision import WeightForm
from windrow_sidecar.finetune.standalone.dedicated import open_alone
from windrow_sidecar.testing.rounding import apart, in_float64, no_farther
from windrow_sidecar.testing.tinyjob import adapter_of, bit_equal

MIB, WORKER = 1 << 20, 1
# Of 14.5 MB in fp32: room for two layers of 2.4 MB and the rest.
ROOM = 7 * MIB
SLOW = 40e6  # bytes a second: a layer takes 60 ms, far longer than a row in it on any machine

pytestmark = pytest.mark.usefixtures("one_thread")


def trained(session, before=lambda tasklet: True, after=lambda tasklet: None) -> list[int]:
    """Run to the end; returns the sizes of the groups."""
    stream, groups = session.stream, []
    while (tasklet := stream.peek()) is not None:
        if not before(tasklet):
            continue
        if stream.group_to_begin:
            groups.append(len(stream.group_to_begin))
        stream.run(stream.peek())
        after(tasklet)
    return groups


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Return what is learnt with every layer in memory."""
    session = open_alone(example_job(tmp_path_factory.mktemp("whole"), microBatchSize=1))
    trained(session)
    return adapter_of(session)


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """The same in float64."""
    job = example_job(tmp_path_factory.mktemp("wide"), microBatchSize=1)
    begun = adapter_of(open_alone(job))
    base = load_base(MODEL, form=WeightForm(torch.float64))
    with in_float64():
        session = open_alone(job, base=base)
        with torch.no_grad():  # torch draws other numbers in float64
            for name, parameter in trainable(session.model).items():
                parameter.copy_(begun[name])
        trained(session)
    return adapter_of(session)


def equal_but_for_the_order_of_sums(found, expected, truth) -> bool:
    """Return whether gradients differ by their sums' order alone, which a visit's size decides."""
    ours, theirs = (apart(learnt, truth).of_norm for learnt in (found, expected))
    return no_farther([ours], [theirs], torch.float32)


def test_alone_as_many_micro_batches_visit_a_layer_as_hide_its_transfer(tmp_path, expected, truth):
    device, estimates = HostDevice(), Estimates()
    base = load_base(MODEL, room_bytes=ROOM, copy_rate=SLOW)
    assert base.frozen.capacity < base.config.num_hidden_layers
    job = example_job(tmp_path, microBatchSize=1)
    session = open_alone(job, device, base, estimates)
    gate = OpenGate(1, device, estimates)
    groups = trained(session, gate.launch, gate.landed)
    assert groups[0] == 1, "nothing is known yet"
    assert max(groups) > 1
    assert sum(groups) == 2 * job.spec.training.batch_size
    assert equal_but_for_the_order_of_sums(adapter_of(session), expected, truth)
    base.frozen.close()


def test_layers_that_all_fit_are_visited_by_one_micro_batch(tmp_path):
    estimates = Estimates()
    session = open_alone(example_job(tmp_path, microBatchSize=1), estimates=estimates)
    gate = OpenGate(1, estimates=estimates)
    assert set(trained(session, gate.launch, gate.landed)) == {1}


def test_beside_decode_a_slot_keeps_the_copy_to_its_rate_and_shares_each_visit(
    tmp_path, run_dir, monkeypatch, expected, truth
):
    monkeypatch.setattr(base_model, "_room_bytes", lambda device: ROOM)
    geometry = Geometry(
        layers=2, kv_heads=2, head_dim=32, dtype_bytes=4, block_bytes=65536, chunks=64
    )
    arena = Arena.create(geometry, reserved_chunks=0)
    arena.serve(str(RunDir(run_dir).arena_socket()))
    job = example_job(tmp_path, microBatchSize=1)
    with LendingDecode(arena, limit=24) as decode:
        cores = WholeDevice("finetune", 2)
        slot = open_slot(WORKER, RunDir(run_dir), cores, copy_rate=SLOW)
        context = slot.take(job, JobState())
        context.memory.restore()
        frozen, stream = slot._base.frozen, context.session.stream

        def may_run(tasklet) -> bool:
            context.memory.settle()
            tasklet = stream.peek() or tasklet
            if not context.memory.starving(tasklet) and slot.gate.launch(tasklet):
                return True
            slot.gate.quiet(tasklet)
            slot.gate.wait()
            return False

        groups = trained(context.session, may_run, slot.gate.landed)
        slot.close()
    assert max(groups) > 1
    assert 2 <= decode.most_resident < 6
    assert frozen.bytes_per_s <= SLOW
    assert equal_but_for_the_order_of_sums(adapter_of(context.session), expected, truth)
    frozen.close()
    arena.close()


@pytest.mark.parametrize(
    ("wanted", "tokens", "fitting"), [(1, 90, 1), (4, 90, 3), (4, 10, 4), (4, 400, 1), (3, 0, 3)]
)
def test_no_micro_batch_becomes_smaller_for_company(wanted, tokens, fitting):
    assert most_that_fit(wanted, tokens, lambda n: 300 // n) == fitting


def test_the_agents_copy_rate_is_its_workers(run_dir):
    flags = ["--run-dir", str(run_dir)]
    for settings in (
        parse_settings([*flags, "--copy-rate", "2Gi"], {}),
        parse_settings(flags, {ENV_COPY_RATE: "2Gi"}),
    ):
        assert worker_environment(settings)[ENV_COPY_RATE] == str(2 << 30)
    assert ENV_COPY_RATE not in worker_environment(parse_settings(flags, {}))
    for wrong in ("fast", "0"):
        with pytest.raises(UserError, match="not a rate in bytes a second") as refused:
            parse_settings([*flags, "--copy-rate", wrong], {})
        assert refused.value.field == ENV_COPY_RATE


class InChunks(LentAllocations):
    """A job whose layers lie in lent chunks of the host's arena, as all of torch's do on a GPU."""

    def __init__(self, folder, run_dir) -> None:
        super().__init__(run_dir, WORKER)
        self.lend(2)  # four layers, and no more
        base = load_base(MODEL, room_bytes=10 * MIB)
        self.frozen = base.frozen
        self.frozen._make_slot = self._slot
        self.session = open_alone(example_job(folder, microBatchSize=1), base=base)
        self.residents = Residents(self.frozen)
        self.memory.residents = self.residents
        self.tenancy = self.memory.tenancy()
        self.of_job = self.tenancy.serve(self.session.stream, self.session.activation_budget)

    def _slot(self, n_bytes: int) -> torch.Tensor:
        address = self.allocator.allocate(n_bytes)
        memory = (ctypes.c_uint8 * n_bytes).from_address(address)
        weakref.finalize(memory, self.allocator.free, address)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def may_run(self, tasklet) -> bool:
        self.of_job.settle()
        return not self.of_job.starving(tasklet)

    def close(self) -> None:
        self.frozen.close()
        self.of_job.release()
        super().close()


@pytest.fixture
def in_chunks(tmp_path, run_dir):
    made = InChunks(tmp_path, run_dir)
    yield made
    made.close()


def test_layers_leave_first_and_the_group_on_its_way_goes_on(in_chunks, expected):
    ran = []

    def may_run(tasklet) -> bool:
        if len(ran) % 9 == 5:  # decode needs one of two chunks, in the middle of a group
            in_chunks.decode.revoke(1)
            in_chunks.of_job.settle()
            assert in_chunks.decode.draining(WORKER) == []
            assert len(in_chunks.decode.held(WORKER)) == 1
            assert in_chunks.residents.layers <= 2
        if len(in_chunks.decode.held(WORKER)) < 2:
            in_chunks.decode.lend(1, owner=WORKER)
        return in_chunks.may_run(tasklet)

    groups = trained(in_chunks.session, may_run, ran.append)
    assert len(ran) == sum(groups) * 13 + 2, "nothing ran twice"
    assert bit_equal(adapter_of(in_chunks.session), expected)


def test_without_room_for_two_layers_the_worker_says_that_it_starves(in_chunks):
    stream = in_chunks.session.stream
    assert in_chunks.may_run(stream.peek())
    stream.run(stream.peek())
    in_chunks.decode.revoke(2)
    in_chunks.of_job.settle()
    assert in_chunks.decode.held(WORKER) == []
    assert in_chunks.residents.layers == 0
    assert in_chunks.of_job.starving(stream.peek())
    in_chunks.decode.lend(1, owner=WORKER)
    assert in_chunks.may_run(stream.peek())


def test_as_many_layers_are_held_as_lent_memory_has_room_for(in_chunks):
    stream = in_chunks.session.stream
    most = in_chunks.frozen.capacity
    assert most == 4
    for _ in range(6):
        assert in_chunks.may_run(stream.peek())
        stream.run(stream.peek())
    in_chunks.decode.revoke(1)
    in_chunks.of_job.settle()
    assert in_chunks.frozen.capacity == 2, "one chunk has room for two"
    in_chunks.decode.lend(3, owner=WORKER)
    while not stream.between_micro_batches:
        stream.run(stream.peek())
    in_chunks.of_job.settle()
    assert in_chunks.frozen.capacity == in_chunks.frozen.depth, "more than were there at first"
