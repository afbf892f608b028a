"""Limits hold whatever a policy says, and decode is safe again within two steps and a tasklet.

In simulated time: a decode whose steps take what the true model says, beside a worker that stops
one tasklet after it has been told to.
"""

from __future__ import annotations

import random

import pytest

from windrow_sidecar.qos.control import Controller, EngineTraits
from windrow_sidecar.qos.levels import host_levels, overlapping_levels
from windrow_sidecar.qos.policies import POLICIES, Context, make_policy
from windrow_sidecar.qos.predictor import Predictor
from windrow_sidecar.qos.solo import SoloStepModel
from windrow_sidecar.qos.terms import HarvestTerms
from windrow_sidecar.qos.view import Action, Grant, Offer, View

MS_NS = 1_000_000
LEVELS = host_levels(4)
SOLO = {units: SoloStepModel(1000 + 2000 / units, 800 / units, 0.0) for units in range(1, 5)}
OBJECTIVE_US, TASKLET_NS = 10_000, 2_500_000


def run_everything(view: tuple[int, ...], offer: tuple[int, ...], allowed: int) -> Grant:
    """All units for the worker, for ever; requests wait, steps wait."""
    far_ns = View._make(view).start_ns + 10**12
    return Grant(Action.GO, 10**6, 1, gap_until_ns=far_ns, hold_admission_until_ns=far_ns)


def run_all_it_may(view: tuple[int, ...], offer: tuple[int, ...], allowed: int) -> Grant:
    """The most that the hard limits let pass."""
    split = LEVELS.splits[allowed - 1]
    return Grant(Action.GO, split.finetune_units, split.decode_units)


class Simulated:
    """A decode whose steps take `slow` times what its profile says while the worker runs."""

    def __init__(self, policy, percent: int = 100, slow: float = 1.0) -> None:
        self.controller = Controller(
            LEVELS, Predictor(LEVELS, SOLO), engine=EngineTraits(layers=8, gaps=True)
        )
        name = policy if isinstance(policy, str) else "windrow"
        terms = HarvestTerms("p", name, "harvest", OBJECTIVE_US, max_compute_percent=percent)
        self.controller.set_terms(terms)
        if callable(policy):
            allowed = LEVELS.allowed(percent)
            self.controller.decider.set_terms(
                policy=lambda view, offer: policy(view, offer, allowed),
                idle="",
                observing=False,
                per_request=False,
                refused=False,
                objective_us=OBJECTIVE_US,
                deferral_us=terms.deferral_us,
                first_token_us=0,
                allowed=allowed,
                idle_units=LEVELS.idle_share(percent),
            )
        self.slow, self.now_ns = slow, 10**10
        self.quiet_at_ns, self.offer = 0, Offer(job_epoch=1)
        self.last = Grant()

    def step(self, batch: int) -> tuple[Grant, int]:
        """One step; returns the grant and its latency."""
        view = View(batch=batch, objective_us=OBJECTIVE_US, start_ns=self.now_ns)
        before = self.last
        grant = self.controller.decide(view, self._answer(), self.now_ns, present=True)
        if grant.finetune_units < before.finetune_units:
            self.quiet_at_ns = self.now_ns + TASKLET_NS
        self.last = grant
        alone_us = SOLO[grant.decode_units].predict_us(batch, 0)
        harmed = grant.finetune_units or self.now_ns < self.quiet_at_ns
        latency_us = int(alone_us * (self.slow if harmed else 1.0))
        if grant.gap_until_ns:
            latency_us += (grant.gap_until_ns - self.now_ns) // 1000
        self.now_ns += latency_us * 1000
        self.controller.observe(self.now_ns, latency_us)
        return grant, latency_us

    def _answer(self) -> Offer:
        running = self.last.action == Action.GO or self.now_ns < self.quiet_at_ns
        return Offer(
            job_epoch=1,
            in_flight_us=TASKLET_NS // 1000 if running else 0,
            pause_epoch_seen=self.last.pause_epoch,
        )


@pytest.mark.parametrize("policy", [run_everything, run_all_it_may])
@pytest.mark.parametrize("percent", [25, 50, 75, 100])
def test_a_policy_that_always_runs_everything_passes_no_limit(policy, percent):
    slot, rng = Simulated(policy, percent), random.Random(percent)
    for _ in range(500):
        begun_ns = slot.now_ns
        grant, _ = slot.step(rng.choice((1, 4, 8)))
        assert grant.finetune_units <= 4 * percent // 100
        assert grant.decode_units >= 1
        assert grant.gap_until_ns - begun_ns <= OBJECTIVE_US * 1000
        assert grant.hold_admission_until_ns - begun_ns <= 400 * MS_NS


