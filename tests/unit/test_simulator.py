"""A simulated GPU adds up, repeats itself, and is decided by what production decides with."""

from __future__ import annotations

import gc
import math
import random
import weakref
from dataclasses import replace
from itertools import pairwise
from statistics import mean, stdev

import pytest

from windrow.errors import UserError
from windrow_lab.load.trace import TraceRequest, check_trace
from windrow_sidecar.engines.harvest.hook import HarvestHook
from windrow_sidecar.qos.control import Controller
from windrow_sidecar.qos.levels import host_levels
from windrow_sidecar.qos.policies import POLICIES
from windrow_sidecar.qos.terms import HarvestTerms
from windrow_simulator import papers
from windrow_simulator.arena import ArenaGeometry
from windrow_simulator.bounds import limits, spatial_bound, temporal_bound
from windrow_simulator.decode import SECOND_NS, DecodeGpu, DecodeSettings
from windrow_simulator.figures import Histogram, SlotFigures, interval
from windrow_simulator.hardware import gpu_named, model_named
from windrow_simulator.papers import joining_gain, with_prompts
from windrow_simulator.replay import replay
from windrow_simulator.run import Cell, best_of, simulate
from windrow_simulator.scenario import ALONE, SimulationSettings, build, checked, gpu_levels
from windrow_simulator.traffic import DecodeRequest, Traffic, day_time, dealt, load_trace
from windrow_simulator.truth import Assumptions, Noise, Residuals, RooflineTruth
from windrow_simulator.worker import SimulatedWorker, WorkerMemory

MS = 1_000_000
SMALL = SimulationSettings(rates="published", gpus=2, seconds=10, warm_up=2, rate=6, processes=1)


class Plain:
    """Every step takes 2 ms and 1 ms more for each request, 1.5 times as long beside a worker.

    The worker makes a token a millisecond and unit.
    """

    dedicated_rate = 2e-3

    def step_us(self, batch, context_tokens, decode, finetune):
        return (2000 + 1000 * batch) * (1.5 if finetune else 1.0)

    def finetune_rate(self, finetune, *, beside_decode):
        return 1e-3 * finetune


PROFILE = {
    "solo": [{"units": n, "c0Us": 2000.0, "b0Us": 1000.0, "k0NsPerToken": 0.0} for n in (1, 2)]
}


def gpu(*, chunks=100, memory=None, terms=None):
    levels = host_levels(2)
    worker = SimulatedWorker(
        Plain(), (1, 2), memory or WorkerMemory(), layer_tokens=8, layers=4, draw=random.Random(1)
    )
    worker.assign(1)
    figures = SlotFigures(10_000)
    geometry = ArenaGeometry(chunks, 1 << 20, 16)
    settings = DecodeSettings(max_batch=64, reserve_tokens=16)
    made = DecodeGpu(
        levels, PROFILE, Plain(), Noise(Residuals((1.0,)), 1), worker, geometry, figures, settings
    )
    made.set_terms(terms)
    return made


def request(number=0, at_s=0.0, prompt=20, output=4):
    at_ns = SECOND_NS + int(at_s * 1e9)
    return DecodeRequest(at_ns, at_ns, prompt, output, number)


TERMS = HarvestTerms("p", "windrow", "harvest", objective_us=20_000, max_memory_percent=100)


def test_two_gpus_worked_by_hand():
    # GPU 0: a request of 4 tokens at 0 s and one of 2 tokens at 4 ms. Alone a step with one takes
    # 3 ms, with two 4 ms: it steps at 0-3 (1), 3-6 (1), 6-10 (2), 10-14 (2: both end).
    # GPU 1: nothing but one token at 5 ms, which takes one step of 3 ms.
    first, second = gpu(), gpu()
    first.submit(request(1, 0.0, output=4))
    first.submit(request(2, 0.004, output=2))
    second.submit(request(3, 0.005, output=1))
    for each in (first, second):
        each.run_until(SECOND_NS + 20 * MS)
    assert first.figures.steps == 4
    assert first.figures.busy_us == pytest.approx(14_000)
    assert first.figures.idle_us == pytest.approx(6_000)
    assert first.figures.generated_tokens == 6
    # From the first token on: 3 tokens in 11 ms, and one in 4 ms.
    assert first.figures.request_tpot.mean == pytest.approx((11_000 / 3 + 4_000) / 2)
    assert first.figures.ttft.mean == pytest.approx((3_000 + 6_000) / 2)
    assert (second.figures.steps, second.figures.busy_us) == (1, pytest.approx(3_000))
    assert second.figures.idle_us == pytest.approx(17_000)


