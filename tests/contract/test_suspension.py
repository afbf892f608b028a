"""A layer that is held up between its modules computes what it computes at one go."""

from __future__ import annotations

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from windrow_sidecar._core import Arena, Geometry
from windrow_sidecar.finetune.colocated.grants import GrantGate, OfferFacts
from windrow_sidecar.finetune.engine.sizing import SETTLED, Estimates, Windows
from windrow_sidecar.finetune.engine.suspension import BrokenOff, Suspension, between_modules
from windrow_sidecar.finetune.training.health import StallWatch
from windrow_sidecar.qos.view import Action, Grant, Offer, Phase
from windrow_sidecar.testing.tinyjob import adapter_of, bit_equal, finish, tiny_job

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=[Windows(1000), Windows(5)], ids=["rows", "windows"])
def untouched(request):
    job = tiny_job(sizing=request.param, micro_batches=2)
    finish(job)
    return request.param, adapter_of(job)


def job_with(point, sizing, adapter=None):
    job = tiny_job(sizing=sizing, micro_batches=2, adapter=adapter)
    base = job.model.get_base_model()
    between_modules(base.model.layers, base.lm_head, point)
    return job


@pytest.mark.parametrize("adapted", ["all-linear", "q_proj"])
def test_there_are_points_within_every_forward_and_every_backward(untouched, adapted):
    points = []
    adapter = {"lora": {"rank": 2, "alpha": 4, "targetModules": adapted}}
    job = job_with(lambda *_: points.append(1), untouched[0], adapter)
    while (tasklet := job.stream.peek()) is not None:
        points.clear()
        job.stream.run(tasklet)
        frozen_below = (
            tasklet.layer == 0 and adapted == "q_proj"
        )  # its keys and values need no way back
        if tasklet.phase in (Phase.FORWARD, Phase.BACKWARD) and not frozen_below:
            # Behind queries, keys and values, behind attention, and between the MLP's products.
            assert len(points) >= 4
        if tasklet.phase is Phase.LOSS and not tasklet.is_window:  # which may have no label
            # Behind the product with the head, and before the one of its way back.
            assert len(points) == (1 if tasklet.micro.evaluation else 2)


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stretches=st.lists(st.integers(1, 19), min_size=1, max_size=12))
def test_tasklets_that_are_broken_off_anywhere_change_nothing(untouched, stretches):
    sizing, expected = untouched
    left, broken = [*stretches], 0

    def point(*_) -> None:
        if left:
            left[0] -= 1
            if not left[0]:
                left.pop(0)
                raise BrokenOff

    job = job_with(point, sizing)
    while (tasklet := job.stream.peek()) is not None:
        try:
            job.stream.run(tasklet)
        except BrokenOff:
            job.stream.break_off(tasklet)
            broken += 1
    assert broken == len(stretches)
    assert bit_equal(adapter_of(job), expected)


def test_a_backward_of_whole_rows_that_is_broken_off_loses_nothing_but_itself():
    untouched = tiny_job(micro_batches=2)
    finish(untouched)
    breaks = False

    def point(*_) -> None:
        nonlocal passed
        passed += 1
        if breaks and passed == 4:
            raise BrokenOff

    job, passed, broken = job_with(point, Windows(1000)), 0, 0
    while (tasklet := job.stream.peek()) is not None:
        passed, breaks = 0, tasklet.phase is Phase.BACKWARD and not breaks
        try:
            job.stream.run(tasklet)
        except BrokenOff:
            job.stream.break_off(tasklet)
            assert job.stream.peek() == tasklet
            broken += 1
    assert broken > 10
    assert bit_equal(adapter_of(job), adapter_of(untouched))


class Cores:
    """A partition that remembers what it was told."""

    def __init__(self) -> None:
        self.units = []

    def levels(self) -> tuple[int, ...]:
        return 1, 2

    def activate(self, units: int) -> None:
        self.units.append(units)


class Slot:
    """The page between decode and a worker, and the worker's gate."""

    def __init__(self) -> None:
        geometry = Geometry(
            layers=1, kv_heads=1, head_dim=32, dtype_bytes=4, block_bytes=4096, chunks=2
        )
        self.arena = Arena.create(geometry, reserved_chunks=1)
        self.page, self.cores, self.epoch = self.arena.page, Cores(), 0
        self.estimates = Estimates()
        self.now_ns = 0  # besides the time that passes
        self.gate = GrantGate(
            self.page,
            self.cores,
            self.estimates,
            lambda: OfferFacts(1),
            decode_lives=lambda: True,
            clock=lambda: time.monotonic_ns() + self.now_ns,
        )

    def give(self, **fields) -> None:
        self.page.beat(0)
        self.page.publish_grant(Grant(**fields))

    def go(self, units: int) -> None:
        self.give(action=Action.GO, finetune_units=units, pause_epoch=self.epoch)

    def pause(self) -> None:
        self.epoch += 1
        self.give(action=Action.PAUSE, pause_epoch=self.epoch)

    @property
    def offer(self) -> Offer:
        return Offer._make(self.page.read_offer())


