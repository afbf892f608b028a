"""How a pod's GPU is shared is decided at the agent's start, told, and watched over."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from windrow.proto import agent_pb2, attach_pb2
from windrow.rundir import RunDir
from windrow_sidecar.agent.channel import OutgoingQueue
from windrow_sidecar.agent.flags import parse_settings
from windrow_sidecar.agent.gpu_sharing import SWITCHED_OFF, GpuSharing, probe_gpu
from windrow_sidecar.agent.job_run import JobRun
from windrow_sidecar.agent.outbox import EventOutbox
from windrow_sidecar.agent.settings import AgentSettings
from windrow_sidecar.agent.slot import AgentSlot
from windrow_sidecar.agent.worker_process import (
    Standby,
    WorkerGround,
    WorkerLogFollower,
    WorkerProcess,
    worker_environment,
)
from windrow_sidecar.agent.worker_supervisor import WorkerSupervisor
from windrow_sidecar.compute.mps import CONTROL, MpsDaemon
from windrow_sidecar.compute.sharing import Sharing, choose_sharing, probe
from windrow_sidecar.compute.survey import Survey, survey
from windrow_sidecar.compute.utilization import visible_device

FAKE = Path(__file__).with_name("fake_mps_control.py")
GPU = Survey(gpu="a GPU", units=132)
PIPE = "CUDA_MPS_PIPE_DIRECTORY"


class Pod:
    """A run directory, another program that speaks the protocol of NVIDIA's, and what was told."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = RunDir(folder)
        self.control = folder / CONTROL
        self.control.symlink_to(FAKE)
        self.changed = asyncio.Event()
        self.open: list[GpuSharing] = []

    def daemon(self) -> MpsDaemon:
        return MpsDaemon(self.run_dir.mps_folder, control=str(self.control))

    async def share(
        self, found: Survey, daemon: MpsDaemon | None, *, connects: bool = True
    ) -> GpuSharing:
        async def found_so(environment: Mapping[str, str]) -> Survey:
            return replace(found, is_mps_client=connects and PIPE in environment)

        made = GpuSharing(
            self.run_dir, daemon, probe=found_so, changed=self.changed.set, every_s=0.01
        )
        await made.start()
        self.open.append(made)
        return made

    def put_clients(self, *pids: int) -> None:
        (self.run_dir.mps_folder / "pipe" / "clients").write_text("\n".join(map(str, pids)))


@pytest.fixture
async def pod(run_dir) -> AsyncIterator[Pod]:
    made = Pod(run_dir)
    yield made
    if (made.run_dir.mps_folder / "pipe").is_dir():
        made.put_clients()
    for sharing in made.open:
        await sharing.close()


async def test_a_gpu_with_shares_gets_a_daemon_and_its_environment_is_told(pod):
    sharing = await pod.share(GPU, pod.daemon())
    assert sharing.sharing.mode == "spatial"
    told = pod.run_dir.read_mps_environment()
    assert told["CUDA_MPS_PIPE_DIRECTORY"] == str(pod.run_dir.mps_folder / "pipe")
    settings = AgentSettings(pod.run_dir)
    assert told.items() <= worker_environment(settings).items()
    await sharing.close()
    assert pod.run_dir.read_mps_environment() == {}
    assert "CUDA_MPS_PIPE_DIRECTORY" not in worker_environment(settings)


async def test_without_shares_of_sms_no_daemon_is_started(pod):
    found = Survey(gpu="an old GPU", units=80, green_missing="its driver knows none")
    sharing = await pod.share(found, pod.daemon())
    assert sharing.sharing == Sharing("temporal", "no green contexts: its driver knows none")
    assert not pod.run_dir.mps_folder.exists()


async def test_switched_off_it_is_shared_in_time(pod):
    sharing = await pod.share(GPU, None)
    assert sharing.sharing == Sharing("temporal", f"no MPS daemon: {SWITCHED_OFF}")


