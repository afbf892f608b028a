"""`windrow demo` from an empty machine to an adapter, as a person runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from windrow_lab.figures.summary import PODS, summarize

pytestmark = pytest.mark.paired

ROOT = Path(__file__).parents[2]
WANTED = (
    "kubernetes.version", "job.phase", "job.steps", "job.loss.first", "job.loss.last",
    "job.eval_loss.base", "job.eval_loss.tuned", "adapter.path", "serving.objective_ms",
    "serving.tpot_ms.p50", "serving.tpot_ms.p99", "serving.steps",
    "serving.steps_over_objective", "serving.requests_completed", "harvest.tokens",
    "harvest.tokens_per_second", "harvest.eta",
)  # fmt: skip
SECONDS = 10


@pytest.fixture(scope="module")
def demo(tools, tmp_path_factory):
    """Folder, summary and output of one run without a terminal."""
    folder = tmp_path_factory.mktemp("demo")
    out = folder / "run"
    command = [sys.executable, "-c", "from windrow_cli import main; main()", "demo"]
    command += [f"--seconds={SECONDS}", f"--out={out}", "--json", "--steps=6"]
    run = subprocess.run(
        command,
        env={**os.environ, "KUBEBUILDER_ASSETS": str(tools.etcd.parent)},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-6000:]
    said = json.loads(run.stdout)
    assert said == json.loads((out / "summary.json").read_text())
    return out, said, run.stderr


def value(summary, path):
    for key in path.split("."):
        summary = summary[key]
    return summary


@pytest.mark.parametrize("path", WANTED)
def test_the_summary_holds_every_figure(demo, path):
    assert value(demo[1], path) is not None


def test_the_job_succeeds_and_its_adapter_is_better_on_held_out_rows(demo):
    _, summary, _ = demo
    assert summary["job"]["phase"] == "Succeeded"
    assert summary["job"]["steps"] == 6
    assert summary["job"]["eval_loss"]["tuned"] < summary["job"]["eval_loss"]["base"]
    assert summary["serving"]["requests_failed"] == 0
    assert summary["serving"]["requests_completed"] > 0


def test_the_figures_are_those_of_the_raw_log(demo):
    out, summary, _ = demo
    again = summarize(out)
    for part in ("serving", "harvest"):
        assert again[part] == summary[part]
    marks = {
        mark["what"]: mark
        for line in (out / "run.events.jsonl").read_text().splitlines()
        if (mark := json.loads(line))["kind"] == "mark"
    }
    begin, end = marks["measure-begin"]["at_ns"], marks["measure-end"]["at_ns"]
    assert end - begin == SECONDS * 1_000_000_000
    took_ms, tokens = [], 0
    for path in (out / PODS).rglob("*.events.jsonl"):
        for line in path.read_text().splitlines():
            event = json.loads(line)
            if event["kind"] == "step" and begin <= event["end_ns"] <= end:
                took_ms.append((event["end_ns"] - event["start_ns"]) / 1e6)
            if event["kind"] == "tasklet" and event["phase"] == "opt":
                tokens = max(tokens, event["tokens_done"])
    took_ms.sort()
    serving = summary["serving"]
    assert serving["steps"] == len(took_ms) > 0
    assert serving["steps_over_objective"] == sum(ms > serving["objective_ms"] for ms in took_ms)
    assert serving["tpot_ms"]["p50"] == round(took_ms[(len(took_ms) + 1) // 2 - 1], 3)
    assert summary["harvest"]["tokens"] == tokens > 0


# peft asks transformers for a property that has got another name.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_peft_loads_the_adapter(demo):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(ROOT / "models/windrow-tiny")
    tuned = PeftModel.from_pretrained(base, demo[1]["adapter"]["path"])
    ups = [p for name, p in tuned.named_parameters() if "lora_B" in name]
    assert ups
    assert all(p.abs().max() > 0 for p in ups)


def test_what_happens_is_told_in_lines_and_nothing_is_left_running(demo):
    out, _, told = demo
    assert "FinetuneJob of 6 steps" in told
    assert "Succeeded" in told
    assert (out / "report.html").stat().st_size > 1_000_000
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = process.read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        assert str(out).encode() not in command, command
