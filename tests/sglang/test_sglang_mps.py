"""SGLang's processes are clients of the MPS daemon, which comes before any of them uses CUDA."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from support.sglang_servers import PYTHON

from windrow.rundir import ENV_MPS_WAIT, ENV_RUN_DIR, RunDir
from windrow_sidecar.compute.mps import CONTROL, MpsDaemon

FAKE = Path(__file__).parent.parent / "contract" / "fake_mps_control.py"

# As `python -m sglang.launch_server` and `sglang serve` begin; then as they start a scheduler.
FIRST_PROCESS = """
import json, multiprocessing

def scheduler(pipe):
    from windrow_sidecar import _core
    pipe.send(bool(_core.driver("cuda").facts["is_mps_client"]))

if __name__ == "__main__":
    import sglang.launch_server  # counts the GPUs, and so initialises CUDA here
    from sglang.srt.plugins import load_plugins
    load_plugins()
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=scheduler, args=(theirs,))
    child.start()
    print("found", json.dumps(ours.recv()))
    child.join()
"""


def test_the_first_process_brings_the_daemon_up_and_the_others_are_its_clients(
    run_dir, tmp_path, standin
):
    (run_dir / CONTROL).symlink_to(FAKE)
    (tmp_path / "first.py").write_text(FIRST_PROCESS)
    env = os.environ | {
        "PATH": f"{run_dir}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": str(standin.parent),
        ENV_RUN_DIR: str(run_dir),
        ENV_MPS_WAIT: "120",
    }
    try:
        done = subprocess.run(
            [PYTHON, tmp_path / "first.py"],
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        said = [line for line in done.stdout.splitlines() if line.startswith("found ")]
        assert said == ["found true"], done.stderr[-4000:]
        clients = (run_dir / "mps" / "pipe" / "joined").read_text().splitlines()
        assert len(clients) == 2, "a trial, then the scheduler; not the first process"
    finally:
        daemon = MpsDaemon(RunDir(run_dir).mps_folder, control=str(run_dir / CONTROL))
        if daemon.take_over():
            daemon.stop()
