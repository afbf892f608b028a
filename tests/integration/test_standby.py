"""A worker that waits ahead of its job."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from windrow.proto import agent_pb2, attach_pb2
from windrow.rundir import RunDir
from windrow_sidecar.agent.channel import OutgoingQueue
from windrow_sidecar.agent.outbox import EventOutbox
from windrow_sidecar.agent.settings import AgentSettings
from windrow_sidecar.agent.slot import AgentSlot
from windrow_sidecar.agent.switches import Off
from windrow_sidecar.agent.worker_process import Standby, WorkerProcess

pytestmark = pytest.mark.paired

ASSIGN = attach_pb2.Assign(job_uid="uid-1", epoch=3, spec_json="{}")


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AgentSettings:
    """The worker's place is taken by a program that notes its order, or ends at once."""
    module = tmp_path / "standing_in.py"
    module.write_text(
        "import pathlib, sys\n"
        "run_dir = pathlib.Path(sys.argv[sys.argv.index('--run-dir') + 1])\n"
        "if (run_dir / 'broken').exists(): sys.exit(9)\n"
        "line = sys.stdin.readline() if '--standby' in sys.argv else 'started for it'\n"
        "(run_dir / 'order').write_text(line)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return AgentSettings(RunDir(tmp_path), worker_module="standing_in")


async def test_the_waiting_worker_gets_the_job(settings: AgentSettings):
    standby = Standby(settings, 0)
    await standby.prepare("model")
    worker = await WorkerProcess.start(settings, ASSIGN, standby)
    assert (await worker.wait()).code == 0
    assert (settings.run_dir.root / "order").read_text() == '{"job_uid": "uid-1", "epoch": 3}\n'


async def test_without_a_waiting_worker_one_is_started_for_the_job(settings: AgentSettings):
    worker = await WorkerProcess.start(settings, ASSIGN, Standby(settings, 0))
    assert (await worker.wait()).code == 0
    assert (settings.run_dir.root / "order").read_text() == "started for it"


async def test_a_waiting_worker_that_ended_is_done_without_for_a_while(settings: AgentSettings):
    (settings.run_dir.root / "broken").touch()
    standby = Standby(settings, 0)
    await standby.prepare("model")
    first = standby._process
    await first.wait()
    await standby.prepare("model")
    assert standby._process is None
    (settings.run_dir.root / "broken").unlink()
    worker = await WorkerProcess.start(settings, ASSIGN, standby)
    assert (await worker.wait()).code == 0


async def test_one_that_is_dismissed_ends_and_another_can_be_prepared(settings: AgentSettings):
    standby = Standby(settings, 0)
    await standby.prepare("model")
    pid = standby._process.pid
    await standby.dismiss()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    await standby.prepare("model")
    worker = await WorkerProcess.start(settings, ASSIGN, standby)
    assert (await worker.wait()).code == 0


@pytest.mark.parametrize("by", ["switch", "policy"])
async def test_a_slot_that_is_turned_off_keeps_no_worker_waiting(settings: AgentSettings, by: str):
    slot = AgentSlot(0, settings, EventOutbox(), on_facts=lambda: None)
    slot.set_policy(agent_pb2.EnginePolicy(mode="harvest"))
    await slot.engine_attached(agent_pb2.EngineHello(driver="host", model="m"), OutgoingQueue())
    await slot._preparing
    pid = slot._standby._process.pid
    assert not slot.needs_no_worker
    if by == "switch":
        slot.switch(Off("turned off"))
    else:
        slot.set_policy(agent_pb2.EnginePolicy(mode="off"))
    await slot._preparing
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert slot.needs_no_worker
    await slot.close()


async def test_closing_ends_the_one_that_waits(settings: AgentSettings):
    standby = Standby(settings, 0)
    await standby.prepare("model")
    pid = standby._process.pid
    await standby.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    await standby.prepare("model")
    assert standby._process is None
    await asyncio.sleep(0)
