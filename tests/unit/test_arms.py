"""Check what an arm got done in a segment, from events that are written down here by hand."""

import json
from dataclasses import asdict

import pytest

from windrow.eventlog import EventLog, MarkEvent, RequestEvent, StepEvent, TaskletEvent
from windrow_lab.compare import arms
from windrow_lab.compare.arms import (
    Arm,
    ComparisonSession,
    Segment,
    TrainerProgress,
    figures_of,
    waited_for_kv,
)

SECOND = 1_000_000_000


def tasklet(step, phase, start_s, end_s, done, *, tokens=100, job="job"):
    return TaskletEvent(
        job, 1, step, phase, 0, tokens, done, round(start_s * SECOND), round(end_s * SECOND), 1
    )


def step(start_ms, end_ms, waiting=0):
    return StepEvent(0, start_ms * 10**6, end_ms * 10**6, 1, 10, 0, 0, waiting, 2, 0, 0, 1.0, 0, 0)


def request(arrived_ms, first_ms, end_ms, error=""):
    return RequestEvent("r", arrived_ms * 10**6, first_ms * 10**6, end_ms * 10**6, 5, 7, error)


def ns(*seconds):
    return tuple(round(s * SECOND) for s in seconds)


def test_a_plain_loops_step_counts_evenly_over_the_time_in_which_it_might_run():
    # Two steps of 100 tokens; it is stopped from 3 s to 13 s, within the second one.
    loop = TrainerProgress(
        [tasklet(0, "opt", 0, 2, 100), tasklet(1, "opt", 2, 14, 200)], [ns(0, 3), ns(13, 20)]
    )
    assert loop.at(2 * SECOND) == 100
    assert loop.at(3 * SECOND) == pytest.approx(150)
    assert loop.at(10 * SECOND) == pytest.approx(150), "stopped: nothing is done"
    assert loop.at(14 * SECOND) == 200
    assert loop.rate(ns(2, 3)) == pytest.approx(50)
    assert loop.rate(ns(13, 14)) == pytest.approx(50)


def test_our_workers_tasklets_say_how_far_a_step_was():
    # Backward takes three times as long as forward: after it, 4 of 5 parts are done.
    worker = TrainerProgress(
        [
            tasklet(0, "fwd", 0, 1, 0),
            tasklet(0, "bwd", 1, 4, 0),
            tasklet(0, "opt", 4, 5, 500),
        ],
        [ns(0, 10)],
    )
    assert worker.at(1 * SECOND) == pytest.approx(100)
    assert worker.at(4 * SECOND) == pytest.approx(400)
    assert worker.at(5 * SECOND) == 500


def test_a_large_tasklet_is_more_of_a_step_than_a_small_one():
    worker = TrainerProgress(
        [
            tasklet(0, "fwd", 0, 2, 0, tokens=30),
            tasklet(0, "fwd", 2, 3, 0, tokens=10),  # small ones take longer for each token
            tasklet(0, "fwd", 3, 4, 0, tokens=10),
            tasklet(0, "opt", 4, 5, 500, tokens=0),
        ],
        [ns(0, 10)],
    )
    assert worker.at(2 * SECOND) == pytest.approx(500 * (30 / 50) * (4 / 5))
    assert worker.at(3 * SECOND) == pytest.approx(500 * (40 / 50) * (4 / 5))


def test_what_another_job_had_done_before_takes_nothing_from_a_job():
    worker = TrainerProgress(
        [tasklet(0, "opt", 0, 1, 800, job="before"), tasklet(0, "opt", 2, 3, 300)], [ns(0, 10)]
    )
    assert worker.rate(ns(1, 3)) == pytest.approx(300 / 2)


def test_a_step_that_never_ended_counts_for_nothing():
    begun = TrainerProgress([tasklet(0, "fwd", 0, 1, 0), tasklet(0, "bwd", 1, 2, 0)], [ns(0, 9)])
    assert begun.at(9 * SECOND) == 0
    assert TrainerProgress([], [ns(0, 9)]).rate(ns(1, 2)) == 0


