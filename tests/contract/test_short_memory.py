"""No group begins that memory does not hold, whatever was free when it was formed."""

from __future__ import annotations

import pytest
from support.examplejob import example_job

from windrow.conditions import Reason
from windrow_sidecar.compute.host_device import HostDevice
from windrow_sidecar.finetune.job.failures import failure
from windrow_sidecar.finetune.memory.training_memory import OwnMemory
from windrow_sidecar.finetune.standalone.dedicated import open_alone

pytestmark = pytest.mark.usefixtures("one_thread")


class Machine(HostDevice):
    """The host, on which a test says what is free, and what a release of caches frees."""

    def __init__(self) -> None:
        super().__init__()
        self.free, self.cached = 1 << 40, 0

    def free_bytes(self) -> int:
        return self.free

    def release_caches(self) -> None:
        self.free, self.cached = self.free + self.cached, 0


@pytest.fixture
def alone(tmp_path):
    """A machine, and a job on it of which one group of several rows is next."""
    machine = Machine()
    session = open_alone(example_job(tmp_path), machine)
    assert session.stream.peek().micro.tokens
    return machine, session, OwnMemory(session.stream, activation_budget=session.activation_budget)


def least(machine, session, tokens: int) -> int:
    """Return what a group of so many tokens takes, found by asking."""
    low, high = 0, 1 << 40
    while low < high:
        machine.free = (low + high) // 2
        fits = session.activation_budget.fits(tokens)
        low, high = (low, machine.free) if fits else (machine.free + 1, high)
    return low


def test_a_group_that_fits_no_more_is_formed_anew_and_smaller(alone):
    machine, session, memory = alone
    stream = session.stream
    formed = stream.tokens_to_begin
    assert formed > session.longest_row
    machine.free = least(machine, session, session.longest_row)
    memory.settle()
    assert not memory.starving(stream.peek())
    assert stream.tokens_to_begin <= session.longest_row


def test_a_row_that_does_not_fit_ends_the_job_with_the_bytes(alone):
    machine, session, memory = alone
    machine.free = 1000
    memory.settle()
    tasklet = session.stream.peek()
    with pytest.raises(MemoryError, match=r"takes \d{5,} bytes at least, 1000 are free") as caught:
        memory.starving(tasklet)
    assert failure(caught.value, "")[0].reason is Reason.OUT_OF_MEMORY


def test_what_the_process_holds_unused_is_given_back_before_anything_is_refused(alone):
    machine, session, memory = alone
    machine.free, machine.cached = 0, 1 << 40
    assert not memory.starving(session.stream.peek())
    assert machine.cached == 0


def test_a_group_that_has_begun_goes_on(alone):
    machine, session, memory = alone
    session.stream.run(session.stream.peek())
    machine.free = 0
    memory.settle()
    assert session.stream.tokens_to_begin == 0
    assert not memory.starving(session.stream.peek())