def test_a_pause_in_the_middle_of_a_layer_is_obeyed_at_its_next_module(untouched):
    sizing, expected = untouched
    slot, stall, answered = Slot(), StallWatch(), []

    def decode_answers() -> bool:
        """Runs while the worker is held up: it says so, with the pause that it has seen."""
        assert slot.offer.in_flight_us == 0
        assert slot.offer.pause_epoch_seen == slot.epoch
        assert stall.stalled() is None
        answered.append(slot.offer.phase)
        slot.go(1)
        return False

    suspension = Suspension(slot.gate, stall, decode_answers)
    passed = 0

    def point(*_) -> None:
        nonlocal passed
        passed += 1
        if passed % 19 == 0 and slot.offer.in_flight_us:
            slot.pause()
        suspension.point()

    job = job_with(point, sizing)
    slot.go(2)
    while (tasklet := job.stream.peek()) is not None:
        assert slot.gate.launch(tasklet)
        job.stream.run(tasklet)
        slot.gate.landed(tasklet)
        (ran,) = slot.gate.take_ran()
        assert ran.tasklet == tasklet
        assert ran.begin_ns < ran.end_ns
    assert {Phase.FORWARD, Phase.BACKWARD} <= set(answered)
    assert slot.cores.units[0] == 2
    assert slot.cores.units[-1] == 1  # fewer cores are taken in the middle of a layer, too
    assert bit_equal(adapter_of(job), expected)


def test_a_tasklet_that_is_longer_than_what_each_step_grants_runs_in_parts(untouched):
    sizing, expected = untouched
    slot, parts, passed, ran = Slot(), 0, 0, []

    def next_step() -> bool:
        """Runs while the worker is held up: decode's next step grants as much again."""
        nonlocal parts
        assert slot.offer.in_flight_us == 0
        parts += 1
        slot.give(action=Action.GO, finetune_units=1, budget_us=2_000)
        return False

    suspension = Suspension(slot.gate, StallWatch(), next_step)

    def point(*_) -> None:
        nonlocal passed
        passed += 1
        slot.now_ns += 1_500_000  # a stretch takes longer than half of what is granted
        suspension.point()

    job = job_with(point, sizing)
    while (tasklet := job.stream.peek()) is not None:
        for units in slot.cores.levels():
            slot.estimates.learn(tasklet, units, 6_000.0)
        slot.give(action=Action.GO, finetune_units=1, budget_us=2_000)
        assert slot.gate.launch(tasklet)
        job.stream.run(tasklet)
        slot.gate.landed(tasklet)
        slot.gate.take_ran()
        ran.append(tasklet.phase)
    assert {Phase.LOSS, Phase.OPTIMIZER} < {*ran}
    assert parts > passed // 3  # two stretches at most in each
    assert bit_equal(adapter_of(job), expected)


def test_a_gap_takes_a_part_of_a_tasklet_that_was_cut_for_more():
    slot = Slot()
    job = tiny_job()
    tasklet = job.stream.peek()
    for units in slot.cores.levels():
        slot.estimates.learn(tasklet, units, 60_000.0)

    def gap(us: int) -> bool:
        ends_ns = time.monotonic_ns() + slot.now_ns + us * 1000
        slot.give(
            action=Action.GO, finetune_units=1, gap_until_ns=ends_ns, in_flight_bound_us=10_000_000
        )
        return slot.gate.launch(tasklet)

    assert not gap(50_000)  # as long as the grant asks for: it is to fit whole
    slot.gate.quiet(tasklet)
    ends_ns = time.monotonic_ns() + slot.now_ns + 50_000_000
    slot.give(action=Action.GO, finetune_units=1, gap_until_ns=ends_ns, in_flight_bound_us=20_000)
    assert slot.gate.launch(tasklet)
    assert not slot.gate.revoked()
    slot.now_ns += 60_000_000
    assert slot.gate.revoked()


def test_a_grant_into_which_a_tasklet_has_run_is_used_by_so_much():
    slot = Slot()
    job = tiny_job()
    tasklet = job.stream.peek()
    for units in slot.cores.levels():
        slot.estimates.learn(tasklet, units, 6_000.0)
    slot.go(1)
    assert slot.gate.launch(tasklet)
    slot.give(action=Action.GO, finetune_units=1, budget_us=2_000)
    assert not slot.gate.revoked()  # has seen it
    slot.now_ns += 1_500_000
    assert not slot.gate.revoked()
    slot.gate.landed(tasklet)
    assert not slot.gate.launch(tasklet)  # half a millisecond is left: no part for that
    slot.give(action=Action.GO, finetune_units=1, budget_us=2_000)
    assert slot.gate.launch(tasklet)


