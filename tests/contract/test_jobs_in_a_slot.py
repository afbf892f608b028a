"""Jobs of one worker take turns in its lent chunks; each learns what it learns alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.acting_runner import ActingRunner, job_handle

from windrow.conditions import Reason
from windrow.errors import InvariantBroken, UserError
from windrow.protocol import Ending
from windrow_sidecar.finetune.colocated.jobs import crowded
from windrow_sidecar.finetune.engine.sizing import Windows
from windrow_sidecar.finetune.job.failures import failure
from windrow_sidecar.finetune.job.job_handle import JobShare
from windrow_sidecar.finetune.job.multiplexer import JobMultiplexer, fair_start
from windrow_sidecar.finetune.memory.lent import LentBoundaries, LentMemory, TenantBoundaries
from windrow_sidecar.finetune.memory.training_memory import NoRoom
from windrow_sidecar.finetune.model.loading import BaseModel
from windrow_sidecar.finetune.model.shallow_clone import shallow_clone
from windrow_sidecar.testing.tinyjob import (
    HIDDEN,
    LAYERS,
    activation_budget_of,
    adapter_of,
    bit_equal,
    finish,
    tiny_job,
    tiny_llama,
)

OWNER, CHUNKS = 7, 12
KINDS = (
    {},
    {"adapter": {"lora": {"rank": 4, "targetModules": "q_proj,up_proj"}}, "seed": 5},
    {"adapter": {"type": "ia3"}, "seed": 7, "steps": 3},
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=[Windows(1000), Windows(5)], ids=["rows", "windows"])
def alone(request):
    """Return how the work is cut, and what each job learns alone."""
    jobs = [tiny_job(sizing=request.param, **kind) for kind in KINDS]
    for job in jobs:
        finish(job)
    return request.param, [adapter_of(job) for job in jobs]


class Slot:
    """Jobs over one base, whose boundaries lie in the same lent chunks, and decode."""

    def __init__(self, arenas, sizing) -> None:
        self.decode, worker = arenas
        self.lent = LentBoundaries(worker, OWNER, boundaries=LAYERS, bytes_per_token=HIDDEN * 4)
        base = BaseModel(tiny_llama(), None, None, shared=False)
        self.jobs, self.memories = [], []
        for kind in KINDS:
            boundaries = TenantBoundaries(self.lent)
            job = tiny_job(
                base=shallow_clone(base).model, sizing=sizing, boundaries=boundaries, **kind
            )
            self.jobs.append(job)
            activation_budget = activation_budget_of(job, lambda: 1 << 30)
            self.memories.append(LentMemory(self.lent, boundaries, job.stream, activation_budget))

    def turn(self, n: int, most: int) -> bool:
        """Run so many tasklets of a job; whether there are more."""
        stream, memory = self.jobs[n].stream, self.memories[n]
        memory.restore()
        for _ in range(most):
            if stream.peek() is None:
                return False
            memory.settle()
            tasklet = stream.peek()
            if memory.starving(tasklet):
                self.decode.lend(CHUNKS, owner=OWNER)
                continue
            stream.run(tasklet)
        memory.offload()
        return True


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    turns=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 12), st.integers(0, CHUNKS)), max_size=25
    )
)
def test_turns_in_the_same_chunks_change_nothing_whatever_decode_asks_back(arenas, alone, turns):
    sizing, expected = alone
    slot = Slot(arenas, sizing)
    live = {0, 1, 2}
    rest = [(n, 7, 0) for _ in range(200) for n in range(3)]
    for n, tasklets, asked_back in (*turns, *rest):
        if n in live and not slot.turn(n, tasklets):
            live.remove(n)
            slot.memories[n].release()
        if asked_back:
            slot.decode.revoke(asked_back)
    assert not live
    learnt = [adapter_of(job) for job in slot.jobs]
    slot.lent.give_all_back()
    assert slot.decode.counts()[2] == slot.decode.counts()[4] == 0
    for ours, theirs in zip(learnt, expected, strict=True):
        assert bit_equal(ours, theirs)


def test_the_end_of_a_job_that_is_away_leaves_the_chunks_of_the_one_that_is_there(arenas, alone):
    sizing, expected = alone
    slot = Slot(arenas, sizing)
    slot.turn(0, 5)
    slot.memories[1].restore()
    while slot.lent.is_clear:  # into the middle of a group
        slot.memories[1].settle()
        if slot.memories[1].starving(slot.jobs[1].stream.peek()):
            slot.decode.lend(CHUNKS, owner=OWNER)
            continue
        slot.jobs[1].stream.run(slot.jobs[1].stream.peek())
    held = slot.decode.counts()[2]
    slot.memories[0].release()
    assert not slot.lent.is_clear
    assert slot.decode.counts()[2] == held
    while slot.turn(1, 50):
        pass
    learnt = adapter_of(slot.jobs[1])
    slot.lent.give_all_back()
    assert bit_equal(learnt, expected[1])


def test_two_jobs_never_lie_in_the_chunks_at_once(arenas):
    decode, worker = arenas
    lent = LentBoundaries(worker, OWNER, boundaries=LAYERS, bytes_per_token=HIDDEN * 4)
    decode.lend(CHUNKS, owner=OWNER)
    lent.settle()
    here, away = TenantBoundaries(lent), TenantBoundaries(lent)
    here.move_in()
    with pytest.raises(InvariantBroken):
        away.expect(1, 4)
    here.expect(1, 4)
    kept = here.place(torch.ones(1, 4, HIDDEN))
    with pytest.raises(InvariantBroken):
        away.place(torch.zeros(1, 4, HIDDEN))
    with pytest.raises(InvariantBroken):
        away.move_in()
    away.clear()
    here.place(torch.zeros(1, 4, HIDDEN))
    assert kept.eq(1).all()
    here.clear()
    away.move_in()
    assert away.is_tenant
    assert not here.is_tenant
    lent.give_all_back()


class Plenty(LentMemory):
    """Decode lends whatever is missing."""

    def __init__(self, decode, *of_the_job) -> None:
        super().__init__(*of_the_job)
        self._decode = decode

    def restore(self) -> bool:
        self._decode.lend(CHUNKS, owner=OWNER)
        self.settle()
        return super().restore()


class LateRoom(Plenty):
    """Decode has taken the room as the job's first turn begins."""

    came = False

    def restore(self) -> bool:
        came, self.came = self.came, True
        moved = super().restore()
        if not came:
            raise NoRoom("decode lends less")
        return moved


