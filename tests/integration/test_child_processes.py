"""Check what a keeper starts ends with it, in whatever way either of them ends."""

import os
import signal
import subprocess
import sys
from datetime import timedelta

import pytest
from waiting import DEADLINE_SECONDS, processes_below, wait_until

from windrow.errors import Transient
from windrow_lab.cluster.up import start_ticks
from windrow_lab.machine.child_processes import descendants
from windrow_lab.machine.processes import Keeper, ProcessCommand


@pytest.fixture
def keeper():
    with Keeper() as running:
        yield running


def python(code, log, **fields):
    return ProcessCommand([sys.executable, "-uc", code], log, **fields)


def pids_in(path):
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def test_a_child_has_the_environment_niceness_and_cpus_that_were_asked_for(keeper, tmp_path):
    log, cpu = tmp_path / "log", max(os.sched_getaffinity(0))
    code = "import os; print(os.environ['A'], os.nice(0), os.sched_getaffinity(0), os.getcwd())"
    command = python(code, log, env={"A": "b"}, cwd=tmp_path, nice=3, cpus=[cpu])
    assert keeper.start(command).exited.result(timeout=DEADLINE_SECONDS) == 0
    assert log.read_text() == f"b {os.nice(0) + 3} {{{cpu}}} {tmp_path}\n"


def test_a_program_that_is_not_there_is_an_error_of_the_start(keeper, tmp_path):
    with pytest.raises(OSError, match="no-such-program"):
        keeper.start(ProcessCommand(["no-such-program"], tmp_path / "log"))


def test_the_exit_says_which_signal_ended_a_child(keeper, tmp_path):
    child = keeper.start(ProcessCommand(["sleep", "600"], tmp_path / "log"))
    assert child.poll() is None
    child.signal(signal.SIGKILL)
    assert child.exited.result(timeout=DEADLINE_SECONDS) == -signal.SIGKILL


def test_a_child_that_ignores_sigterm_is_killed_after_its_grace(keeper, tmp_path):
    log = tmp_path / "log"
    code = (
        "import signal; signal.signal(15, signal.SIG_IGN); print('up')\nwhile True: signal.pause()"
    )
    child = keeper.start(python(code, log))
    wait_until(lambda: log.read_text(), "the child is up")
    assert child.stop(grace=timedelta(milliseconds=100)) == -signal.SIGKILL


ESCAPER = """
import os, subprocess, sys
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


def test_what_left_the_process_group_of_a_child_ends_with_it_too(keeper, tmp_path):
    log = tmp_path / "log"
    child = keeper.start(python(ESCAPER, log))
    [escaped] = wait_until(lambda: pids_in(log), "the pid of the grandchild")
    child.signal(signal.SIGKILL)
    child.exited.result(timeout=DEADLINE_SECONDS)
    assert escaped not in processes_below()


def test_closing_the_keeper_ends_all_and_removes_what_it_owns(tmp_path):
    log, owned, given_back = tmp_path / "log", tmp_path / "owned", tmp_path / "given-back"
    owned.mkdir()
    given_back.mkdir()
    before = processes_below()
    with Keeper() as keeper:
        keeper.own(owned)
        keeper.own(given_back)
        keeper.disown(given_back)
        child = keeper.start(python(ESCAPER, log))
        wait_until(lambda: pids_in(log), "the pid of the grandchild")
        assert len(processes_below() - before) == 3
    assert child.exited.result(timeout=0) < 0
    assert processes_below() <= before
    assert not owned.exists()
    assert given_back.exists()


def test_children_end_when_the_keeper_itself_is_killed(tmp_path):
    with Keeper() as keeper:
        child = keeper.start(ProcessCommand(["sleep", "600"], tmp_path / "log"))
        os.kill(keeper.pid, signal.SIGKILL)
        child.exited.result(timeout=DEADLINE_SECONDS)
        wait_until(lambda: is_gone(child.pid), "it is gone")
        with pytest.raises(Transient, match="gone"):
            keeper.start(ProcessCommand(["true"], tmp_path / "log"))


def is_gone(pid):
    return start_ticks(pid) is None


# Forks a copy of itself that holds the pipe to the keeper open, then dies.
FORKING_OWNER = """
import os, signal, sys, time
from pathlib import Path
from windrow_lab.machine.processes import Keeper, ProcessCommand
keeper = Keeper()
child = keeper.start(ProcessCommand(["sleep", "600"], Path(sys.argv[1])))
if os.fork() == 0:
    time.sleep(600)
print(child.pid, flush=True)
signal.pause()
"""


def test_a_fork_that_holds_the_pipe_does_not_keep_the_children_alive(tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-uc", FORKING_OWNER, str(tmp_path / "log")],
        stdout=subprocess.PIPE,
    )
    with owner:
        child = int(owner.stdout.readline())
        forked = [pid for pid in descendants(owner.pid) if pid != child]
        owner.kill()
        wait_until(lambda: is_gone(child), "the child is gone")
        for pid in forked:
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)