def test_worker_on_an_idle_gpu_has_all_of_it():
    idle = gpu(terms=TERMS)
    idle.run_until(SECOND_NS + SECOND_NS)
    # Two units, a token a millisecond each; it hears of the grant at once.
    assert idle.figures.finetune_tokens == pytest.approx(2000, rel=1e-3)


def test_worker_beside_decode_has_its_share_and_decode_is_longer_by_it():
    busy = gpu(terms=TERMS)
    busy.submit(request(1, 0.0, output=100))
    busy.run_until(SECOND_NS + 100 * MS)
    # Of the steps of the first grant on, each takes 4.5 ms, and the worker has one unit.
    assert busy.figures.tpot.quantile(0.9) == pytest.approx(4500, rel=0.01)
    assert busy.figures.finetune_tokens == pytest.approx(100, rel=0.1)


@pytest.mark.parametrize("policy", [ALONE, *POLICIES])
def test_everything_that_comes_goes_and_time_adds_up(policy):
    settings = replace(SMALL, policy=policy)
    ground = build(settings)
    cell = Cell(ground, policy, 12.0, 0, 2)
    came = list(dealt(ground.traffic.arrivals(2, 10.0, 5), cell.pool, 2))
    for slot in cell.slots:
        slot.submit(request(0, 0.0, prompt=700, output=40))
    for number, at in enumerate(came, start=1):
        slot = cell.slots[at.gpu]
        slot.submit(request(number, at.ready_s, at.prompt_tokens, at.output_tokens))
    for slot in cell.slots:
        slot.run_until(61 * SECOND_NS)
        assert (slot.in_flight, slot.context_tokens) == (0, 0)
        assert slot.figures.seconds == pytest.approx((slot.now_ns - SECOND_NS) / 1e9)
        free, kv, lent, reserved, draining = slot.arena.counts()
        assert free + kv + lent + reserved + draining == ground.geometry.chunks
        assert kv <= 1  # the one that is kept for the next page
        assert slot.figures.finetune_tokens == pytest.approx(slot.worker.tokens)
        # No worker makes more than the whole device would, and alone it makes nothing.
        most = ground.dedicated_per_second * slot.figures.seconds
        assert slot.figures.finetune_tokens <= most * (1 + 1e-9)
        assert (slot.figures.finetune_tokens == 0) == (policy == ALONE)
    generated = sum(slot.figures.generated_tokens for slot in cell.slots)
    assert generated == sum(at.output_tokens for at in came) + 2 * 40


def test_kv_that_outgrows_the_arena_sends_the_youngest_back_and_loses_no_token():
    tight = gpu(chunks=8)  # room for 128 tokens
    for number in range(3):
        tight.submit(request(number, 0.0, prompt=20, output=60))
    tight.run_until(SECOND_NS + 5 * SECOND_NS)
    tight.check()
    assert tight.figures.retractions > 0
    assert tight.figures.requests == 3
    assert tight.figures.generated_tokens == 180


def test_lent_memory_comes_back_before_a_request_is_refused_for_long():
    lending = gpu(chunks=40, memory=WorkerMemory(needed=1, wanted=40), terms=TERMS)
    lending.run_until(SECOND_NS + 3 * SECOND_NS)
    assert lending.arena.counts()[2] > 20
    lending.submit(request(1, 3.0, prompt=500, output=10))
    lending.run_until(SECOND_NS + 5 * SECOND_NS)
    assert lending.figures.requests == 1
    assert lending.figures.starved_us < 100_000


def test_a_model_of_its_own_is_swapped_in_as_fast_as_the_host_gives_it():
    # All 4 layers want 8 chunks, 2 are held: 3/4 of the layers come again, each way, in 1 s a pass.
    memory = WorkerMemory(2, 8, 8, layers=4, swapped_us=1e6, group_tokens=600)
    worker = SimulatedWorker(
        Plain(), (1, 2), memory, layer_tokens=8, layers=4, draw=random.Random(1)
    )
    worker.hold(2)
    assert worker._swap_bound() * 1e6 == pytest.approx(600 / (2 * 0.75))
    worker.hold(8)
    assert math.isinf(worker._swap_bound())
    worker.hold(1)
    assert worker.starving


