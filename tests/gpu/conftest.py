"""Tests that need a GPU are skipped with the reason where there is none."""

import pytest
import torch

from windrow_sidecar import _core


@pytest.fixture(autouse=True)
def gpu() -> None:
    try:
        _core.driver("cuda")
    except _core.DriverUnavailable as error:
        pytest.skip(f"no GPU: {error}")
    if not torch.cuda.is_available():
        pytest.skip("this torch was built without CUDA")
