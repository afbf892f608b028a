"""Decode's start brings up the MPS daemon before CUDA, in bounded time, or serves without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from windrow.conditions import Reason
from windrow.rundir import ENV_MPS_WAIT, ENV_RUN_DIR, ENV_SHARING, RunDir
from windrow_sidecar.compute import mps_start
from windrow_sidecar.compute.mps import CONTROL
from windrow_sidecar.compute.mps_joining import DaemonNote, shared_memory_of
from windrow_sidecar.compute.mps_start import bring_up
from windrow_sidecar.compute.sharing import PIPE_DIRECTORY, WITHOUT_MPS, choose_sharing, probe

FAKE = Path(__file__).with_name("fake_mps_control.py")
LONG = timedelta(seconds=60)  # a machine under load starts a process slowly


@pytest.fixture
def pod(run_dir: Path) -> Iterator[RunDir]:
    (run_dir / CONTROL).symlink_to(FAKE)
    mps_start._started.clear()
    yield RunDir(run_dir)
    for daemon in mps_start._started:
        daemon.abandon()


@pytest.fixture
def environ(pod: RunDir, monkeypatch) -> dict[str, str]:
    for name in (PIPE_DIRECTORY, WITHOUT_MPS, ENV_SHARING, ENV_MPS_WAIT):
        monkeypatch.delenv(name, raising=False)
    return {**os.environ, "PATH": f"{pod.root}:{os.environ['PATH']}"}


def code_of(variables: dict[str, str]) -> str:
    assert set(variables) == {WITHOUT_MPS}
    return variables[WITHOUT_MPS].partition(":")[0]


def test_the_daemon_runs_and_a_process_has_tried_it_before_decode_gets_its_variables(
    cuda_standin, pod, environ
):
    variables = bring_up(pod, environ, wait=LONG)
    assert variables[PIPE_DIRECTORY] == str(pod.mps_folder / "pipe")
    tried = (pod.mps_folder / "pipe" / "joined").read_text().splitlines()
    assert len(tried) == 1
    note = DaemonNote.read(pod)
    assert note.environment == variables
    assert (note.uid, note.starter) == (os.getuid(), os.getpid())
    assert bring_up(pod, environ | variables) == {}, "a process of decode's has them already"


def test_a_second_engine_of_the_pod_joins_the_daemon_of_the_first(cuda_standin, pod, environ):
    first = bring_up(pod, environ, wait=LONG)
    note = DaemonNote.read(pod)
    assert bring_up(pod, environ, wait=LONG) == first
    assert [daemon.is_own for daemon in mps_start._started] == [True, False]
    assert DaemonNote.read(pod) == note


def test_after_a_restart_the_pipes_of_before_are_replaced(cuda_standin, pod, environ):
    first = bring_up(pod, environ, wait=LONG)
    mps_start._started[0].abandon()  # as its container ends it; its files stay on the volume
    assert (pod.mps_folder / "pipe" / "control").exists()
    assert bring_up(pod, environ, wait=LONG) == first
    assert mps_start._started[1].alive()


def test_a_process_that_hangs_in_cudas_start_is_killed_in_time_and_decode_serves_without(
    cuda_standin, pod, environ, monkeypatch
):
    """Hang, as the server lets another user's clients wait."""
    hanging = run_dir_with(pod, '#!/bin/sh\ntouch "$CUDA_MPS_PIPE_DIRECTORY/hang"\n')
    began = time.monotonic()
    variables = bring_up(pod, environ, control=hanging, wait=timedelta(seconds=2))
    assert code_of(variables) in {Reason.MPS_CLIENT_HANGS, Reason.MPS_NOT_STARTED}
    assert time.monotonic() - began >= 1
    assert not mps_start._started[0].alive(), "nobody is to become its client later"
    assert DaemonNote.read(pod) is None
    assert choose_sharing(probe("cuda", variables)).code == code_of(variables)


def run_dir_with(pod: RunDir, before: str) -> str:
    """A program that does something before it is the daemon."""
    program = pod.root / f"odd-{CONTROL}"
    program.write_text(f'{before}exec python3 -S {FAKE} "$@"\n')
    program.chmod(0o755)
    return str(program)


def test_a_daemon_that_does_not_answer_costs_decode_what_it_may_wait_and_no_more(pod, environ):
    silent = pod.root / f"silent-{CONTROL}"
    silent.write_text("#!/bin/sh\nexec sleep 600\n")
    silent.chmod(0o755)
    variables = bring_up(pod, environ, control=str(silent), wait=timedelta(seconds=0.2))
    assert code_of(variables) == Reason.MPS_NOT_STARTED
    assert not mps_start._started[0].alive()