def test_a_trainer_that_got_nothing_in_the_rest_of_the_window_is_not_paid_for_its_first_second():
    ran = TrainerProgress(
        [tasklet(n, "opt", n / 2, (n + 1) / 2, 50 * (n + 1)) for n in range(2)], [ns(0, 9)]
    )
    assert ran.rate(ns(0, 8)) == pytest.approx(100 / 8)


def test_steps_count_by_their_end_and_requests_by_their_arrival():
    segment = Segment(0, "naive", "beside", "naive", ns(0, 10), ns(1, 2))
    steps = [step(900, 999), step(999, 1004), step(1004, 1024), step(1990, 2001)]
    requests = [
        request(950, 1000, 1500),
        request(1100, 1110, 1900),
        request(1200, 0, 1800, "hung up"),
    ]
    found = figures_of(segment, steps, requests, [], objective_ms=10)
    assert (found.steps, found.over) == (2, 0.5)
    assert (found.tpot_p50_ms, found.tpot_p99_ms) == (5.0, 20.0)
    assert (found.requests, found.completed) == (2, 2)
    assert (found.ttft_p50_ms, found.ttft_p99_ms) == (10.0, 600.0)
    assert found.tokens_per_second is None


def test_a_request_waited_for_kv_where_a_step_left_it_out():
    steps = [step(0, 10), step(10, 20, waiting=1), step(20, 30)]
    came_before = request(5, 30, 40)  # there at 10, its first token at 30
    got_in = request(1, 10, 40)
    later = request(15, 30, 40)  # came while that step ran
    assert waited_for_kv([came_before, got_in, later], steps) == 1


@pytest.fixture
def out(tmp_path):
    """Write one whole round and one that was broken off, with a policy in force in time."""
    folder = tmp_path / "session-1"
    folder.mkdir()
    played = [
        Segment(0, "alone", "plain", "", ns(0, 10), ns(1, 9)),
        Segment(0, "windrow", "harvested", "job", ns(10, 20), ns(12, 19)),
        Segment(1, "alone", "plain", "", ns(20, 30), ns(21, 29)),
    ]
    (folder / arms.SEGMENTS).write_text("".join(json.dumps(asdict(s)) + "\n" for s in played))
    log = EventLog(folder / "pods" / "harvested-0" / "engine.events.jsonl", source="harvested-0")
    log.append(MarkEvent(round(10.5 * SECOND), "policy", "demo: windrow, harvest, 10000 us"))
    log.append(step(13_000, 13_005))
    log.append(tasklet(0, "opt", 11, 15, 400))
    log.append(tasklet(1, "opt", 15, 19, 800))
    log.flush()
    log = EventLog(folder / "pods" / "plain-0" / "engine.events.jsonl", source="engine-30000")
    log.append(step(2_000, 2_020))
    log.flush()
    return tmp_path


ARMS = [Arm("alone", "alone", ""), Arm("windrow", "policy", "", "windrow")]
TURNS = [(arm.name, 0.0) for arm in ARMS]


def test_only_whole_rounds_count(out):
    (session,) = (at.whole(TURNS) for at in ComparisonSession.all_of(out))
    assert {at.round for at in session.segments} == {0}
    alone, windrow = session.figures(ARMS, objective_ms=10)
    assert (alone.arm, alone.over, alone.tokens_per_second) == ("alone", 1.0, None)
    assert (windrow.arm, windrow.over) == ("windrow", 0.0)
    assert windrow.tokens_per_second == pytest.approx(100)


