"""A real decode and a real worker, all protections of decode on, and predictor and guard off."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.light import ablations
from benchmarks.light.ablations import ARMS, EFFORT, STEADY, SURGE, Ablations, of_surges, stage_of
from benchmarks.light.measure import Document, Parts
from windrow_sidecar.qos.solo import solo_models

pytestmark = [pytest.mark.alone, pytest.mark.extended]

ALL_ON, NONE = ARMS[0].name, "without predictor and guard"
# Less, and noise alone decides whether a surge fits decode's narrow share.
LEAST_GAIN = 1.1


class Between(Ablations):
    """Its objective lies between what a surge takes on all cores and on one, by the profile."""

    def _objective(self) -> Document:
        batch = STEADY + int(SURGE["requests"])
        context = batch * (EFFORT.context + int(SURGE["generated"]) // 2)
        models = solo_models(self._profile([]))
        wide, narrow = (models[units].predict_us(batch, context) for units in (2, 1))
        return {"ms": math.sqrt(wide * narrow) / 1e3, "gain": narrow / wide}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="wr-") as name:
        yield Path(name)


def test_a_surge_gets_decodes_cores_back_and_without_predictor_and_guard_it_does_not(
    folder: Path,
) -> None:
    parts = Parts(folder / "parts", resume=False)
    effort = dataclasses.replace(EFFORT, steps=16, seconds=6.0)
    arms = [arm for arm in ARMS if arm.name in (ALL_ON, NONE)]
    said: list[str] = []
    bench = Between(ablations.plan_of(folder), parts, effort, said.append, rounds=1, arms=arms)
    try:
        bench.run()
    finally:
        bench.close()
    if parts["objective"]["gain"] < LEAST_GAIN:
        pytest.skip("decode gains nothing from its second core here")

    def narrow(arm: str) -> float:
        """Share of the steps of surges in which decode had one core of two."""
        units = of_surges(parts[stage_of(0, arm)], "units")
        assert len(units) >= int(SURGE["generated"]) // 2, said
        return sum(n == 1 for n in units) / len(units)

    assert narrow(NONE) > 0.9
    assert narrow(ALL_ON) < 0.5
    # Both let the worker run beside the few requests between surges: with all on for some tasklets,
    # of whichever phase.
    for arm in (ALL_ON, NONE):
        assert sum(
            of_a_phase["count"] for of_a_phase in parts[stage_of(0, arm)]["tasklets"].values()
        )


def test_a_profile_of_a_faster_device_promises_shorter_steps() -> None:
    profile = {
        "solo": [{"units": 2, "c0Us": 10.0, "b0Us": 4.0, "k0NsPerToken": 2.0}],
        "samples": [{"units": 2, "batch": 1, "stepUs": 14.0}],
    }
    halved = ablations.faster(profile, 2.0)
    assert halved["solo"][0] == {"units": 2, "c0Us": 5.0, "b0Us": 2.0, "k0NsPerToken": 1.0}
    assert halved["samples"][0]["stepUs"] == 7.0
    assert profile["solo"][0]["c0Us"] == 10.0
