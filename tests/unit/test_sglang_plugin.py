"""The plugin where there is no SGLang: what it does before it touches any of it."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest
import torch

from windrow.errors import InvariantBroken, UserError
from windrow.rundir import ENV_FINETUNE, ENV_RUN_DIR, RunDir
from windrow_sidecar.engines import hook
from windrow_sidecar.engines.sglang import compat, hooking, in_engine, opening, plugin, queues
from windrow_sidecar.engines.sglang.harvesting import SchedulerHarvest
from windrow_sidecar.engines.sglang.pool import check_pool, plan_geometry
from windrow_sidecar.qos.view import Grant


def test_without_a_run_directory_sglang_is_not_even_imported(monkeypatch):
    monkeypatch.delenv(ENV_RUN_DIR, raising=False)
    plugin.register()
    assert "sglang" not in sys.modules


def test_a_process_without_a_scheduler_is_left_alone(monkeypatch, tmp_path):
    monkeypatch.setenv(ENV_RUN_DIR, str(tmp_path))
    # An earlier process has looked for the MPS daemon.
    monkeypatch.setenv("WINDROW_WITHOUT_MPS", "MpsMissing: a test")
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
    assert "the model's KV is in a MLATokenToKVPool" in record.getMessage()
    assert record.exc_info is None
    assert ours.off


@dataclass
class PoolStats:
    """Counts of a pool with sliding windows that the plugin reads."""

    full_num_used: int
    full_token_usage: float
    full_capacity: int
    swa_num_used: int = 40


def test_tokens_that_are_lent_beside_sliding_windows_are_neither_used_nor_leaked(tmp_path):
    ours = plugin.Plugin(RunDir(tmp_path), {})
    windows = SimpleNamespace(full_attn_allocator=SimpleNamespace(lent_tokens=256))
    observer = SimpleNamespace(token_to_kv_pool_allocator=windows)
    stats = ours.token_info(PoolStats(356, 0.356, 1000), observer)
    assert stats == PoolStats(100, 0.1, 1000)
    (checker, _), uncached = ours.check_full_pool(observer, stats, 5)
    assert (checker, uncached) == (observer, {"uncached": 261})


def test_a_pool_in_the_arena_that_is_not_the_one_of_all_tokens_is_not_harvested(caplog, tmp_path):
    # SGLang may make the windows' pool first, where the plugin does not know the other one's kind.
    ours = plugin.Plugin(RunDir(tmp_path), {})
    ours.arena, ours.allocator_class = SimpleNamespace(), PoolStats
    of_windows = PoolStats(0, 0.0, 1000)
    ours.scheduler = SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(
            full_attn_allocator=SimpleNamespace(),
            swa_attn_allocator=of_windows,
            get_kvcache=MLATokenToKVPool,
        )
    )
    with caplog.at_level(logging.ERROR):
        ours._guarded("not started", ours._start)
    (record,) = caplog.records
    assert "the model's KV is in a MLATokenToKVPool" in record.getMessage()
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


DECODES = SimpleNamespace(is_decode=lambda: True)


class Batch:
    """A decode batch of one request, as the seam reads SGLang's."""

    reqs = (SimpleNamespace(rid="r0"),)
    seq_lens_cpu = torch.tensor([20])
    forward_mode = DECODES


def parts_with(**step_hook) -> SimpleNamespace:
    """Return what a scheduler is harvested with, as far as a step asks for it."""
    return SimpleNamespace(
        inner=SimpleNamespace(is_awake=True, controller=SimpleNamespace(terms=None)),
        hook=SimpleNamespace(**{"first_token_objective_us": 0, "deferral_us": 0, **step_hook}),
        partition=SimpleNamespace(activate=lambda units: None),
        splits=SimpleNamespace(units=2),
        allocator=SimpleNamespace(chunks=SimpleNamespace(refresh=lambda: None)),
        log=None,
        speculates=False,
        turns=None,
        ranks=None,
    )


