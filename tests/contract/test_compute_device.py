"""One suite for every device that a worker computes on: the host, and a GPU where there is one."""

from __future__ import annotations

import time

import pytest
import torch
from support.queueing_device import QueueingDevice

from windrow.errors import UserError
from windrow_sidecar.compute.device import ComputeDevice
from windrow_sidecar.compute.finding import find_device
from windrow_sidecar.testing.rounding import apart, in_type_of
from windrow_sidecar.testing.tinyjob import adapter_of, finish, tiny_job, tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> ComputeDevice:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return find_device(request.param)


def some_work(device: ComputeDevice) -> torch.Tensor:
    x = torch.ones(256, 256, device=device.torch)
    for _ in range(20):
        x = x @ x / 256
    return x


def test_it_is_found_again_by_its_own_name(device):
    assert find_device(device.name).torch == device.torch
    assert torch.empty(1, device=device.torch).device.type == device.torch.type


def test_it_has_memory_and_units(device):
    assert device.free_bytes() > 1 << 20
    assert device.total_units() >= 1


def test_a_mark_is_reached_when_what_was_queued_before_it_has_ended(device):
    some_work(device)
    mark = device.mark()
    mark.wait()
    assert mark.done()


def test_marks_have_times_of_the_hosts_clock_in_their_order(device):
    device.mark().wait()  # what the first one makes
    before_ns = time.monotonic_ns()
    begin = device.mark()
    some_work(device)
    end = device.mark()
    assert before_ns - 1_000_000 <= begin.at_ns() <= end.at_ns()
    assert end.at_ns() <= time.monotonic_ns() + 1_000_000
    assert begin.at_ns() == begin.at_ns()


def test_copies_come_after_a_mark_and_before_what_is_held_back(device):
    copies = device.copies()
    source = device.host_copy(4096).fill_(7)
    room = torch.zeros(4096, dtype=torch.uint8, device=device.torch)
    copies.after(device.mark())
    copies.start(room, source)
    arrived = copies.mark()
    copies.hold_back(arrived)
    assert int((room + 1).sum()) == 8 * 4096
    arrived.wait()
    assert arrived.done()


def test_a_job_learns_there_what_it_learns_on_the_host(device):
    learnt = []
    for at in (torch.device("cpu"), device.torch):
        base = tiny_llama().double().to(at)
        with in_type_of(base):
            job = tiny_job(base=base)
            finish(job)
        learnt.append({name: tensor.cpu() for name, tensor in adapter_of(job).items()})
    assert apart(learnt[1], learnt[0]).by_rounding


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", ""])
def test_what_is_no_device_is_refused_by_name(name):
    with pytest.raises(UserError, match="Write cpu, cuda, or cuda:N"):
        find_device(name)


def test_a_gpu_that_torch_does_not_see_is_refused_with_what_to_do():
    missing = torch.cuda.device_count()
    with pytest.raises(UserError, match="sees") as error:
        find_device(f"cuda:{missing}")
    assert error.value.reason == "NoCudaDevice"


def test_a_graph_made_on_more_units_than_are_left_is_made_again():
    """torch runs a backward on the stream of its forward; so the share would not be kept."""
    plain = tiny_job()
    finish(plain)
    launched: list[int] = []
    share = 0

    def units() -> int:
        return share

    job = tiny_job(units=units)
    layers = job.stream.parts.stack.layers
    layers[0].register_forward_hook(lambda *_: launched.append(share))
    while (tasklet := job.stream.peek()) is not None:
        share = 4 if tasklet.phase.name == "FORWARD" else 2
        job.stream.run(tasklet)
    assert {2, 4} == set(launched)
    ours = adapter_of(job)
    assert all(torch.equal(ours[name], values) for name, values in adapter_of(plain).items())


def test_the_simulated_device_ends_work_when_somebody_waits():
    device = QueueingDevice()
    device.work(30)
    mark = device.mark()
    device.work(20)
    assert not mark.done()
    mark.wait()
    assert (mark.done(), device.now_ns, device.queued_ns) == (True, 30_000, 20_000)