async def test_a_program_that_is_missing_is_the_reason(pod):
    missing = MpsDaemon(pod.run_dir.mps_folder, control="no-such-mps-control")
    sharing = await pod.share(GPU, missing)
    assert sharing.sharing.mode == "temporal"
    assert "no-such-mps-control is not on PATH" in sharing.sharing.reason
    assert pod.run_dir.read_mps_environment() == {}


async def test_where_no_process_becomes_a_client_the_daemon_goes_and_the_reason_is_told(pod):
    daemon = pod.daemon()
    sharing = await pod.share(GPU, daemon, connects=False)
    assert sharing.sharing.mode == "temporal"
    assert "was to be a client of the daemon was none" in sharing.sharing.reason
    assert not daemon.alive()
    assert pod.run_dir.read_mps_environment() == {}


async def test_clients_of_a_daemon_that_is_taken_over_prove_it_and_nobody_else_is_tried(pod):
    first = pod.daemon()
    first.start()
    pod.put_clients(41)
    sharing = await pod.share(GPU, pod.daemon(), connects=False)
    assert sharing.sharing.mode == "spatial"
    assert pod.run_dir.read_mps_environment()
    assert first.alive()
    pod.put_clients()
    await sharing.close()
    first._process.wait(20)


async def test_an_engine_that_is_no_client_has_workers_run_in_turn(pod):
    sharing = await pod.share(GPU, pod.daemon())
    slot = AgentSlot(
        0,
        AgentSettings(pod.run_dir),
        EventOutbox(),
        on_facts=lambda: None,
        gpus=sharing,
    )
    hello = agent_pb2.EngineHello(driver="cuda", sharing="spatial")
    await slot.engine_attached(hello, OutgoingQueue[agent_pb2.EngineCommand]())
    assert slot.facts().sharing == "spatial"
    hello = agent_pb2.EngineHello(driver="cuda", sharing="temporal", sharing_reason="no client")
    await slot.engine_attached(hello, OutgoingQueue[agent_pb2.EngineCommand]())
    assert slot.facts().sharing == "temporal"
    assert slot.facts().sharing_reason == "decode shares it so: no client"
    assert PIPE not in worker_environment(AgentSettings(pod.run_dir), slot._standby.ground)
    other = AgentSlot(
        1, AgentSettings(pod.run_dir), EventOutbox(), on_facts=lambda: None, gpus=sharing
    )
    hello = agent_pb2.EngineHello(slot=1, driver="cuda", sharing="spatial")
    await other.engine_attached(hello, OutgoingQueue[agent_pb2.EngineCommand]())
    assert other.facts().sharing == "spatial", "what one engine does is that slot's alone"
    assert PIPE in worker_environment(AgentSettings(pod.run_dir), other._standby.ground)
    await slot.close()
    await other.close()


@pytest.mark.parametrize(
    ("found", "hello", "unseen"),
    [
        (
            Survey(why="no libcuda", uuids=()),
            {},
            "the sidecar's container sees no GPU (no libcuda)",
        ),
        (replace(GPU, uuids=["a"]), {}, ""),
        (replace(GPU, uuids=["b"]), {}, "is none of the 1 that the sidecar's container sees"),
        (replace(GPU, uuids=["b"]), {"device": "gpu:NVIDIA-H100-MIG-1g.10gb"}, ""),
        (replace(GPU, uuids=["b"]), {"device_uuid": ""}, ""),
        (Survey(why="looking at it failed: killed"), {}, ""),
        (Survey(why="no libcuda", uuids=()), {"driver": "host"}, ""),
    ],
)
async def test_a_sidecar_that_does_not_see_decodes_gpu_says_so_in_its_facts(
    pod, found, hello, unseen
):
    sharing = await pod.share(found, None)
    slot = AgentSlot(
        0, AgentSettings(pod.run_dir), EventOutbox(), on_facts=lambda: None, gpus=sharing
    )
    slot.hello = agent_pb2.EngineHello(**{"driver": "cuda", "device_uuid": "a"} | hello)
    assert unseen in slot.facts().unseen_device
    assert bool(unseen) == bool(slot.facts().unseen_device)


