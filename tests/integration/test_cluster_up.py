"""`up` leaves a cluster running that `down`, and only `down`, ends."""

import io
import os
import signal
import subprocess
import time

import pytest
from kubernetes import client, config
from rich.console import Console
from waiting import processes_below

from windrow.errors import UserError
from windrow_lab.cluster.local import ClusterError, ClusterSettings
from windrow_lab.cluster.up import (
    down,
    running_cluster,
    running_kubeconfig,
    start_ticks,
    state_file,
    up,
)
from windrow_lab.machine.child_processes import descendants

QUIET = Console(file=io.StringIO())


@pytest.fixture
def settings(tools, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield ClusterSettings(tools=tools.etcd.parent)
    down()


def test_what_is_up_answers_is_up_once_and_goes_down_whole(settings):
    info = up(settings, console=QUIET)
    assert running_cluster() == info
    assert os.getsid(info.pid) == info.pid, "it would not survive its terminal otherwise"
    kept = descendants(info.pid)
    assert len(kept) >= 6

    with config.new_client_from_config(str(running_kubeconfig())) as api:
        nodes = client.CoreV1Api(api).list_node().items
    assert [node.metadata.name for node in nodes] == ["process-node"]

    with pytest.raises(UserError, match="up already") as refused:
        up(settings, console=QUIET)
    assert info.kubeconfig in refused.value.remedy

    assert down() == info
    assert running_cluster() is None
    assert [pid for pid in {*kept, info.pid} if start_ticks(pid) is not None] == []
    assert not os.path.exists(info.kubeconfig)
    assert down() is None


@pytest.mark.extended
def test_killing_its_holder_ends_it_and_the_next_up_works(settings):
    info = up(settings, console=QUIET)
    kept = descendants(info.pid)
    os.kill(info.pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while [pid for pid in kept if start_ticks(pid) is not None]:
        assert time.monotonic() < deadline, "the supervisor ends what it holds"
        time.sleep(0.05)
    os.waitpid(info.pid, 0)
    assert running_cluster() is None

    again = up(settings, console=QUIET)
    assert again.pid != info.pid
    assert down() == again


@pytest.mark.extended
def test_a_stale_state_file_ends_no_stranger(settings):
    with subprocess.Popen(["sleep", "600"]) as stranger:
        path = state_file(os.environ)
        path.parent.mkdir(parents=True)
        path.write_text(
            f'{{"pid": {stranger.pid}, "start_ticks": 1, "kubeconfig": "k", "server": "s",'
            ' "version": "v", "log_dir": "l"}'
        )
        assert down() is None
        assert stranger.poll() is None
        stranger.kill()
    assert not path.exists()


@pytest.mark.extended
def test_a_cluster_that_does_not_come_up_says_why_and_leaves_nothing(settings):
    before = processes_below()
    broken = ClusterSettings(tools=settings.tools, operator_arguments=("--no-such-flag",))
    with pytest.raises(ClusterError, match="no-such-flag"):
        up(broken, console=QUIET)
    assert processes_below() <= before
    assert running_cluster() is None
