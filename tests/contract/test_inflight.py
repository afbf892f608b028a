"""Check what a worker has in flight on a device that queues stays within the bound of its grant."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.queueing_device import QueueingDevice, Reached

from windrow_sidecar._core import Arena, Geometry
from windrow_sidecar.compute.whole_device import WholeDevice
from windrow_sidecar.finetune.colocated.grants import GrantGate, OfferFacts
from windrow_sidecar.finetune.engine.group_progress import tasklet_of
from windrow_sidecar.finetune.engine.sizing import Estimates, Paced
from windrow_sidecar.finetune.job.gate import OpenGate
from windrow_sidecar.finetune.tasklets import MicroBatch
from windrow_sidecar.qos.view import Action, Grant, Offer, Phase
from windrow_sidecar.testing.tinyjob import tiny_job

pytestmark = pytest.mark.usefixtures("one_thread")
UNITS, BOUND_US, TAKES_US = 8, 10_000, 4_000


class Slot:
    """The page, and a worker's gate in front of a device that queues."""

    def __init__(self) -> None:
        geometry = Geometry(
            layers=1, kv_heads=1, head_dim=32, dtype_bytes=4, block_bytes=4096, chunks=2
        )
        self.arena = Arena.create(geometry, reserved_chunks=1)
        self.device, self.estimates = QueueingDevice(), Estimates()
        self.epoch = 0
        self.gate = GrantGate(
            self.arena.page,
            WholeDevice("finetune", UNITS),
            self.estimates,
            lambda: OfferFacts(1),
            decode_lives=lambda: True,
            device=self.device,
            clock=self.device.clock,
        )

    def give(self, action: Action, bound_us: int = BOUND_US, **fields) -> None:
        decision = Grant(
            action, UNITS, in_flight_bound_us=bound_us, pause_epoch=self.epoch, **fields
        )
        self.arena.page.beat(0)
        self.arena.page.publish_grant(decision)

    def pause(self) -> None:
        self.epoch += 1
        self.give(Action.PAUSE)

    @property
    def offer(self) -> Offer:
        return Offer._make(self.arena.page.read_offer())


@pytest.fixture
def slot() -> Iterator[Slot]:
    made = Slot()
    yield made
    made.arena.close()


@pytest.fixture(scope="module")
def forward():
    tasklet = tiny_job().stream.peek()
    assert tasklet.phase is Phase.FORWARD
    return tasklet


def test_a_worker_that_shares_in_time_only_takes_the_whole_device_or_nothing(slot, forward):
    """Decode that shares in space grants parts beside its steps, and the whole while it idles."""
    slot.give(Action.GO)
    assert slot.gate.launch(forward)
    slot.arena.page.publish_grant(Grant(Action.GO, UNITS - 1, in_flight_bound_us=BOUND_US))
    assert slot.gate.revoked(), "what runs on all of it ends where only a part is granted"
    slot.gate.landed(forward)
    slot.gate.quiet(forward)
    assert not slot.gate.launch(forward)
    assert slot.offer.in_flight_us == 0
    slot.give(Action.GO)
    assert slot.gate.launch(forward)


def test_the_next_tasklet_is_queued_behind_the_one_that_runs_and_no_more_than_the_bound(
    slot, forward
):
    slot.estimates.learn(forward, UNITS, TAKES_US)
    slot.give(Action.GO)
    most = 0
    for n in range(20):
        assert slot.gate.launch(forward)
        slot.device.work(TAKES_US)
        slot.gate.landed(forward)
        most = max(most, slot.device.queued_ns)
        assert slot.device.queued_ns <= BOUND_US * 1e3
        assert slot.offer.in_flight_us <= BOUND_US
        if n >= 1:
            assert slot.device.queued_ns > TAKES_US * 1e3, "the device never runs dry"
    assert most == 2 * TAKES_US * 1e3


def test_what_was_never_measured_runs_alone(slot, forward):
    slot.give(Action.GO)
    for _ in range(3):
        assert slot.gate.launch(forward)
        assert slot.device.queued_ns == 0
        slot.device.work(TAKES_US)
        slot.gate.landed(forward)
        slot.estimates = Estimates()
        slot.gate._estimates = slot.estimates  # nothing is learnt


