"""The objective is twice the load's p90 step of decode alone, by the profile's own model."""

import pytest

from windrow.crd import LatencyProfileSpec, SoloModel
from windrow.errors import UserError
from windrow.eventlog import StepEvent
from windrow_lab.load import client as load
from windrow_lab.load.objective import (
    HIGHEST_RATE,
    SLOW_MINUTES,
    WANTED_BATCH,
    at_pace,
    bearable_rate,
    objective_for,
    pace_of,
    play,
    solo_model,
)
from windrow_lab.load.trace import TraceRequest


def model(units: int = 2, c0: float = 3000, b0: float = 500, k0: float = 0.0) -> SoloModel:
    return SoloModel(units=units, c0_us=c0, b0_us=b0, k0_ns_per_token=k0)


def profile(*solo: SoloModel) -> LatencyProfileSpec:
    return LatencyProfileSpec(
        key="k", device="host", engine="builtin", solo=list(solo), taken_at="2026-01-01T00:00:00Z"
    )


def test_one_request_after_the_other_makes_a_batch_of_one():
    requests = [TraceRequest(float(i), 100, 10) for i in range(5)]
    shape = play(requests, model())
    assert (shape.p90_batch, shape.steps) == (1, 50)
    assert shape.busy_s == pytest.approx(50 * 0.005)


def test_requests_that_arrive_together_share_their_steps():
    requests = [TraceRequest(0.0, 100, 10), TraceRequest(0.0, 200, 10), TraceRequest(0.0, 300, 5)]
    shape = play(requests, model(k0=100.0))
    assert shape.steps == 10
    assert shape.p90_batch == 3
    assert shape.mean_batch == pytest.approx(2.5, rel=1e-3)
    assert shape.p90_context_tokens == 600 + 3 * 4  # the fifth step: the last with all three


def test_slower_steps_make_larger_batches():
    requests = load.schedule(seconds=60, rate=1.0, seed=3, endpoints=1, trace=None)
    fast, slow = play(requests, model(c0=1000)), play(requests, model(c0=9000))
    assert fast.mean_batch < slow.mean_batch
    assert fast.busy_s < slow.busy_s


def test_the_objective_is_twice_the_step_of_all_units():
    requests = [TraceRequest(0.0, 100, 10)] * 8
    on_all = solo_model(profile(model(units=1, c0=99_000), model(units=2)))
    objective = objective_for(requests, on_all)
    assert objective.shape.p90_batch == 8
    assert objective.solo_ms == pytest.approx(7.0)
    assert objective.milliseconds == pytest.approx(14.0)


def test_the_objective_counts_context_and_rounds_up_to_a_tenth():
    requests = [TraceRequest(0.0, 1000, 2)] * 4
    objective = objective_for(requests, model(c0=5000, b0=0, k0=10.0))
    assert objective.shape.p90_context_tokens == 4004
    assert objective.solo_ms == pytest.approx(5.04004)
    assert objective.milliseconds == pytest.approx(10.1)


def test_a_tenth_of_the_busy_time_passes_the_step_whatever_makes_it_long():
    # 100 tokens beside a context of 1,000, and then 10 beside 8,000: of 700 ms the latter take 130.
    requests = [TraceRequest(0.0, 1000, 100), TraceRequest(1.0, 8000, 10)]
    shape = play(requests, model(c0=5000, b0=0, k0=1000.0))
    assert shape.p90_batch == 1
    assert shape.p90_step_us == pytest.approx(13_000, rel=0.01)
    fewer = play([requests[0], TraceRequest(1.0, 8000, 4)], model(c0=5000, b0=0, k0=1000.0))
    assert fewer.p90_step_us == pytest.approx(6_100, rel=0.01)


def test_a_profile_without_models_and_a_load_without_requests_are_refused():
    with pytest.raises(UserError, match="no solo model"):
        solo_model(profile())
    with pytest.raises(UserError, match="no request arrives"):
        objective_for([], model())


def step(batch, took_us, admitted=0, prefill=0):
    times = {"start_ns": 5_000, "end_ns": 5_000 + took_us * 1000}
    return StepEvent(
        step=0, **times, batch=batch, context_tokens=1000, admitted=admitted,
        prefill_tokens=prefill, waiting=0, decode_units=2, finetune_units=0, predicted_us=0,
        hook_us=0, chunks_kv=1, chunks_lent=0,
    )  # fmt: skip


def test_the_pace_is_the_median_of_live_steps_against_the_model():
    slow = [step(4, 6_000), step(4, 7_500), step(8, 14_000)]  # the model says 5, 5 and 7 ms
    assert pace_of(slow, model()) == pytest.approx(1.5)
    assert pace_of([*slow, step(4, 90_000, admitted=1), step(4, 90_000, prefill=9)], model()) == 1.5
    assert pace_of([], model()) == 1.0


def test_at_a_slower_pace_the_batch_grows_and_the_objective_with_it():
    requests = load.schedule(seconds=60, rate=1.0, seed=3, endpoints=1, trace=None)
    quiet, live = (objective_for(requests, model(), pace) for pace in (1.0, 1.5))
    assert live.shape.p90_batch > quiet.shape.p90_batch
    assert live.milliseconds > 1.5 * quiet.milliseconds


def test_a_machine_gets_the_load_that_brings_its_batch_into_the_middle_of_the_range():
    def schedule_at(rate):
        return load.schedule(seconds=60, rate=rate, seed=7, endpoints=1, trace=None)

    fast, slow, dead = (model(c0=c0, b0=100, k0=100.0) for c0 in (2000, 9000, 10_000_000))
    assert bearable_rate(schedule_at, model(c0=1, b0=1)) == HIGHEST_RATE
    rates = [bearable_rate(schedule_at, solo) for solo in (fast, slow)]
    assert rates[0] > rates[1] > 0.05
    for rate, solo in zip(rates, (fast, slow), strict=True):
        in_slow_minutes = at_pace(solo, SLOW_MINUTES)
        assert play(schedule_at(rate), in_slow_minutes).mean_batch <= WANTED_BATCH
        assert play(schedule_at(rate + 0.05), in_slow_minutes).mean_batch > WANTED_BATCH
    assert bearable_rate(schedule_at, dead) == 0.05