def test_a_policy_that_breaks_the_objective_is_stopped_within_two_steps_and_a_tasklet():
    slot = Simulated(run_all_it_may, slow=4.0)
    over, alone = 0, 0
    for _ in range(2000):
        grant, latency_us = slot.step(4)
        over = over + 1 if latency_us > OBJECTIVE_US else 0
        # Two steps over the objective, then what is in flight ends within the third.
        assert over <= 3
        alone += grant.action == Action.PAUSE
    # After a pause of 50 ms two steps are tried again; soon the breaker gives up for longer.
    assert slot.controller.guard.reason
    assert alone > 1500


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("latency_us", [float("nan"), float("inf"), -5, 0, 6e8])
def test_a_latency_that_cannot_be_pauses_and_teaches_nothing(name, latency_us):
    slot = Simulated(name)
    for _ in range(5):
        slot.step(4)
    predictor = slot.controller.predictor
    known = (predictor.co_run, predictor.margin)
    slot.controller.observe(slot.now_ns, latency_us)
    assert (predictor.co_run, predictor.margin) == known
    assert slot.step(4)[0].action == Action.PAUSE


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_view_of_nonsense_pauses_whatever_the_policy(name):
    slot = Simulated(name)
    slot.step(4)
    view = View(batch=-3, objective_us=OBJECTIVE_US, start_ns=slot.now_ns)
    grant = slot.controller.decide(view, Offer(job_epoch=1), slot.now_ns, present=True)
    assert (grant.action, grant.finetune_units) == (Action.PAUSE, 0)
    assert slot.controller.why_paused == "the view holds impossible figures"


def test_an_objective_below_what_decode_alone_takes_is_refused_with_the_number():
    slot = Simulated("static")
    # 1 + 2/4 + 4 x 0.8/4 = 2.3 ms for one request on four cores.
    slot.controller.set_terms(HarvestTerms("p", "static", "harvest", 2000))
    for batch in (0, 4):
        assert slot.step(batch)[0].action == Action.PAUSE
    assert "2 ms is below the 2.3 ms that decode alone takes" in slot.controller.refusal
    slot.controller.set_terms(HarvestTerms("p", "static", "harvest", OBJECTIVE_US))
    slot.step(4)
    assert slot.controller.refusal == ""


def worth(grant: Grant, view: View, ctx: Context) -> float:
    """Return how much the worker is given, in the measure of the policy that gives it.

    Tasklets, or tokens of a window; else units, for as much of the step as it may have them.
    """
    if grant.n_tasklets or grant.window_tokens:
        return grant.n_tasklets or grant.window_tokens
    if grant.gap_until_ns:
        gap_us = (grant.gap_until_ns - view.start_ns) / 1000
        return grant.finetune_units * gap_us / (gap_us + ctx.solo_us[0])
    if grant.budget_us:
        return grant.finetune_units * min(1.0, grant.budget_us / grant.predicted_us)
    return grant.finetune_units


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_more_slack_never_gives_the_worker_less(name):
    """A longer objective, with everything else as it was."""
    rng, policy = random.Random(7), make_policy(name)
    offer = Offer(1, 0, 3, 0, 4, 256, (4000, 2000, 1333, 1000, 0, 0, 0, 0))
    for _ in range(60):
        levels = rng.choice([LEVELS, overlapping_levels(4, (1, 2, 3))])
        n = len(levels.splits)
        solo = [rng.uniform(2000, 6000)] * n
        beside = [solo[0] * factor for factor in sorted(rng.uniform(1, 3) for _ in range(n))]
        gaps = rng.random() < 0.5
        ctx = Context(levels, n, 4, beside, 0.05, 0, False, 2500, solo, layers=8, gaps=gaps)
        least = 0.0
        for objective_us in range(2000, 30_000, 500):
            view = View(batch=4, objective_us=objective_us, start_ns=10**10)
            given = worth(policy.decide(view, offer, ctx), view, ctx)
            assert given >= least - 1e-3, (objective_us, ctx)  # budgets are whole microseconds
            least = given
