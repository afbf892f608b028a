"""A worker on a real GPU trains alone, with times from events, and on a share of SMs."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from windrow.eventlog import TaskletEvent, read_events
from windrow_sidecar.compute.cuda import CudaPartition

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
ROOT = Path(__file__).resolve().parents[2]


def trained(folder: Path, *flags: str) -> tuple[dict, list[TaskletEvent]]:
    manifest = yaml.safe_load((ROOT / "examples" / "finetunejob.yaml").read_text())
    manifest["spec"]["output"]["destination"] = str(folder / "out")
    (folder / "job.yaml").write_text(yaml.safe_dump(manifest))
    command = [sys.executable, "-m", "windrow_sidecar.finetune.worker", "--standalone"]
    command += ["--device", "cuda", "--job", str(folder / "job.yaml"), "--steps", "3"]
    command += ["--json", str(folder / "m.json"), "--log-dir", str(folder), *flags]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    events = [e for _, e in read_events(folder) if isinstance(e, TaskletEvent)]
    return json.loads((folder / "m.json").read_text()), events


def test_a_job_trains_on_the_gpu_and_its_tasklets_follow_one_another(tmp_path):
    measured, events = trained(tmp_path)
    assert measured["loss_last"] < measured["loss_first"] * 1.5
    assert events
    for before, after in itertools.pairwise(events):
        assert before.start_ns <= before.end_ns <= after.end_ns


def test_a_job_trains_on_a_share_of_the_sms(tmp_path):
    units = CudaPartition("finetune", use_stream=lambda _: None).levels()[0]
    measured, _ = trained(tmp_path, "--units", str(units))
    assert measured["units"] == units
