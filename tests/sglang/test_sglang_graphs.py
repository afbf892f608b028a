"""SGLang's decode is confined to a share of a GPU's SMs by replaying graphs captured for it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from support.sglang_servers import PYTHON


@pytest.fixture
def found(standin) -> dict:
    """Return what SGLang's own runner captured and would replay, over the stand-in for a GPU."""
    program = Path(__file__).parent / "graph_runner_process.py"
    done = subprocess.run(
        [PYTHON, program, standin], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_sglang_captures_each_batch_size_for_each_share_and_replays_the_chosen_one(found):
    levels = found["levels"]
    assert len(levels) > 2
    captured = found["captured"]
    # The whole device first: it has the largest buffers. SGLang takes large batches first.
    assert [(c["share"], c["size"]) for c in captured] == [
        (level, size) for level in reversed(levels) for size in (2, 1)
    ]
    streams = {c["share"]: c["stream"] for c in captured}
    assert len(set(streams.values())) == len(levels), "two shares were captured on one stream"
    assert all(c["stream"] == streams[c["share"]] for c in captured)
    # Models overlap kernels on a stream of the whole device: not while a share is captured.
    sides = {c["share"]: c["side_stream"] for c in captured}
    assert sides == {level: "side" if level == levels[-1] else None for level in levels}
    assert found["side_stream"] == "side"
    # Attention's plan is the one of the graph's own capture.
    assert all(c["shared_plans"] == ["page_table"] for c in captured)
    for level, replay in zip([*levels, levels[0]], found["replays"], strict=True):
        assert replay == {"share": level, "plan": f"plan of 2 for {level}"}


def test_the_worker_has_what_decodes_share_leaves(found):
    whole = found["levels"][-1]
    assert found["splits"][0] == [0, whole]
    assert [decode for _, decode in found["splits"]] == [*reversed(found["levels"])]
    assert all(worker + decode == whole for worker, decode in found["splits"])
