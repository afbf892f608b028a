"""First light on the host at its smallest: real processes, from the profile to the figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import first_light

pytestmark = [pytest.mark.alone, pytest.mark.extended]


def run(out: Path, *flags: str) -> int:
    smallest = ["--quick", "--seconds=1.5", "--batch=2", "--objectives", "500"]
    return first_light.main([*smallest, f"--json={out}", *flags])


def test_every_stage_runs_and_a_second_run_goes_on_where_the_first_ended(tmp_path, capsys):
    out = tmp_path / "light.json"
    assert run(out, "--driver=host", "--shape=tiny") == 0, capsys.readouterr().err
    capsys.readouterr()
    found = json.loads(out.read_text())
    assert found["environment"]["driver"] == "host"
    figures = {row["name"]: row for row in found["results"]}
    assert {row["met"] for row in found["results"]} == {None}, "no goal of a GPU is claimed"
    assert figures["dedicated worker"]["value"] > 0
    assert figures["worker on lent memory, decode idle"]["value"] > 0
    assert figures["windrow at 500 ms: TPOT p50"]["value"] > 0
    assert 0 <= figures["gaps at 500 ms: steps over"]["value"] <= 100
    assert not any("bound" in name or "capture" in name for name in figures)
    for arm in ("windrow", "gaps"):
        part = json.loads((tmp_path / "light.json.parts" / f"{arm}-500.json").read_text())
        assert part["tasklets"], f"the worker ran nothing under {arm}"
    assert out.with_suffix(".html").stat().st_size > 100_000

    (tmp_path / "light.json.parts" / "alone.json").unlink()
    assert run(out, "--resume") == 0
    assert capsys.readouterr().err.count("measured before") == 7
    before = {name: row["value"] for name, row in figures.items() if "alone at" not in name}
    after = {row["name"]: row["value"] for row in json.loads(out.read_text())["results"]}
    assert before.items() <= after.items() | {("decode is loaded", before["decode is loaded"])}

    assert run(out, "--resume", "--batch=3") == 2
    assert "--resume" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused_before_anything_runs(tmp_path, capsys):
    assert run(tmp_path / "light.json", "--driver=cuda") == 2
    assert "--driver" in capsys.readouterr().err
    assert not (tmp_path / "light.json.parts").exists()