@pytest.mark.parametrize(
    ("gap_until_ns", "sleeps_s"), [(0, []), (900, []), (5_001_000, [0.005]), (10**18, [1.0])]
)
def test_a_batch_is_launched_when_the_workers_turn_is_over(monkeypatch, gap_until_ns, sleeps_s):
    slept: list[float] = []
    monkeypatch.setattr(hook.time, "sleep", slept.append)
    parts = parts_with(
        before_step=lambda facts: Grant(gap_until_ns=gap_until_ns), request_objective_us=0
    )
    scheduler = SimpleNamespace(waiting_queue=[])
    harvest = SchedulerHarvest(parts, None, clock=lambda: 1000)
    harvest.before_batch(scheduler, Batch)
    assert slept == sleeps_s


def test_the_facts_tell_the_slack_of_the_request_that_has_saved_the_least():
    told: list[int] = []
    now_ns = [0]

    def before_step(facts):
        told.append(facts.slack_us)
        return Grant()

    parts = parts_with(
        before_step=before_step,
        after_step=lambda end_ns, latency_us: None,
        request_objective_us=1000,
    )
    harvest = SchedulerHarvest(parts, None, clock=lambda: now_ns[0])
    early, late = (
        SimpleNamespace(rid=rid, output_ids=[1], finished=lambda: False) for rid in ("r0", "r1")
    )
    batch = SimpleNamespace(reqs=[early], seq_lens_cpu=torch.tensor([20]), forward_mode=DECODES)

    def step(us: int) -> None:
        harvest.before_batch(SimpleNamespace(waiting_queue=[]), batch)
        now_ns[0] += us * 1000
        for request in batch.reqs:
            request.output_ids.append(1)
        harvest.after_batch(batch)

    step(us=400)  # delivers the first token here: from then on it is held to 1,000 us a token
    step(us=400)
    batch.reqs, batch.seq_lens_cpu = [early, late], torch.tensor([22, 30])
    step(us=1500)
    step(us=1500)  # the other has its first token only now
    step(us=1)
    assert told == [0, 0, 600, 0, -500]


EXTENDS = SimpleNamespace(is_decode=lambda: False, is_extend=lambda: True)


def test_prompts_that_wait_are_told_and_their_passes_and_first_tokens_reported():
    seen, passes, firsts = [], [], []
    now_ns = [10_000_000_000]
    parts = parts_with(
        before_step=lambda facts: seen.append(facts) or Grant(decode_units=2),
        after_prompt=lambda tokens, latency_us, grant: passes.append((tokens, latency_us)),
        after_first_token=firsts.append,
        first_token_objective_us=500_000,
        request_objective_us=0,
    )

    def prompt(name, tokens, *, arrived_s):
        return SimpleNamespace(
            rid=name,
            origin_input_ids=[1] * tokens,
            output_ids=[],
            extend_end=tokens,
            finished=lambda: False,
            time_stats=SimpleNamespace(wait_queue_entry_time=arrived_s),
        )

    first, cut = prompt("r0", 100, arrived_s=9.9), prompt("r1", 80, arrived_s=9.95)
    cut.extend_end = 28  # its pass ends there
    retracted = prompt("r2", 50, arrived_s=1.0)
    retracted.output_ids.append(1)
    scheduler = SimpleNamespace(
        waiting_queue=[prompt("r3", 40, arrived_s=9.99), retracted], chunked_req=cut
    )
    batch = SimpleNamespace(reqs=[first], extend_num_tokens=128, forward_mode=EXTENDS)
    harvest = SchedulerHarvest(parts, None, clock=lambda: now_ns[0])
    harvest.before_batch(scheduler, batch)
    # 128 in this pass, 52 more of the one that is cut, 40 in the queue.
    assert (seen[0].prefill_tokens, seen[0].prompts_left) == (128, 128 + 52 + 40)
    assert seen[0].first_token_waited_us == pytest.approx(100_000, abs=2)
    now_ns[0] += 30_000_000
    first.output_ids.append(1)
    harvest.after_batch(batch)
    assert passes == [(128, 30_000)]
    assert firsts == [pytest.approx(130_000, abs=2)]


