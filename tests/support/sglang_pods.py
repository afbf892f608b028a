"""A job beside one of SGLang's servers, the sidecar that sends it, and what both have logged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.examplejob import pod_job

from windrow.eventlog import read_events
from windrow_sidecar.testing.attached_operator import AttachedOperator

TOKENS = 48
QUESTIONS = ["The for statement", "A list is", "To open a file", "When an exception is raised"]


def job(folder: Path) -> dict:
    # As many steps as two stops need, on a fast machine too.
    sizes = {"maxSteps": 24, "batchSize": 4, "maxSequenceLength": 256}
    return pod_job(folder, every_steps=4, dataset={"evalFraction": 0.05}, **sizes)


def start_agent(
    operator: AttachedOperator, folder: Path, environment: dict[str, str]
) -> subprocess.Popen:
    agent = [
        *(sys.executable, "-m", "windrow_sidecar.agent"),
        f"--operator-address=127.0.0.1:{operator.port}",
        f"--operator-ca={operator.cert.decode()}",
        f"--token-file={folder / 'token'}",
    ]
    env = os.environ | environment
    with (folder / "pod.log").open("ab") as out:
        return subprocess.Popen(agent, env=env, stdout=out, stderr=out, process_group=0)


def events_of(folder: Path, kind: type) -> list:
    return [event for _, event in read_events(folder) if isinstance(event, kind)]
