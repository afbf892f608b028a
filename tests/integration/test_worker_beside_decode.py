"""A real worker process under a real arena and page; the test plays decode and the agent."""

from __future__ import annotations

import contextlib
import json
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent import futures
from pathlib import Path

import grpc
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.dlpack import from_dlpack
from transformers import AutoModelForCausalLM

from windrow.eventlog import LossEvent, TaskletEvent, read_events
from windrow.proto import agent_pb2, agent_pb2_grpc
from windrow.rundir import RunDir
from windrow_sidecar._core import Arena, Geometry, SharedWeights
from windrow_sidecar.engines.fingerprint import model_fingerprint
from windrow_sidecar.finetune.beside.grants import ASK_AFTER_SILENCE_NS
from windrow_sidecar.finetune.runner import Ending
from windrow_sidecar.qos.view import Action, Decision, Offer

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "windrow-tiny"
UID = "3b1c"
BLOCK = 128 * 1024
CHUNKS = 24


class Decode:
    """Decode as the worker sees it: an arena, beats, grants, lent chunks, exported weights."""

    def __init__(self, run_dir: RunDir, *, weights: bool) -> None:
        geometry = Geometry(
            layers=6, kv_heads=4, head_dim=32, dtype_bytes=4, block_bytes=BLOCK, chunks=CHUNKS
        )
        self.arena = Arena.create(geometry, reserved_chunks=1)
        if weights:
            self._export(run_dir)
        self.arena.serve(str(run_dir.arena_socket()))
        self.page = self.arena.page
        self.grant = Decision()
        self.silent = False
        self._stop = threading.Event()
        self._beats = threading.Thread(target=self._beat, daemon=True)
        self._beats.start()

    def give(self, **fields) -> None:
        self.grant = Decision(**fields)
        self.page.publish_grant(*(getattr(self.grant, n) for n in Decision.__slots__[:-1]))

    def go(self, units: int = 1, **fields) -> None:
        epoch = self.grant.pause_epoch
        self.give(
            action=Action.GO,
            finetune_units=units,
            decode_units=1,
            pause_epoch=epoch,
            in_flight_bound_us=20_000,
            **fields,
        )

    def pause(self) -> None:
        self.give(action=Action.PAUSE, pause_epoch=self.grant.pause_epoch + 1)

    @property
    def offer(self) -> Offer:
        return Offer(*self.page.read_offer())

    def fall_silent(self) -> None:
        self._stop.set()
        self._beats.join()

    def close(self) -> None:
        self.fall_silent()
        self.arena.close()

    def _beat(self) -> None:
        while not self._stop.wait(0.05):
            if not self.silent:
                self.page.beat(0)

    def _export(self, run_dir: RunDir) -> None:
        tensors = {k: v.float() for k, v in load_file(MODEL / "model.safetensors").items()}
        places, end = {}, 0
        for name, tensor in tensors.items():
            places[name] = {"offset": end, "shape": list(tensor.shape), "dtype": "float32"}
            end += -(-tensor.numel() * 4 // 64) * 64
        shared = SharedWeights.create(end)
        storage = from_dlpack(shared.tensor())
        for name, tensor in tensors.items():
            at = places[name]["offset"]
            storage[at : at + tensor.numel() * 4].view(torch.float32).copy_(tensor.flatten())
        del storage
        shared.seal()
        self.arena.export("weights", shared.fd)
        manifest = {"fingerprint": model_fingerprint(MODEL), "tensors": places}
        run_dir.weights_manifest().write_text(json.dumps(manifest))
        self._shared = shared


class Agent(agent_pb2_grpc.AgentServicer):
    """Collects what the worker reports; `commands` go to it."""

    def __init__(self, run_dir: RunDir) -> None:
        self.events: list[agent_pb2.WorkerEvent] = []
        self.hellos: list[agent_pb2.WorkerHello] = []
        self.progress: list[agent_pb2.WorkerProgress] = []
        self.commands: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        agent_pb2_grpc.add_AgentServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{run_dir.agent_socket}")
        self._server.start()

    def Worker(self, request_iterator, context):
        def read() -> None:
            where = {"hello": self.hellos, "event": self.events, "progress": self.progress}
            with contextlib.suppress(grpc.RpcError):  # the worker was killed
                for report in request_iterator:
                    kind = report.WhichOneof("message")
                    where[kind].append(getattr(report, kind))
            self.commands.put(None)

        threading.Thread(target=read, daemon=True).start()
        while (action := self.commands.get()) is not None:
            yield agent_pb2.WorkerCommand(action=action)

    def kinds(self) -> list[str]:
        return [e.kind for e in self.events]

    def close(self) -> None:
        self.commands.put(None)
        self._server.stop(0).wait()


class Pod:
    """One decode pod: starts workers in it."""

    def __init__(self, root: Path, *, weights: bool = True) -> None:
        self.root = root
        self.run_dir = RunDir(root)
        self.out = root / "out"
        self.agent = Agent(self.run_dir)
        self.decode = Decode(self.run_dir, weights=weights)
        self.workers: list[subprocess.Popen] = []

    def start(self, epoch: int = 1, **training) -> subprocess.Popen:
        spec = job_spec(self.out)
        spec["training"] |= training
        folder = self.run_dir.job_dir(UID)
        folder.mkdir(parents=True, exist_ok=True)
        job = {"namespace": "default", "name": "job", "uid": UID, "epoch": epoch, "spec": spec}
        (folder / "job.json").write_text(json.dumps(job))
        command = [sys.executable, "-m", "windrow_sidecar.finetune.worker"]
        command += ["--run-dir", str(self.root), "--job-uid", UID, "--epoch", str(epoch)]
        with (self.root / f"worker-{epoch}.log").open("ab") as log:
            worker = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        self.workers.append(worker)
        return worker

    def logs(self) -> str:
        return "".join(p.read_text()[-3000:] for p in self.root.glob("worker-*.log"))

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.wait()
        self.agent.close()
        self.decode.close()


def job_spec(out: Path) -> dict:
    return {
        "model": {"name": str(MODEL)},
        "dataset": {
            "source": str(ROOT / "examples" / "support-tone" / "train.jsonl"),
            "evalFraction": 0.03,
        },
        "adapter": {"lora": {"rank": 4, "alpha": 8}},
        "training": {
            "maxSteps": 4,
            "batchSize": 4,
            "maxSequenceLength": 256,
            "learningRate": "5e-3",
        },
        "checkpoint": {"everySteps": 1, "keep": 2},
        "output": {"destination": str(out)},
    }


def layers_of_model() -> int:
    return json.loads((MODEL / "config.json").read_text())["num_hidden_layers"]


def weights_bytes() -> int:
    return sum(t.numel() * 4 for t in load_file(MODEL / "model.safetensors").values())


def until(condition, *, within: float = 60.0, pod: Pod | None = None, worker=None):
    deadline = time.monotonic() + within
    while not (found := condition()):
        ended = worker is not None and worker.poll() is not None
        if ended or time.monotonic() > deadline:
            pytest.fail(
                f"{'worker ended' if ended else 'not in time'}\n{pod.logs() if pod else ''}"
            )
        time.sleep(0.01)
    return found


@pytest.fixture
def pod(tmp_path_factory):
    pod = Pod(tmp_path_factory.mktemp("p"))
    yield pod
    pod.close()


def lend_what_is_wanted(pod: Pod, worker, epoch: int = 1) -> int:
    wanted = until(lambda: pod.decode.offer.wanted_chunks, pod=pod, worker=worker)
    pod.decode.arena.lend(wanted, owner=epoch)
    return wanted


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_a_job_runs_to_its_adapter_and_gives_everything_back(pod):
    worker = pod.start()
    assert until(lambda: pod.decode.offer.job_epoch == 1, pod=pod, worker=worker)
    pod.decode.go()
    wanted = lend_what_is_wanted(pod, worker)
    until(lambda: pod.decode.offer.held_chunks == wanted, pod=pod, worker=worker)
    until(lambda: worker.poll() is not None, pod=pod)
    assert worker.returncode == Ending.SUCCEEDED, pod.logs()

    kinds = pod.agent.kinds()
    assert kinds[0] == "STARTED"
    assert kinds[-1] == "SUCCEEDED"
    last = pod.agent.events[-1]
    assert last.tuned_eval_loss < last.base_eval_loss
    assert pod.agent.progress[-1].step == 4
    assert pod.agent.progress[-1].checkpoint_step == 4
    assert pod.decode.arena.counts()[2] == 0
    pod.decode.arena.check()
    assert pod.decode.offer.job_epoch == 0

    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    tuned = PeftModel.from_pretrained(base, last.adapter_path)
    assert tuned.peft_config["default"].base_model_name_or_path == str(MODEL)

    events = [e for _, e in read_events(pod.root)]
    steps = [e for e in events if isinstance(e, TaskletEvent) and e.phase == "opt"]
    assert [e.tokens_done for e in steps][-1] == pod.agent.progress[-1].tokens
    stages = [e.stage for e in events if isinstance(e, LossEvent)]
    assert stages == ["base", *["training"] * 4, "tuned"]


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A pod whose worker has a job without an end; each test finds it at work."""
    pod = Pod(tmp_path_factory.mktemp("p"))
    pod.worker = pod.start(maxSteps=100_000)
    until(lambda: pod.decode.offer.job_epoch == 1, pod=pod, worker=pod.worker)
    yield pod
    pod.close()


@pytest.fixture
def at_work(running):
    """The running pod, granted and with all the memory that its worker wants."""
    decode = running.decode
    decode.go()
    held = decode.arena.counts()[2]
    wanted = until(lambda: decode.offer.wanted_chunks, pod=running, worker=running.worker)
    decode.arena.lend(max(0, wanted - held), owner=1)
    return running


def test_decodes_weights_are_not_loaded_a_second_time(running):
    smaps = Path("/proc", str(running.worker.pid), "smaps").read_text()
    mapped = re.findall(
        r"windrow-weights.*?\nSize: +(\d+) kB.*?\nPrivate_Dirty: +(\d+) kB", smaps, re.S
    )
    assert [(int(size) * 1024 >= weights_bytes(), int(dirty)) for size, dirty in mapped] == [
        (True, 0)
    ]


def test_without_a_grant_nothing_runs(running):
    running.decode.pause()
    epoch = running.decode.grant.pause_epoch
    offer = until(
        lambda: (o := running.decode.offer).pause_epoch_seen == epoch and not o.in_flight_us and o,
        pod=running,
        worker=running.worker,
    )
    beats = running.decode.page.read_offer()[-1]
    until(lambda: running.decode.page.read_offer()[-1] > beats, pod=running, worker=running.worker)
    assert running.decode.offer.tasklet_id == offer.tasklet_id


def test_a_pause_is_seen_within_a_tasklet_and_the_worker_goes_on_after_it(at_work):
    pod, worker = at_work, at_work.worker
    until(lambda: pod.decode.offer.tokens_done, pod=pod, worker=worker)
    pod.agent.events.clear()
    pod.decode.pause()
    epoch = pod.decode.grant.pause_epoch
    quiet = until(
        lambda: (o := pod.decode.offer).pause_epoch_seen == epoch and not o.in_flight_us and o,
        within=5,
        pod=pod,
        worker=worker,
    )
    until(lambda: "PAUSED" in pod.agent.kinds(), pod=pod, worker=worker)
    assert pod.decode.offer.tasklet_id == quiet.tasklet_id
    assert quiet.resident_layers == layers_of_model()
    pod.decode.go()
    until(lambda: pod.decode.offer.tasklet_id > quiet.tasklet_id, pod=pod, worker=worker)
    until(lambda: "RESUMED" in pod.agent.kinds(), pod=pod, worker=worker)


def test_a_worker_waits_for_a_decode_that_is_silent_but_alive(at_work):
    decode, worker = at_work.decode, at_work.worker
    decode.silent = True
    far = 2 * ASK_AFTER_SILENCE_NS
    until(lambda: decode.page.heartbeat_age_ns(0) > far, pod=at_work, worker=worker)
    done, decode.silent = decode.offer.tokens_done, False
    decode.go()
    until(lambda: decode.offer.tokens_done > done, pod=at_work, worker=worker)


def test_only_the_granted_number_of_tasklets_runs(at_work):
    decode, worker = at_work.decode, at_work.worker
    decode.pause()
    epoch = decode.grant.pause_epoch
    until(lambda: decode.offer.pause_epoch_seen == epoch, pod=at_work, worker=worker)
    first = decode.offer.tasklet_id
    for granted in (3, 2):
        decode.go(n_tasklets=granted)
        first += granted
        until(
            lambda upto=first: (o := decode.offer).tasklet_id == upto and not o.in_flight_us,
            pod=at_work,
            worker=worker,
        )


def test_revoked_chunks_come_back_while_the_job_goes_on(at_work):
    pod, worker, arena = at_work, at_work.worker, at_work.decode.arena
    for _ in range(5):
        done = pod.decode.offer.tokens_done
        until(lambda done=done: pod.decode.offer.tokens_done > done, pod=pod, worker=worker)
        arena.revoke(CHUNKS)
        until(lambda: arena.counts()[4] == 0, within=5, pod=pod, worker=worker)
        assert arena.counts()[2] == 0
        until(lambda: pod.decode.offer.starving, pod=pod, worker=worker)
        arena.check()
        wanted = pod.decode.offer.wanted_chunks
        arena.lend(wanted, owner=1)


def test_a_worker_of_a_higher_epoch_resumes_and_the_one_before_writes_nothing_more(pod):
    first = pod.start(maxSteps=1000)
    until(lambda: pod.decode.offer.job_epoch == 1, pod=pod, worker=first)
    pod.decode.go()
    lend_what_is_wanted(pod, first)
    until(lambda: "CHECKPOINTED" in pod.agent.kinds(), pod=pod, worker=first)

    second = pod.start(epoch=2, maxSteps=1000)
    assert first.wait(60) == Ending.FENCED
    assert pod.decode.arena.counts()[2] == 0
    until(lambda: pod.agent.kinds().count("STARTED") == 2, pod=pod, worker=second)
    started = [e for e in pod.agent.events if e.kind == "STARTED"][-1]
    assert started.reason == "Resumed"
    assert any(e.reason == "Fenced" for e in pod.agent.events if e.kind == "FAILED")
    second.send_signal(signal.SIGTERM)
    assert second.wait(60) == Ending.STOPPED


def test_the_end_of_decode_is_survived_by_a_checkpoint(pod):
    worker = pod.start(maxSteps=1000)
    until(lambda: pod.decode.offer.job_epoch == 1, pod=pod, worker=worker)
    pod.decode.go()
    lend_what_is_wanted(pod, worker)
    until(lambda: pod.decode.offer.tokens_done, pod=pod, worker=worker)
    pod.decode.close()
    assert worker.wait(30) == Ending.DECODE_GONE, pod.logs()
    until(lambda: "STOPPED" in pod.agent.kinds(), pod=pod)
    assert pod.agent.events[-1].reason == "SlotLost"


def test_bad_input_is_a_failure_that_names_the_field(pod):
    worker = pod.start()
    folder = pod.run_dir.job_dir(UID)
    job = json.loads((folder / "job.json").read_text())
    job["spec"]["dataset"]["source"] = str(pod.root / "rows.jsonl")
    (pod.root / "rows.jsonl").write_text('{"messages": []}\n')
    (folder / "job.json").write_text(json.dumps(job))
    assert worker.wait(60) == Ending.USER_ERROR, pod.logs()
    until(lambda: pod.agent.events, pod=pod)
    event = pod.agent.events[-1]
    assert event.user_error
    assert event.reason == "DatasetInvalid"
    assert "rows.jsonl:1" in event.detail
