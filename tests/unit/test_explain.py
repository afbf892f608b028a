"""Decisions that an engine keeps come back as they were, with how their steps went."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta

import pytest
from typer.testing import CliRunner

from windrow.decisions import CAPACITY, read_decisions
from windrow.errors import UserError
from windrow.rundir import RunDir
from windrow_cli import app
from windrow_cli.explain import moment, ring_of
from windrow_sidecar.engines.harvest.decision_log import Decisions, Outcome
from windrow_sidecar.qos.control import Decided
from windrow_sidecar.qos.view import Action, Grant, Offer, View

NOW = datetime(2025, 6, 1, 18, 2, 11, tzinfo=UTC)


def decided(step: int, at_ns: int, **grant) -> Decided:
    return Decided(
        at_ns,
        View(step=step, batch=6, context_tokens=7412, objective_us=20_000, slack_us=-5),
        Offer(job_epoch=3, phase=3),
        Grant(**grant),
        0.08,
        9_500.0,
        "" if grant else "objective",
        False,
    )


def test_a_decision_comes_back_with_its_outcome(tmp_path):
    log = Decisions(RunDir(tmp_path))
    log.keep(decided(1, 5_000_000_000))
    log.keep(Outcome(2, 0, 11_000, 20_000))
    going = {"action": Action.GO, "finetune_units": 48, "decode_units": 132, "budget_us": 6000}
    log.keep(decided(2, 5_100_000_000, **going, predicted_us=18_200))
    log.drain()
    log.keep(Outcome(2, 1, 21_000, 39_000))
    log.drain()
    paused, ran = read_decisions(RunDir(tmp_path).decision_log())
    assert (paused.step, paused.batch, paused.slack_us, paused.phase) == (1, 6, -5, "backward")
    assert (ran.steps, ran.steps_over, ran.mean_us, ran.longest_us) == (2, 1, 19_500, 21_000)
    assert (ran.at - paused.at).total_seconds() == pytest.approx(0.1, abs=1e-5)
    assert paused.sentence() == (
        "batch 6, 7,412 context tokens; alone a step takes 9.5 ms, the objective is 20 ms with a "
        "margin of 8%: the worker paused: objective; 2 steps took 10.0 ms on average, 11.0 at most"
    )
    assert "the worker got 48 units, decode 132, for 6.0 ms; 2 steps took 19.5" in ran.sentence()
    assert "(predicted 18.2), 21.0 at most, 1 over the objective" in ran.sentence()


@pytest.mark.parametrize(("layers", "kept"), [(6, 6), (300, 255), (-1, 0)])
def test_a_worker_that_starves_is_told_with_its_layers_in_memory(tmp_path, layers, kept):
    log = Decisions(RunDir(tmp_path))
    offer = Offer(job_epoch=3, phase=3, starving=1, resident_layers=layers)
    log.keep(decided(1, 10**9)._replace(offer=offer, why_paused="starving"))
    log.drain()
    (starved,) = read_decisions(RunDir(tmp_path).decision_log())
    assert starved.resident_layers == kept
    assert f"paused: starving, with the weights of {kept} layers in memory" in starved.sentence()


def test_a_garbled_offer_has_a_record(tmp_path):
    log = Decisions(RunDir(tmp_path))
    garbled = Offer(job_epoch=-1, phase=-1, starving=2**40, resident_layers=-(2**62))
    log.keep(decided(1, 10**9)._replace(offer=garbled))
    log.drain()
    (kept,) = read_decisions(RunDir(tmp_path).decision_log())
    assert (kept.job_epoch, kept.phase, kept.resident_layers) == (0, "none", 0)


def test_the_ring_keeps_the_newest_and_never_grows(tmp_path):
    log = Decisions(RunDir(tmp_path))
    path = RunDir(tmp_path).decision_log()
    size = path.stat().st_size
    for step in range(CAPACITY + 10):
        log.keep(decided(step, step))
    log.drain()
    kept = read_decisions(path)
    assert [kept[0].step, kept[-1].step] == [10, CAPACITY + 9]
    assert path.stat().st_size == size


def test_a_breach_keeps_what_led_there(tmp_path):
    log = Decisions(RunDir(tmp_path))
    log.keep(decided(1, 10**9))
    log.keep(Outcome(2, 2, 26_000, 51_000))
    log.breached("two steps over the objective")
    log.drain()
    reason, last = RunDir(tmp_path).breach_log().read_text().splitlines()
    assert json.loads(reason) == {"breach": "two steps over the objective"}
    assert json.loads(last)["steps_over"] == 2


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("now", NOW),
        ("-30s", NOW - timedelta(seconds=30)),
        ("-5m", NOW - timedelta(minutes=5)),
        ("17:00:05", NOW.replace(hour=17, minute=0, second=5)),
        ("17:00", NOW.replace(hour=17, minute=0, second=0)),
        ("2025-06-01T18:02:11+02:00", NOW - timedelta(hours=2)),
    ],
)
def test_a_moment_is_written_as_people_say_it(text, meant):
    assert moment(text, NOW) == meant


@pytest.mark.parametrize("text", ["yesterday", "25:00", "-5", ""])
def test_what_is_no_moment_is_refused(text):
    with pytest.raises(UserError, match="--around"):
        moment(text, NOW)


def test_the_command_prints_lines_and_json(tmp_path):

    log = Decisions(RunDir(tmp_path))
    log.keep(decided(1, time.monotonic_ns()))
    log.drain()
    said = CliRunner().invoke(app, ["explain", str(tmp_path), "--within", "60"]).output
    assert "the worker paused: objective" in said
    rows = CliRunner().invoke(app, ["explain", str(tmp_path), "--within", "60", "--json"]).output
    assert json.loads(rows)[0]["batch"] == 6


@pytest.mark.parametrize("flags", [["--around", "-30s"], ["--within", "5"]])
def test_of_a_slots_name_decisions_are_not_silently_left_out(flags):
    with pytest.raises(UserError, match="are in its pod") as error:
        CliRunner().invoke(
            app, ["explain", "decode-0.1", "-n", "chat", *flags], catch_exceptions=False
        )
    around = flags[1] if flags[0] == "--around" else "now"
    assert "kubectl exec -n chat decode-0 -c windrow -- windrow explain" in error.value.remedy
    assert error.value.remedy.endswith(f"--around {around}")


def test_of_a_pod_with_several_slots_the_one_is_asked_for_that_is_meant(tmp_path):
    rings = [Decisions(RunDir(tmp_path, slot)) for slot in (0, 1)]
    with pytest.raises(UserError, match="run directory of 2 slots") as error:
        ring_of(str(tmp_path))
    assert f"{tmp_path}/decisions-0.ring, {tmp_path}/decisions-1.ring" in error.value.remedy
    del rings


def test_of_a_process_the_ring_is_meant_that_it_writes(tmp_path):
    writes = (
        "import sys; from pathlib import Path; from windrow.rundir import RunDir\n"
        "from windrow_sidecar.engines.harvest.decision_log import Decisions\n"
        "ring = Decisions(RunDir(Path(sys.argv[1]), 1)); print(flush=True); sys.stdin.read()"
    )
    Decisions(RunDir(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", writes, str(tmp_path)],
        env=os.environ | {"WINDROW_RUN_DIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as engine:
        engine.stdout.readline()
        ring = ring_of(str(engine.pid))
        assert ring.name == "decisions-1.ring"
        assert ring.samefile(RunDir(tmp_path, 1).decision_log())
        engine.stdin.close()


def test_a_file_of_another_release_is_refused(tmp_path):
    RunDir(tmp_path).decision_log().write_bytes(b"x" * 4096)
    with pytest.raises(UserError, match="not a ring of decisions of this release"):
        read_decisions(RunDir(tmp_path).decision_log())
    with pytest.raises(UserError, match="cannot be read"):
        read_decisions(tmp_path / "nothing")
