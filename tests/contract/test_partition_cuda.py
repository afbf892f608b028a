"""Shares of SMs through the same calls as shares of cores, over the stand-in and over a GPU."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from windrow.errors import UserError
from windrow_sidecar import _core
from windrow_sidecar.compute.cuda import CudaPartition
from windrow_sidecar.compute.partition import UnknownLevel
from windrow_sidecar.compute.sharing import GpuCapabilities, choose_sharing
from windrow_sidecar.finetune.standalone.dedicated import take_units
from windrow_sidecar.qos.levels import GPU_SHARES, gpu_shares


@pytest.fixture(params=["cuda_standin", pytest.param("gpu", marks=pytest.mark.gpu)])
def sides(request) -> tuple[CudaPartition, CudaPartition]:
    """Decode's and the worker's, as two processes would make them."""
    request.getfixturevalue(request.param)
    decode, worker = (CudaPartition(s, use_stream=lambda _: None) for s in ("decode", "finetune"))
    return decode, worker


def test_the_worker_has_few_levels_of_whole_groups_and_leaves_decode_one(sides):
    _, worker = sides
    *shared, whole = worker.levels()
    assert 1 <= len(shared) <= GPU_SHARES
    group_units = _core.driver("cuda").partition().group_units
    assert {units % group_units for units in shared} == {0}
    assert shared[-1] < whole == worker.total_units


@pytest.mark.parametrize(
    ("groups", "shares"),
    [
        (2, (1,)),
        (3, (1, 2)),
        (4, (1, 2, 3)),
        (16, (2, 8, 10, 11, 12, 13, 14, 15)),
        (27, (3, 14, 16, 18, 20, 22, 24, 26)),
    ],
)
def test_shares_lie_where_decode_has_up_to_half_of_the_groups(groups, shares):
    assert gpu_shares(groups) == shares


def test_every_level_and_its_complement_run_on_different_sms(sides):
    decode, worker = sides
    for units in worker.levels()[:-1]:
        ours, theirs = worker.measure(units), decode.measure(decode.total_units - units)
        assert len(ours) == units
        assert choose_sharing(GpuCapabilities("", "", "green", theirs, ours)).mode == "spatial"


def test_the_whole_device_is_every_sm(sides):
    for partition in sides:
        assert len(partition.measure(partition.total_units)) == partition.total_units


def test_each_share_keeps_its_one_stream(sides):
    streams: list[int] = []
    worker = CudaPartition("finetune", use_stream=streams.append)
    low, high = worker.levels()[:2]
    for units in (low, high, low):
        worker.activate(units)
    assert streams[0] == streams[2] != streams[1]


def test_sms_that_make_no_group_are_no_level(sides):
    for partition in sides:
        with pytest.raises(UnknownLevel):
            partition.activate(3)


def test_an_event_of_the_device_may_be_recorded_on_the_stream_of_any_share(request, sides):
    """As torch records them: made by itself, first used on one share and then on another."""
    streams: list[int] = []
    worker = CudaPartition("finetune", use_stream=streams.append)
    for units in worker.levels()[:2]:
        worker.activate(units)
    is_real = request.node.callspec.params["sides"] == "gpu"
    libcuda = ctypes.CDLL("libcuda.so.1" if is_real else str(request.getfixturevalue("standin")))

    def second(name: str) -> Callable[..., int]:
        """Return a call by the name that cuda.h gives it; the stand-in has the plain one alone."""
        return getattr(libcuda, f"{name}_v2" if is_real else name)

    event, context = ctypes.c_void_p(), ctypes.c_void_p()
    assert libcuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert second("cuCtxPushCurrent")(context) == 0
    assert libcuda.cuEventCreate(ctypes.byref(event), 0) == 0
    for stream in streams:
        assert libcuda.cuEventRecord(event, ctypes.c_void_p(stream)) == 0
        assert libcuda.cuEventSynchronize(event) == 0
    assert second("cuEventDestroy")(event) == 0
    assert second("cuCtxPopCurrent")(ctypes.byref(context)) == 0
    second("cuDevicePrimaryCtxRelease")(0)


LETTER = """
import sys
from windrow_sidecar import _core
from windrow_sidecar.compute.sharing import green_missing
_core.use_libcuda(sys.argv[1])
print(green_missing("cuda"))
"""


def test_a_driver_that_keeps_torchs_events_from_shares_is_shared_in_time(standin):
    """It would refuse torch's first event on a share: found out before anybody computes there."""
    said = subprocess.run(
        [sys.executable, "-c", LETTER, str(standin)],
        env=os.environ | {"WINDROW_STANDIN_GREEN_EVENTS": "0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "keeps events of the primary context from streams of green contexts" in said.stdout
    assert "CUDA_ERROR_INVALID_HANDLE" in said.stdout


def test_units_that_are_no_level_are_told_with_the_levels_and_no_word_of_decode(cuda_standin):
    device = SimpleNamespace(torch=torch.device("cuda"), name="cuda")
    with pytest.raises(UserError, match=r"its levels here are 16, .* Choose one of them") as error:
        take_units(device, 63)
    assert "decode" not in str(error.value)


def test_a_machine_without_a_gpu_is_told_what_to_do():
    _core.use_libcuda("libcuda-that-is-not-there.so")
    try:
        with pytest.raises(UserError, match="Share the GPU in time") as error:
            CudaPartition("decode")
    finally:
        _core.use_libcuda("libcuda.so.1")
    assert error.value.reason == "NoGreenContexts"