def test_the_decisions_are_those_of_production():
    slot = build(SMALL).slot(1, 12.0)
    assert type(slot.hook) is HarvestHook
    assert type(slot.hook.controller) is Controller
    slot.set_terms(HarvestTerms("p", "windrow", "harvest", 12_000))
    slot.submit(request(1, 0.0, prompt=500, output=50))
    slot.run_until(3 * SECOND_NS)
    snapshot = slot.hook.snapshot()
    assert snapshot.steps == 50
    assert snapshot.view.objective_us == 12_000


def test_a_slot_that_nobody_refers_to_any_more_is_collected():
    slot = build(SMALL).slot(1, 12.0)
    seen = weakref.ref(slot)
    slot.set_terms(HarvestTerms("p", "windrow", "harvest", 12_000))
    slot.run_until(SECOND_NS * 2)
    del slot
    gc.collect()
    assert seen() is None


def test_the_same_seed_gives_the_same_figures_and_another_one_others():
    one, again = simulate(build(SMALL)), simulate(build(SMALL))
    assert one == again
    assert simulate(build(replace(SMALL, seed=8))) != one


def test_twice_the_gpus_at_twice_the_traffic_do_the_same_each():
    few, many = (
        simulate(build(replace(SMALL, gpus=gpus, seconds=30, warm_up=5)))[1] for gpus in (4, 8)
    )
    # Same rate for each GPU; cells differ by their place in the trace only.
    assert many.eta == pytest.approx(few.eta, rel=0.05)
    assert many.tpot_p50_ms == pytest.approx(few.tpot_p50_ms, rel=0.05)
    assert many.tokens == pytest.approx(2 * few.tokens, rel=0.05)
    assert many.gpu_hours == pytest.approx(many.eta * 8 * 30 / 3600, rel=0.01)


def test_a_cluster_of_any_size_is_told_from_its_sample():
    sampled = simulate(build(replace(SMALL, gpus=1000, sample=4)))[1]
    whole = simulate(build(replace(SMALL, gpus=4)))[1]
    assert sampled.eta == whole.eta
    assert sampled.tokens == pytest.approx(250 * whole.tokens)
    assert whole.eta_error == 0
    assert 0 < sampled.eta_error < 0.1


def test_a_sample_mean_has_the_textbook_interval():
    # s = 1, n = 4 of very many: t(3) / sqrt(4) = 3.18 / 2.
    values = [-(1.5**0.5), 0, 0, 1.5**0.5]
    assert interval(values, 10**9) == pytest.approx(1.59, rel=1e-3)
    assert interval(values, 4) == 0


def test_a_histogram_knows_quantiles_within_half_a_percent():
    counted = Histogram()
    for value in range(1, 1001):
        counted.add(float(value))
    assert counted.quantile(0.5) == pytest.approx(500, rel=0.005)
    assert counted.quantile(0.99) == pytest.approx(990, rel=0.005)
    assert counted.share_above(900.0) == pytest.approx(0.1, abs=0.006)


def test_the_policy_that_is_advised_holds_the_objective():
    rows = simulate(build(replace(SMALL, policy="windrow,static")))
    best = best_of(rows, 99.0)
    kept = [r for r in rows if r.policy == best[12.0]]
    assert best == {12.0: "windrow"}
    assert kept[0].over <= rows[0].over + 0.01


@pytest.mark.parametrize("partition", ["none", "green"])
def test_a_time_to_first_token_is_kept_where_decode_computes_prompts(partition):
    asked = {"aggregated": True, "partition": partition, "objectives_ms": (20.0,), "rate": 3}
    load = replace(SMALL, seconds=60, warm_up=20, **asked)
    alone, beside = simulate(build(load))
    _, kept = simulate(build(replace(load, ttft_ms=400.0)))
    assert alone.ttft_p99_ms < 200
    assert kept.ttft_p99_ms < 1.2 * 400
    # Without an objective the worker pauses for each prompt, which then waits for the step that
    # runs: at most one as long as the objective. With one it pauses only as far as that asks.
    assert beside.ttft_p99_ms < alone.ttft_p99_ms + 20
    assert kept.eta > beside.eta > 0.8 * kept.eta
    assert kept.over < 0.01


