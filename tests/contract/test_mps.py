"""The MPS daemon is started, watched, asked and stopped through its control program."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from windrow.errors import Transient, UserError
from windrow_sidecar.compute.mps import CONTROL, MpsDaemon

FAKE = Path(__file__).with_name("fake_mps_control.py")


@pytest.fixture
def control(run_dir: Path) -> str:
    """Another program that speaks the protocol of NVIDIA's."""
    program = run_dir / CONTROL
    program.symlink_to(FAKE)
    return str(program)


@pytest.fixture
def daemon(run_dir: Path, control: str) -> Iterator[MpsDaemon]:
    made = MpsDaemon(run_dir / "mps", control=control)
    yield made
    made.stop()


def put_clients(run_dir: Path, *pids: int) -> None:
    (run_dir / "mps" / "pipe" / "clients").write_text("\n".join(map(str, pids)))


def test_it_answers_once_started_and_is_gone_once_stopped(daemon, run_dir):
    assert not daemon.alive()
    daemon.start()
    assert daemon.alive()
    assert daemon.servers() == []
    daemon.stop()
    assert not daemon.alive()
    assert not (run_dir / "mps" / "pipe" / "control").exists()
    daemon.stop()


def test_starting_twice_starts_one(daemon):
    daemon.start()
    first = daemon._process
    daemon.start()
    assert daemon._process is first


def test_its_folders_are_this_users_and_clients_are_told_of_them(daemon, run_dir):
    daemon.start()
    pipe = Path(daemon.environment["CUDA_MPS_PIPE_DIRECTORY"])
    assert pipe == run_dir / "mps" / "pipe"
    assert pipe.stat().st_mode & 0o777 == 0o700


def test_the_daemon_chooses_no_devices_and_no_sms_for_its_clients(run_dir, control):
    chosen = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}
    daemon = MpsDaemon(run_dir / "mps", control=control, environ=os.environ | chosen)
    daemon.start()
    read = Path(f"/proc/{daemon._process.pid}/environ").read_bytes().split(b"\0")
    names = {entry.partition(b"=")[0].decode() for entry in read}
    assert not chosen.keys() & names
    assert "CUDA_MPS_PIPE_DIRECTORY" in names
    assert not chosen.keys() & daemon.environment.keys(), "a client keeps its own"
    daemon.stop()


def test_one_client_is_terminated_and_the_others_stay(daemon, run_dir):
    daemon.start()
    put_clients(run_dir, 41, 42)
    assert daemon.clients() == {100: [41, 42]}
    assert daemon.terminate_client(41)
    assert daemon.clients() == {100: [42]}
    assert not daemon.terminate_client(41)


def test_a_daemon_that_died_is_seen_and_may_be_started_again(daemon, run_dir):
    daemon.start()
    daemon._process.kill()
    daemon._process.wait()
    assert not daemon.alive()
    with pytest.raises(Transient, match="Cannot find MPS control daemon"):
        daemon.servers()
    daemon.start()  # over the pipes that the dead one has left
    assert daemon.alive()


def test_a_daemon_that_ends_at_once_says_why(run_dir, control):
    daemon = MpsDaemon(
        run_dir / "mps", control=control, environ=os.environ | {"WINDROW_FAKE_MPS_BROKEN": "1"}
    )
    with pytest.raises(Transient, match="ended at once: An instance of this daemon"):
        daemon.start()
    assert not daemon.alive()


def test_a_daemon_that_does_not_answer_in_time_is_ended(run_dir):
    silent = run_dir / CONTROL
    silent.write_text('#!/bin/sh\n[ "$1" = -f ] && exec sleep 600\nexit 1\n')
    silent.chmod(0o755)
    daemon = MpsDaemon(run_dir / "mps", control=str(silent), sleep=lambda _: None)
    with pytest.raises(Transient, match="does not answer"):
        daemon.start(within=timedelta(0))
    assert not daemon.alive()


def test_a_machine_without_mps_is_told_what_to_do(run_dir):
    daemon = MpsDaemon(run_dir / "mps", control="no-such-mps-control")
    with pytest.raises(UserError, match="sharing temporal") as error:
        daemon.start()
    assert error.value.reason == "MpsMissing"


def namespace_of(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/pid").strip("pid:[]")


def put_rows(run_dir: Path, *rows: tuple[int, str]) -> None:
    text = "".join(f"{pid} {namespace}\n" for pid, namespace in rows)
    (run_dir / "mps" / "pipe" / "clients").write_text(text)


def test_a_client_of_another_pid_namespace_is_found_by_its_number_there(daemon, run_dir):
    """A number may be two processes: here the worker's own and one of decode's."""
    apart = ["unshare", "--pid", "--fork", "--kill-child"]
    tried = subprocess.run([*apart, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no PID namespaces here: {tried.stderr.strip()}")
    daemon.start()
    shell = "echo started; exec sleep 60"
    with subprocess.Popen([*apart, "sh", "-c", shell], stdout=subprocess.PIPE) as outer:
        assert outer.stdout.readline() == b"started\n"
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        worker = int(children[0])
        try:
            # The worker is 1 in its namespace; decode has a process 1 too, and one of the
            # worker's number outside.
            put_rows(run_dir, (1, "4026500000"), (worker, "4026500000"), (1, namespace_of(worker)))
            found = daemon.find_client(worker, shares_namespace=False)
            assert (found.server, found.pid) == (100, 1)
            put_rows(run_dir, (1, "4026500000"), (worker, "4026500000"))
            assert daemon.find_client(worker, shares_namespace=False) is None
            assert not daemon.terminate_client(worker, shares_namespace=False)
            assert daemon.clients() == {100: [1, worker]}, "decode's are left alone"
        finally:
            outer.kill()


def test_a_client_of_the_daemons_own_namespace_is_found_by_its_number(daemon, run_dir):
    daemon.start()
    put_rows(run_dir, (os.getpid(), namespace_of(os.getpid())))
    for shares in (True, False):
        assert daemon.find_client(os.getpid(), shares_namespace=shares).pid == os.getpid()


def test_a_daemon_whose_list_of_processes_has_no_namespaces_names_nobody(run_dir):
    control = run_dir / CONTROL
    control.write_text('#!/bin/sh\nread -r line\n[ "$line" = ps ] && echo "PID SERVER"\nexit 0\n')
    control.chmod(0o755)
    daemon = MpsDaemon(run_dir / "mps", control=str(control))
    assert daemon.find_client(os.getpid(), shares_namespace=False) is None
