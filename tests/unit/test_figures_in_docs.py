"""Figures that the documentation gives of waits, bounds and limits are those of the code."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import windrow_cli as cli
from windrow_lab.demo import run as demo
from windrow_operator import budget, job_steps, slots, webhook
from windrow_operator.lease import LeaseTimes
from windrow_sidecar.agent.settings import AgentSettings
from windrow_sidecar.engines.harvest.settings import HarvestSettings
from windrow_sidecar.engines.sglang import compat, learning
from windrow_sidecar.engines.streaming import copying
from windrow_sidecar.finetune.colocated import agent_link, loading
from windrow_sidecar.finetune.job import multiplexer
from windrow_sidecar.finetune.training import health
from windrow_sidecar.memory.geometry import Geometry
from windrow_sidecar.qos import terms
from windrow_sidecar.qos.guard import GuardSettings
from windrow_sidecar.qos.policies import FIGURES


def default(of: type, name: str) -> Any:
    return next(field.default for field in fields(of) if field.name == name)


ROOT = Path(__file__).parents[2]
STEADY_MS = default(HarvestSettings, "steady_ns") / 1e6
GRACE_S = default(AgentSettings, "grace_s")
GUARD, NORM = GuardSettings(), health.NormLimits()
# The look that misses the agent for the first time is not counted (see `agent_link`).
SILENCE_S = agent_link.SILENT_AFTER_S + 3 * agent_link.LOOK_EVERY_S
CSRC = {
    name: int(
        re.search(rf"{name} = ([\d']+)", (ROOT / "csrc" / path).read_text())[1].replace("'", "")
    )
    for name, path in (
        ("kMostPeers", "src/server.cpp"),
        ("kFdsPerMessage", "include/windrow/socket.h"),
        ("kMostIdleBlocks", "src/alias_cache.cpp"),
    )
}
SAID = {
    "docs/quickstart/laptop.md": [
        f"0 done, {cli.EXIT_FAILED} failed, {cli.EXIT_USAGE} correct the input, "
        f"{cli.EXIT_TRANSIENT} unreachable now, 130 interrupted",
    ],
    "docs/finetuning.md": [
        f"has said nothing for {SILENCE_S:.0f} seconds writes a checkpoint",
        f"within the grace ({GRACE_S:.0f} s)",
        f"three steps in a row with a norm above {NORM.factor:.0f} times the median of the last "
        f"{NORM.window}",
        f"switching costs {100 / multiplexer.TURN_PER_SWITCH:.0f}% at most",
    ],
    "docs/memory.md": [
        f"hears nothing of it for {SILENCE_S:.0f} seconds",
        f"at most {CSRC['kFdsPerMessage']} descriptors a message and {CSRC['kMostPeers']} "
        "connections",
    ],
    "docs/allocator.md": [f"or {CSRC['kMostIdleBlocks']:,} blocks idle"],
    "docs/policies.md": [
        f"needs {FIGURES['grow_headroom']:.0%} of headroom",
        f"over {FIGURES['slack_steps']:g} steps at least",
        f"worth at least {FIGURES['part_gain'] - 1:.0%} more",
        f"wait for a place in decode for {GUARD.queue_us / 1e3:.0f} ms pause",
        f"pause the worker for {GUARD.pause_ns / 1e6:.0f} ms and widen the margin by "
        f"{GUARD.widen * 100:.0f} points",
        f"fade by half every {GUARD.widen_half_life_ns / 1e9:.0f} s",
        f"opens for {GUARD.first_break_ns / 1e9:.0f} s (twice as long each time, "
        f"{GUARD.longest_break_ns / 1e9:.0f} s at most)",
        f"widen the margin by {FIGURES['beyond_margin'] * 100:.0f} points until "
        f"{FIGURES['seen_often']} such steps",
        f"`spec.objective.deferralBound`, {terms.DEFAULT_DEFERRAL_US / 1e3:.0f} ms by default",
    ],
    "docs/runbooks/breaker-open.md": [
        f"({GUARD.first_break_ns / 1e9:.0f} s, doubled up to {GUARD.longest_break_ns / 1e9:.0f} s)"
    ],
    "docs/runbooks/webhook-failing.md": [f"within its {webhook._DECIDE_SECONDS:g} s"],
    "docs/operations/failures.md": [f"up to {webhook.TIMEOUT_SECONDS} s later"],
    "docs/operations/sizing.md": [
        f"{budget.PROGRESS_PER_SECOND + budget.FIGURES_PER_SECOND:g} writes a second, however many",
    ],
    "docs/sglang.md": [
        f"({demo.LEARN_S:.0f} s, again up to four times)",
        f"a chunk waits {compat.TRANSFER_GUARD_S:.0f} s before it is lent",
        f"seen {learning._STEPS_NEEDED} times, blocks of {learning._BLOCK} steps",
    ],
    "docs/gpu.md": [
        f"pieces of {copying.PIECE_BYTES_ON_GPU >> 20} MiB from pinned host memory",
    ],
    "docs/activations.md": [f"in pieces of {copying.PIECE_BYTES >> 20} MiB"],
    "docs/design/0016-which-replica-acts.md": [
        f"{LeaseTimes().duration + 2 * LeaseTimes().retry:.0f} s after the leader's last renewal",
    ],
    "docs/design/0011-profiles-and-grants-of-one-step.md": [f"is valid for {STEADY_MS:.0f} ms"],
}


@pytest.mark.parametrize("page", SAID)
def test_figures_of_a_page_are_those_of_the_code(page):
    text = " ".join((ROOT / page).read_text().split())
    assert [said for said in SAID[page] if said not in text] == []


def test_words_for_figures_are_those_of_the_code():
    assert (NORM.in_a_row, demo.LEARN_LOADS) == (3, 4)  # "three steps in a row", "four times"
    assert health.TASKLET_FACTOR == multiplexer.TURN_PER_SWITCH == 20  # "twenty times", both
    assert health.TASKLET_LEAST_S == 60  # "more than a minute"
    assert default(AgentSettings, "worker_silence_s") == 120  # "says nothing for two minutes"
    assert default(AgentSettings, "max_jobs") == 4  # "up to four jobs"
    assert job_steps.PROGRESS_INTERVAL.total_seconds() == slots.LOOK_SECONDS
    assert loading.FORGET_WITHIN_S == 10  # "within ten seconds"
    assert health.LOADING_AFTER_S == 3600
    assert GUARD.stale_ns == 10**9  # "A view older than a second"


def test_the_chunk_of_the_demo_is_as_described():
    text = (ROOT / "docs" / "memory.md").read_text()
    assert "12 blocks of 128 KiB, 1.5 MiB, 256 tokens" in text
    chunk = Geometry(
        layers=6, kv_heads=2, head_dim=64, dtype_bytes=4, block_bytes=128 << 10, chunks=1
    )
    assert chunk.slots_per_chunk == 256
    assert chunk.arena_bytes == 12 * (128 << 10)
