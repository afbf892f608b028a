"""Check how a pod's GPU is shared is decided at the agent's start, told, and watched over."""

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
from prometheus_client.core import CollectorRegistry

from windrow.conditions import Reason
from windrow.errors import UserError
from windrow.proto import agent_pb2, attach_pb2
from windrow.rundir import RunDir
from windrow_sidecar.agent.channel import OutgoingQueue
from windrow_sidecar.agent.exporter import Exporter
from windrow_sidecar.agent.flags import parse_settings
from windrow_sidecar.agent.gpu_sharing import GpuSharing, probe_gpu
from windrow_sidecar.agent.job_run import JobRun
from windrow_sidecar.agent.outbox import EventOutbox
from windrow_sidecar.agent.settings import AgentSettings
from windrow_sidecar.agent.slot import AgentSlot
from windrow_sidecar.agent.worker_process import (
    Standby,
    WorkerDevices,
    WorkerLogs,
    WorkerProcess,
    worker_environment,
)
from windrow_sidecar.agent.worker_supervisor import WorkerSupervisor
from windrow_sidecar.compute.mps import CONTROL, MpsDaemon
from windrow_sidecar.compute.mps_joining import DaemonNote
from windrow_sidecar.compute.mps_priority import CLIENT_PRIORITY
from windrow_sidecar.compute.sharing import choose_sharing, probe
from windrow_sidecar.compute.survey import Survey, survey
from windrow_sidecar.compute.utilization import visible_device
from windrow_sidecar.testing.attached_operator import until

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
        self.started: list[MpsDaemon] = []

    def daemon(self) -> MpsDaemon:
        return MpsDaemon(self.run_dir.mps_folder, control=str(self.control))

    def decode_starts(self) -> MpsDaemon:
        """Do what decode's start does, up to its note; it is this process."""
        daemon = self.daemon()
        self.started.append(daemon)
        daemon.start()
        DaemonNote.here(daemon.environment).write(self.run_dir)
        return daemon

    async def share(self, found: Survey, **options: object) -> GpuSharing:
        async def found_so(environment: Mapping[str, str]) -> Survey:
            return found

        made = GpuSharing(
            self.run_dir,
            self.daemon(),
            probe=found_so,
            changed=self.changed.set,
            every_s=0.01,
            **options,
        )
        await made.start()
        self.open.append(made)
        return made

    async def joined(self) -> GpuSharing:
        """An agent beside a decode that has started and called."""
        sharing = await self.share(GPU)
        await sharing.join()
        return sharing

    def put_clients(self, *pids: int) -> None:
        (self.run_dir.mps_folder / "pipe" / "clients").write_text("\n".join(map(str, pids)))


@pytest.fixture
async def pod(run_dir) -> AsyncIterator[Pod]:
    made = Pod(run_dir)
    yield made
    for sharing in made.open:
        await sharing.close()
    for daemon in made.started:
        daemon.abandon()


async def test_the_agent_joins_the_daemon_of_decodes_start_once_decode_calls(cuda_standin, pod):
    pod.decode_starts()
    sharing = await pod.share(GPU)
    assert (sharing.sharing.mode, sharing.sharing.code) == ("temporal", Reason.NO_WORKER_YET)
    assert sharing.worker_environment == {}
    await sharing.join()
    assert (sharing.sharing.mode, sharing.sharing.code) == ("spatial", Reason.MPS_CLIENTS)
    assert sharing.worker_environment[PIPE] == str(pod.run_dir.mps_folder / "pipe")
    devices = WorkerDevices(mps=tuple(sharing.worker_environment.items()))
    settings = AgentSettings(pod.run_dir)
    assert PIPE in worker_environment(settings, devices)
    assert PIPE not in worker_environment(settings)


async def test_without_shares_of_sms_nothing_is_joined(pod):
    pod.decode_starts()
    sharing = await pod.share(Survey(gpu="old", units=80, green_missing="its driver knows none"))
    assert sharing.sharing.reason == "no green contexts: its driver knows none"
    assert sharing.sharing.code == Reason.NO_GREEN_CONTEXTS


async def test_a_policy_that_says_temporal_joins_nothing(pod):
    pod.decode_starts()
    sharing = await pod.share(GPU, in_time=True)
    await sharing.join()
    assert (sharing.sharing.mode, sharing.sharing.code) == ("temporal", Reason.POLICY_TEMPORAL)


async def test_where_decode_left_no_note_that_is_the_reason(pod):
    assert (await pod.joined()).sharing.code == Reason.NO_MPS_DAEMON