def test_the_facts_of_a_decode_that_speculates_are_of_its_requests():
    """The batch's lengths are those before drafts were accepted, or are not there."""
    told = []
    parts = parts_with(
        before_step=lambda facts: told.append(facts) or Grant(),
        after_step=lambda end_ns, latency_us: None,
        request_objective_us=0,
    )
    parts.speculates = True
    request = SimpleNamespace(
        rid="r0", origin_input_ids=[1] * 20, output_ids=[1], finished=lambda: False
    )
    batch = SimpleNamespace(reqs=[request], seq_lens_cpu=None, forward_mode=DECODES)
    harvest = SchedulerHarvest(parts, None, clock=lambda: 1000)
    for accepted in (1, 3, 3):
        harvest.before_batch(SimpleNamespace(waiting_queue=[]), batch)
        request.output_ids += [1] * accepted
        harvest.after_batch(batch)
    assert [(facts.context_tokens, facts.tokens) for facts in told] == [
        (21, 1.0),
        (22, 1.0),
        (25, 3.0),
    ]


@pytest.mark.parametrize(("tokens", "of_a_chunk"), [(4096, 256), (1_000_000, 3920)])
def test_a_pool_on_cores_has_no_more_blocks_than_a_worker_can_map(tokens, of_a_chunk):
    llama_8b = {"layer_num": 32, "head_num": 8, "head_dim": 128, "store_dtype": torch.bfloat16}
    geometry = plan_geometry(SimpleNamespace(**llama_8b, size=tokens, page_size=16, device="cpu"))
    assert geometry.slots_per_chunk == of_a_chunk
    assert geometry.slots_per_chunk * geometry.chunks >= tokens + 16
    assert 2 * geometry.layers * geometry.chunks <= 16_384


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_latent_kv_on_a_gpu_lies_in_whole_pages_of_memory_and_of_kv(dtype):
    deepseek = {"layer_num": 61, "kv_lora_rank": 512, "kv_cache_dim": 576, "store_dtype": dtype}
    pool = SimpleNamespace(**deepseek, size=1 << 20, page_size=64, device="cuda")
    geometry = plan_geometry(pool)
    assert geometry.slots_per_chunk % 64 == 0
    assert geometry.block_bytes % (2 << 20) == 0
    # One layer of 62 is empty, since they lie in pairs.
    assert geometry.chunk_bytes == 62 * 576 * dtype.itemsize * geometry.slots_per_chunk
    assert geometry.slots_per_chunk * geometry.chunks >= (1 << 20) + 64


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"store_dtype": torch.uint8}, "its KV is quantized"),
        ({"layer_shard_enabled": True}, "its layers are sharded"),
        ({"enable_custom_mem_pool": True}, "a custom memory pool holds it"),
    ],
)
def test_a_latent_pool_that_cannot_be_lent_is_refused_with_the_reason(changed, why):
    plain = {
        "kv_lora_rank": 512,
        "dtype": torch.bfloat16,
        "store_dtype": torch.bfloat16,
        "enable_custom_mem_pool": False,
        "layer_num": 2,
        "use_dsa": False,
        "layer_shard_enabled": False,
        "dcp_replicated": False,
    }
    check_pool(SimpleNamespace(**plain))
    in_bytes = {"dtype": torch.float8_e4m3fn, "store_dtype": torch.uint8}
    check_pool(SimpleNamespace(**{**plain, **in_bytes}))
    with pytest.raises(UserError, match=why):
        check_pool(SimpleNamespace(**{**plain, **changed}))


@pytest.fixture
def stock(monkeypatch) -> type:
    """A class of a module "stock", as one of SGLang's."""

    class Counter:
        limit = 3

        def add(self, a: int, b: int = 0) -> int:
            return a + b

    module = ModuleType("stock")
    module.Counter = Counter
    monkeypatch.setitem(sys.modules, "stock", module)
    return Counter


