"""Workers that come from the agent's fork server, as processes of this test, which is the agent."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from waiting import is_running, wait_until

from windrow.proto import attach_pb2
from windrow.rundir import RunDir
from windrow_sidecar.agent.settings import AgentSettings
from windrow_sidecar.agent.worker_process import (
    Standby,
    WorkerDevices,
    WorkerProcess,
    make_fork_server,
)

ASSIGN = attach_pb2.Assign(job_uid="uid-1", epoch=3, spec_json="{}")
# Imports nothing, says what it is, then does what the test has written down for it.
MODULE = """
    import json, os, pathlib, signal, sys, threading

    def load_ahead():
        (here := pathlib.Path(__file__).parent).joinpath("loaded").touch()
        if (here / "threads").exists():
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        if (here / "broken").exists():
            sys.exit("nothing to load")

    def main(argv):
        run_dir = pathlib.Path(argv[argv.index("--run-dir") + 1])
        order = sys.stdin.readline() if "--standby" in argv else ""
        about = {
            "arguments": argv, "parent": os.getppid(), "group": os.getpgid(0), "pid": os.getpid(),
            "order": order, "cores": sorted(os.sched_getaffinity(0)), "nice": os.nice(0),
            "scheduler": os.sched_getscheduler(0), "shown": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "oom": pathlib.Path("/proc/self/oom_score_adj").read_text().strip(),
            "line": pathlib.Path("/proc/self/cmdline").read_text().rstrip("\\0").split("\\0")[1:],
            "forked": "fork_server" in sys.modules["__main__"].__file__,
        }
        (run_dir / "about.json").write_text(json.dumps(about))
        print("said by the worker", flush=True)
        ending = (run_dir / "ending").read_text() if (run_dir / "ending").exists() else "return 0"
        if ending == "wait":
            threading.Event().wait()
        if ending == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if ending == "raise":
            raise RuntimeError("this worker has a defect")
        return int(ending.removeprefix("return "))

    if __name__ == "__main__":
        sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AgentSettings:
    (tmp_path / "standing_in_forked.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return AgentSettings(RunDir(tmp_path), worker_module="standing_in_forked")


@pytest.fixture
async def forks(settings: AgentSettings):
    server = make_fork_server(settings)
    yield server
    await server.close()


def about(settings: AgentSettings) -> dict:
    return json.loads((settings.run_dir.root / "about.json").read_text())


def ending(settings: AgentSettings, how: str) -> None:
    (settings.run_dir.root / "ending").write_text(how)


async def said(settings: AgentSettings) -> dict:
    """Return what the worker has written down of itself, once it has."""
    file = settings.run_dir.root / "about.json"
    await until(lambda: file.exists() and file.read_text(), "the worker's word")
    return json.loads(file.read_text())


async def until(condition, what: str) -> None:
    await asyncio.to_thread(wait_until, condition, what)


async def test_a_forked_worker_is_what_one_started_by_exec_is(settings, forks, monkeypatch):
    cores = tuple(sorted(os.sched_getaffinity(0))[:1])
    devices = WorkerDevices(cores=cores, gpu="GPU-7")
    found = []
    for source in (None, forks):
        standby = Standby(settings, 0, source)
        await standby.show(devices)
        worker = await WorkerProcess.start(settings, ASSIGN, standby)
        assert (await worker.wait()).code == 0
        found.append(about(settings))
        assert found[-1]["pid"] == found[-1]["group"] == worker.pid
        assert found[-1]["parent"] == os.getpid()
        (settings.run_dir.root / "about.json").unlink()
    by_exec, forked = found
    assert [by_exec.pop("forked"), forked.pop("forked")] == [False, True]
    same = by_exec.keys() - {"pid", "group"}
    assert {name: by_exec[name] for name in same} == {name: forked[name] for name in same}
    assert forked["cores"] == list(cores)
    assert forked["shown"] == "GPU-7"
    assert forked["oom"] == "1000"
    assert (settings.run_dir.job_dir("uid-1") / "worker.log").read_text().count("said by") == 2


@pytest.mark.parametrize(
    ("how", "code"), [("return 3", 3), ("crash", -signal.SIGSEGV), ("raise", 1)]
)
async def test_it_is_reported_as_it_ended(settings, forks, how, code):
    ending(settings, how)
    worker = await WorkerProcess.start(settings, ASSIGN, Standby(settings, 0, forks))
    end = await worker.wait()
    assert end.code == code
    assert ("this worker has a defect" in end.log_tail) == (how == "raise")


async def test_a_forked_one_on_standby_gets_the_job(settings, forks):
    standby = Standby(settings, 0, forks)
    await standby.prepare("model")
    worker = await WorkerProcess.start(settings, ASSIGN, standby)
    assert (await worker.wait()).code == 0
    assert about(settings)["order"] == '{"job_uid": "uid-1", "epoch": 3}\n'
    assert about(settings)["forked"]


async def test_closing_ends_the_forked_one_that_waits(settings, forks):
    standby = Standby(settings, 0, forks)
    await standby.prepare("model")
    await standby._process.started()
    pid = standby._process.pid
    assert pid
    await standby.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_worker_that_is_killed_before_it_was_forked_never_runs(settings, forks):
    worker = await WorkerProcess.start(settings, ASSIGN, Standby(settings, 0, forks))
    assert worker.pid == 0
    worker.kill()
    assert (await worker.wait()).code == -signal.SIGKILL
    assert not (settings.run_dir.root / "about.json").exists()


async def test_workers_outlive_the_server_and_the_next_ones_come_from_a_new_one(settings, forks):
    ending(settings, "wait")
    first = await WorkerProcess.start(settings, ASSIGN, Standby(settings, 0, forks))
    assert (await said(settings))["forked"]
    server = forks.pid
    os.kill(server, signal.SIGKILL)
    await until(lambda: not forks.pid, "the end of the server")
    os.kill(first.pid, 0)
    (settings.run_dir.root / "about.json").unlink()
    second = await WorkerProcess.start(settings, ASSIGN, Standby(settings, 0, forks))
    assert (await said(settings))["forked"]
    assert forks.pid != server
    for worker in (first, second):
        worker.kill()
        assert (await worker.wait()).code == -signal.SIGKILL


@pytest.mark.parametrize("defect", ["threads", "broken"])
async def test_where_nothing_can_be_forked_workers_are_started_by_exec(
    settings, forks, caplog, defect
):
    (settings.run_dir.root / defect).touch()
    worker = await WorkerProcess.start(settings, ASSIGN, Standby(settings, 0, forks))
    assert (await worker.wait()).code == 0
    assert not about(settings)["forked"]
    assert "workers are started by exec" in caplog.text
    assert defect != "threads" or "it has 2 threads" in caplog.text
    (settings.run_dir.root / "loaded").unlink()
    again = await WorkerProcess.start(settings, ASSIGN, Standby(settings, 0, forks))
    assert (await again.wait()).code == 0
    assert not (settings.run_dir.root / "loaded").exists(), "no server is tried for a while"


AGENT = """
import asyncio, sys
from pathlib import Path
from windrow.proto import attach_pb2
from windrow.rundir import RunDir
from windrow_sidecar.agent.settings import AgentSettings
from windrow_sidecar.agent.worker_process import Standby, WorkerProcess, make_fork_server

async def main():
    settings = AgentSettings(RunDir(Path(sys.argv[1])), worker_module="standing_in_forked")
    standby = Standby(settings, 0, make_fork_server(settings))
    assign = attach_pb2.Assign(job_uid="uid-1", epoch=3, spec_json="{}")
    worker = await WorkerProcess.start(settings, assign, standby)
    await worker.wait()

asyncio.run(main())
"""


def test_server_and_workers_end_with_the_agent(settings):
    ending(settings, "wait")
    agent = subprocess.Popen([sys.executable, "-c", AGENT, str(settings.run_dir.root)])
    worker = asyncio.run(said(settings))["pid"]
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    assert str(worker) in children
    assert len(children) == 2, "the server and the worker"
    agent.kill()
    agent.wait()
    wait_until(lambda: not any(is_running(int(pid)) for pid in children), "their end")
