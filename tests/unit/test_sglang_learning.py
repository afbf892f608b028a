from __future__ import annotations

from types import SimpleNamespace

import pytest

from windrow.rundir import RunDir, profile_file
from windrow_sidecar.engines.hook import StepInput
from windrow_sidecar.engines.profile import Subject
from windrow_sidecar.engines.sglang.harvesting import SchedulerHarvest, _Step
from windrow_sidecar.engines.sglang.learning import (
    FullShareEstimate,
    KeptProfile,
    SoloLearner,
    StepTokens,
)
from windrow_sidecar.qos.levels import host_levels
from windrow_sidecar.qos.solo import fit_solo


def took_us(units: int, batch: int, context: int) -> int:
    return round((1000 + 200 * max(batch, 4) + context) * 2 / units)


def learned(learner: SoloLearner, steps: int, batches=(4, 6, 8), contexts=(100, 700, 1300)):
    """Decode alone for so many steps, on the shares that the learner asks for."""
    found, asked = [], set()
    for i in range(steps):
        units = learner.units or 2
        asked.add(units)
        batch, context = batches[i // 100 % len(batches)], contexts[i // 300 % len(contexts)]
        learner.add(units, batch, context, took_us(units, batch, context))
        if (news := learner.news()) is not None:
            found.append(news)
    return found, asked


def test_every_share_is_tried_and_the_profile_is_that_of_the_machine():
    found, asked = learned(SoloLearner(host_levels(2)), 6000)
    assert asked == {1, 2}
    for units, fit in fit_solo(found[-1]).items():
        for batch, context in ((4, 100), (8, 1300), (6, 700)):
            wanted = took_us(units, batch, context)
            # Medians of whole microseconds, of contexts that share a bucket exactly.
            assert abs(fit.model.predict_us(batch, context) - wanted) <= 2


def test_there_is_no_profile_before_each_share_has_been_seen_often_enough():
    found, _ = learned(SoloLearner(host_levels(2)), 60)
    assert found == []


def test_decode_has_all_units_again_once_enough_is_known():
    learner = SoloLearner(host_levels(2))
    learned(learner, 3000, batches=(4,), contexts=(100,))
    assert learner.complete
    shares = set()
    for _ in range(100):
        shares.add(learner.units)
        learner.add(2, 4, 100, took_us(2, 4, 100))
    assert shares == {0}


def test_a_batch_that_one_share_has_not_seen_is_shown_to_it_in_a_quarter_of_the_steps():
    learner = SoloLearner(host_levels(2))
    learned(learner, 400, batches=(4,), contexts=(100,))
    on_one = 0
    for _ in range(192):  # until it knows: two blocks of 12, of which two steps each do not count
        on_one += learner.units == 1
        learner.add(learner.units or 2, 16, 100, took_us(learner.units or 2, 16, 100))
    assert 12 <= on_one <= 48


def test_a_new_profile_comes_only_with_new_ground():
    learner = SoloLearner(host_levels(2))
    first, _ = learned(learner, 400, batches=(4,), contexts=(100,))
    again, _ = learned(learner, 400, batches=(4,), contexts=(100,))
    assert (len(first), again) == (1, [])
    wider, _ = learned(learner, 2000, batches=(2, 4, 8, 12), contexts=(100, 2000))
    assert wider


def test_the_first_steps_after_a_move_do_not_count():
    learner = SoloLearner(host_levels(2))
    for i in range(2000):
        units = learner.units or 2
        moved = i % 12 < 2
        learner.add(units, 4, 100, 9_000_000 if moved else took_us(units, 4, 100))
        if (news := learner.news()) is not None:
            break
    assert {sample.step_us for sample in news} == {took_us(1, 4, 100), took_us(2, 4, 100)}


def test_a_profile_is_kept_for_the_next_start_of_the_same_kind(caplog, tmp_path):
    kept = KeptProfile(RunDir(tmp_path))
    kept.keep({"key": "k", "solo": []})
    assert kept.of("k") == {"key": "k", "solo": []}
    assert kept.of("another") is None
    assert caplog.text == ""


def test_an_engine_starts_from_what_another_pod_has_measured(tmp_path):
    (stored := tmp_path / "stored").mkdir()
    (stored / profile_file("a")).write_text('{"key": "a", "of": "another pod"}')
    kept = KeptProfile(RunDir(tmp_path), stored)
    assert kept.of("a") == {"key": "a", "of": "another pod"}
    assert kept.of("b") is None
    kept.keep({"key": "a", "of": "this one"})
    assert kept.of("a") == {"key": "a", "of": "this one"}


def test_a_profile_that_cannot_be_kept_is_told_and_missed(caplog, tmp_path):
    kept = KeptProfile(RunDir(tmp_path / "gone"))
    kept.keep({"key": "k"})
    assert kept.of("k") is None
    assert "not kept for the next start" in caplog.text


def test_an_engine_starts_from_what_another_slot_of_its_pod_has_measured(tmp_path):
    KeptProfile(RunDir(tmp_path, 2)).keep({"key": "a", "of": 2})
    mine = KeptProfile(RunDir(tmp_path, 1))
    assert mine.of("a") == {"key": "a", "of": 2}
    assert mine.of("b") is None
    mine.keep({"key": "a", "of": 1})
    assert mine.of("a") == {"key": "a", "of": 1}


def test_without_a_profile_the_load_that_is_seen_says_what_shares_would_take_at_most():
    estimate = FullShareEstimate(host_levels(4))
    for _ in range(39):
        estimate.add(4, 100, 2000)
    assert estimate.news() is None  # too few to say anything
    estimate.add(4, 100, 2000)
    found = {sample.units: sample.step_us for sample in estimate.news()}
    assert found == {4: 2000, 3: pytest.approx(2000 * 4 / 3), 2: 4000, 1: 8000}
    assert estimate.news() is None
    for _ in range(8):
        estimate.add(8, 100, 3000)
    assert {sample.batch for sample in estimate.news()} == {4, 8}


class Inner:
    """The hook, as far as learning asks it."""

    def __init__(self, mode):
        self.controller = SimpleNamespace(terms=SimpleNamespace(mode=mode))
        self.profiles = []

    def set_profile(self, profile):
        self.profiles.append(profile)


def test_a_policy_that_observes_is_told_a_gain_and_harvests_by_no_estimate():
    """Observing moves no share of decode's, so that nothing but its load is known."""
    levels, inner = host_levels(2), Inner("observe")
    subject = Subject("host:2-cores", "host", "sglang", "0.5.23", "f")
    parts = SimpleNamespace(inner=inner, splits=levels, subject=subject)
    harvest = SchedulerHarvest(parts, SoloLearner(levels))
    for batch in (4, 6, 8):
        for _ in range(20):
            facts = StepInput(1, 0, batch, 100, 0, 0, 0)
            harvest._learn(_Step(facts, None, 2, 0, 0), took_us(2, batch, 100))
    (profile, *_) = inner.profiles
    assert len(profile["solo"]) == 2  # one core and both
    harvest._forget_estimate()
    assert None not in inner.profiles
    inner.controller.terms.mode = "harvest"
    harvest._forget_estimate()
    assert inner.profiles[-1] is None


def test_a_policy_that_observes_again_keeps_what_was_measured():
    levels, inner, kept = host_levels(2), Inner("harvest"), []
    parts = SimpleNamespace(
        inner=inner,
        splits=levels,
        subject=Subject("host:2-cores", "host", "sglang", "0.5.23", "f"),
        link=SimpleNamespace(set_profile=lambda _: None),
        keep_profile=kept.append,
    )
    learner = SoloLearner(levels)
    harvest = SchedulerHarvest(parts, learner)

    def steps(units):
        for batch in (4, 6, 8):
            for _ in range(60):
                facts = StepInput(1, 0, batch, 100, 0, 0, 0)
                at = units or learner.units or 2
                harvest._learn(_Step(facts, None, at, 0, 0), took_us(at, batch, 100))

    while not kept:
        steps(0)
    measured = inner.profiles[-1]
    assert measured is kept[-1]
    inner.controller.terms.mode = "observe"
    steps(2)
    harvest._forget_estimate()
    inner.controller.terms.mode = "harvest"
    harvest._forget_estimate()
    assert inner.profiles[-1] is measured


def test_the_tokens_of_a_step_are_those_that_its_requests_got_in_it():
    def request(rid: str) -> SimpleNamespace:
        return SimpleNamespace(rid=rid, output_ids=[], finished=lambda: False)

    counted, first, second = StepTokens(), request("a"), request("b")

    def step(**got: int) -> float:
        batch = [r for r in (first, second) if r.rid in got]
        for r in batch:
            r.output_ids += [0] * got[r.rid]
        counted.delivered(batch)
        return counted.mean

    assert step(a=1) == 1.0  # of a prompt
    assert step(a=3) == 3.0
    assert step(a=1, b=1) == 2.0  # the other's first counts for nothing
    assert step(a=1, b=3) == 2.0
    first.finished = lambda: True
    assert step(a=4, b=0) == 2.5  # SGLang delivers nothing to a request that is being retracted
    assert step(a=2) == 2.5  # what is computed after its end is thrown away
    for _ in range(400):
        step(b=2)
    assert counted.mean == pytest.approx(2.0, abs=1e-4)
