from __future__ import annotations

from windrow_sidecar._core import AdmissionRate, KvDemand, kv_demand_bytes, reserve_chunks

MS = 1_000_000
# Llama-3-8B: 131,072 bytes of KV a token, chunks of 64 blocks of 2 MiB.
CHUNK_BYTES = 64 * 2 * 1024 * 1024
# The Azure conversation trace: 6,352 context tokens (99th percentile) arrive within 50 ms.
CONVERSATION = {
    "release_us": 50_000,
    "objective_us": 50_000,
    "max_batch": 128,
    "token_bytes": 131_072,
    "admitted_q99_tokens": 6_352,
}


def harli_bytes(**changes) -> float:
    return kv_demand_bytes(KvDemand(**{**CONVERSATION, **changes}), prompts=False)


def chunks(prompts: bool = True, **changes) -> int:
    demand = KvDemand(**{**CONVERSATION, **changes})
    return reserve_chunks(demand, prompts=prompts, chunk_bytes=CHUNK_BYTES, total=128)


def test_the_papers_formula_gives_17_mb():
    assert harli_bytes() == 128 * 131_072  # 16.8 MB
    assert chunks(prompts=False) == 1


def test_with_the_prompts_of_the_conversation_trace_seven_chunks_are_needed():
    prompts = kv_demand_bytes(KvDemand(**CONVERSATION), prompts=True) - harli_bytes()
    assert prompts == 6_352 * 131_072  # 0.83 GB
    assert chunks() == 7


def test_the_reserve_is_one_chunk_at_least_and_a_quarter_of_the_arena_at_most():
    assert chunks(release_us=0, max_batch=1, admitted_q99_tokens=0) == 1
    assert chunks(admitted_q99_tokens=10**9) == 32


def test_without_an_objective_only_prompts_count():
    assert harli_bytes(objective_us=0) == 0


def test_twice_the_time_to_let_go_needs_twice_the_growth():
    assert harli_bytes(release_us=100_000) == 2 * harli_bytes()


def test_admitted_tokens_are_summed_by_window_and_empty_windows_count():
    rate = AdmissionRate(50 * MS)
    now = 10**12
    for _ in range(99):
        rate.add(now, 10)
        now += 50 * MS
    rate.add(now, 4000)
    rate.add(now + MS, 4000)
    assert rate.q99() == 10
    rate.add(now + 50 * MS, 6000)
    assert rate.q99() == 6000  # now two bursts of 101 windows
    rate.add(now + 10**11, 0)
    assert rate.q99() == 0


def test_a_young_rate_knows_its_largest_window():
    rate = AdmissionRate(50 * MS)
    rate.add(10**12, 700)
    assert rate.q99() == 700
