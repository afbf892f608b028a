"""`windrow finetune`, as a user runs it: a real worker, no cluster."""

from __future__ import annotations

import html
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
import yaml

from windrow_sidecar.finetune.data.remote import Credentials, storage_options

ROWS = Path(__file__).resolve().parents[2] / "examples" / "support-tone" / "train.jsonl"
MODEL = Path(__file__).resolve().parents[2] / "models" / "windrow-tiny"
COMMAND = (sys.executable, "-c", "from windrow_cli import main; main()", "finetune")


def manifest(tmp_path, **training) -> Path:
    tmp_path.mkdir(exist_ok=True)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(ROWS.read_text().splitlines(keepends=True)[:12]))
    spec = {
        "model": {"name": str(MODEL)},
        "dataset": {"source": str(rows), "evalFraction": 0.2, "badRows": "skip"},
        "adapter": {"lora": {"rank": 2, "alpha": 4}},
        "training": {
            "maxSteps": 3,
            "batchSize": 2,
            "maxSequenceLength": 64,
            "learningRate": "1e-3",
            "evalEverySteps": 2,
            "packing": True,
            **training,
        },
        "checkpoint": {"everySteps": 1},
        "output": {"destination": str(tmp_path / "out")},
    }
    path = tmp_path / "job.yaml"
    head = {"apiVersion": "windrow.dev/v1alpha1", "kind": "FinetuneJob", "metadata": {"name": "j"}}
    path.write_text(yaml.safe_dump({**head, "spec": spec}))
    return path