def test_a_process_sees_the_gpus_that_it_is_shown(cuda_standin, monkeypatch):
    monkeypatch.setenv("WINDROW_STANDIN_GPUS", "3")
    looked = [sys.executable, "-m", "windrow_sidecar.compute.survey"]

    def seen(**environment: str) -> list[str]:
        said = subprocess.run(
            looked, env=os.environ | environment, capture_output=True, text=True, check=True
        )
        return list(json.loads(said.stdout)["uuids"])

    first, second, third = seen()
    assert len({first, second, third}) == 3
    assert seen(CUDA_VISIBLE_DEVICES=visible_device(second, "GPU")) == [second]
    assert seen(CUDA_VISIBLE_DEVICES="2,0") == [third, first]
    assert seen(CUDA_VISIBLE_DEVICES="") == []


async def test_a_worker_that_waits_on_another_gpu_than_decodes_ends(run_dir, monkeypatch, tmp_path):
    (tmp_path / "worker_that_waits.py").write_text("import sys; sys.stdin.read()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    settings = replace(
        parse_settings(["--run-dir", str(run_dir)], {}), worker_module="worker_that_waits"
    )
    standby = Standby(settings, 0)
    await standby.show(WorkerGround(gpu="GPU-1"))
    await standby.prepare("/m")
    waits = standby._process
    await standby.show(WorkerGround(gpu="GPU-1"))
    assert waits.returncode is None
    await standby.show(WorkerGround(gpu="GPU-2"))
    assert waits.returncode == -signal.SIGKILL
    assert standby.take(attach_pb2.Assign()) is None
    await standby.close()


async def test_without_a_gpu_there_is_nothing_to_share(pod):
    sharing = await pod.share(Survey(why="no driver"), pod.daemon())
    assert sharing.sharing is None
    assert not pod.run_dir.mps_folder.exists()


async def test_a_daemon_that_ends_is_told_and_workers_run_in_turn_from_then_on(pod):
    daemon = pod.daemon()
    sharing = await pod.share(GPU, daemon)
    daemon._process.kill()
    await asyncio.wait_for(pod.changed.wait(), 20)
    assert sharing.sharing.mode == "temporal"
    assert "the MPS daemon has ended" in sharing.sharing.reason
    assert pod.run_dir.read_mps_environment() == {}
    assert not daemon.alive(), "it is not started again: decode would not be its client"


async def test_while_decode_is_its_client_the_daemon_outlives_the_agent_and_is_taken_over(pod):
    first = pod.daemon()
    sharing = await pod.share(GPU, first)
    pod.put_clients(41)
    await sharing.close()
    assert first.alive()
    assert pod.run_dir.read_mps_environment()

    second = pod.daemon()
    again = await pod.share(GPU, second)
    assert again.sharing.mode == "spatial"
    assert second._process is None, "none was started beside it"
    assert second.clients() == {100: [41]}
    pod.put_clients()
    await again.close()
    first._process.wait(20)
    assert pod.run_dir.read_mps_environment() == {}


async def test_the_slots_facts_tell_how_its_gpu_is_shared(pod):
    sharing = await pod.share(GPU, None)
    slot = AgentSlot(
        0,
        AgentSettings(pod.run_dir),
        EventOutbox(),
        on_facts=lambda: None,
        gpus=sharing,
    )
    slot.hello = agent_pb2.EngineHello(driver="cuda")
    assert slot.facts().sharing == "temporal"
    assert SWITCHED_OFF in slot.facts().sharing_reason
    slot.hello = agent_pb2.EngineHello(driver="host")
    assert slot.facts().sharing == slot.facts().sharing_reason == ""


@pytest.mark.parametrize(("said", "wanted"), [("auto", True), ("off", False)])
def test_mps_is_switched_by_flag_and_environment(run_dir, said, wanted):
    flags = ["--run-dir", str(run_dir)]
    assert parse_settings([*flags, "--mps", said], {}).mps is wanted
    assert parse_settings(flags, {"WINDROW_MPS": said}).mps is wanted