def test_a_daemon_that_ends_at_once_is_the_reason(pod, environ):
    variables = bring_up(pod, environ | {"WINDROW_FAKE_MPS_BROKEN": "1"}, wait=LONG)
    assert code_of(variables) == Reason.MPS_NOT_STARTED
    assert "already running" in variables[WITHOUT_MPS]


def test_a_gpu_that_a_process_uses_without_the_daemon_is_the_reason(
    cuda_standin, pod, environ, monkeypatch
):
    variables = bring_up(pod, environ | {"WINDROW_STANDIN_MPS": "0"}, wait=LONG)
    assert code_of(variables) == Reason.MPS_NOT_CONNECTED


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({ENV_SHARING: "temporal"}, Reason.POLICY_TEMPORAL),
        ({"PATH": "/nowhere"}, Reason.MPS_MISSING),
        ({ENV_MPS_WAIT: "soon"}, Reason.MPS_NOT_STARTED),
        ({ENV_MPS_WAIT: "-1"}, Reason.MPS_NOT_STARTED),
    ],
)
def test_where_no_daemon_is_wanted_or_can_be_none_is_started(pod, environ, more, code):
    assert code_of(bring_up(pod, environ | more)) == code
    assert not pod.mps_folder.exists()


def test_a_daemon_that_decode_chose_itself_is_left_to_it(pod, environ):
    assert bring_up(pod, environ | {PIPE_DIRECTORY: "/tmp/nvidia-mps"}) == {}
    assert not pod.mps_folder.exists()


def test_a_run_directory_that_cannot_be_written_is_no_reason_to_end(environ):
    assert code_of(bring_up(RunDir(Path("/proc/nowhere")), environ)) == Reason.MPS_NOT_STARTED


def test_a_process_that_uses_cuda_already_does_not_become_a_client(cuda_standin, pod, environ):
    code = (
        "import os; from pathlib import Path; from windrow.rundir import RunDir; "
        "from windrow_sidecar import _core; from windrow_sidecar.compute import mps_start; "
        "assert not mps_start.cuda_is_initialized(); _core.driver('cuda').facts; "
        f"print(mps_start.bring_up(RunDir(Path({str(pod.root)!r})), os.environ))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert Reason.MPS_TOO_LATE in done.stdout


def test_a_part_of_a_volume_is_another_shared_memory(tmp_path):
    (tmp_path / "part").mkdir()
    whole, part = shared_memory_of(tmp_path), shared_memory_of(tmp_path / "part")
    assert whole == shared_memory_of(tmp_path)
    assert whole != part
    assert shared_memory_of(tmp_path / "none") == ""


def test_the_builtin_engine_brings_it_up_before_it_loads_torch(
    cuda_standin, pod, environ, tmp_path
):
    code = (
        "import os, sys; from windrow_sidecar.engines.builtin import __main__ as engine; "
        "start = engine.bring_up; at = []; "
        "engine.bring_up = lambda *a: (at.append('torch' in sys.modules), start(*a))[1]; "
        "print(engine.main(), at, os.environ.get('CUDA_MPS_PIPE_DIRECTORY'))"
    )
    (model := tmp_path / "model").mkdir()
    (model / "config.json").write_text("{}")  # refused once the environment is settled
    flags = [f"--model-path={model}"]
    said = {}
    for device in ("cpu", "cuda"):
        done = subprocess.run(
            [sys.executable, "-c", code, *flags, f"--device={device}"],
            env=environ | {ENV_RUN_DIR: str(pod.root), ENV_MPS_WAIT: "60"},
            capture_output=True,
            text=True,
            check=False,
        )
        said[device] = done.stdout.strip()
    left = mps_start.MpsDaemon(pod.mps_folder, control=str(pod.root / CONTROL))
    assert left.take_over()
    left.stop()
    assert said["cpu"] == "2 [] None"
    assert said["cuda"] == f"2 [False] {pod.mps_folder / 'pipe'}"


def test_windrow_run_gives_the_server_what_the_start_has_found(cuda_standin, pod, environ):
    """The server is a client from its first call on, and the daemon ends with it."""
    server = (
        "import json, os; from windrow_sidecar import _core; "
        "print(json.dumps([_core.driver('cuda').facts['is_mps_client'], os.getpid()]))"
    )
    done = subprocess.run(
        [Path(sys.executable).with_name("windrow"), "run", "--", sys.executable, "-c", server],
        env=environ | {ENV_RUN_DIR: str(pod.root), ENV_MPS_WAIT: "60"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    is_client, pid = json.loads(done.stdout)
    assert is_client
    joined = (pod.mps_folder / "pipe" / "joined").read_text().split()
    assert int(joined[-2]) == pid, "after the trial"
    daemon = mps_start.MpsDaemon(pod.mps_folder, control=str(pod.root / CONTROL))
    assert not daemon.take_over()
