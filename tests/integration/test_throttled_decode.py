"""A CPU limit that holds decode up, in a real control group, ends harvesting for a while."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_harvest_hook import TERMS, worker_of
from waiting import wait_until

from windrow.proto import agent_pb2
from windrow_sidecar.cgroup import Throttled, read_throttled
from windrow_sidecar.engines.harvest import EngineAgentLink
from windrow_sidecar.engines.harvest.settings import HarvestSettings
from windrow_sidecar.qos.view import Action
from windrow_sidecar.testing.stepping_engine import SteppingEngine

pytestmark = pytest.mark.paired

BURN = "while True: pass"
_ROOT = Path("/sys/fs/cgroup")


@contextmanager
def limited_process():
    """A process that wants a core, in a new group that may use a twentieth of one."""
    v2 = (_ROOT / "cgroup.controllers").exists()
    group = (_ROOT if v2 else _ROOT / "cpu") / f"windrow-test-{os.getpid()}"
    limits = {"cpu.max": "5000 100000"} if v2 else {"cpu.cfs_quota_us": "5000"}
    try:
        group.mkdir()
        for name, value in limits.items():
            (group / name).write_text(value)
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no control group with a CPU limit can be made here: {error}")
    process = subprocess.Popen([sys.executable, "-c", BURN])
    try:
        (group / "cgroup.procs").write_text(str(process.pid))
        yield process
    finally:
        process.kill()
        process.wait()
        wait_until(lambda: not (group / "cgroup.procs").read_text(), "the group is empty")
        group.rmdir()


def test_what_a_limit_costs_a_real_group_is_read_and_grows():
    with limited_process() as process:
        groups = Path("/proc", str(process.pid), "cgroup")
        first = wait_until(
            lambda: (found := read_throttled(groups)).periods and found, "it was throttled"
        )
        wait_until(lambda: read_throttled(groups).periods > first.periods, "it is, again")
        assert read_throttled(groups).seconds > first.seconds > 0


def test_decode_that_its_limit_holds_up_beside_the_worker_loses_the_worker_for_a_while():
    with tempfile.TemporaryDirectory(prefix="wr-") as folder, limited_process() as process:
        groups = Path("/proc", str(process.pid), "cgroup")
        decode = SteppingEngine(Path(folder), HarvestSettings())
        link = EngineAgentLink(
            Path(folder, "agent.sock"),
            agent_pb2.EngineHello(),
            decode.hook,
            throttled=lambda: read_throttled(groups),
        )
        decode.hook.set_terms(TERMS)
        try:
            stats = [link._stats() for _ in range(3)]
            decode.step()
            assert not any(s.breaker for s in stats), "no worker ran, so none is to blame"
            with worker_of(decode):
                wait_until(lambda: decode.step().finetune_units == 1, "the worker runs")

                def gave_up():
                    decode.step()
                    return "CPU limit" in link._stats().breaker

                wait_until(gave_up, "the breaker opens")
                assert decode.step().action == Action.PAUSE
                told = link._stats()
                assert told.throttled_periods > 0
                assert told.throttled_seconds > 0
                assert "raise resources.limits.cpu" in told.breaker
        finally:
            decode.close()


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        (
            "0::/pod/decode\n",
            {
                "pod/decode/cpu.stat": "nr_periods 9\nnr_throttled 2\nthrottled_usec 30000\n",
                "pod/cpu.stat": "nr_periods 9\nnr_throttled 1\nthrottled_usec 20000\n",
            },
            Throttled(3, 0.05),
        ),
        (
            # In a container, where the pod's own group cannot be seen: the time it cost can.
            "0::/\n",
            {
                "cpu.stat": "nr_periods 9\nnr_throttled 0\nthrottled_usec 0\n",
                "cpu.stat.local": "throttled_usec 250000\n",
            },
            Throttled(0, 0.25),
        ),
        (
            "2:cpuacct:/a\n1:cpu:/a\n",
            {"cpu/a/cpu.stat": "nr_periods 9\nnr_throttled 4\nthrottled_time 1500000000\n"},
            Throttled(4, 1.5),
        ),
        ("0::/gone\n", {}, Throttled()),
    ],
    ids=["v2", "v2 in a container", "v1", "not mounted"],
)
def test_what_each_version_writes_is_understood(tmp_path, group, files, expected):
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text)
    (tmp_path / "cgroup").write_text(group)
    found = read_throttled(tmp_path / "cgroup", tmp_path / "fs")
    assert found.periods == expected.periods
    assert found.seconds == pytest.approx(expected.seconds)
