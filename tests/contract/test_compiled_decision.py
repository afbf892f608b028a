"""What runs before a step equals what the policies' Python says, bit for bit."""

from __future__ import annotations

import random

import pytest

from windrow_sidecar._core import DECISION_FIGURES
from windrow_sidecar.engines.harvest.compiled import CompiledController, _figures
from windrow_sidecar.qos.control import Controller, EngineTraits
from windrow_sidecar.qos.guard import Guard
from windrow_sidecar.qos.levels import (
    Partitioning,
    host_levels,
    overlapping_levels,
    pair_levels,
    whole_levels,
)
from windrow_sidecar.qos.policies import POLICIES, Policy
from windrow_sidecar.qos.policies.fineinfer import FineInfer
from windrow_sidecar.qos.policies.harli import Harli
from windrow_sidecar.qos.policies.windrow import Windrow
from windrow_sidecar.qos.predictor import Predictor
from windrow_sidecar.qos.solo import SoloStepModel
from windrow_sidecar.qos.terms import HarvestTerms
from windrow_sidecar.qos.view import LEVELS_MAX, Offer, View

OPTIONS = (
    Windrow(turns=True),
    Harli(repick="step"),
    FineInfer(switch="iteration"),
)
ASKED: tuple[Policy, ...] = (*(make() for make in POLICIES.values()), *OPTIONS)
DEVICES = (
    host_levels(2),
    overlapping_levels(132, (8, 16, 24, 32, 48, 64, 80)),
    pair_levels(132),
    whole_levels(132),
)
HISTORIES = [
    pytest.param(policy, levels, id=f"{policy.name}{policy.option}-{len(levels.splits)}")
    for policy in ASKED
    for levels in DEVICES
]
A_MILLION = 1_000_000 // len(HISTORIES) + 1
MODES = ("harvest",) * 8 + ("observe", "off")
PAST_64_BITS = 1 << 62


