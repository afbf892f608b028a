"""The co-run part of a profile, from steps that a policy grants a worker anyway."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import pytest

from windrow.crd import parse_profile_spec
from windrow.errors import UserError
from windrow.proto import agent_pb2
from windrow_sidecar._core import Arena
from windrow_sidecar.engines.harvest import EngineAgentLink, HarvestHook
from windrow_sidecar.engines.harvest.beside import StepsBeside
from windrow_sidecar.engines.hook import StepInput
from windrow_sidecar.engines.profile import (
    Subject,
    check_reusable,
    document,
    several_batches,
    solo_samples,
    with_co_run,
)
from windrow_sidecar.qos.co_run import CoRunSample, co_run_model
from windrow_sidecar.qos.levels import host_levels
from windrow_sidecar.qos.solo import SoloSample, solo_models
from windrow_sidecar.qos.terms import HarvestTerms
from windrow_sidecar.qos.view import Offer
from windrow_simulator.arena import ArenaGeometry, SimulatedArena, SimulatedPage

SUBJECT = Subject("host:2-cores", "host", "sglang", "0.5.23", "f" * 16)
TAKEN = datetime(2026, 1, 1, tzinfo=UTC)


def alone_us(units: int, batch: int, context: int) -> float:
    return (2000 + 500 * max(batch, 4) + context) * 2 / units


def measured(batches=(4, 8, 12), units=(1, 2)) -> dict:
    return document(
        SUBJECT,
        [
            SoloSample(n, batch, context, alone_us(n, batch, context))
            for n in units
            for batch in batches
            for context in (100, 900, 2000)
        ],
        taken_at=TAKEN,
    )


class LaggingDevice:
    """Plays a slot in simulated time, whose steps take `lag` times as long beside the worker.

    `computes`: whether the worker runs tasklets while it is granted units.
    """

    def __init__(self, profile, *, lag: float = 1.2, computes: bool = True) -> None:
        self._now_ns, self._lag, self._computes = 0, lag, computes
        self._tasklet, self._step = 1, 0
        page = SimulatedPage(self._offer, lambda grant: None)
        geometry = ArenaGeometry(chunks=64, chunk_bytes=1 << 20, slots_per_chunk=16)
        arena = cast(Arena, SimulatedArena(geometry, page, reserved=1))
        self.hook = HarvestHook(arena, host_levels(2), profile, clock=lambda: self._now_ns)
        self.hook.set_terms(HarvestTerms("p", "windrow", "harvest", objective_us=60_000))

    def _offer(self) -> Offer:
        done = 100 * self._tasklet
        return Offer(job_epoch=1, tasklet_id=self._tasklet, tokens=100, tokens_done=done)

    def steps(self, n: int, batch: int, context: int = 100) -> int:
        """Decode so many steps; returns how many were granted beside the worker."""
        beside = 0
        for _ in range(n):
            self._step += 1
            grant = self.hook.before_step(
                StepInput(self._step, self._now_ns, batch, context, 0, 0, 0)
            )
            took = alone_us(grant.decode_units, batch, context)
            if grant.finetune_units:
                beside += 1
                took *= self._lag
                self._tasklet += self._computes
            self._now_ns += round(1000 * took)
            self.hook.after_step(self._now_ns, round(took))
        return beside


def look(device: LaggingDevice):
    """Do what the link does once a second."""
    device.hook.predicted_tokens_per_second(device.hook.snapshot())
    return device.hook.take_profile_beside()


def test_steps_beside_a_workers_tasklets_make_the_co_run_part():
    device = LaggingDevice(measured())
    look(device)
    for batch in (4, 8, 12):
        assert device.steps(120, batch) > 60, "the policy grants a share"
    found = look(device)
    assert found is not None
    parse_profile_spec(found)  # as the API server takes it
    assert found["takenAt"] > measured()["takenAt"], "else a store keeps the old one"
    assert solo_models(found) == solo_models(measured())
    assert solo_samples(found) == solo_samples(measured())
    rows = [row for row in found["samples"] if row["finetuneUnits"]]
    assert [(row["units"], row["batch"]) for row in rows] == [(1, 4), (1, 8), (1, 12)]
    assert all(row["finetuneTokensPerSecond"] > 0 for row in rows)
    # Least squares of three points that see 1.2 and a prior that says 1.05 and counts as one: each
    # point's (1/2, 1/2) has a squared length of 1/2.
    seen = len(rows) / 2
    expected = 1.05 + 0.15 * seen / (1 + seen)
    assert co_run_model(found).factor(0.5, 0.5) == pytest.approx(expected, abs=1e-3)
    assert look(device) is None, "nothing new"


def test_a_batch_of_one_size_beside_a_worker_is_told_to_nobody():
    device = LaggingDevice(measured())
    for batch in (1, 2, 4):  # below the floor they count as one
        device.steps(120, batch)
    assert look(device) is None
    device.steps(120, 8)
    assert look(device) is not None


def test_a_worker_that_had_units_and_computed_nothing_slows_nobody_down():
    device = LaggingDevice(measured(), computes=False)
    for batch in (4, 8):
        assert device.steps(120, batch) > 60
    assert look(device) is None


@pytest.mark.parametrize(
    "profile",
    [
        None,
        measured() | {"roofline": True},
        measured() | {"coRun": {"b1": 1.1, "k1": 1.1, "samples": 9}},
        measured(batches=(4,)),
    ],
    ids=["none", "of rates", "with a co-run part", "of one batch size"],
)
def test_only_a_measured_profile_that_lacks_it_gets_a_co_run_part(profile):
    device = LaggingDevice(profile)
    for batch in (4, 8, 12):
        device.steps(120, batch)
    assert look(device) is None


def test_a_profile_that_is_learned_again_keeps_what_was_measured_beside_workers():
    device = LaggingDevice(measured())
    for batch in (4, 8):
        device.steps(120, batch)
    first = look(device)
    device.hook.set_profile(measured(batches=(4, 8, 16)))
    assert device.hook.profile["coRun"]["samples"] == first["coRun"]["samples"]
    again = look(device)
    assert again is not None, "what was learned alone is new"
    assert {row["batch"] for row in again["samples"]} == {4, 8, 16}
    assert look(device) is None
    device.hook.set_profile(measured(), estimated=True)
    assert device.hook.profile is None
    assert look(device) is None, "an estimate is for nobody else"


def test_the_link_reports_the_co_run_part_and_leaves_it_for_the_next_start():
    device, kept = LaggingDevice(measured()), []
    link = EngineAgentLink(
        Path("/nowhere/agent.sock"),
        agent_pb2.EngineHello(),
        device.hook,
        keep_profile=kept.append,
        interval_s=0.0,
    )
    for batch in (4, 8, 12):
        device.steps(120, batch)

    class Stays:
        def wait(self, _seconds):
            return False

    reports = link._reports(Stays())
    said = [next(reports) for _ in range(3)]
    assert [report.WhichOneof("message") for report in said] == ["hello", "stats", "profile"]
    assert json.loads(said[2].profile.profile_json) == kept[0]
    assert said[2].profile.key == SUBJECT.key
    assert kept[0]["coRun"]["samples"] == 3
    assert next(reports).WhichOneof("message") == "stats"


def test_kinds_of_steps_are_bounded_and_told_as_they_grow():
    beside = StepsBeside(host_levels(2))
    for context in range(0, 2_000_000, 1000):
        beside.add([(1, 4, context, 1000.0)] * 16 + [(1, 8, context, 1000.0)] * 16)
    assert beside.news(lambda units: 0.0)
    assert len(beside.samples) == 512
    assert not beside.news(lambda units: 0.0)


def test_a_profile_that_was_found_is_refused_with_its_reason():
    splits = host_levels(2)
    assert set(check_reusable(measured(), SUBJECT, splits)) == {1, 2}
    for changed, said in (
        (measured() | {"roofline": True}, "made of rates"),
        (measured() | {"noisePercent": 40.0}, "scatter by 40%"),
        (measured(units=(2,)), r"lacks decode on \[1\] units"),
        (measured() | {"modelFingerprint": "another"}, "another model"),
    ):
        with pytest.raises(UserError, match=said):
            check_reusable(changed, SUBJECT, splits)


def test_nothing_measured_beside_leaves_a_profile_as_it_is():
    assert with_co_run(measured(), [], 2) == measured()
    step = SoloSample(1, 4, 100, 1.0)
    assert not several_batches([step, SoloSample(1, 2, 100, 1.0)])
    assert not several_batches([step, SoloSample(1, 8, 100, 1.0), SoloSample(2, 8, 100, 1.0)])
    assert not several_batches([])
    made = with_co_run(measured(), [CoRunSample(step, 1, 0.0)], 2)
    assert with_co_run(made, [CoRunSample(step, 1, 5.0)] * 2, 2)["coRun"]["samples"] == 2
