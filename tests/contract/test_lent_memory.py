"""Decode takes chunks back while a group lies in them: within one tasklet, and nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from windrow_sidecar.finetune.engine.sizing import Windows
from windrow_sidecar.finetune.engine.suspension import BrokenOff
from windrow_sidecar.finetune.memory.lent import LentBoundaries, LentMemory, TenantBoundaries
from windrow_sidecar.finetune.model.boundaries import Graph
from windrow_sidecar.qos.view import Phase
from windrow_sidecar.testing.tinyjob import (
    HIDDEN,
    LAYERS,
    activation_budget_of,
    adapter_of,
    bit_equal,
    tiny_job,
)

OWNER, CHUNKS = 7, 12


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=[Windows(1000), Windows(5)], ids=["rows", "windows"])
def untouched(request):
    """Return the cut of the work, and what is learnt in how many tasklets at full memory."""
    job = tiny_job(sizing=request.param)
    ran = 0
    while (tasklet := job.stream.peek()) is not None:
        job.stream.run(tasklet)
        ran += 1
    return request.param, adapter_of(job), ran


class Beside:
    """A tiny job whose boundaries lie in lent chunks, and decode.

    `free_bytes`: of the host, for boundaries that leave their chunks; `own_bytes`: for the rest of
    a group.
    """

    def __init__(self, arenas, sizing, *, free_bytes=1 << 30) -> None:
        self.own_bytes = 1 << 30
        self.decode, worker = arenas
        self.lent = LentBoundaries(worker, OWNER, boundaries=LAYERS, bytes_per_token=HIDDEN * 4)
        boundaries = TenantBoundaries(self.lent)
        self.job = tiny_job(sizing=sizing, boundaries=boundaries)
        activation_budget = activation_budget_of(self.job, lambda: self.own_bytes)
        self.memory = LentMemory(
            self.lent, boundaries, self.job.stream, activation_budget, free_bytes=lambda: free_bytes
        )
        self.memory.restore()
        self.ran = 0

    def go(self, most: int) -> bool:
        """Run so many tasklets; whether there are more."""
        for _ in range(most):
            if self.job.stream.peek() is None:
                return False
            self.memory.settle()
            tasklet = self.job.stream.peek()
            if self.memory.starving(tasklet):
                self.decode.lend(CHUNKS, owner=OWNER)
                continue
            self.job.stream.run(tasklet)
            self.ran += 1
        return True

    def finish(self):
        """Run what is left and give all chunks back; what was learnt."""
        while self.go(1000):
            pass
        learnt = adapter_of(self.job)
        self.memory.release()
        self.lent.give_all_back()
        return learnt


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moments=st.lists(st.tuples(st.integers(0, 30), st.integers(1, CHUNKS)), max_size=8))
def test_a_group_goes_on_from_the_host_wherever_its_memory_is_asked_back(
    arenas, untouched, moments
):
    sizing, expected, tasklets = untouched
    beside = Beside(arenas, sizing)
    for after, chunks in moments:
        beside.go(after)
        beside.decode.revoke(chunks)
        beside.memory.settle()  # what the next tasklet boundary does
        assert beside.decode.counts()[4] == 0  # nothing drains any more
    learnt = beside.finish()
    assert beside.decode.counts()[2] == 0
    assert learnt.keys() == expected.keys()
    assert bit_equal(learnt, expected)
    assert beside.ran == tasklets  # no group ran twice


def test_a_chunk_asked_back_after_the_group_was_asked_about_stays_for_the_next_boundary(
    arenas, untouched
):
    sizing, expected, tasklets = untouched
    beside = Beside(arenas, sizing)
    while beside.job.stream.peek().phase is not Phase.BACKWARD:
        beside.go(1)
    assert not beside.lent.must_leave()
    beside.decode.revoke(CHUNKS)  # between the two steps of a boundary
    beside.lent.settle()
    assert beside.decode.counts()[4] > 0  # the group is there still
    beside.memory.settle()
    assert beside.decode.counts()[4] == 0
    learnt = beside.finish()
    assert bit_equal(learnt, expected)
    assert beside.ran == tasklets


def test_graphs_that_are_forgotten_between_tasklets_change_nothing_in_what_is_learnt(untouched):
    """What a GPU's worker does first where decode asks for memory: nothing is copied."""
    sizing, expected, tasklets = untouched
    stream, ran, freed = (job := tiny_job(sizing=sizing)).stream, 0, 0
    while (tasklet := stream.peek()) is not None:
        stream.run(tasklet)
        ran += 1
        if ran % 3 == 0:
            before = graphs_of(stream)
            stream.forget()
            freed += before - graphs_of(stream)
    assert bit_equal(adapter_of(job), expected)
    assert ran == tasklets, "no group ran twice"
    assert freed > 0


def graphs_of(stream) -> int:
    """Return how many layers' graphs wait for their backward."""
    group = stream._batch_group
    activations = group._at.values() if group is not None else ()
    waiting = (graph for at in activations for layer in at.graphs for graph in layer)
    return sum(isinstance(graph, Graph) for graph in waiting)


def test_chunks_come_back_from_a_group_whose_first_tasklet_was_given_up(arenas, untouched):
    """The group had been laid out in them: nobody looked there any more, and decode waited."""
    sizing, expected, _ = untouched
    beside = Beside(arenas, sizing)
    while not beside.job.stream.tokens_to_begin:
        beside.go(1)
    beside.decode.lend(CHUNKS, owner=OWNER)
    beside.memory.settle()

    def give_up(*_) -> None:
        hook.remove()
        raise BrokenOff

    hook = beside.job.stream.parts.stack.layers[0].mlp.register_forward_pre_hook(give_up)
    tasklet = beside.job.stream.peek()
    with pytest.raises(BrokenOff):
        beside.job.stream.run(tasklet)
    beside.job.stream.break_off(tasklet)
    beside.decode.revoke(CHUNKS)
    for _ in range(2):  # as a worker does that waits: the group that comes next does not fit
        beside.memory.settle()
    assert beside.decode.counts()[4] == 0
    learnt = beside.finish()
    assert bit_equal(learnt, expected)


def test_without_room_on_the_host_the_group_is_dropped_and_runs_again(arenas, untouched):
    sizing, expected, tasklets = untouched
    beside = Beside(arenas, sizing, free_bytes=0)
    while beside.job.stream.peek().phase is not Phase.BACKWARD:
        beside.go(1)
    beside.decode.revoke(CHUNKS)
    beside.memory.settle()
    assert beside.decode.counts()[4] == 0
    learnt = beside.finish()
    assert bit_equal(learnt, expected)
    assert beside.ran > tasklets


def test_a_group_waits_where_the_worker_lacks_memory_of_its_own(arenas, untouched):
    sizing, expected, _ = untouched
    beside = Beside(arenas, sizing)
    while not beside.job.stream.tokens_to_begin:
        beside.go(1)
    beside.decode.lend(CHUNKS, owner=OWNER)
    beside.memory.settle()
    beside.own_bytes = 1000
    assert beside.memory.starving(beside.job.stream.peek())
    assert beside.memory.is_starving  # decode hears of it with the next offer
    beside.own_bytes = 1 << 30
    beside.memory.settle()
    assert not beside.memory.starving(beside.job.stream.peek())
    learnt = beside.finish()
    assert bit_equal(learnt, expected)