def test_a_process_is_a_client_where_its_environment_and_the_driver_say_so(
    cuda_standin, run_dir, monkeypatch
):
    without = choose_sharing(probe("cuda", {}))
    assert without.mode == "temporal"
    assert "CUDA_MPS_PIPE_DIRECTORY is not set" in without.reason
    gone = choose_sharing(probe("cuda", {"CUDA_MPS_PIPE_DIRECTORY": str(run_dir)}))
    assert f"no daemon answers in {run_dir}" in gone.reason
    (run_dir / "control").touch()
    alone = choose_sharing(probe("cuda", {PIPE: str(run_dir)}))
    assert alone.mode == "temporal", "the driver ran this process without MPS"
    assert f"did not connect this process to the daemon in {run_dir}" in alone.reason
    monkeypatch.setenv("WINDROW_STANDIN_MPS", "1")
    there = choose_sharing(probe("cuda", {PIPE: str(run_dir)}))
    assert there.mode == "spatial"


async def test_a_worker_that_is_no_client_beside_decode_that_is_one_is_told_in_the_facts(pod):
    """Decode grants it the whole GPU while it idles: see `test_inflight`."""
    sharing, told = await pod.share(GPU, pod.daemon()), []
    slot = AgentSlot(
        0,
        AgentSettings(pod.run_dir),
        EventOutbox(),
        on_facts=lambda: told.append(slot.facts().sharing),
        gpus=sharing,
    )
    hello = agent_pb2.EngineHello(driver="cuda", sharing="spatial")
    await slot.engine_attached(hello, OutgoingQueue[agent_pb2.EngineCommand]())
    run = JobRun(slot._settings, attach_pb2.Assign(job_uid="u", epoch=1), EventOutbox(), None)
    slot.jobs.runs.append(run)
    slot.engine_reported(agent_pb2.EngineStats())
    progress = agent_pb2.WorkerProgress(sharing="temporal", sharing_reason="no daemon answers")
    await run.heard(agent_pb2.WorkerReport(progress=progress))
    slot.engine_reported(agent_pb2.EngineStats())
    slot.engine_reported(agent_pb2.EngineStats())
    assert slot.facts().sharing_reason == "the worker shares it so: no daemon answers"
    slot.jobs.runs.clear()
    slot.engine_reported(agent_pb2.EngineStats())
    assert told == ["spatial", "temporal", "spatial"]
    await slot.close()


async def test_the_gpu_work_of_a_client_is_ended_before_it_is_killed(pod, tmp_path):
    sharing = await pod.share(GPU, pod.daemon())
    order: list[str] = []
    environ = AgentSettings(pod.run_dir, grace_s=0.05)
    supervisor = WorkerSupervisor(
        environ, 0, on_exit=lambda _: order.append("reaped"), end_gpu_work=sharing.end_client
    )
    sleeper = await asyncio.create_subprocess_exec("sleep", "60", process_group=0)
    pod.put_clients(41, sleeper.pid)
    (log := tmp_path / "worker.log").touch()
    supervisor._process = WorkerProcess(sleeper, log, WorkerLogFollower(log, "default/tone"))
    clients = pod.run_dir.mps_folder / "pipe" / "clients"
    kill = supervisor._process.kill
    supervisor._process.kill = lambda: (order.append(clients.read_text()), kill())
    supervisor.kill_for(JobRun(environ, attach_pb2.Assign(), EventOutbox(), supervisor))
    assert await asyncio.wait_for(sleeper.wait(), 20) == -signal.SIGKILL
    assert order == ["41"], "the daemon was told before the process was killed"


def test_a_survey_says_what_would_be_chosen_and_why(cuda_standin, run_dir):
    without = survey(path=str(run_dir))
    assert (without.mode, without.mps_missing) == ("temporal", f"{CONTROL} is not on PATH")
    (run_dir / CONTROL).symlink_to(FAKE)
    found = survey(path=str(run_dir))
    assert found.mode == "spatial"
    assert found.gpu
    assert found.units > 8


async def test_the_agent_looks_from_another_process(cuda_standin):
    found = await probe_gpu({})
    assert found.gpu
    assert found.green_missing == ""
    assert not found.is_mps_client


