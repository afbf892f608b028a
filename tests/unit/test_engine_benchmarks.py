"""The engine's benchmarks take a device by name, each alone and all with one command."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks import activations, endurance, finetune, offload

WHOLE = ["--shape", "tiny", "--all"]
EACH = [(finetune, WHOLE), (activations, []), (offload, []), (endurance, [])]


@pytest.mark.parametrize(("benchmark", "flags"), EACH, ids=lambda of: getattr(of, "__name__", ""))
@pytest.mark.parametrize("driver", ["cuda", "tpu"])
def test_a_device_that_is_not_here_is_told_before_anything_is_made(
    monkeypatch, benchmark, flags, driver
):
    if driver == "cuda" and torch.cuda.is_available():
        pytest.skip("torch sees a GPU here")
    monkeypatch.setattr(sys, "argv", ["benchmark", *flags, "--driver", driver])
    said = "no GPU here" if driver == "cuda" else "not a valid device"
    with pytest.raises(SystemExit, match=said):
        benchmark.main()


def test_the_whole_table_reaches_every_other_benchmark_with_its_device(monkeypatch, tmp_path):
    started = []

    def run(command, **_):
        started.append(command[2:])
        return finetune.subprocess.CompletedProcess(command, int("offload" in command[2]))

    monkeypatch.setattr(finetune.subprocess, "run", run)
    failed = finetune.the_rest("cuda:1", quick=True, beside=tmp_path / "gpu.json")
    assert failed == ["offload"], "the others run all the same"
    for name, command in zip(finetune.THE_REST, started, strict=True):
        json = str(tmp_path / f"gpu-{name}.json")
        assert command == [f"benchmarks.{name}", "--driver", "cuda:1", "--quick", "--json", json]


def test_the_whole_table_wants_a_shape(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark", "--all"])
    with pytest.raises(SystemExit):
        finetune.main()
    assert "--all wants a --shape" in capsys.readouterr().err