def finetune(*paths: Path) -> tuple[int, dict]:
    done = subprocess.run(
        [*COMMAND, *paths, "--units", "1", "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    return done.returncode, json.loads(done.stdout)


def test_a_job_runs_to_its_adapter_and_leaves_its_curves(tmp_path):
    path = manifest(tmp_path)
    with (tmp_path / "rows.jsonl").open("a") as rows:
        rows.write('{"messages": []}\n')
    code, said = finetune(path)
    assert (code, said["state"]) == (0, "Succeeded"), said
    assert (said["step"], said["total_steps"], said["skipped_rows"]) == (3, 3, 1)
    assert said["tuned_eval_loss"] > 0
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    assert said["train_rows"] + said["held_out_rows"] == said["cut_rows"] == 12
    skipped, cut, packed = said["notes"]
    assert skipped.startswith("1 row is wrong and left out (first ")
    assert cut.startswith("12 rows are cut to spec.training.maxSequenceLength, 64 tokens")
    # Every row is cut to 64 tokens, so there is nothing to save.
    assert packed == (
        "rows are packed into lines: 0% of what layers compute on is padding, 0% without packing"
    )
    report = Path(said["report"]).read_text()
    assert all(html.escape(note) in report for note in said["notes"])
    assert str(MODEL) in report
    assert "<td>10 rows</td>" in report
    assert len(report) < 50_000
    metrics = (tmp_path / "out" / ".windrow" / "job" / "metrics.jsonl").read_text().splitlines()
    stages = [json.loads(line).get("stage") for line in metrics]
    assert stages == ["base", None, None, "held-out", None, "tuned"]


@pytest.mark.extended
def test_a_job_learns_from_preferences_and_the_plain_loop_refuses_them(tmp_path):
    path = manifest(tmp_path, method="dpo", packing=False, maxSequenceLength=256)
    body = yaml.safe_load(path.read_text())
    body["spec"]["dataset"] |= {"format": "preference"}
    path.write_text(yaml.safe_dump(body))
    chats = [json.loads(line)["messages"] for line in ROWS.read_text().splitlines()[:12]]
    rows = [
        {"prompt": chat[:-1], "chosen": chat[-1:], "rejected": other[-1:]}
        for chat, other in zip(chats, chats[1:] + chats[:1], strict=True)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    code, said = finetune(path)
    assert (code, said["state"], said["step"]) == (0, "Succeeded", 3), said
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "out" / "adapter_config.json").is_file()
    # The base compared with itself prefers neither answer: -log sigmoid(0), in float32.
    assert said["base_eval_loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert 0 < said["tuned_eval_loss"] != said["base_eval_loss"]
    command = [sys.executable, "-m", "windrow_sidecar.finetune.standalone.baseline"]
    done = subprocess.run(
        [*command, "--job", path, "--steps=1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "spec.training.method: the plain loop knows no loss" in done.stdout + done.stderr


def lines_of(path: Path) -> list[str]:
    command = [*COMMAND, path, "--units", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    folder = path.parent / "out"
    said = re.sub(r"(step-0000000\d)-\d+", r"\1", done.stdout.replace(str(folder), "OUT"))
    said = re.sub(r"(loss|lr|norm|before,) \d[\w.+-]*\w", r"\1 N", said)
    return re.sub(r"[\d,]+ (tokens/s|s left)", r"N \1", said).splitlines()


def test_a_console_says_each_thing_once_and_never_a_step_beyond_the_last(tmp_path):
    path = manifest(tmp_path, maxSequenceLength=512, maxSteps=3)
    shown = lines_of(path)
    assert len(shown) == len(set(shown))
    told = [line for line in shown if not line.startswith(("step ", "checkpointed: "))]
    assert told == [
        "started: from the beginning",
        "note: rows are packed into lines: 0% of what layers compute on is padding, 2% without "
        "packing",
        "evaluated: before the first step: held-out loss N",
        "evaluated: step 2: held-out loss N",
        "evaluated: held-out loss N before, N after",
        "succeeded: 3 steps",
        "adapter: OUT",
        "report: OUT/.windrow/job/report.html",
    ]
    assert "checkpointed: OUT/.windrow/job/checkpoints/step-00000003" in shown
    steps = [line for line in shown if line.startswith("step ")]
    assert steps
    assert all(re.match(r"step [123]/3, loss N, lr N, grad norm N", line) for line in steps)

    shown = lines_of(manifest(tmp_path, maxSequenceLength=512, maxSteps=1))
    assert "succeeded: 3 steps, of 1 that are asked for now" in shown
    assert "step 3/3, loss N, lr -, grad norm -, - tokens/s" in shown


def test_a_wrong_row_ends_it_with_file_line_and_remedy(tmp_path):
    path = manifest(tmp_path)
    path.write_text(path.read_text().replace("badRows: skip", "badRows: fail"))
    with (tmp_path / "rows.jsonl").open("a") as rows:
        rows.write('{"messages": []}\n')
    earlier = tmp_path / "out" / ".windrow" / "job" / "metrics.jsonl"
    earlier.parent.mkdir(parents=True)
    earlier.write_text('{"step": 1, "loss": 3.0}\n')
    code, said = finetune(path)
    assert (code, said["state"]) == (2, "Failed")
    assert said["report"] == "", "it would show the run before"
    assert f"{tmp_path / 'rows.jsonl'}:13: has no `messages`" in said["message"]
    assert not (tmp_path / "out" / "adapter_model.safetensors").exists()


@pytest.mark.extended
def test_jobs_share_a_base_and_one_with_a_wrong_row_ends_alone(tmp_path):
    paths = [manifest(tmp_path / name, seed=seed) for seed, name in enumerate("abc")]
    paths[1].write_text(paths[1].read_text().replace("badRows: skip", "badRows: fail"))
    with (tmp_path / "b" / "rows.jsonl").open("a") as rows:
        rows.write('{"messages": []}\n')
    code, said = finetune(*paths)
    assert code == 2
    assert [(job["state"], job["step"]) for job in said] == [
        ("Succeeded", 3),
        ("Failed", 0),
        ("Succeeded", 3),
    ]
    assert f"{tmp_path / 'b' / 'rows.jsonl'}:13: has no `messages`" in said[1]["message"]
    adapters = [tmp_path / name / "out" / "adapter_model.safetensors" for name in "ac"]
    assert adapters[0].read_bytes() != adapters[1].read_bytes()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--device=tpu"],
            "windrow: --device: 'tpu' is not a valid device. Write cpu, cuda, or cuda:N.\n",
        ),
        (["--units=4096", "--seconds=1"], "windrow: --units: 4096 cores: this process has "),
    ],
)
def test_a_device_that_cannot_be_had_is_told_in_one_line(tmp_path, arguments, words):
    done = subprocess.run(
        [*COMMAND, manifest(tmp_path), *arguments], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(words)
    assert done.stderr.count("\n") == 1


@pytest.mark.extended
def test_a_run_that_only_measures_prints_its_figures_and_leaves_no_adapter(tmp_path):
    done = subprocess.run(
        [*COMMAND, manifest(tmp_path), "--units=1", "--seconds=0.1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["steps"] >= 1
    assert figures["tokens_per_second"] > 0
    assert not (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_a_link_out_of_the_working_directory_is_refused_before_anything_runs(tmp_path):
    path, elsewhere = manifest(tmp_path / "here"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "here" / "link").symlink_to(elsewhere)
    body = yaml.safe_load(path.read_text())
    body["spec"]["output"]["destination"] = "link/tone"
    path.write_text(yaml.safe_dump(body))
    done = subprocess.run(
        [*COMMAND, path], cwd=path.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "spec.output.destination: link/tone leads by a link to" in done.stderr
    assert list(elsewhere.iterdir()) == []


def test_a_manifest_that_is_wrong_starts_nothing(tmp_path):
    path = manifest(tmp_path, colour=1)
    done = subprocess.run(
        [*COMMAND, path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"windrow: {path}: spec.training.colour: unknown field")
    assert not (tmp_path / "out").exists()


@pytest.mark.extended
def test_a_job_writes_to_a_bucket_and_goes_on_from_there_on_another_machine(bucket, tmp_path):
    url, secret = bucket
    system = fsspec.filesystem("s3", **storage_options(url, Credentials("s3", secret)))
    path = manifest(tmp_path)

    def run(machine: str, *options: str) -> tuple[int, dict]:
        home = {"XDG_CACHE_HOME": str(tmp_path / machine)}
        command = [*COMMAND, path, "--output", url, "--units", "1", "--json", *options]
        done = subprocess.run(
            command, env=os.environ | secret | home, stdout=subprocess.PIPE, text=True, timeout=240
        )
        return done.returncode, json.loads(done.stdout)

    code, said = run("here")
    assert (code, said["state"], said["adapter"]) == (0, "Succeeded", url), said
    assert said["checkpoint"].startswith(f"{url}/.windrow/job/checkpoints/step-00000003")
    assert Path(said["report"]).is_relative_to(tmp_path / "here")
    assert not (tmp_path / "out").exists()
    assert system.exists(f"{url}/adapter_model.safetensors")

    path.write_text(path.read_text().replace("maxSteps: 3", "maxSteps: 4"))
    code, said = run("there")
    assert (code, said["step"], said["total_steps"]) == (0, 4, 4), said
    written = system.cat_file(f"{url}/.windrow/job/metrics.jsonl").decode().splitlines()
    steps = [entry["step"] for entry in map(json.loads, written) if "loss" in entry]
    assert steps == [1, 2, 3, 4]
    assert not list(tmp_path.rglob("*.safetensors")), "what is uploaded takes no disk here"

    code, said = run("there", "--fresh", "--output", f"{url}-elsewhere")
    assert (code, said["step"], said["adapter"]) == (0, 4, f"{url}-elsewhere"), said


def test_a_bucket_without_credentials_is_told_with_what_to_set(bucket, tmp_path):
    url, secret = bucket
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "here"), "HOME": str(tmp_path)}
    env |= {"AWS_ENDPOINT_URL": secret["AWS_ENDPOINT_URL"], "AWS_EC2_METADATA_DISABLED": "true"}
    command = [*COMMAND, manifest(tmp_path), "--output", url, "--units", "1", "--json"]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=240)
    said = json.loads(done.stdout)
    assert (done.returncode, said["state"]) == (2, "Failed")
    assert "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in said["message"]
