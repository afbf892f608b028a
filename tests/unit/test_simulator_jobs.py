"""Jobs of a simulated cluster wait, give way, move and end as the operator decides it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from windrow.errors import UserError
from windrow_operator import moving, planning, preemption, reconcile
from windrow_sidecar.qos.levels import host_levels
from windrow_sidecar.qos.terms import HarvestTerms
from windrow_simulator import cluster
from windrow_simulator.agent import JobTimes
from windrow_simulator.arena import ArenaGeometry
from windrow_simulator.cluster import JobQueue
from windrow_simulator.decode import SECOND_NS, DecodeGpu
from windrow_simulator.figures import SlotFigures
from windrow_simulator.run import simulate
from windrow_simulator.scenario import SimulationSettings, build
from windrow_simulator.traffic import (
    DecodeRequest,
    JobArrival,
    Traffic,
    job_arrivals,
    read_jobs,
    surge_time,
)
from windrow_simulator.truth import Noise, Residuals
from windrow_simulator.worker import SimulatedWorker, WorkerMemory

SMALL = SimulationSettings(rates="published", gpus=2, seconds=30, warm_up=2, rate=6, processes=1)
TERMS = HarvestTerms("p", "windrow", "harvest", objective_us=100_000, max_memory_percent=100)
PROFILE = {
    "solo": [{"units": n, "c0Us": 20_000.0, "b0Us": 1000.0, "k0NsPerToken": 0.0} for n in (1, 2)],
    # What a worker would get is known before one has run.
    "samples": [
        {
            **{"units": 1, "finetuneUnits": 1, "batch": 64, "contextTokens": 10**7},
            **{"stepUs": 252_000.0, "finetuneTokensPerSecond": 1000.0},
        }
    ],
}


class Slow:
    """Every step takes 20 ms and 1 ms more for each request; a worker stretches it threefold.

    The worker makes 1,000 tokens a second and unit.
    """

    dedicated_rate = 2e-3

    def step_us(self, batch, context_tokens, decode, finetune):
        return (20_000 + 1000 * batch) * (3.0 if finetune else 1.0)

    def finetune_rate(self, finetune, *, beside_decode):
        return 1e-3 * finetune


def idle_gpu():
    """A GPU without a request: a worker makes 2,000 tokens a second on its two units."""
    worker = SimulatedWorker(
        Slow(), (1, 2), WorkerMemory(), layer_tokens=8, layers=4, draw=random.Random(1)
    )
    made = DecodeGpu(
        host_levels(2),
        PROFILE,
        Slow(),
        Noise(Residuals((1.0,)), 1),
        worker,
        ArenaGeometry(400, 1 << 20, 16_384),
        SlotFigures(100_000),
    )
    made.set_terms(TERMS)
    return made


def played(gpus, jobs, until_s, **settings):
    """Give the operator its turn every second; returns the queue."""
    settings = {"cluster": len(gpus), "times": JobTimes(2.0, 1.0), **settings}
    queue = JobQueue(gpus, model="m", jobs=jobs, **settings)
    for second in range(until_s + 1):
        for each in gpus:
            each.run_until(SECOND_NS * (1 + second))
        queue.turn(float(second))
    return queue


def test_a_job_gives_way_and_goes_on_worked_by_hand():
    # Loading takes 2 s, saving 1 s, and the worker makes 2,000 tokens a second.
    #  0 s  the first job (12,000 tokens) has the slot; it trains from 2 s on.
    #  5 s  the urgent one (6,000) comes. The first has made 6,000, saves until 6 s and stops.
    #  6 s  the urgent one has the slot, trains from 8 to 11 s and ends.
    # 11 s  the first one loads again, trains from 13 s on, and ends at 16 s.
    jobs = [JobArrival(0.0, 0, 12_000), JobArrival(5.0, 1000, 6_000)]
    queue = played([idle_gpu()], jobs, 20)
    first, urgent = queue.jobs
    assert (urgent.ended_s, first.ended_s) == (11.0, 16.0)
    figures = queue.figures()
    high, low = figures.by_priority
    assert (high.priority, low.priority) == ("1000", "0")
    assert (high.wait_s, low.wait_s) == (1.0, 5.0)
    assert (high.turnaround_s, low.turnaround_s) == (6.0, 16.0)
    assert (high.preemptions, low.preemptions) == (0, 1)
    # A second of saving and two of loading again, at 2,000 tokens a second.
    assert (low.lost_s, low.lost_tokens) == pytest.approx((3.0, 6000))
    assert high.lost_s == 0
    assert (high.tokens, low.tokens, figures.all.tokens) == pytest.approx((6000, 12_000, 18_000))


def test_without_preemption_the_urgent_job_waits_for_the_end_of_the_other_one():
    jobs = [JobArrival(0.0, 0, 12_000), JobArrival(5.0, 1000, 6_000)]
    queue = played([idle_gpu()], jobs, 20, preemption=False)
    first, urgent = queue.jobs
    # 12,000 tokens from 2 s on: until 8 s; then 2 s of loading and 3 s of training.
    assert (first.ended_s, urgent.ended_s) == (8.0, 13.0)
    assert queue.figures().by_priority[0].wait_s == 3.0
    assert queue.figures().all.preemptions == queue.figures().all.lost_s == 0


def test_the_least_important_job_gives_way_and_only_one():
    jobs = [JobArrival(0.0, p, 1e9) for p in (5, 1, 3)] + [JobArrival(4.0, 9, 1e9)]
    queue = played([idle_gpu() for _ in range(3)], jobs, 10)
    waiting = [each.job.priority for each in queue.jobs if not each.job.slot]
    assert waiting == [1]
    assert queue.figures().all.preemptions == 1


def test_a_job_leaves_a_gpu_that_decode_fills_and_not_before_its_time():
    busy, free = idle_gpu(), idle_gpu()
    queue = JobQueue(
        [busy, free], cluster=2, model="m", jobs=[JobArrival(0.0, 0, 1e9)], times=JobTimes(2, 1)
    )
    moved_s = 0.0
    # From 60 s on so many requests come to the first GPU that no step has room for a worker.
    for number in range(45):
        at_ns = SECOND_NS * 61  # the simulation begins at 1 s
        busy.submit(DecodeRequest(at_ns, at_ns, 20, 100_000, number))
    for second in range(1300):
        for each in (busy, free):
            each.run_until(SECOND_NS * (1 + second))
        queue.turn(float(second))
        if not moved_s and queue.jobs[0].job.slot.endswith("1"):
            moved_s = second
    # It stays for ten minutes at least, and then for the five in which the other one predicts more;
    # the operator looks every ten seconds, and saving takes one.
    assert 900 <= moved_s <= 922
    figures = queue.figures().all
    assert (figures.moves, figures.preemptions) == (1, 0)
    assert figures.lost_s == pytest.approx(3.0)
    # 58 s before the requests came, and from the move on, 2,000 a second; next to nothing between.
    assert figures.tokens == pytest.approx(2000 * (58 + 1299 - moved_s - 2), rel=0.02)


def test_what_decides_is_the_operators_own():
    assert cluster.reconcile is reconcile.reconcile
    assert cluster.victims is preemption.victims
    assert cluster.JobMoves is moving.JobMoves


def test_jobs_go_where_the_operator_would_place_them_and_each_token_is_of_one_job(monkeypatch):
    placed = []

    def place(job, slots):
        choice = planning.place(job, slots)
        placed.append((job.name, choice))
        return choice

    monkeypatch.setattr(reconcile, "place", place)
    settings = replace(SMALL, jobs=6, job_tokens=(20_000, 20_000), job_load_s=1)
    figures = simulate(build(settings))[1].jobs.all
    assert figures.submitted == 6
    assert figures.ended + figures.running + figures.waiting == 6
    assert sum(isinstance(choice, planning.Placement) for _, choice in placed) >= 2
    # A job that ends within a turn leaves what the worker made after it to nobody.
    assert 0 < figures.tokens <= 6 * 20_000
    assert figures.ended > 0


def test_more_jobs_than_slots_wait_and_the_urgent_ones_wait_less():
    settings = replace(
        *(SMALL,),
        **{"jobs": 12, "job_tokens": (30_000, 30_000), "job_load_s": 1, "seconds": 40},
        priorities=((0, 0.6), (1000, 0.4)),
    )
    high, low = simulate(build(settings))[1].jobs.by_priority
    assert low.wait_s > high.wait_s


def test_gpus_that_are_like_simulated_ones_take_jobs_too_and_harvest_by_their_jobs():
    settings = replace(SMALL, gpus=10, sample=2, job_tokens=(1e9, 1e9), seconds=20, job_load_s=0)
    all_busy = simulate(build(replace(settings, jobs=30)))[1]
    jobs = all_busy.jobs.all
    assert (jobs.running, jobs.waiting) == (10, jobs.submitted - 10)
    some = simulate(build(replace(settings, jobs=5)))[1]
    assert some.jobs.all.running == 5
    # The cluster's tokens are those of its jobs: what was made after the warm-up.
    assert some.tokens == pytest.approx(some.jobs.all.tokens, rel=0.15)


def test_jobs_that_share_a_slot_share_its_tokens():
    jobs = [JobArrival(0.0, 0, 6000), JobArrival(0.0, 0, 6000)]
    queue = played([idle_gpu()], jobs, 12, jobs_per_slot=2)
    # Both load until 2 s, and make 1,000 a second each.
    assert [each.ended_s for each in queue.jobs] == [8.0, 8.0]


def test_a_surge_comes_in_the_middle_third():
    # 3 times as much between 10 and 20 s: 10 s of an even stream are over at 10, 30 more at 20.
    assert [surge_time(at, 30.0, 3.0) for at in (5, 10, 25, 40, 45)] == [5, 10, 15, 20, 25]
    traffic = Traffic((), per_second=20.0)
    came = [r.at_s for r in traffic.arrivals(1, 300.0, 3, surge=4.0)]
    within = sum(100 <= at < 200 for at in came)
    assert 3 < within / (sum(at < 100 for at in came) + sum(at >= 200 for at in came)) * 2 < 5


def test_drawn_jobs_have_their_sizes_and_priorities():
    jobs = job_arrivals(4000, 100.0, tokens=(1e6, 1e8), priorities=[(0, 3), (50, 1)], seed=1)
    assert all(1e6 <= job.tokens <= 1e8 and 0 <= job.at_s < 100 for job in jobs)
    assert sum(job.tokens < 1e7 for job in jobs) == pytest.approx(2000, rel=0.1)
    assert sum(job.priority == 50 for job in jobs) == pytest.approx(1000, rel=0.1)


def test_jobs_are_read_from_a_file_or_refused_by_their_line(tmp_path):
    path = tmp_path / "jobs.csv"
    path.write_text("at_seconds,priority,tokens\n60,1000,2e6\n0,0,5000\n")
    assert read_jobs(path) == [JobArrival(60, 1000, 2e6), JobArrival(0, 0, 5000)]
    ground = build(replace(SMALL, job_list=str(path)))
    assert ground.has_jobs
    path.write_text("at_seconds,priority,tokens\n60,1000,\n")
    with pytest.raises(UserError, match=r"jobs.csv:2: says no job"):
        read_jobs(path)
    path.write_text("at_seconds,tokens\n60,5\n")
    with pytest.raises(UserError, match="at_seconds, priority, tokens"):
        read_jobs(path)
    path.write_text("at_seconds,priority,tokens\n")
    with pytest.raises(UserError, match="holds no job"):
        read_jobs(path)
    with pytest.raises(UserError, match="--job-list"):
        read_jobs(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"job_tokens": (5.0, 2.0)}, "--job-tokens"),
        ({"job_tokens": (0.0, 2.0)}, "--job-tokens"),
        ({"priorities": ((0, 0.0),)}, "--priorities"),
        ({"priorities": ((0, 2.0), (1, -1.0))}, "--priorities"),
        ({"surge": 0.5}, "--surge"),
        ({"job_load_s": -1.0}, "--load-seconds"),
        ({"job_save_s": 60.0}, "--save-seconds"),
    ],
)
def test_settings_of_jobs_that_cannot_run_are_refused(changes, said):
    with pytest.raises(UserError, match=said):
        build(replace(SMALL, **changes))