@pytest.mark.parametrize("policy", ["windrow", "harli", "temporal"])
def test_steps_that_the_objective_allows_let_nobody_wait_for_a_place_in_the_batch(policy):
    # So many requests, at steps of 40 ms, would be far more than the batch has places for.
    loose = {"objectives_ms": (40.0,), "rate": 20, "seconds": 60, "warm_up": 20}
    alone, beside = simulate(build(replace(SMALL, policy=policy, **loose)))
    assert beside.eta > 0.2
    assert beside.ttft_p99_ms < 2 * alone.ttft_p99_ms


def beside_without(*names, **changes):
    """Figures of decode alone, and beside a worker without some of decode's protections."""
    settings = replace(SMALL, policy="windrow", without=names, **changes)
    return simulate(build(settings))


def test_without_the_guard_requests_wait_for_a_place_in_the_batch():
    loose = {"objectives_ms": (40.0,), "rate": 20, "seconds": 60, "warm_up": 20}
    _, guarded = beside_without(**loose)
    _, beside = beside_without("guard", **loose)
    assert beside.ttft_p99_ms > 3 * guarded.ttft_p99_ms


def test_without_the_predictor_the_objective_breaks():
    tight = {"objectives_ms": (8.0,), "rate": 8, "seconds": 30}
    alone, guarded = beside_without(**tight)
    _, beside = beside_without("predictor", **tight)
    assert guarded.over < alone.over + 0.01
    assert beside.over > alone.over + 0.05


def test_without_the_reserve_requests_wait_for_lent_memory():
    short = {"memory_gb": 30.0, "max_memory_percent": 100, "train": "llama-3-8b", "seconds": 30}
    _, guarded = beside_without(**short)
    _, beside = beside_without("reserve", **short)
    assert beside.waited_for_kv > guarded.waited_for_kv


def test_predictors_that_do_not_learn_what_a_worker_costs_harvest_less():
    # Their prior says that most SMs for the worker double a step, which takes a third longer.
    tight = {"objectives_ms": (8.0,), "rate": 8, "seconds": 30, "partition": "none"}
    _, ours = beside_without(**tight)
    for form in ("harli", "llmstation"):
        _, theirs = beside_without(predictor=form, **tight)
        assert ours.eta > 1.2 * theirs.eta


def test_slack_that_requests_have_saved_is_the_workers():
    tight = {"objectives_ms": (7.0,), "rate": 8, "seconds": 30}
    _, of_steps = beside_without(**tight)
    _, of_requests = beside_without(scope="perRequest", **tight)
    assert of_requests.eta > 1.05 * of_steps.eta
    assert of_requests.requests_within > 0.99
    assert of_requests.over > of_steps.over, "steps are late, no request is"


def test_prefill_queues_and_kv_takes_its_time():
    ground = build(SMALL)
    pool = Cell(ground, ALONE, 12.0, 0, 1).pool
    alone_s = ground.prefill.prefill_us(4000) / 1e6
    sent_s = ground.prefill.transfer_us(4000) / 1e6
    first, second = pool.ready_s(1.0, 4000), pool.ready_s(1.0, 4000)
    assert first == pytest.approx(1 + alone_s + sent_s)
    assert second == pytest.approx(1 + 2 * alone_s + sent_s)


def test_a_day_keeps_its_mean_and_has_its_peak_in_the_afternoon():
    times = [day_time(i / 100, 240.0) for i in range(24_000)]
    assert times == sorted(times)
    night = sum(1 for t in times if t < 60)
    noon = sum(1 for t in times if 120 <= t < 180)
    assert times[-1] == pytest.approx(240, rel=0.01)
    assert noon > 2 * night


def test_a_trace_begins_anew_elsewhere_in_each_cell_and_keeps_its_rate():
    rows = [TraceRequest(i * 2.0, 100 + i, 10) for i in range(50)]
    traffic = Traffic(rows, per_second=5.0)
    first, second = (list(traffic.arrivals(2, 30.0, seed)) for seed in (1, 2))
    assert len(first) == pytest.approx(300, abs=2)
    assert [r.prompt_tokens for r in first] != [r.prompt_tokens for r in second]


HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["2023-11-16 18:00:00.0,5,5", "2023-11-16 17:00:00.0,5,5"], "Sort the file"),
        (["2023-11-16 18:00:00.0,-5,5", "2023-11-16 18:00:01.0,5,5"], "below 0"),
        (["2023-11-16 18:00:00.0,5,5", "2023-11-16 18:00:00.0,5,5"], "one time"),
        (["2023-11-16 18:00:00.0,5,5"], "two rows"),
        (
            [f"2023-11-16 18:00:{i:02}.0,5,5" for i in range(60)] + ["2023-11-16 19:00:00.0,5,5"],
            "hole of 3541 s",
        ),
    ],
)
def test_a_trace_that_is_not_sound_is_refused(tmp_path, rows, said):
    path = tmp_path / "trace.csv"
    path.write_text(HEAD + "\n".join(rows) + "\n")
    with pytest.raises(UserError, match=said):
        load_trace(str(path), None)


def test_negative_seconds_of_a_trace_are_refused(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("Timestamp,Request tokens,Response tokens\n-1,5,5\n2,5,5\n")
    with pytest.raises(UserError, match="not negative"):
        load_trace(str(path), None)


def test_a_trace_without_a_hole_passes():
    check_trace([TraceRequest(i * 1.0, 5, 5) for i in range(50)], "here")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"policy": "best"}, "no policy 'best'"),
        ({"percentile": 101.0}, "not a percentage"),
        ({"percentile": 20.0}, "not a percentage"),
        ({"objectives_ms": (0.0,)}, "objective is 0"),
        ({"gpu": "H999"}, "Choose one of: A100-80G"),
        ({"model": "gpt"}, "Choose one of: llama-3-8b"),
        ({"gpus": 0}, "--gpus: 0 is not from 1"),
        ({"rate": float("nan")}, "--rate"),
        ({"partition": "mig"}, "not a partition"),
        ({"rates": "hoped"}, "not a source of rates"),
        ({"worker_rate": (6458.0,)}, "no effect on published rates"),
        ({"rates": "measured", "worker_rate": (2209.0, 6458.0)}, "at most as high"),
        ({"predictor": "oracle"}, "'oracle' is not a predictor"),
        ({"without": ("guard", "brakes")}, "--without: brakes is not a protection"),
        ({"scope": "perToken"}, "perStep"),
        ({"memory_gb": float("nan")}, "--memory-gb"),
        ({"memory_gb": -1.0}, "--memory-gb"),
        ({"trace": "code"}, "--traces"),
        ({"ttft_ms": 400.0}, "on other GPUs"),
        ({"aggregated": True, "batch": 4}, "no effect on a profile"),
        ({"trace": "conv", "traces": "no/such/folder"}, "no/such/folder/AzureLLM"),
        ({"trace": "nowhere.csv"}, "no file nowhere.csv"),
        ({"model": "llama-3-70b"}, "leaves no room"),
    ],
)
def test_settings_that_cannot_run_are_refused_with_what_to_write(changes, said):
    with pytest.raises(UserError, match=said):
        build(replace(SMALL, **changes))


