"""The plugin where there is no SGLang: what it does before it touches any of it."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import pytest
import torch

from windrow.rundir import ENV_RUN_DIR, RunDir
from windrow_sidecar.engines import hook
from windrow_sidecar.engines.sglang import plugin
from windrow_sidecar.engines.sglang.harvesting import SchedulerHarvest
from windrow_sidecar.engines.sglang.pool import plan_geometry
from windrow_sidecar.qos.view import Grant


def test_without_a_run_directory_sglang_is_not_even_imported(monkeypatch):
    monkeypatch.delenv(ENV_RUN_DIR, raising=False)
    plugin.register()
    assert "sglang" not in sys.modules


def test_a_process_without_a_scheduler_is_left_alone(monkeypatch, tmp_path):
    monkeypatch.setenv(ENV_RUN_DIR, str(tmp_path))
    plugin.register()
    assert "sglang" not in sys.modules


class MLATokenToKVPool:
    """A pool that the plugin does not know."""


def test_a_model_whose_kv_is_of_another_kind_is_named_once(caplog, tmp_path):
    ours = plugin.Plugin(RunDir(tmp_path), {})
    allocator = SimpleNamespace(get_kvcache=MLATokenToKVPool)
    ours.scheduler = SimpleNamespace(token_to_kv_pool_allocator=allocator)
    with caplog.at_level(logging.ERROR):
        ours._guarded("not started", ours._start)
        ours._guarded("not started", ours._start)
    (record,) = caplog.records
    assert "the model's KV lies in a MLATokenToKVPool" in record.getMessage()
    assert record.exc_info is None
    assert ours.off


def test_what_fails_by_surprise_is_told_with_its_trace_and_stays_here(caplog, tmp_path):
    ours = plugin.Plugin(RunDir(tmp_path), {})

    def breaks() -> None:
        raise ZeroDivisionError("of the plugin")

    with caplog.at_level(logging.ERROR):
        ours._guarded_step(breaks)
    (record,) = caplog.records
    assert "harvesting is off, a step hook failed: of the plugin" in record.getMessage()
    assert record.exc_info is not None


class Batch:
    """A decode batch of one request, as the seam reads SGLang's."""

    reqs = (SimpleNamespace(rid="r0"),)
    seq_lens_cpu = torch.tensor([20])
    forward_mode = SimpleNamespace(is_decode=lambda: True)


@pytest.mark.parametrize(
    ("gap_until_ns", "sleeps_s"), [(0, []), (900, []), (5_001_000, [0.005]), (10**18, [1.0])]
)
def test_a_batch_is_launched_when_the_workers_turn_is_over(monkeypatch, gap_until_ns, sleeps_s):
    slept: list[float] = []
    monkeypatch.setattr(hook.time, "sleep", slept.append)
    parts = SimpleNamespace(
        inner=SimpleNamespace(is_awake=True, controller=SimpleNamespace(terms=None)),
        hook=SimpleNamespace(before_step=lambda facts: Grant(gap_until_ns=gap_until_ns)),
        partition=SimpleNamespace(activate=lambda units: None),
        splits=SimpleNamespace(units=2),
        allocator=SimpleNamespace(chunks=SimpleNamespace(refresh=lambda: None)),
    )
    scheduler = SimpleNamespace(waiting_queue=[])
    harvest = SchedulerHarvest(parts, None, clock=lambda: 1000)
    harvest.before_batch(scheduler, Batch)
    assert slept == sleeps_s


@pytest.mark.parametrize(("tokens", "of_a_chunk"), [(4096, 256), (1_000_000, 3920)])
def test_a_pool_on_cores_has_no_more_blocks_than_a_worker_can_map(tokens, of_a_chunk):
    llama_8b = {"layer_num": 32, "head_num": 8, "head_dim": 128, "store_dtype": torch.bfloat16}
    geometry = plan_geometry(SimpleNamespace(**llama_8b, size=tokens, page_size=16, device="cpu"))
    assert geometry.slots_per_chunk == of_a_chunk
    assert geometry.slots_per_chunk * geometry.chunks >= tokens + 16
    assert 2 * geometry.layers * geometry.chunks <= 16_384
