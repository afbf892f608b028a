"""Policy, predictor, guard and handover together, step by step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from windrow.errors import UserError
from windrow_sidecar.qos.control import Controller
from windrow_sidecar.qos.guard import SECOND_NS
from windrow_sidecar.qos.levels import Partitioning, host_levels, whole_levels
from windrow_sidecar.qos.policies import FIGURES
from windrow_sidecar.qos.predictor import START_MARGIN, Predictor
from windrow_sidecar.qos.solo import SoloStepModel
from windrow_sidecar.qos.terms import HarvestTerms, make_terms
from windrow_sidecar.qos.view import Action, Grant, Offer, View

MS = 1_000_000
# Two cores: batch 4 takes 4 ms on both and 6 ms on one, batch 16 takes 10 and 18 ms.
SOLO = {1: SoloStepModel(2000, 1000, 0), 2: SoloStepModel(2000, 500, 0)}
TERMS = HarvestTerms("p", "windrow", "harvest", objective_us=12_000)
SMALL, BURST = 4, 16


class Pod:
    """A controller with a clock, and a worker that answers when it is told to."""

    def __init__(
        self,
        terms: HarvestTerms | None = TERMS,
        predictor: bool = True,
        levels: Partitioning = host_levels(2),  # noqa: B008
    ) -> None:
        self.controller = Controller(levels, Predictor(levels, SOLO) if predictor else None)
        self.controller.set_terms(terms)
        self.now_ns = SECOND_NS
        self.offer = Offer(job_epoch=1)
        self.last = Grant()

    def step(
        self, batch: int = SMALL, latency_us: int = 5000, present: bool = True, slack_us: int = 0
    ) -> Grant:
        self.now_ns += 10 * MS
        objective = self.controller.terms.objective_us if self.controller.terms else 0
        view = View(batch=batch, objective_us=objective, slack_us=slack_us)
        self.last = self.controller.decide(
            view, self.offer if present else Offer(), self.now_ns, present=present
        )
        if batch:
            self.controller.observe(self.now_ns + latency_us * 1000, latency_us)
        return self.last

    def worker_answers(self, in_flight_us: int = 0) -> None:
        self.offer = Offer(
            job_epoch=1, in_flight_us=in_flight_us, pause_epoch_seen=self.last.pause_epoch
        )


def units(decision: Grant) -> tuple[int, int]:
    return decision.finetune_units, decision.decode_units


def test_headroom_is_shared_and_a_burst_takes_it_back():
    pod = Pod()
    assert units(pod.step()) == (1, 1)
    first = pod.step(BURST)
    assert units(first) == (0, 1)  # the worker still runs on the other core
    assert first.pause_epoch == 1
    assert pod.controller.why_paused == "objective"
    pod.worker_answers(in_flight_us=900)
    assert units(pod.step(BURST)) == (0, 1)
    pod.worker_answers(in_flight_us=0)
    assert units(pod.step(BURST)) == (0, 2)
    assert units(pod.step()) == (1, 1)


def test_a_profile_that_is_withdrawn_stops_the_worker_until_there_is_one():
    pod = Pod()
    assert units(pod.step()) == (1, 1)
    view = View(batch=SMALL, objective_us=TERMS.objective_us)
    assert pod.controller.headroom_units(view) == 1
    pod.controller.set_predictor(None)
    assert pod.controller.headroom_units(view) == 0
    assert pod.step().action == Action.PAUSE
    assert pod.controller.why_paused == "no latency profile"
    pod.worker_answers()
    pod.controller.set_predictor(Predictor(host_levels(2), SOLO))
    pod.step()
    assert units(pod.step()) == (1, 1)


def test_a_device_that_is_shared_in_time_is_the_workers_while_decode_idles():
    pod = Pod(levels=whole_levels(2))
    assert units(pod.step(batch=0)) == (2, 2)
    pod.worker_answers()
    assert (units(pod.step()), pod.last.pause_epoch) == ((0, 2), 1)
    assert pod.controller.why_paused == "objective"
    assert units(pod.step(batch=0)) == (2, 2)


def test_no_part_is_given_of_a_device_that_is_shared_in_time():
    pod = Pod(
        HarvestTerms("p", "windrow", "harvest", 12_000, max_compute_percent=50),
        levels=whole_levels(2),
    )
    assert units(pod.step(batch=0)) == (0, 2)


def test_decode_takes_everything_when_the_worker_is_gone():
    pod = Pod()
    pod.step()
    assert units(pod.step(present=False)) == (0, 2)
    assert pod.controller.why_paused == "no worker"


@pytest.mark.parametrize(
    ("terms", "predictor", "why"),
    [
        (None, True, "no policy"),
        (HarvestTerms("p", "windrow", "off", 12_000), True, "off"),
        (TERMS, False, "no latency profile"),
    ],
)
def test_without_policy_or_profile_nothing_is_granted(terms, predictor, why):
    pod = Pod(terms, predictor)
    for batch in (0, SMALL, BURST):
        assert units(pod.step(batch)) == (0, 2)
    assert pod.controller.why_paused == why
    assert pod.controller.headroom_units(View(batch=SMALL)) == 0


def test_a_policy_that_is_taken_away_pauses_the_worker():
    pod = Pod()
    assert units(pod.step()) == (1, 1)
    pod.controller.set_terms(None)
    assert (pod.step().action, pod.last.pause_epoch) == (Action.PAUSE, 1)


def test_observe_grants_nothing_and_remembers_what_it_would():
    pod = Pod(HarvestTerms("p", "windrow", "observe", 12_000))
    assert units(pod.step(present=False)) == (0, 2)
    assert pod.controller.would_units == 1
    pod.step(BURST, present=False)
    assert pod.controller.would_units == 0
    assert pod.last.pause_epoch == 0


def test_an_idle_decode_gives_all_and_takes_back_at_its_next_step_without_a_pause():
    pod = Pod()
    pod.step()
    assert units(pod.step(0)) == (2, 1)
    back = pod.step()
    assert (units(back), back.action, back.pause_epoch) == ((1, 1), Action.GO, 1)


def test_the_guard_pauses_a_worker_that_the_policy_would_let_run():
    pod = Pod()
    pod.step(latency_us=13_000)
    pod.step(latency_us=13_000)
    assert pod.step().action == Action.PAUSE
    assert pod.controller.why_paused == "guard"
    queue = Pod()
    assert queue.step().action == Action.GO
    queue.controller.guard.queued(queue.now_ns, 60_000)
    assert queue.step().action == Action.PAUSE
    assert queue.controller.why_paused == "queue"


def test_limits_bind_the_idle_device_too():
    pod = Pod(HarvestTerms("p", "windrow", "harvest", 12_000, max_compute_percent=60))
    assert pod.step().finetune_units == 1
    assert pod.step(0).finetune_units == 1
    none = Pod(HarvestTerms("p", "windrow", "harvest", 12_000, max_compute_percent=40))
    assert none.step().action == Action.PAUSE
    assert none.step(0).action == Action.PAUSE


def test_steps_beside_the_worker_teach_and_steps_between_two_partitions_do_not():
    pod = Pod()
    predictor = pod.controller.predictor
    before = predictor.predict_us(SMALL, 0)[1]
    for _ in range(410):  # the first few lie between two partitions
        pod.step(latency_us=7800)
    left = abs(before - 7800) * FIGURES["forgetting"] ** 400
    assert predictor.predict_us(SMALL, 0)[1] == pytest.approx(7800, abs=left)
    learned = predictor.co_run
    pod.step(BURST, latency_us=50_000)  # paused, but decode is still on one core
    assert predictor.co_run == learned


def test_by_request_a_long_step_is_no_breach_while_there_is_slack():
    pod = Pod(HarvestTerms("p", "windrow", "harvest", 12_000, per_request=True))
    for _ in range(10):
        pod.step(latency_us=13_000, slack_us=100_000)
    assert pod.controller.guard.trips == 0
    for _ in range(2):
        pod.step(latency_us=13_000, slack_us=-1)
    assert pod.controller.guard.trips == 1


def test_headroom_is_what_an_eager_worker_would_get_though_none_is_there():
    pod = Pod()
    pod.step(present=False)
    assert pod.controller.headroom_units(View(batch=SMALL, objective_us=12_000)) == 1
    assert pod.controller.headroom_units(View(batch=BURST, objective_us=12_000)) == 0
    assert pod.controller.headroom_units(View(batch=0, objective_us=12_000)) == 2


class Granting:
    """A controller whose policy answers with a grant that is given, on four cores."""

    def __init__(self) -> None:
        levels = host_levels(4)
        solo = {units: SoloStepModel(100, 0, 0) for units in range(1, 5)}
        self.controller = Controller(levels, Predictor(levels, solo))
        self.controller.set_terms(TERMS)
        self.wish, self.now_ns = Grant(), SECOND_NS
        self.controller.decider.set_terms(
            policy=lambda view, offer: self.wish,
            idle="",
            observing=False,
            per_request=False,
            refused=False,
            objective_us=12_000,
            deferral_us=0,
            first_token_us=0,
            allowed=4,
            idle_units=4,
        )

    def grant(self, finetune_units: int, decode_units: int, **offer: int) -> Grant:
        self.wish = Grant(Action.GO, finetune_units, decode_units)
        self.now_ns += 10 * MS
        view = View(batch=4, objective_us=12_000)
        return self.controller.decide(view, Offer(1, **offer), self.now_ns, present=True)


def test_after_a_grant_shrinks_decode_waits_for_the_acknowledgement_only():
    slot = Granting()
    slot.grant(3, 1)
    shrunk = slot.grant(1, 3, in_flight_us=500)
    assert (shrunk.pause_epoch, shrunk.decode_units) == (1, 1)
    # What is in flight now was launched within the new grant.
    assert slot.grant(1, 3, in_flight_us=500, pause_epoch_seen=1).decode_units == 3


def test_narrowing_decode_is_immediate():
    first = Granting().grant(1, 1)
    assert (first.decode_units, first.pause_epoch) == (1, 0)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"mode": "always"}, "spec.mode"),
        ({"policy": "best"}, "spec.policy"),
        ({"scope": "perDay"}, "spec.objective.scope"),
        ({"objective_seconds": 0.0}, "spec.objective.tpot"),
        ({"objective_seconds": float("nan")}, "spec.objective.tpot"),
        ({"percentile": 0.0}, "spec.objective.percentile"),
        ({"max_compute_percent": 0}, "spec.limits.maxSmPercent"),
        ({"max_memory_percent": 101}, "spec.limits.maxMemoryPercent"),
        ({"deferral_seconds": 61.0}, "spec.objective.deferralBound"),
        ({"deferral_seconds": float("nan")}, "spec.objective.deferralBound"),
        ({"first_token_seconds": 601.0}, "spec.objective.ttft"),
        ({"first_token_seconds": float("nan")}, "spec.objective.ttft"),
    ],
)
def test_terms_that_cannot_be_kept_are_refused_by_field(changes, field):
    asked = {
        "name": "p",
        "policy": "harli",
        "mode": "harvest",
        "objective_seconds": 0.04,
        "percentile": 95.0,
        "scope": "",
        "max_compute_percent": 60,
        "max_memory_percent": 0,
    }
    terms = make_terms(**asked)
    assert (terms.objective_us, terms.percentile) == (40_000, 95.0)
    assert (terms.max_compute_percent, terms.max_memory_percent) == (60, 0)
    assert terms.deferral_us == 400_000
    assert make_terms(**asked, deferral_seconds=0.3).deferral_us == 300_000
    assert terms.first_token_us == 0
    assert make_terms(**asked, first_token_seconds=0.5).first_token_us == 500_000
    assert make_terms(**{**asked, "name": ""}) is None
    with pytest.raises(UserError) as refused:
        make_terms(**{**asked, **changes})
    assert refused.value.field == field


def test_another_objective_or_policy_begins_with_a_clean_record_and_another_mode_does_not():
    pod = Pod()
    for _ in range(4):
        pod.step(latency_us=13_000)
    assert pod.controller.guard.trips
    before = pod.controller.guard
    for mode in ("observe", "harvest"):
        pod.controller.set_terms(replace(TERMS, mode=mode))
        assert pod.controller.guard is before
    pod.controller.set_terms(replace(TERMS, policy="harli"))
    assert pod.controller.guard.trips == 0
    pod.controller.guard.trips = 1
    pod.controller.set_terms(replace(TERMS, policy="harli", objective_us=20_000))
    assert pod.controller.guard.trips == 0


def test_a_margin_is_of_its_objective_and_policy_and_is_found_again():
    pod, harli = Pod(), replace(TERMS, policy="harli")
    predictor = pod.controller.predictor
    predictor.margin = learned = 0.3
    pod.controller.set_terms(replace(TERMS, mode="observe"))
    assert predictor.margin == learned
    pod.controller.set_terms(harli)
    assert predictor.margin == START_MARGIN
    predictor.margin = of_harli = 0.2
    pod.controller.set_terms(TERMS)
    assert predictor.margin == learned
    pod.controller.set_terms(harli)
    assert predictor.margin == of_harli


def test_a_step_of_several_tokens_may_take_so_many_times_the_objective():
    pod = Pod(replace(TERMS, objective_us=4000))
    assert pod.controller.refusal == ""
    assert pod.step().finetune_units == 0  # 4 ms alone, 6 ms beside a worker
    guard, predictor = pod.controller.guard, pod.controller.predictor
    guard.trips, predictor.margin = 1, 0.2
    pod.controller.set_step_tokens(3.0)
    view = View(batch=SMALL, objective_us=pod.controller.step_objective_us)
    granted = pod.controller.decide(view, pod.offer, pod.now_ns + MS, present=True)
    assert (view.objective_us, granted.in_flight_bound_us) == (12_000, 3000)
    assert pod.controller.terms.objective_us == 4000
    # What was learned is of the same objective, and the policy's terms may come again.
    pod.controller.set_terms(replace(TERMS, objective_us=4000))
    assert (pod.controller.guard, guard.trips, predictor.margin) == (guard, 1, 0.2)
    assert pod.controller.step_objective_us == 12_000
    pod.controller.set_step_tokens(0.5)
    assert (pod.controller.step_tokens, pod.controller.step_objective_us) == (1.0, 4000)


def test_an_objective_below_decode_alone_is_refused_for_the_tokens_of_a_step():
    pod = Pod(replace(TERMS, objective_us=1000))
    assert "the objective of 1 ms is below the 4.0 ms that decode alone" in pod.controller.refusal
    pod.controller.set_step_tokens(2.0)
    assert "takes for one request and 2.0 tokens: raise" in pod.controller.refusal
    pod.controller.set_step_tokens(4.0)
    assert pod.controller.refusal == ""
