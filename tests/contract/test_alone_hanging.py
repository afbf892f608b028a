"""A job without a cluster whose disk does not answer ends, with the reason, and does not hang."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys

from support.examplejob import example_job

from windrow.protocol import Ending

# A watch that waits for a second: nobody waits a quarter of an hour for a test.
RUN = """
import sys
from pathlib import Path
from windrow_sidecar.compute.host_device import HostDevice
from windrow_sidecar.finetune.standalone.run import JobGroup
from windrow_sidecar.finetune.training.health import StallWatch
from support.examplejob import example_job

together = JobGroup([example_job(Path(sys.argv[1]))], 1, None, HostDevice())
for standing in together._standings:
    standing.stall = StallWatch(after_s=1.0)
together.run()
"""


def test_a_folder_that_does_not_answer_ends_the_run_as_no_progress(tmp_path):
    job = example_job(tmp_path)
    root = job.destination / ".windrow" / job.uid
    root.mkdir(parents=True)
    with (root / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            [sys.executable, "-c", RUN, tmp_path], stdout=subprocess.PIPE, check=False, timeout=120
        )
    said = [json.loads(line) for line in done.stdout.splitlines()]
    event = next(line["event"] for line in said if "event" in line)
    assert (event["kind"], event["reason"]) == ("FAILED", "NoProgress")
    assert "taking the job's folder has not ended within 1 s" in event["detail"]
    assert done.returncode == Ending.FAILED