async def test_a_daemon_that_does_not_answer_is_the_reason(pod):
    daemon = pod.decode_starts()
    daemon._process.kill()
    daemon._process.wait()
    assert (await pod.joined()).sharing.code == Reason.MPS_ENDED


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("shared_memory", "1:2", Reason.OTHER_SHARED_MEMORY),
        ("uid", 65534, Reason.OTHER_USER),
        ("environment", {PIPE: "/nowhere/pipe"}, Reason.OTHER_PIPE_DIRECTORY),
    ],
)
async def test_a_container_that_lacks_a_condition_says_which(pod, field, value, code):
    pod.decode_starts()
    replace(DaemonNote.read(pod.run_dir), **{field: value}).write(pod.run_dir)
    sharing = await pod.joined()
    assert (sharing.sharing.mode, sharing.sharing.code) == ("temporal", code)


async def test_a_sidecar_without_the_daemons_program_says_so(pod):
    pod.decode_starts()
    sharing = await pod.share(GPU)
    sharing._daemon = MpsDaemon(pod.run_dir.mps_folder, control="no-such-mps-control")
    await sharing.join()
    assert sharing.sharing.code == Reason.MPS_MISSING
    assert "sidecar's container" in sharing.sharing.reason


async def test_a_trial_that_hangs_is_killed_and_workers_run_in_turn(cuda_standin, pod):
    pod.decode_starts()
    (pod.run_dir.mps_folder / "pipe" / "hang").touch()
    sharing = await pod.share(GPU, trial_within_s=0.5)
    await sharing.join()
    assert sharing.sharing.code == Reason.MPS_CLIENT_HANGS


async def test_a_process_that_runs_without_the_daemon_is_the_reason(cuda_standin, pod, monkeypatch):
    monkeypatch.setenv("WINDROW_STANDIN_MPS", "0")
    pod.decode_starts()
    assert (await pod.joined()).sharing.code == Reason.MPS_NOT_CONNECTED


async def test_a_daemon_that_does_not_know_the_sidecars_process_is_not_joined(
    cuda_standin, pod, monkeypatch
):
    monkeypatch.setenv("WINDROW_STANDIN_MPS", "1")  # a client that no list names
    pod.decode_starts()
    (pod.run_dir.mps_folder / "pipe" / "joined").mkdir()
    sharing = await pod.joined()
    assert sharing.sharing.code == Reason.CLIENT_UNKNOWN


async def test_a_restart_of_decode_is_joined_again(cuda_standin, pod):
    first = pod.decode_starts()
    sharing = await pod.joined()
    first.stop()
    await asyncio.wait_for(pod.changed.wait(), 20)
    assert sharing.sharing.code == Reason.MPS_ENDED
    assert sharing.worker_environment == {}
    pod.decode_starts()
    await sharing.join()
    assert sharing.sharing.mode == "spatial"


async def test_a_daemon_that_misses_one_question_has_not_ended(cuda_standin, pod):
    pod.decode_starts()
    sharing = await pod.joined()
    misses, asked = pod.run_dir.root / "misses", pod.run_dir.root / "asked"
    forgetful = pod.run_dir.root / "forgetful"
    forgetful.write_text(
        f"#!/bin/sh\necho >> {asked}\nrm {misses} 2>/dev/null && exit 1\n"
        f'exec python3 -S {FAKE} "$@"\n'
    )
    forgetful.chmod(0o755)
    misses.touch()
    forgetful.replace(pod.control)  # while the agent asks
    await until(lambda: asked.exists() and asked.stat().st_size >= 4)
    assert not misses.exists()
    assert sharing.sharing.mode == "spatial"
    assert not pod.changed.is_set()


async def test_a_restart_of_the_agent_finds_the_daemon_again(cuda_standin, pod):
    daemon = pod.decode_starts()
    await (await pod.joined()).close()
    assert daemon.alive(), "it is decode's"
    pod.put_clients(41)
    again = await pod.share(GPU)
    await again.end_client(41)
    assert 41 not in daemon.clients().get(100, []), "an earlier agent's worker is ended through it"
    await again.join()
    assert again.sharing.mode == "spatial"


async def test_the_daemon_of_a_decode_that_is_gone_quits_with_the_agent(pod):
    daemon = pod.decode_starts()
    ended = await asyncio.create_subprocess_exec("true")
    await ended.wait()
    replace(DaemonNote.read(pod.run_dir), starter=ended.pid).write(pod.run_dir)
    sharing = await pod.share(GPU)
    pod.put_clients(41)
    await sharing.close()
    assert daemon.alive(), "somebody uses it"
    pod.put_clients()
    await sharing.close()
    daemon._process.wait(20)