def test_jobs_of_two_places_count_apart(out):
    folder = out / "session-1"
    fused = Segment(0, "fused", "harvested-fused", "job", ns(20, 30), ns(22, 29))
    with (folder / arms.SEGMENTS).open("a") as segments:
        segments.write(json.dumps(asdict(fused)) + "\n")
    pod = "harvested-fused-0"
    log = EventLog(folder / "pods" / pod / "engine.events.jsonl", source=pod)
    log.append(MarkEvent(round(20.5 * SECOND), "policy", "demo: flexllm, harvest, 10000 us"))
    log.append(step(23_000, 23_005))
    log.append(tasklet(0, "opt", 21, 25, 80))
    log.append(tasklet(1, "opt", 25, 29, 160))
    log.flush()
    (session,) = ComparisonSession.all_of(out)
    of_it = [*ARMS, Arm("fused", "policy", "", "flexllm", "fused")]
    found = {at.arm: at for at in session.figures(of_it, objective_ms=10) if at.round == 0}
    assert found["windrow"].tokens_per_second == pytest.approx(100)
    assert found["fused"].tokens_per_second == pytest.approx(20)


def test_a_policy_that_was_not_in_force_in_its_window_is_found_out(out):
    (session,) = ComparisonSession.all_of(out)
    with pytest.raises(ValueError, match="policy harli was not in force"):
        session.figures([ARMS[0], Arm("windrow", "policy", "", "harli")], objective_ms=10)
    with pytest.raises(ValueError, match="windrow was not in force at 20 ms"):
        session.figures(ARMS, objective_ms=20)


def test_what_knows_no_objective_counts_for_each_and_a_policy_for_its_own(tmp_path):
    folder = tmp_path / "session-1"
    folder.mkdir()
    played = [
        Segment(0, "alone", "plain", "", ns(0, 10), ns(1, 9)),
        Segment(0, "windrow", "harvested", "job", ns(10, 20), ns(12, 19), factor=2.0),
        Segment(0, "windrow", "harvested", "job", ns(20, 30), ns(22, 29), factor=4.0),
        Segment(1, "alone", "plain", "", ns(30, 40), ns(31, 39)),
        Segment(1, "windrow", "harvested", "job", ns(40, 50), ns(42, 49), factor=4.0),
    ]
    (folder / arms.SEGMENTS).write_text("".join(json.dumps(asdict(s)) + "\n" for s in played))
    log = EventLog(folder / "pods" / "harvested-0" / "engine.events.jsonl", source="harvested-0")
    for begin_s, objective_us in ((10.5, 10_000), (20.5, 20_000), (40.5, 20_000)):
        detail = f"demo: windrow, harvest, {objective_us} us"
        log.append(MarkEvent(round(begin_s * SECOND), "policy", detail))
    # A step of 400 tokens that runs through the turns of both objectives.
    log.append(tasklet(0, "opt", 12, 28, 400))
    log.flush()
    (session,) = ComparisonSession.all_of(tmp_path)
    turns = [("alone", 0.0), ("windrow", 2.0), ("windrow", 4.0)]
    assert {at.round for at in session.whole(turns).segments} == {0}  # the other was broken off
    (_, tight) = session.whole(turns).at(2.0).figures(ARMS, objective_ms=10)
    loose = [at for at in session.at(4.0).figures(ARMS, objective_ms=20) if at.arm == "windrow"]
    assert tight.tokens_per_second == pytest.approx(25)
    assert [at.tokens_per_second for at in loose] == [pytest.approx(150 / 7), 0]


def test_every_policy_that_a_harvest_policy_can_choose_is_an_arm():
    from windrow_lab.compare.run import CompareSettings, policies

    names = [arm.name for arm in CompareSettings().chosen()]
    assert set(policies()) <= set(names)
    assert len(names) == len(set(names))


def test_a_turn_that_was_played_again_does_not_count_but_its_trainer_ran(out):
    slow = Segment(0, "windrow", "harvested", "job", ns(8, 9), ns(8, 9), slower=1.4, counts=False)
    with (out / "session-1" / arms.SEGMENTS).open("a") as lines:
        lines.write(json.dumps(asdict(slow)) + "\n")
    (session,) = ComparisonSession.all_of(out)
    assert slow in session.played
    assert slow not in session.segments
