"""The libraries by which a prefill instance sends KV register an arena's memory, over loopback."""

from __future__ import annotations

import os
import subprocess

import pytest
from support.sglang_servers import OVER_TCP, PYTHON, require_transfer

from windrow_sidecar.engines.sglang.transfers import RangeProbe


def probe(backend: str) -> RangeProbe:
    """Return the plugin's probe, in SGLang's environment and on the memory of cores."""
    module = "windrow_sidecar.engines.sglang.transfer_probe"
    command = [str(PYTHON), "-m", module, f"--backend={backend}", "--device=cpu"]
    return RangeProbe(command, {**os.environ, **OVER_TCP})


def test_mooncake_registers_a_range_of_the_arena():
    require_transfer()
    probe("mooncake").check()


def test_nixl_registers_a_range_of_the_arena():
    # SGLang's environment here is without it: 235 MB for one test. By hand: nixl and nixl-cu13.
    if subprocess.run([PYTHON, "-c", "import nixl._api"], capture_output=True).returncode:
        pytest.skip("NIXL is not installed in SGLang's environment")
    probe("nixl").check()
