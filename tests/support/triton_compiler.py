"""Compile Triton's kernels in a process of their own: in the tests' own, Triton interprets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# Of a Hopper GPU.
SHARED_BYTES_OF_AN_SM = 227 << 10


def compiled_by(code: str, cache: Path) -> dict[str, dict[str, Any]]:
    """Run code that compiles kernels and prints what it found of each, as JSON; returns that.

    Args:
        code: of Python.
        cache: an empty directory, so that everything is compiled.
    """
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environ | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found