async def test_a_client_of_the_daemon_that_was_started_finds_itself_one(cuda_standin, pod):
    daemon = pod.daemon()
    daemon.start()
    assert (await probe_gpu(daemon.environment)).is_mps_client
    daemon.stop()
    assert not (await probe_gpu(daemon.environment)).is_mps_client


async def test_what_the_agent_starts_is_tried_by_a_real_process(cuda_standin, pod):
    sharing = GpuSharing(pod.run_dir, pod.daemon())
    pod.open.append(sharing)
    await sharing.start()
    assert sharing.sharing.mode == "spatial"
    assert pod.run_dir.read_mps_environment()


def test_doctor_shows_how_the_gpu_would_be_shared(cuda_standin, run_dir):
    said = subprocess.run(
        [sys.executable, "-c", "from windrow_cli import main; main()", "doctor", "--json"],
        env=os.environ | {"KUBECONFIG": str(run_dir / "none")},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    findings = {finding["what"]: finding for finding in json.loads(said.stdout)}
    assert findings["gpu"]["ok"]
    assert findings["gpu sharing"]["found"].startswith("temporal: no MPS daemon")


GPU_NAME = "GPU-12345678-9abc-def0-1234-56789abcdef0"


@pytest.mark.parametrize(
    ("access", "seen", "hello", "shown"),
    [
        ("env", ["u"], {"driver": "cuda"}, GPU_NAME),
        ("mps", ["u"], {"driver": "cuda:0"}, GPU_NAME),
        ("env", ["u"], {"driver": "cuda:1"}, GPU_NAME),
        (
            "env",
            ["u"],
            {"driver": "cuda", "device": "NVIDIA H100 80GB HBM3 MIG 1g.10gb"},
            GPU_NAME.replace("GPU", "MIG"),
        ),
        (
            "env",
            ["u"],
            {"driver": "cuda", "device": "gpu:NVIDIA-H100-80GB-HBM3-MIG-1g.10gb"},
            GPU_NAME.replace("GPU", "MIG"),
        ),
        ("", ["u", "v"], {"driver": "cuda"}, GPU_NAME),
        ("", ["u", "v"], {"driver": "cuda:1"}, GPU_NAME),
        ("", ["u"], {"driver": "cuda"}, "None"),
    ],
)
async def test_workers_see_the_gpu_alone_that_decode_has_named(
    run_dir, tmp_path, monkeypatch, access, seen, hello, shown
):
    worker = "import os; print('sees', os.environ.get('CUDA_VISIBLE_DEVICES'))"
    (tmp_path / "worker_that_says.py").write_text(worker)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    flags = ["--run-dir", str(run_dir)]
    settings = replace(
        parse_settings(flags, {"WINDROW_GPU_ACCESS": access}), worker_module="worker_that_says"
    )
    gpus = GpuSharing(RunDir(run_dir), None)
    gpus.found = replace(GPU, uuids=seen)
    slot = AgentSlot(0, settings, EventOutbox(), on_facts=lambda: None, gpus=gpus)
    named = agent_pb2.EngineHello(device_uuid="123456789abcdef0" * 2, **hello)
    await slot.engine_attached(named, OutgoingQueue[agent_pb2.EngineCommand]())
    assign = attach_pb2.Assign(job_uid="u", epoch=1, spec_json="{}")
    process = await WorkerProcess.start(settings, assign, slot._standby)
    await process.wait()
    assert f"sees {shown}\n" in (run_dir / "jobs" / "u" / "worker.log").read_text()
    await slot.close()


@pytest.mark.parametrize("is_client", [True, False])
async def test_a_daemon_of_the_nodes_is_used_and_none_is_started(pod, is_client):
    async def found(environment):
        assert not environment, "the sidecar's own variables name it"
        return replace(GPU, is_mps_client=is_client)

    sharing = GpuSharing(pod.run_dir, None, of_node=True, probe=found)
    await sharing.start()
    assert sharing.sharing.mode == ("spatial" if is_client else "temporal")
    assert is_client or "did not become a client of the node's daemon" in sharing.sharing.reason
    assert not pod.run_dir.mps_folder.exists()
    assert not pod.run_dir.mps_environment.exists()
    await sharing.close()