def test_hooks_wrap_a_method_as_sglangs_registry_would(stock):
    hooking.put(
        around={"stock.Counter.add": lambda add, *args, **kw: 10 * add(*args, **kw)},
        before={},
        after={},
    )
    assert stock().add(1, b=2) == 30
    hooking.put(
        around={}, before={"stock.Counter.add": lambda self, a, b: ((self, a + 1, b), {})}, after={}
    )
    assert stock().add(1, 2) == 40
    hooking.put(around={}, before={}, after={"stock.Counter.add": lambda result, *_: result + 1})
    assert stock().add(1, 2) == 41
    hooking.put(around={}, before={"stock.Counter.add": lambda *_: None}, after={})
    hooking.put(around={}, before={}, after={"stock.Counter.add": lambda *_: None})
    assert stock().add(1, 2) == 41


def test_what_is_no_method_is_refused_and_nothing_is_hooked(stock):
    original = stock.add
    with pytest.raises(InvariantBroken, match=r"stock\.Counter\.limit is not a plain method"):
        hooking.put(
            around={"stock.Counter.add": lambda *_: 0},
            before={"stock.Counter.limit": lambda *_: None},
            after={},
        )
    assert stock.add is original


def test_made_up_weights_are_not_shared_and_their_flag_is_named():
    compat.check_load_format(SimpleNamespace(load_format="auto"))
    with pytest.raises(UserError, match="Leave it out to serve the checkpoint") as refused:
        compat.check_load_format(SimpleNamespace(load_format="dummy"))
    assert refused.value.field == "--load-format dummy"


def test_a_pool_of_which_no_chunk_could_be_lent_is_refused_with_what_it_needs():
    chunks = SimpleNamespace(most_lendable=lambda: 0, pages_per_chunk=16)
    allocator = SimpleNamespace(chunks=chunks, page_size=16, size=768)
    with pytest.raises(UserError, match="Serve with 1024 tokens of KV or more") as refused:
        opening._lendable(allocator)
    assert (refused.value.field, refused.value.reason) == ("--max-total-tokens", "KvPoolTooSmall")
    chunks.most_lendable = lambda: 3
    assert opening._lendable(allocator) == 3


def test_empty_chunks_are_looked_for_only_while_decodes_stream_is_idle():
    """A stream that is never idle is waited for once a second."""
    now_ns, idle, looked = [10**12], [False], []
    policy = SimpleNamespace(mode="harvest", max_memory_percent=50)
    inner = SimpleNamespace(
        is_awake=True, chunks_lacking=2, controller=SimpleNamespace(terms=policy)
    )
    allocator = SimpleNamespace(
        chunks=SimpleNamespace(pages_per_chunk=4, lent_pages=0),
        page_size=16,
        settle=lambda now: None,
        hold=lambda pages: None,
        is_idle=lambda: idle[0],
        set_free=lambda wanted, keep_pages: looked.append(now_ns[0]) or 1,
    )
    arena = SimpleNamespace(counts=lambda: (2, 6, 0, 1, 0))
    parts = SimpleNamespace(
        inner=inner,
        allocator=allocator,
        arena=arena,
        hook=SimpleNamespace(failed=False),
        reserved_tokens=0,
        splits=SimpleNamespace(units=2),
        ranks=None,
        lending=None,
    )
    harvest = SchedulerHarvest(parts, None, clock=lambda: now_ns[0])
    scheduler = SimpleNamespace(running_batch=SimpleNamespace(reqs=[]), waiting_queue=[])
    harvest.between_batches(scheduler)
    assert len(looked) == 1, "the first time it is due"
    for _ in range(20):
        now_ns[0] += 10_000_000
        harvest.between_batches(scheduler)
    assert len(looked) == 1, "for 200 ms the stream was busy"
    idle[0] = True
    now_ns[0] += 10_000_000
    harvest.between_batches(scheduler)
    assert len(looked) == 2
    idle[0] = False
    now_ns[0] += 1_100_000_000
    harvest.between_batches(scheduler)
    assert len(looked) == 3