@pytest.mark.parametrize(
    ("choice", "percent", "priority"),
    [("auto", 100, "1"), ("auto", 50, "0"), ("normal", 100, "0"), ("below", 50, "1")],
)
async def test_a_worker_that_may_run_on_every_sm_is_a_client_below_decode(
    cuda_standin, pod, monkeypatch, choice, percent, priority
):
    monkeypatch.setenv(CLIENT_PRIORITY, "0")  # the container's own is decode's
    daemon = pod.decode_starts()
    assert CLIENT_PRIORITY not in daemon.environment, "decode's process keeps its own"
    settings = AgentSettings(pod.run_dir, mps_priority=choice, standby=False)
    sharing = await pod.share(GPU)
    slot = AgentSlot(0, settings, EventOutbox(), on_facts=lambda: None, gpus=sharing)
    hello = agent_pb2.EngineHello(driver="cuda", sharing="spatial")
    await slot.engine_attached(hello, OutgoingQueue[agent_pb2.EngineCommand]())
    slot.set_policy(agent_pb2.EnginePolicy(mode="harvest", max_compute_percent=percent))
    if slot._showing is not None:
        await slot._showing
    shown = worker_environment(settings, slot._standby.devices)
    assert (shown[CLIENT_PRIORITY], shown[PIPE]) == (priority, daemon.environment[PIPE])
    hello = agent_pb2.EngineHello(driver="cuda", sharing="temporal")
    await slot.engine_attached(hello, OutgoingQueue[agent_pb2.EngineCommand]())
    assert dict(slot._standby.devices.mps) == {}, "in turn there is nobody to be below"
    await slot.close()


def test_a_priority_that_is_none_is_refused_by_its_variable():
    with pytest.raises(UserError, match="auto, normal or below") as refused:
        parse_settings([], {"WINDROW_MPS_PRIORITY": "-1"})
    assert refused.value.field == "WINDROW_MPS_PRIORITY"
    assert parse_settings([], {"WINDROW_MPS_PRIORITY": "below"}).mps_priority == "below"


async def test_an_engine_that_is_no_client_has_workers_run_in_turn(cuda_standin, pod):
    pod.decode_starts()
    sharing = await pod.share(GPU)
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
    assert PIPE in worker_environment(AgentSettings(pod.run_dir), slot._standby.devices)
    hello = agent_pb2.EngineHello(
        driver="cuda", sharing="temporal", sharing_reason="no client", sharing_code="MpsTooLate"
    )
    await slot.engine_attached(hello, OutgoingQueue[agent_pb2.EngineCommand]())
    assert slot.facts().sharing == "temporal"
    assert slot.facts().sharing_reason == "decode shares it so: no client"
    assert slot.facts().sharing_code == Reason.MPS_TOO_LATE
    assert PIPE not in worker_environment(AgentSettings(pod.run_dir), slot._standby.devices)
    other = AgentSlot(
        1, AgentSettings(pod.run_dir), EventOutbox(), on_facts=lambda: None, gpus=sharing
    )
    hello = agent_pb2.EngineHello(slot=1, driver="cuda", sharing="spatial")
    await other.engine_attached(hello, OutgoingQueue[agent_pb2.EngineCommand]())
    assert other.facts().sharing == "spatial", "what one engine does is that slot's alone"
    assert PIPE in worker_environment(AgentSettings(pod.run_dir), other._standby.devices)
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
        (replace(GPU, uuids=["a", "b"]), {}, ""),  # workers are shown decode's alone
        (replace(GPU, uuids=["a", "b"]), {"device_uuid": ""}, "sees 2 GPUs, and decode has not"),
        (Survey(why="looking at it failed: killed"), {}, ""),
        (Survey(why="no libcuda", uuids=()), {"driver": "host"}, ""),
    ],
)
async def test_a_sidecar_that_does_not_see_decodes_gpu_says_so_in_its_facts(
    pod, found, hello, unseen
):
    sharing = await pod.share(found)
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
    await standby.show(WorkerDevices(gpu="GPU-1"))
    await standby.prepare("/m")
    waits = standby._process
    await standby.show(WorkerDevices(gpu="GPU-1"))
    assert waits.returncode is None
    await standby.show(WorkerDevices(gpu="GPU-2"))
    assert waits.returncode == -signal.SIGKILL
    assert standby.take(attach_pb2.Assign()) is None
    await standby.close()


