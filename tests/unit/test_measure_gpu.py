"""The steps of a day on a GPU, over processes of this machine."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

from tools import measure_gpu
from tools.measure_gpu import Step


def step(name: str, code: str, *, least_s: float = 0.0, limit_s: float = 60.0, **flags) -> Step:
    return Step(name, (sys.executable, "-c", code, "OUT"), least_s, limit_s, **flags)


def how(outcomes) -> dict[str, str]:
    return {outcome.name: outcome.how for outcome in outcomes}


def test_each_leaves_what_it_said_and_one_that_fails_keeps_nothing_from_the_next(tmp_path):
    planned = [
        step("told", "print('[1]')", keeps=True),
        step("fails", "raise SystemExit('no such thing')"),
        step("writes", "import sys; open(sys.argv[1] + '/made', 'w')"),
    ]
    found = measure_gpu.run(planned, tmp_path / "out", 60)
    assert how(found) == {"told": "passed", "fails": "failed", "writes": "passed"}
    assert json.loads((tmp_path / "out" / "told.json").read_text()) == [1]
    assert "no such thing" in (tmp_path / "out" / "fails.log").read_text()
    assert (tmp_path / "out" / "made").exists()


def test_without_the_first_one_nothing_follows(tmp_path):
    planned = [step("doctor", "raise SystemExit(1)", needed=True), step("next", "")]
    assert how(measure_gpu.run(planned, tmp_path, 60)) == {"doctor": "failed", "next": "left out"}


def test_what_takes_too_long_is_ended_and_what_does_not_fit_is_left_out(tmp_path):
    waits = step("waits", "import time; time.sleep(600)", limit_s=1.0)
    found = measure_gpu.run([waits, step("large", "", least_s=1e6)], tmp_path, 60)
    assert how(found) == {"waits": "too long", "large": "left out"}
    assert found[0].seconds < 600


def test_every_step_runs_what_is_there_and_writes_into_the_folder():
    for planned in measure_gpu.steps("tiny"):
        program, *words = planned.command
        assert Path(program).exists()
        assert words[0] != "-m" or importlib.util.find_spec(words[1])
        assert planned.keeps or planned.name == "tests" or words[-1].startswith("--json=OUT/")
        assert planned.least_s < planned.limit_s