@pytest.mark.parametrize(
    ("custom", "microseconds"),
    [
        (None, 0),
        ({"other": 1}, 0),
        ({"windrow_deferral_ms": 300}, 300_000),
        ({"windrow_deferral_ms": 0.2}, 1_000),
        ({"windrow_deferral_ms": 1e9}, 60_000_000),
        ({"windrow_deferral_ms": 10**400}, 60_000_000),
        ({"windrow_deferral_ms": -(10**400)}, 1_000),
        ({"windrow_deferral_ms": True}, 0),
        ({"windrow_deferral_ms": float("nan")}, 0),
        ({"windrow_deferral_ms": "300"}, 0),
    ],
)
def test_a_request_of_sglang_brings_its_own_bound_in_its_custom_params(custom, microseconds):
    request = SimpleNamespace(sampling_params=SimpleNamespace(custom_params=custom))
    assert queues.own_deferral_us(request) == microseconds


def test_the_facts_tell_when_a_waiting_request_of_sglang_is_due():
    told: list[int] = []

    def before_step(facts):
        told.append(facts.due_ns)
        return Grant()

    def waits(own_ms, *, arrived_s):
        custom = {queues.DEFERRAL_PARAMETER: own_ms} if own_ms else None
        return SimpleNamespace(
            output_ids=[],
            sampling_params=SimpleNamespace(custom_params=custom),
            time_stats=SimpleNamespace(wait_queue_entry_time=arrived_s),
        )

    parts = parts_with(
        before_step=before_step,
        after_step=lambda end_ns, latency_us: None,
        request_objective_us=0,
        deferral_us=400_000,
    )
    harvest = SchedulerHarvest(parts, None, clock=lambda: 10**10)
    queue = [waits(0, arrived_s=9.9), waits(50, arrived_s=9.98)]
    harvest.before_batch(SimpleNamespace(waiting_queue=queue), Batch)
    decode = SimpleNamespace(
        queue=[
            SimpleNamespace(req=queue[1], waiting_for_input=True),
            SimpleNamespace(req=waits(1, arrived_s=9.0), waiting_for_input=False),
        ],
        retracted_queue=[queue[0]],
    )
    scheduler = SimpleNamespace(waiting_queue=[], disagg_decode_prealloc_queue=decode)
    harvest.before_batch(scheduler, Batch)
    assert told == pytest.approx([10_030_000_000] * 2, abs=1000)


@pytest.mark.parametrize(
    ("value", "device", "ranks", "sleeps", "field"),
    [
        ("in engine", "cpu", 1, True, ENV_FINETUNE),
        ("in-engine", "cuda", 1, True, ENV_FINETUNE),
        ("in-engine", "cpu", 2, True, ENV_FINETUNE),
        ("in-engine", "cpu", 1, False, "--sleep-on-idle"),
    ],
)
def test_jobs_in_the_scheduler_are_refused_by_the_name_of_what_keeps_them(
    value, device, ranks, sleeps, field
):
    args = SimpleNamespace(device=device, tp_size=ranks, sleep_on_idle=sleeps)
    with pytest.raises(UserError) as refused:
        in_engine.wanted({ENV_FINETUNE: value}, args)
    assert refused.value.field == field
    assert refused.value.remedy


def test_jobs_run_in_a_process_of_their_own_unless_the_environment_says_otherwise():
    args = SimpleNamespace(device="cuda", sleep_on_idle=False)
    assert not in_engine.wanted({}, args)
    assert not in_engine.wanted({ENV_FINETUNE: "process"}, args)
    assert in_engine.wanted(
        {ENV_FINETUNE: "in-engine"}, SimpleNamespace(device="cpu", tp_size=1, sleep_on_idle=True)
    )


def test_a_scheduler_without_the_libraries_of_jobs_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(in_engine, "_HOST", "windrow_sidecar.no_such_library")
    with pytest.raises(UserError, match="not installed here") as refused:
        in_engine.prepare(RunDir(tmp_path), tmp_path)
    assert "peft" in refused.value.remedy