async def test_without_a_gpu_there_is_nothing_to_share(pod):
    sharing = await pod.share(Survey(why="no driver"))
    assert sharing.sharing is None
    assert not pod.run_dir.mps_folder.exists()


async def test_the_slots_facts_tell_how_its_gpu_is_shared(pod):
    sharing = await pod.share(GPU, in_time=True)
    slot = AgentSlot(
        0,
        AgentSettings(pod.run_dir),
        EventOutbox(),
        on_facts=lambda: None,
        gpus=sharing,
    )
    slot.hello = agent_pb2.EngineHello(driver="cuda")
    assert slot.facts().sharing == "temporal"
    assert "the policy says sharing: temporal" in slot.facts().sharing_reason
    assert slot.facts().sharing_code == Reason.POLICY_TEMPORAL
    assert slot.max_jobs() == AgentSettings.max_jobs
    slot.hello = agent_pb2.EngineHello(driver="host")
    assert slot.facts().sharing == slot.facts().sharing_reason == ""


async def test_the_slots_metric_has_the_form_and_one_of_the_tables_reasons(pod):
    sharing = await pod.share(GPU, in_time=True)
    settings = AgentSettings(pod.run_dir, pod_namespace="d", pod_name="decode-0")
    slot = AgentSlot(0, settings, EventOutbox(), on_facts=lambda: None, gpus=sharing)
    (registry := CollectorRegistry()).register(Exporter(settings, lambda: [slot], lambda: True))

    def told() -> list[tuple[str, str]]:
        (family,) = (f for f in registry.collect() if f.name == "windrow_slot_sharing_info")
        return [(s.labels["sharing"], s.labels["reason"]) for s in family.samples]

    assert told() == []
    slot.hello = agent_pb2.EngineHello(driver="cuda")
    assert told() == [("temporal", Reason.POLICY_TEMPORAL)]
    said = agent_pb2.EngineHello(
        driver="cuda", sharing="temporal", sharing_code=Reason.MPS_TOO_LATE
    )
    slot.hello = said
    assert told() == [("temporal", Reason.MPS_TOO_LATE)]
    said.sharing_code = "a word of another release"
    assert told() == [("temporal", Reason.REASON_NOT_SAID)]
    slot.hello = agent_pb2.EngineHello(driver="host")
    assert told() == [("spatial", "Cores")]


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, "auto"),
        ({"WINDROW_SHARING": "spatial"}, "spatial"),
        ({"WINDROW_MPS": "off"}, "temporal"),
        ({"WINDROW_MPS": "off", "WINDROW_SHARING": "auto"}, "auto"),
    ],
)
def test_sharing_is_chosen_by_flag_and_environment(run_dir, variables, wanted):
    flags = ["--run-dir", str(run_dir)]
    assert parse_settings(flags, variables).sharing == wanted
    assert parse_settings([*flags, "--sharing", "temporal"], variables).sharing == "temporal"


def test_another_way_to_share_is_refused(run_dir):
    with pytest.raises(UserError, match="'off' is not a valid way to share a GPU"):
        parse_settings(["--run-dir", str(run_dir), "--sharing", "off"], {})


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


async def test_a_worker_that_is_no_client_beside_decode_that_is_one_is_told_in_the_facts(
    cuda_standin, pod
):
    """Decode grants it the whole GPU while it idles: see `test_inflight`."""
    pod.decode_starts()
    sharing, told = await pod.share(GPU), []
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
    pod.decode_starts()
    sharing = await pod.share(GPU)
    order: list[str] = []
    environ = AgentSettings(pod.run_dir, grace_s=0.05)
    supervisor = WorkerSupervisor(
        environ, 0, on_exit=lambda _: order.append("reaped"), end_gpu_work=sharing.end_client
    )
    sleeper = await asyncio.create_subprocess_exec("sleep", "60", process_group=0)
    pod.put_clients(41, sleeper.pid)
    logs = WorkerLogs(RunDir(tmp_path), attach_pb2.Assign(job_namespace="default", job_uid="u"))
    supervisor._process = WorkerProcess(sleeper, logs)
    clients = pod.run_dir.mps_folder / "pipe" / "clients"
    kill = supervisor._process.kill
    supervisor._process.kill = lambda: (order.append(clients.read_text().strip()), kill())
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
    assert not pod.run_dir.mps_note.exists()
    await sharing.close()
