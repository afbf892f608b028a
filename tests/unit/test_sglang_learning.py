from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from windrow.rundir import RunDir, profile_file
from windrow_sidecar.engines.kept_profile import KeptProfile
from windrow_sidecar.engines.profile import Subject
from windrow_sidecar.engines.sglang.learning import (
    FullShareEstimate,
    ReusedProfile,
    SoloLearner,
    StepTokens,
)
from windrow_sidecar.engines.sglang.live_profile import LiveProfile
from windrow_sidecar.qos.levels import host_levels
from windrow_sidecar.qos.solo import fit_solo, solo_models


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
    """Keeps what a live profile gives the hook."""

    def __init__(self, mode="harvest", profile=None):
        self.controller = SimpleNamespace(terms=SimpleNamespace(mode=mode))
        self.profile, self.profiles = profile, []

    def set_profile(self, profile, *, estimated=False):
        self.profiles.append(profile)
        self.profile = None if estimated else profile


SUBJECT = Subject("host:2-cores", "host", "sglang", "0.5.23", "f")


class Live:
    """Holds a live profile of two cores, and what it hands on."""

    def __init__(self, mode="harvest", reused=None):
        levels = host_levels(2)
        self.told, self.kept = [], []
        self.inner = Inner(mode, reused)
        link = SimpleNamespace(set_profile=lambda told: self.told.append(json.loads(told.json)))
        found = ReusedProfile(reused, 2) if reused else None
        self.profile = LiveProfile(
            self.inner, link, SUBJECT, levels, keep=self.kept.append, reused=found
        )

    def steps(self, n, batches=(4, 6, 8), *, units=0, slower=1.0):
        for i in range(n):
            batch = batches[i * len(batches) // n]
            self.profile.before_batch(batch)
            at = units or self.profile.asks_for or 2
            self.profile.alone(at, batch, 100, round(slower * took_us(at, batch, 100)))


def test_a_policy_that_observes_is_told_a_gain_and_harvests_by_no_estimate():
    """Observing moves no share of decode's, so that nothing but its load is known."""
    live = Live("observe")
    live.steps(60)
    (estimate, *_) = live.inner.profiles
    assert len(estimate["solo"]) == 2  # one core and both
    assert None not in live.inner.profiles
    live.inner.controller.terms.mode = "harvest"
    live.profile.before_batch(4)
    assert live.inner.profiles[-1] is None
    assert (live.told, live.kept) == ([], [])


def test_a_policy_that_observes_again_keeps_what_was_measured():
    live = Live()
    while not live.kept:
        live.steps(180)
    measured = live.inner.profiles[-1]
    assert measured is live.kept[-1]
    live.inner.controller.terms.mode = "observe"
    live.steps(180, units=2)
    live.inner.controller.terms.mode = "harvest"
    live.profile.before_batch(4)
    assert live.inner.profiles[-1] is measured


def test_a_profile_of_one_batch_size_serves_this_load_and_is_handed_to_nobody():
    live = Live()
    live.steps(600, batches=(2, 4))  # a step of two costs as much as one of four
    narrow = live.inner.profile
    assert narrow is not None
    assert (live.told, live.kept) == ([], [])
    live.steps(10, batches=(8,))
    assert live.inner.profile is None, "it says nothing of them: they run alone"
    live.profile.idle()
    assert live.inner.profile is narrow
    live.steps(590, batches=(8,))
    assert live.kept[-1] == live.told[-1] == live.inner.profile
    for units in (1, 2):
        sizes = {row["batch"] for row in live.kept[-1]["samples"] if row["units"] == units}
        assert sizes >= {4, 8}


def test_a_batch_size_that_only_passes_by_keeps_no_worker_out():
    live = Live()
    live.steps(600, batches=(4,))
    narrow = live.inner.profile
    live.steps(3, batches=(8,))
    assert live.inner.profile is None
    live.profile.before_batch(0)  # a prompt's pass says nothing of sizes
    assert live.inner.profile is None
    live.steps(49, batches=(4,))
    assert live.inner.profile is narrow
    for batch in range(5, 1000):  # each of another size: none can be learned
        live.profile.before_batch(batch)
    assert live.inner.profile is narrow, "and not for ever"


def learned_profile():
    live = Live()
    live.steps(1200)
    return live.kept[-1]


def test_a_profile_that_was_found_is_used_once_decodes_steps_bear_it_out():
    found = learned_profile()
    live = Live(reused=found)
    assert live.profile.asks_for == 0
    live.profile.idle()
    assert live.inner.profile is found, "while decode idles no step is at stake"
    live.steps(25)
    assert live.inner.profile is None, "nothing runs beside steps that it might be wrong about"
    assert live.told == []
    live.profile.idle()
    assert live.inner.profile is found
    live.profile.before_batch(4)
    assert live.inner.profile is None
    live.steps(20, units=1)  # the worker's core is not back: they say nothing
    assert live.inner.profile is None
    live.steps(1)
    assert live.inner.profile is found
    assert live.told == [found]
    live.steps(30, slower=2.0)  # afterwards the predictor follows each step
    assert live.inner.profile is found


@pytest.mark.parametrize("slower", [0.8, 1.25])
def test_a_profile_that_steps_contradict_is_dropped_and_another_is_learned(slower, caplog):
    live = Live(reused=learned_profile())
    live.steps(26, slower=slower)
    assert live.inner.profile is None
    assert "is not used: steps take" in caplog.text
    live.steps(1200, slower=slower)
    told = live.told[-1]
    assert live.inner.profile == told == live.kept[-1]
    wanted = slower * took_us(2, 8, 100)
    assert solo_models(told)[2].predict_us(8, 100) == pytest.approx(wanted, rel=0.01)


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