class Pair:
    """The same slot decided twice: as it reads and as it runs."""

    def __init__(self, policy: Policy, levels: Partitioning, rng: random.Random) -> None:
        self._policy, self._levels, self._rng = policy, levels, rng
        traits = EngineTraits(layers=rng.choice((1, 32)), gaps=True, chunk_bytes=1 << 27)
        self.both = (
            Controller(levels, self._predictor(), engine=traits),
            CompiledController(levels, self._predictor(), engine=traits),
        )
        self._objective_us, self._now_ns = 0, 1_000_000_000
        self.set_terms()

    def _predictor(self) -> Predictor:
        units = {s.decode_units for s in self._levels.splits}
        solo = {n: SoloStepModel(2000 + 900 / n, 30 + 400 / n, 0.02 + 0.5 / n) for n in units}
        return Predictor(self._levels, solo, profiled=(48, 80_000))

    def set_terms(self) -> None:
        rng = self._rng
        self._objective_us = rng.choice((2000, 6000, 9000, 12_000, 20_000, 40_000))
        terms = None
        if rng.random() < 0.95:
            terms = HarvestTerms(
                "p",
                self._policy.name,
                rng.choice(MODES),
                self._objective_us,
                per_request=rng.random() < 0.3,
                max_compute_percent=rng.choice((1, 30, 60, 100, 100, 100)),
            )
        for controller in self.both:
            controller.set_terms(terms)
            if controller._policy is not None:
                controller._policy = self._policy
        self.both[1]._tell_terms()

    def decide(self) -> None:
        rng = self._rng
        self._now_ns += rng.choice((0, 1000, 4_000_000, 9_000_000, 300_000_000))
        view, offer = self._view(), self._offer()
        present, chunks = rng.random() < 0.95, rng.randrange(9)
        reads, runs = (
            c.decide(view, offer, self._now_ns, present=present, chunks=chunks) for c in self.both
        )
        assert type(runs) is type(reads)
        assert runs == reads, (view, offer)
        ours, theirs = (
            (
                c.explain(0, view, offer, reads),
                c.during,
                c.would_units,
                c.is_settled,
                c.headroom_units(view),
            )
            for c in self.both
        )
        assert ours == theirs

    def step(self) -> None:
        """A step, of about the length that was predicted; a few that cannot be."""
        rng = self._rng
        about_us = self.both[0].during.predicted_us or 5000
        took_us = about_us * rng.choice((1.0, 1.0, 1.0, 1.3, 3.0)) * rng.uniform(0.9, 1.1)
        if rng.random() < 0.002:
            took_us = rng.choice((0.0, float("nan"), 1e9))
        waited_us = rng.choice((0, 49_000, 80_000)) if rng.random() < 0.02 else 0
        for controller in self.both:
            controller.queued(self._now_ns, waited_us)
        first, second = (c.observe(self._now_ns, took_us) for c in self.both)
        assert first == second
        states = [c.guard.state for c in self.both]
        assert states[0] == states[1]

    def _view(self) -> View:
        rng = self._rng
        batch = rng.choice((0, 1, 4, rng.randrange(64)))
        view = View(
            step=1,
            start_ns=self._now_ns - rng.choice((0, 3000, 900_000)),
            batch=batch,
            context_tokens=batch * rng.randrange(4000),
            waiting=rng.choice((0, 0, 3)),
            admitted_tokens=rng.choice((0, 0, 700)),
            free_chunks=rng.randrange(40),
            objective_us=self._objective_us,
            slack_us=rng.randrange(-90_000, 90_000),
            waited_us=rng.choice((0, 5000, 600_000)),
        )
        if rng.random() < 0.01:  # nobody should send these
            name = rng.choice(("batch", "context_tokens", "objective_us", "start_ns", "waited_us"))
            view = view._replace(**{name: rng.choice((-1, 0, 1, PAST_64_BITS))})
        return view

    def _offer(self) -> Offer:
        rng = self._rng
        begin = rng.randrange(32)
        offer = Offer(
            job_epoch=rng.choice((1, 1, 1, 0)),
            phase=rng.randrange(5),
            layer_begin=begin,
            layer_end=begin + rng.randrange(5),
            tokens=rng.choice((0, 128, 2048)),
            estimates_us=tuple(rng.choice((0, rng.randrange(9000))) for _ in range(LEVELS_MAX)),
            memory_delta_bytes=rng.choice((-(1 << 20), 0, 1 << 29)),
            starving=rng.random() < 0.05,
            in_flight_us=rng.choice((0, 900)),
            pause_epoch_seen=rng.choice((0, self.both[0]._handover.pause_epoch)),
            held_chunks=rng.choice((0, 4)),
        )
        if rng.random() < 0.01:
            name = rng.choice(("tokens", "layer_begin", "layer_end", "memory_delta_bytes", "phase"))
            offer = offer._replace(**{name: rng.choice((-1, PAST_64_BITS))})
        return offer


def follow(policy: Policy, levels: Partitioning, decisions: int) -> None:
    rng = random.Random(f"{policy.name}{policy.option}{len(levels.splits)}")
    pair, seen, left = Pair(policy, levels, rng), set(), 20
    for _ in range(decisions):
        if not left:
            pair.set_terms()
            left = rng.choice((20, 60, 260))
        left -= 1
        pair.decide()
        seen.add(pair.both[1].why_paused)
        for _ in range(rng.choice((0, 1, 1, 3))):
            pair.step()
    # A fixed share gives nothing where there is no share.
    runs = set() if policy.name == "static" and len(levels.splits) == 1 else {""}
    assert seen >= {"objective", "no worker", "starving"} | runs


@pytest.mark.parametrize(("policy", "levels"), HISTORIES)
def test_compiled_decisions_equal_the_policies_as_they_read(policy, levels):
    follow(policy, levels, 1000)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("policy", "levels"), HISTORIES)
def test_compiled_decisions_equal_the_policies_over_a_million_views(policy, levels):
    follow(policy, levels, A_MILLION)


def test_every_policy_and_constant_has_its_compiled_twin():
    assert set(_figures(Guard())) == set(DECISION_FIGURES)
    for policy in ASKED:
        levels = host_levels(2)
        controller = CompiledController(levels, Pair(policy, levels, random.Random(1))._predictor())
        controller.set_terms(HarvestTerms("p", policy.name, "harvest", 12_000))
