"""Check what is loaded is left alone by Python's collector, and freed all the same at the end."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from windrow_sidecar.heap import settle_heap


def test_what_has_been_loaded_is_walked_no_more():
    loaded = [[]]
    settle_heap()
    assert not any(seen is loaded for seen in gc.get_objects())
    gc.unfreeze()
    assert any(seen is loaded for seen in gc.get_objects())


def test_a_process_that_settled_its_heap_ends_without_a_word_of_leaks():
    pytest.importorskip("triton")
    ends = "import triton; from windrow_sidecar.heap import settle_heap; settle_heap()"
    done = subprocess.run([sys.executable, "-c", ends], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