def test_a_grant_that_a_tasklet_waited_for_is_charged_no_time_of_the_tasklet_before():
    slot = Slot()
    tasklet = tiny_job().stream.peek()
    for units in slot.cores.levels():
        slot.estimates.learn(tasklet, units, 12_000.0 / units)
    slot.go(1)
    assert slot.gate.launch(tasklet)
    slot.give(action=Action.GO, finetune_units=1, budget_us=20_000_000)
    assert not slot.gate.revoked()  # has seen it, and runs into it
    slot.now_ns += 15_000_000_000
    slot.gate.landed(tasklet)
    slot.go(2)
    assert slot.gate.launch(tasklet)
    assert slot.gate.active_units == 2
    slot.give(action=Action.GO, finetune_units=1, budget_us=10_000_000)
    assert slot.gate.revoked()  # it has to leave a core
    assert slot.gate.hold(lambda: False)
    slot.gate.landed(tasklet)
    assert slot.gate.launch(tasklet)  # of the new grant next to nothing is used


def test_the_longest_time_between_two_points_is_learned_without_what_was_waited():
    slot = Slot()
    tasklet = tiny_job().stream.peek()
    slot.gate.latest()
    for _ in range(SETTLED):
        slot.go(1)
        assert slot.gate.launch(tasklet)
        slot.estimates.learn(tasklet, 1, 1_000.0)
        for stretch_ms in (3_000, 8_000):
            slot.now_ns += stretch_ms * 1_000_000
            assert not slot.gate.revoked()
        slot.pause()
        assert slot.gate.revoked()

        def much_later() -> bool:
            slot.now_ns += 1_000_000_000
            slot.go(1)
            return False

        assert slot.gate.hold(much_later)
        slot.now_ns += 5_000_000_000
        slot.gate.landed(tasklet)
    longest_us = 1e12 / slot.estimates.tokens_to_stop_within(tasklet.phase, 1e12) * tasklet.tokens
    assert longest_us == pytest.approx(8e6, rel=0.04)  # a step of what follows it


def test_units_that_are_granted_in_the_middle_of_a_tasklet_are_taken_at_its_next_module(untouched):
    sizing, expected = untouched
    slot, passed, held = Slot(), 0, []

    def decode_goes_on() -> bool:
        held.append(slot.gate.active_units)
        slot.go(1)
        return False

    suspension = Suspension(slot.gate, StallWatch(), decode_goes_on)

    def point(*_) -> None:
        nonlocal passed
        passed += 1
        if passed == 2:  # decode idles
            slot.go(2)
        if passed == 4:  # and is back
            slot.epoch += 1
            slot.go(1)
        suspension.point()
        if passed == 2:
            assert slot.gate.active_units == 2

    job = job_with(point, sizing)
    while (tasklet := job.stream.peek()) is not None:
        slot.go(1)
        passed = 0
        assert slot.gate.launch(tasklet)
        job.stream.run(tasklet)
        slot.gate.landed(tasklet)
        (ran,) = slot.gate.take_ran()
        assert ran.grew == (passed >= 2)
        assert slot.estimates.estimate_us(tasklet, 2) == 0  # it has not run on two throughout
    assert set(slot.cores.units) == {1, 2}
    assert bit_equal(adapter_of(job), expected)


def test_units_that_would_be_of_no_use_are_not_taken_in_the_middle_either():
    slot = Slot()
    tasklet = tiny_job().stream.peek()
    for units in slot.cores.levels():
        for _ in range(SETTLED):
            slot.estimates.learn(tasklet, units, 6_000.0)
    slot.go(1)
    assert slot.gate.launch(tasklet)
    slot.go(2)
    assert not slot.gate.revoked()
    assert slot.gate.active_units == 1


def test_a_tasklet_that_waits_in_vain_is_given_up_and_offered_again():
    slot = Slot()
    suspension = Suspension(slot.gate, StallWatch(), lambda: True)
    points = []

    def point(*_) -> None:
        points.append(1)
        if len(points) == 3:
            slot.pause()
        suspension.point()

    job = job_with(point, Windows(1000))
    slot.go(1)
    tasklet = job.stream.peek()
    assert slot.gate.launch(tasklet)
    with pytest.raises(BrokenOff):
        job.stream.run(tasklet)
    job.stream.break_off(tasklet)
    assert slot.offer.in_flight_us == 0
    assert job.stream.peek() == tasklet
    assert not slot.gate.launch(tasklet)


def test_a_grant_that_comes_while_the_worker_says_it_is_quiet_is_not_slept_over():
    slot = Slot()
    job = tiny_job()
    tasklet = job.stream.peek()
    slot.pause()
    assert not slot.gate.launch(tasklet)
    slot.go(1)
    slot.gate.quiet(tasklet)
    slot.gate.wait(300.0)  # longer than a test may take
    assert slot.gate.launch(tasklet)


def test_a_job_that_left_the_device_in_the_middle_of_a_step_learns_the_same(untouched):
    sizing, expected = untouched
    job, n = tiny_job(sizing=sizing, micro_batches=2), 0
    while (tasklet := job.stream.peek()) is not None:
        job.stream.run(tasklet)
        n += 1
        if n in (3, 10, 20, 41):
            job.stream.move_buffers(to_host=True)
            job.stream.move_buffers(to_host=False)
    assert n > 41
    assert bit_equal(adapter_of(job), expected)