@pytest.mark.parametrize("host_us", [500, 2_000, 5_300])
@pytest.mark.parametrize("bound_us", [2_500, 10_000, 50_000])
def test_tasklets_that_are_mostly_queueing_are_queued_behind_others_within_the_bound(
    slot, bound_us, host_us
):
    """As long as both counted together, no two fitted the bound; decode waits for kernels alone.

    The device is slower than the host: it lags behind by as much as it is let.
    """
    slot.give(Action.GO, bound_us=bound_us)
    empty, modules, warm, begun = 0, 10, 50, 250
    for n in range(warm + begun):
        slot.arena.page.beat(0)
        tokens = Paced(slot.estimates, bound_us // 2, UNITS, queues=True).tokens(Phase.FORWARD)
        row = MicroBatch(0, (0,), (tokens,))
        tasklet = tasklet_of(Phase.FORWARD, row, 0, row.whole)
        assert slot.gate.launch(tasklet)
        empty += n >= warm and slot.device.queued_ns == 0
        for _ in range(modules):
            slot.device.now_ns += host_us * 1000 // modules
            slot.device.work(2 * tokens / modules)
            assert slot.device.queued_ns <= bound_us * 1e3
        slot.gate.landed(tasklet)
    assert empty <= 0.05 * begun


def test_of_a_tasklet_behind_another_all_time_is_that_of_its_kernels(slot, forward):
    slot.estimates.learn(forward, UNITS, TAKES_US)
    slot.give(Action.GO)
    for _ in range(2):
        slot.gate.launch(forward)
        slot.device.now_ns += 1_000_000
        slot.device.work(TAKES_US)
        slot.device.now_ns += 1_000_000
        slot.gate.landed(forward)
    slot.gate.quiet(None)
    first, second = slot.gate.take_ran()
    assert [ran.queued_ns for ran in (first, second)] == [2_000_000] * 2
    assert first.overlap_ns == 2_000_000, (
        "the device waited for the host, and then worked beside it"
    )
    assert second.overlap_ns == 0


def test_how_long_the_host_took_to_queue_a_tasklet_is_noted(slot, forward):
    slot.give(Action.GO)
    for queued_us in (500, TAKES_US):
        assert slot.gate.launch(forward)
        slot.device.work(TAKES_US / 10)
        slot.device.now_ns += queued_us * 1000
        slot.gate.landed(forward)
    slot.gate.quiet(None)
    assert [ran.queued_ns for ran in slot.gate.take_ran()] == [500_000, TAKES_US * 1000]


def test_on_a_device_that_does_not_queue_nothing_is_noted(forward):
    gate = OpenGate(1)
    gate.launch(forward)
    gate.landed(forward)
    assert [ran.queued_ns for ran in gate.take_ran()] == [0]


def test_times_are_the_devices_own_not_those_of_queueing(slot, forward):
    slot.estimates.learn(forward, UNITS, TAKES_US)
    slot.give(Action.GO)
    for _ in range(2):
        slot.gate.launch(forward)
        slot.device.work(TAKES_US)
        slot.gate.landed(forward)
    slot.gate.quiet(None)
    first, second = slot.gate.take_ran()
    assert [ran.end_ns - ran.begin_ns for ran in (first, second)] == [TAKES_US * 1000] * 2
    assert first.end_ns == second.begin_ns
    assert slot.gate.take_ran() == []


def test_a_device_is_asked_for_a_time_once_however_many_ask_for_it(slot, forward, monkeypatch):
    asked: list[int] = []
    at_ns = Reached.at_ns
    monkeypatch.setattr(Reached, "at_ns", lambda self: asked.append(1) or at_ns(self))
    slot.give(Action.GO)
    slot.gate.launch(forward)
    slot.device.work(TAKES_US)
    slot.gate.landed(forward)
    slot.gate.quiet(None)
    (ran,) = slot.gate.take_ran()
    assert [ran.end_ns - ran.begin_ns for _ in range(3)] == [TAKES_US * 1000] * 3
    assert ran.overlap_ns == 0
    assert len(asked) == 2, "of its begin and of its end"


def test_an_offer_has_the_worker_s_facts_and_the_tasklet_s(slot):
    micro = MicroBatch(0, (0,), (16,))
    forward = tasklet_of(Phase.FORWARD, micro, 1, micro.whole)
    facts = OfferFacts(
        3,
        wanted_chunks=4,
        held_chunks=2,
        tokens_done=700,
        starving=True,
        bytes_per_token=10,
        window_bytes_per_token=1000,
        resident_layers=6,
    )
    slot.gate._facts = lambda: facts
    slot.estimates.learn(forward, UNITS, TAKES_US)
    slot.epoch = 5
    slot.give(Action.GO)
    assert slot.gate.launch(forward)
    common = Offer(
        job_epoch=3,
        starving=1,
        pause_epoch_seen=5,
        wanted_chunks=4,
        held_chunks=2,
        tokens_done=700,
        resident_layers=6,
    )
    levels = len(common.estimates_us)
    assert slot.offer._replace(heartbeat_ns=0) == common._replace(
        phase=Phase.FORWARD,
        layer_begin=forward.layer,
        layer_end=forward.layer_end,
        tokens=forward.tokens,
        estimates_us=(TAKES_US,) + (0,) * (levels - 1),
        memory_delta_bytes=10 * forward.tokens,
        in_flight_us=TAKES_US,
    )
    slot.gate.landed(forward)
    slot.gate.quiet(None)
    assert slot.offer._replace(heartbeat_ns=0) == common._replace(tasklet_id=1)


def test_a_pause_is_over_within_the_bound_and_quiet_is_said_after_it(slot, forward):
    slot.estimates.learn(forward, UNITS, TAKES_US)
    slot.give(Action.GO)
    for _ in range(2):
        slot.gate.launch(forward)
        slot.device.work(TAKES_US)
        slot.gate.landed(forward)
    slot.pause()
    paused_ns = slot.device.now_ns
    assert not slot.gate.launch(forward)
    assert slot.offer.in_flight_us > 0, "it is not over yet"
    slot.gate.quiet(forward)
    assert slot.device.queued_ns == 0
    assert slot.device.now_ns - paused_ns <= BOUND_US * 1e3
    assert (slot.offer.in_flight_us, slot.offer.pause_epoch_seen) == (0, slot.epoch)


def test_a_pause_in_the_middle_of_a_tasklet_waits_for_what_is_queued_of_it(slot, forward):
    slot.estimates.learn(forward, UNITS, TAKES_US)
    slot.give(Action.GO)
    slot.gate.launch(forward)
    slot.device.work(TAKES_US / 2)
    slot.pause()
    assert slot.gate.revoked()

    def decode_answers() -> bool:
        assert slot.device.queued_ns == 0
        assert slot.offer.in_flight_us == 0
        slot.device.now_ns += 7_000_000  # so long it was held up
        slot.give(Action.GO)
        return False

    assert slot.gate.hold(decode_answers)
    slot.device.work(TAKES_US / 2)
    slot.gate.landed(forward)
    slot.gate.quiet(None)
    (ran,) = slot.gate.take_ran()
    assert ran.end_ns - ran.begin_ns == TAKES_US * 1000
    assert ran.held_up


def test_a_budget_counts_what_is_in_flight_as_estimated_and_what_has_ended_as_it_was(slot, forward):
    slot.estimates.learn(forward, UNITS, TAKES_US)
    slot.give(Action.GO, budget_us=3 * TAKES_US)
    launched = 0
    while slot.gate.launch(forward):
        slot.device.work(TAKES_US / 2)  # half of what was thought
        slot.gate.landed(forward)
        slot.gate.quiet(forward)
        launched += 1
        slot.estimates._levels.clear()
        slot.estimates.learn(forward, UNITS, TAKES_US)
    # 4 + 4 fit as estimated; as they were they took 2 each, so more did.
    assert launched == 5


def test_between_two_steps_of_decode_only_what_ends_before_the_next_one_is_launched(slot, forward):
    slot.estimates.learn(forward, UNITS, TAKES_US)
    gap_ns = slot.device.now_ns + 3 * TAKES_US * 1000 - 1
    slot.give(Action.GO, gap_until_ns=gap_ns)
    launched = 0
    while slot.gate.launch(forward):
        slot.device.work(TAKES_US)
        slot.gate.landed(forward)
        launched += 1
    slot.gate.quiet(forward)
    assert launched == 2
    assert slot.device.now_ns <= gap_ns
    slot.give(Action.GO, gap_until_ns=slot.device.now_ns + TAKES_US * 1000)
    assert slot.gate.launch(forward)


def test_a_tasklet_that_takes_longer_than_was_thought_is_suspended_when_the_step_begins(
    slot, forward
):
    slot.estimates.learn(forward, UNITS, TAKES_US)
    slot.give(Action.GO, gap_until_ns=slot.device.now_ns + TAKES_US * 1000)
    assert slot.gate.launch(forward)
    assert not slot.gate.revoked()
    slot.device.now_ns += TAKES_US * 1000 + 1
    assert slot.gate.revoked()
    slot.give(Action.GO, gap_until_ns=slot.device.now_ns + TAKES_US * 1000)
    assert not slot.gate.revoked()


def test_alone_nothing_bounds_what_is_queued_and_quiet_waits_for_all_of_it(forward):
    device = QueueingDevice()
    gate = OpenGate(4, device)
    for _ in range(5):
        assert gate.launch(forward)
        device.work(TAKES_US)
        gate.landed(forward)
    assert gate.take_ran() == []
    gate.quiet(None)
    ran = gate.take_ran()
    assert [r.units for r in ran] == [4] * 5
    assert ran[-1].end_ns == 5 * TAKES_US * 1000