def test_a_profile_of_another_device_is_refused(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(
        '{"key": "k", "device": "host:2-cores", "engine": "builtin", "takenAt": '
        '"2025-01-01T00:00:00Z", "solo": [{"units": 2, "c0Us": 1, "b0Us": 1, "k0NsPerToken": 1}]}'
    )
    with pytest.raises(UserError, match="of host:2-cores, not of A100-80G"):
        build(replace(SMALL, profile=str(path), gpu="A100-80G"))
    with pytest.raises(UserError, match="no co-run samples"):
        build(replace(SMALL, profile=str(path), gpu=""))


def test_sound_settings_are_returned_as_they_are():
    assert checked(SMALL) is SMALL


# Of an H200 with Llama-3-8B at 1,024 tokens a request: temporal and spatial bound.
@pytest.mark.parametrize(
    ("batch", "objective_ms", "temporal", "spatial"),
    [(8, 8, 0.34, 0.64), (16, 10, 0.44, 0.70), (32, 15, 0.59, 0.76), (64, 40, 0.81, 0.88)],
)
def test_the_roofline_bounds_are_those_worked_out_on_paper(batch, objective_ms, temporal, spatial):
    gpu_figures, model = gpu_named("h200"), model_named("llama-3-8b")
    assert temporal_bound(gpu_figures, model, batch, objective_ms) == pytest.approx(
        temporal, abs=0.005
    )
    assert spatial_bound(gpu_figures, model, batch, objective_ms) == pytest.approx(
        spatial, abs=0.005
    )


def test_what_contention_and_shares_leave_of_the_bound_worked_by_hand():
    gpu_figures, model = gpu_named("h200"), model_named("llama-3-8b")
    truth = RooflineTruth(gpu_figures, model, model)
    levels = gpu_levels(gpu_figures, disjoint=True)
    # One to eight of 16 groups of 8 SMs are left to decode, with the 4 SMs that make no group.
    assert [s.finetune_units for s in levels.splits] == [0, 16, 64, 80, 88, 96, 104, 112, 120]
    assert {s.finetune_units + s.decode_units for s in levels.splits} == {132}
    found = limits(truth, levels, 16, 15.0)
    # Beside a worker its traffic of 0.21 of the bandwidth slows a byte by 0.35 of that, and the
    # worker by 0.8 times as much. On 24 SMs decode would need 15.14 ms, so it has 32; of the shares
    # that are offered it has 28.
    slower = 1 + 0.35 * 0.2107 * 0.8
    assert found["contended"] == pytest.approx(100 / 132 / slower, rel=1e-3)
    assert found["offered"] == pytest.approx(104 / 132 / slower, rel=1e-3)
    assert found["step_ms"] < 15 < found["next_ms"]
    # Without contention the best of whole groups is the bound itself.
    free = RooflineTruth(gpu_figures, model, model, Assumptions(contention=0.0))
    for batch, objective_ms in [(8, 8), (16, 15), (64, 20)]:
        bound = spatial_bound(gpu_figures, model, batch, objective_ms)
        assert limits(free, levels, batch, objective_ms)["contended"] == pytest.approx(bound)


def test_a_gpu_with_slower_memory_reads_all_of_it_with_fewer_sms():
    ada, model = gpu_named("rtx-6000-ada"), model_named("llama-3-8b")
    truth = RooflineTruth(ada, model, model)
    # 960 GB/s at 89.6% over 65.2 GB/s an SM: 13.2 of its 142 SMs. With 7 it reads 0.53 as fast.
    whole, few, fewer = (truth.step_us(1, 1024, sms, 0) - 600 for sms in (142, 14, 7))
    assert few == pytest.approx(whole)
    assert fewer == pytest.approx(whole * 13.19 / 7, rel=1e-3)


def test_requests_of_given_lengths_come_by_poisson():
    came = list(Traffic((), per_second=2.0, lengths=(60.0, 65.0)).arrivals(3, 2000.0, 1))
    assert len(came) == pytest.approx(12_000, rel=0.03)
    assert sum(r.prompt_tokens for r in came) / len(came) == pytest.approx(60, rel=0.05)
    assert sum(r.output_tokens for r in came) / len(came) == pytest.approx(65, rel=0.05)
    # Exponential distances: as wide as their mean.
    gaps = [b.at_s - a.at_s for a, b in pairwise(came)]
    assert stdev(gaps) == pytest.approx(mean(gaps), rel=0.05)
    with pytest.raises(UserError, match="--lengths"):
        build(replace(SMALL, lengths=(60.0,)))


def test_prompts_on_the_same_gpus_take_their_time_from_light_and_heavy_load():
    one, tokens, _ = with_prompts(1.0, (4.0, 20.0), "")
    # One and five requests a second on each of four GPUs.
    prefill = build(papers.FLEXLLM).prefill
    light_s = prefill.prefill_us(int(tokens)) / 1e6
    # A prompt of mean length takes a little less than prompts do on average, since attention grows
    # with the square.
    assert one == pytest.approx((1 - 5 * light_s) / (1 - light_s), rel=0.1)
    half, _, wanted = with_prompts(0.9, (4.0, 20.0), "")
    assert half == pytest.approx(0.9 * one)
    assert 0 < wanted < tokens


def test_holding_only_while_decode_is_empty_gains_its_part_of_the_empty_time():
    # Empty for 1 s, busy for 3: a quarter of the time. Held for half a second: 1.5 of 4.5 s.
    assert joining_gain(1.0, 0.25, 0.5) == pytest.approx((1.5 / 4.5) / 0.25 - 1)
    assert joining_gain(1.0, 0.25, 0.0) == 0


def test_a_folder_that_holds_no_run_cannot_be_compared(tmp_path):
    with pytest.raises(UserError, match="--run"):
        replay(tmp_path)