def carry(arenas, sizing, names, memory_of=Plenty, **options):
    """A job of each kind as a carrier takes it."""
    decode, worker = arenas
    lent = LentBoundaries(worker, OWNER, boundaries=LAYERS, bytes_per_token=HIDDEN * 4)
    base = BaseModel(tiny_llama(), None, None, shared=False)
    order, endings, jobs, made = [], {}, [], []
    for name, kind in zip(names, KINDS, strict=False):
        boundaries = TenantBoundaries(lent)
        job = tiny_job(base=shallow_clone(base).model, sizing=sizing, boundaries=boundaries, **kind)
        activation_budget = activation_budget_of(job, lambda: 1 << 30)
        memory = memory_of(decode, lent, boundaries, job.stream, activation_budget)
        acting = ActingRunner(name, job, order, **options.get(name, {}))
        jobs.append(job)
        made.append(job_handle(acting, memory, endings))
    return lent, jobs, made, order, endings


def test_a_job_that_joins_shares_from_then_on_and_a_bad_one_ends_alone(arenas, alone):
    sizing, expected = alone
    lent, jobs, made, order, endings = carry(
        arenas, sizing, ("first", "broken", "late"), broken={"fails_at": 4}
    )
    came = {6: lambda: made[1], 12: lambda: None, 18: lambda: made[2]}

    def arrivals():
        due = [at for at in came if at <= len(order)]
        return came.pop(due[0]) if due else None

    JobMultiplexer(made[:1], arrivals=arrivals, clock=lambda: 0.0).run()
    learnt = [adapter_of(job) for job in jobs]
    lent.give_all_back()
    assert endings == {
        "first": Ending.SUCCEEDED,
        "broken": Ending.FAILED,
        "late": Ending.SUCCEEDED,
    }
    assert bit_equal(learnt[0], expected[0])
    assert bit_equal(learnt[2], expected[2])
    # It has not got all turns until it had caught up.
    joined = order.index("late")
    assert "first" in order[joined : joined + 20]


def test_a_job_whose_room_is_gone_as_its_turn_begins_goes_on(arenas, alone):
    sizing, expected = alone
    lent, jobs, made, _, endings = carry(arenas, sizing, ("first",), memory_of=LateRoom)
    JobMultiplexer(made, clock=lambda: 0.0).run()
    learnt = adapter_of(jobs[0])
    lent.give_all_back()
    assert endings == {"first": Ending.SUCCEEDED}
    assert bit_equal(learnt, expected[0])


def test_a_job_without_room_holds_up_no_other_and_waits_once_it_is_alone(arenas, alone):
    sizing, expected = alone
    lent, jobs, made, order, endings = carry(arenas, sizing, ("hungry", "fed"))
    hungry = made[0].runner
    hungry.fed = lambda: "fed" in endings and hungry.waited > 2
    JobMultiplexer(made, clock=lambda: 0.0).run()
    learnt = [adapter_of(job) for job in jobs]
    lent.give_all_back()
    assert [name for name, _ in pairwise([*dict.fromkeys(order), ""])] == ["fed", "hungry"]
    assert hungry.waited == 3
    assert all(bit_equal(learnt[n], expected[n]) for n in range(2))


def test_who_joins_starts_where_the_one_is_that_is_furthest_behind():
    others = [JobShare(4000), JobShare(9000, weight=3.0)]
    assert fair_start(1.0, others) == 3000
    assert fair_start(2.0, others) == 6000
    assert fair_start(1.0, []) == 0


def test_a_job_that_finds_no_room_beside_others_is_tried_again_elsewhere():
    full = UserError("a step takes 9 bytes, 3 are free", reason=Reason.OUT_OF_MEMORY)
    for error in (full, MemoryError("3 bytes are free")):
        event, _ = failure(crowded(error), "")
        assert (event.kind, event.reason) == ("REJECTED", Reason.OUT_OF_MEMORY)
        assert "beside other jobs of this worker" in event.detail
        assert "3 " in event.detail
        assert not event.user_error
    wrong = UserError("rank 0", field="spec.adapter.lora.rank")
    assert failure(crowded(wrong), "")[0].user_error
