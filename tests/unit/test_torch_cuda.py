"""Check why torch sees no GPU is said with the versions, and with which of them to change."""

from __future__ import annotations

import pytest

from benchmarks.first_light import in_time_only
from windrow_sidecar.torch_cuda import TorchCuda


def found(*, built_for="13.2", driver="13.0", gpus=0, visible=None) -> TorchCuda:
    return TorchCuda("2.15.0", built_for, driver, gpus, visible)


def test_with_a_gpu_nothing_is_missing():
    assert found(gpus=2).missing == ""


@pytest.mark.parametrize(
    ("torch", "why", "remedy"),
    [
        (found(built_for="", driver="13.0"), "built without CUDA", "Install a torch"),
        (found(driver=""), "CUDA 13.2, there is no driver", "R580 or newer, or give the container"),
        (found(driver="12.5"), "the driver's CUDA is 12.5", "built for CUDA 12."),
        (found(built_for="12.8", driver="11.8"), "CUDA 12.8", "Update NVIDIA's driver to R525"),
        # A minor version more than the driver's runs.
        (found(visible="7"), "CUDA_VISIBLE_DEVICES is '7'", "Let CUDA_VISIBLE_DEVICES name"),
    ],
)
def test_what_is_missing_is_said_with_what_to_do(torch, why, remedy):
    assert why in torch.missing
    assert remedy in torch.remedy


def test_first_light_says_what_it_leaves_out_without_mps():
    said = in_time_only("nvidia-cuda-mps-control is not on PATH")
    assert "nvidia-cuda-mps-control is not on PATH" in said
    assert "`windrow` are left out" in said
