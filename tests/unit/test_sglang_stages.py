"""Stages of SGLang on a GPU, as far as no server is needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import sglang_gpu
from benchmarks.harness import Result
from benchmarks.light.checkpoint import write_checkpoint
from benchmarks.sglang_stages.servers import Bench, StageFailed, trouble_in
from benchmarks.sglang_stages.streams import Heard


@pytest.fixture
def bench(tmp_path) -> Bench:
    return Bench(
        python=Path("python"),
        model=tmp_path / "model",
        device="cpu",
        out=tmp_path,
        requests=2,
        context=8,
        generate=4,
        kv_tokens=1024,
        row_tokens=16,
        seconds=1.0,
        lead_s=0.0,
        up_within_s=1.0,
    )


def test_a_random_checkpoint_has_every_tensor_of_its_shape(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "tiny", "cpu")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    assert {*index["weight_map"]} == {name for name, _ in model.named_parameters()}
    written = (folder / "model-00000.safetensors").stat().st_mtime_ns
    assert write_checkpoint(folder, "tiny", "cpu") == folder
    assert (folder / "model-00000.safetensors").stat().st_mtime_ns == written, "it was whole"


def test_the_lines_of_a_log_that_tell_of_trouble_are_named_by_their_number(tmp_path):
    log = tmp_path / "plugin.log"
    log.write_text(
        "up\nwindrow: harvesting is off, not started: why\nserving\nValueError: so\nend\n"
    )
    assert [(each["line"], each["text"][:10]) for each in trouble_in(log)] == [
        (2, "windrow: h"),
        (4, "ValueError"),
    ]
    asked = tmp_path / "asked.log"
    asked.write_text(
        "[t] post-warmup freeze_gc failed\nTraceback\nConnectionError: x\n[t] fired up\n"
    )
    assert [each["line"] for each in trouble_in(asked)] == [4], "it serves all the same"
    quiet = tmp_path / "quiet.log"
    quiet.write_text("one\ntwo\n")
    assert trouble_in(quiet) == [{"log": "quiet.log", "line": 2, "text": "two"}]
    assert trouble_in(tmp_path / "none.log") == []


async def test_a_stage_that_fails_keeps_nothing_from_the_next_and_names_its_lines(bench):
    log = bench.out / "stock.log"
    log.write_text("CUDA error: no such kernel\n")

    async def fails(servers):
        raise StageFailed("it did not come up", [log])

    async def passes(servers):
        return [Result("tokens", 3, "tokens", "higher")]

    found = await sglang_gpu.run(bench, {"stock": fails, "plugin": passes}, 1000.0)
    assert found["plugin"] == "passed"
    assert found["stock"].startswith("failed: it did not come up")
    assert "stock.log:1: CUDA error" in found["stock"]
    failed = json.loads((bench.out / "stock.failed.json").read_text())
    assert failed["lines"] == [
        {"log": "stock.log", "line": 1, "text": "CUDA error: no such kernel"}
    ]
    assert json.loads((bench.out / "plugin.json").read_text())["benchmark"] == "sglang_plugin"
    left = await sglang_gpu.run(bench, {"stock": passes}, 1.0)
    assert left == {"stock": "left out: no time"}


def test_without_sglang_the_step_is_left_out_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SGLANG_VENV", str(tmp_path / "none"))
    told = tmp_path / "all.json"
    assert sglang_gpu.main(["--out", str(tmp_path / "out"), "--json", str(told)]) == 0
    assert "make sglang" in capsys.readouterr().out
    assert json.loads(told.read_text()) == {"leftOut": "there is no SGLang"}


def test_gaps_are_counted_by_when_their_tokens_came():
    heard = Heard(gaps=[(1.0, 5.0), (2.0, 6.0), (3.0, 7.0)])
    assert heard.between(2.0, 3.0) == [6.0]
