"""SGLang's KV pools in an arena hold what they hold in memory of their own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from support.sglang_servers import PYTHON


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    result = tmp_path_factory.mktemp("pools") / "result.json"
    program = str(Path(__file__).parent / "pool_process.py")
    ran = subprocess.run(
        [str(PYTHON), program, str(result)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert result.exists(), ran.stderr[-4000:]
    return json.loads(result.read_text())


@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("kind", ["heads", "latent"])
def test_kv_of_heads_and_of_latent_attention_is_the_same_in_16_and_in_8_bits(played, kind, dtype):
    found = played[f"{kind}, {dtype}"]
    n_bytes = 2 if dtype == "bf16" else 1
    # Three layers of one vector lie in two pairs.
    numbers = 3 * 2 * 2 * 16 if kind == "heads" else 2 * 2 * 32
    assert found == {
        "same": True,
        "inside": True,
        "infos": True,
        "dtype_bytes": n_bytes,
        "token_bytes": numbers * n_bytes,
        "whole_pages": True,
        "tokens": True,
    }
