"""A decode pod as a worker process sees it: the test plays decode and the agent."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from concurrent import futures
from pathlib import Path

import grpc
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.dlpack import from_dlpack

from windrow.proto import agent_pb2, agent_pb2_grpc
from windrow.rundir import RunDir
from windrow_sidecar._core import Arena, Geometry, SharedWeights
from windrow_sidecar.engines.fingerprint import model_fingerprint
from windrow_sidecar.qos.view import Action, Grant, Offer

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "windrow-tiny"
UID = "3b1c"
BLOCK = 128 * 1024
GPU_BLOCK = 2 << 20  # what its virtual memory maps
CHUNKS = 24
# A worker on a machine with so little memory that layers of the model take turns there.
IN_ROOM = (
    "import sys; from windrow_sidecar.finetune import worker; "
    "from windrow_sidecar.finetune.model import loading; "
    "loading._room_bytes = lambda device: {}; sys.exit(worker.main())"
)


class Decode:
    """Decode as the worker sees it: an arena, beats, grants, lent chunks, exported weights."""

    def __init__(self, run_dir: RunDir, *, weights: bool, driver: str = "host") -> None:
        self._driver = driver
        on_gpu = driver != "host"
        geometry = Geometry(
            layers=6,
            kv_heads=4,
            head_dim=32,
            dtype_bytes=4,
            block_bytes=GPU_BLOCK if on_gpu else BLOCK,
            chunks=CHUNKS,
            layout="token-major" if on_gpu else "per-layer",
        )
        self.arena = Arena.create(geometry, reserved_chunks=1, driver=driver)
        if weights:
            self._export(run_dir)
        self.arena.serve(str(run_dir.arena_socket()))
        self.page = self.arena.page
        self.grant = Grant()
        self.silent = False
        self._stop = threading.Event()
        self._beats = threading.Thread(target=self._beat, daemon=True)
        self._beats.start()

    def give(self, **fields) -> None:
        self.grant = Grant(**fields)
        self.page.publish_grant(self.grant)

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
        return Offer._make(self.page.read_offer())

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
        shared = SharedWeights.create(end, driver=self._driver)
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
    """Collects what the worker reports of its jobs, and commands them.

    Attributes:
        events, hellos, progress: of all jobs, in the order in which they came.
        of: the same events by the UID of their job.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self.events: list[agent_pb2.WorkerEvent] = []
        self.hellos: list[agent_pb2.WorkerHello] = []
        self.progress: list[agent_pb2.WorkerProgress] = []
        self.of: dict[str, list[agent_pb2.WorkerEvent]] = defaultdict(list)
        self._commands: dict[str, queue.SimpleQueue[agent_pb2.WorkerCommand | None]] = defaultdict(
            queue.SimpleQueue
        )
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        agent_pb2_grpc.add_AgentServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{run_dir.agent_socket}")
        self._server.start()

    def Worker(self, request_iterator, context):
        hello = next(request_iterator).hello
        self.hellos.append(hello)
        commands = self._commands[hello.job_uid]

        def read() -> None:
            with contextlib.suppress(grpc.RpcError):  # the worker was killed
                for report in request_iterator:
                    if report.HasField("progress"):
                        self.progress.append(report.progress)
                    else:
                        self.events.append(report.event)
                        self.of[hello.job_uid].append(report.event)
            commands.put(None)

        threading.Thread(target=read, daemon=True).start()
        while (command := commands.get()) is not None:
            yield command

    def command(self, action: str, *, to: str = UID, **fields) -> None:
        """Send a command over the stream of a job."""
        self._commands[to].put(agent_pb2.WorkerCommand(action=action, **fields))

    def kinds(self, uid: str | None = None) -> list[str]:
        return [e.kind for e in (self.events if uid is None else self.of[uid])]

    def close(self) -> None:
        for commands in self._commands.values():
            commands.put(None)
        self._server.stop(0).wait()


class Pod:
    """One decode pod: starts workers in it, with this environment; `driver`: of decode's arena."""

    def __init__(
        self,
        root: Path,
        *,
        weights: bool = True,
        driver: str = "host",
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._environ = environ
        self.root = root
        self.run_dir = RunDir(root)
        self.out = root / "out"
        self.agent = Agent(self.run_dir)
        self.decode = Decode(self.run_dir, weights=weights, driver=driver)
        self.workers: list[subprocess.Popen] = []

    def write_job(self, uid: str = UID, epoch: int = 1, **training) -> Path:
        """Put a job's spec where a worker reads it; returns where its adapter goes."""
        out = self.out / uid
        spec = job_spec(out)
        spec["training"] |= training
        folder = self.run_dir.job_dir(uid)
        folder.mkdir(parents=True, exist_ok=True)
        job = {"namespace": "default", "name": uid, "uid": uid, "epoch": epoch, "spec": spec}
        (folder / "job.json").write_text(json.dumps(job))
        return out

    def take(self, uid: str, *, to: str = UID, epoch: int = 1) -> None:
        """Tell the worker, over a job's stream, to carry a further one."""
        self.agent.command("ADD_JOB", to=to, job_uid=uid, epoch=epoch)

    def start(
        self, epoch: int = 1, *, room_bytes: int | None = None, **training
    ) -> subprocess.Popen:
        """Start a worker for the job UID; `room_bytes`: of its machine, for the frozen weights."""
        command = [sys.executable, "-m", "windrow_sidecar.finetune.worker"]
        if room_bytes is not None:
            command[1:] = ["-c", IN_ROOM.format(room_bytes)]
        command += ["--run-dir", str(self.root), "--job-uid", UID, "--epoch", str(epoch)]
        return self.start_by(command, epoch, **training)

    def start_by(self, command: list[str], epoch: int = 1, **training) -> subprocess.Popen:
        """Start a worker for the job UID by this command."""
        self.write_job(epoch=epoch, **training)
        with (self.root / f"worker-{epoch}.log").open("ab") as log:
            worker = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=self._environ)
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


class Lending(threading.Thread):
    """Decode's side of lending: what is wished for, again and again."""

    def __init__(self, pod: Pod) -> None:
        super().__init__(daemon=True)
        self._pod, self._stop_asked = pod, threading.Event()
        self.offered_nothing = False  # at some moment since the worker was there

    def run(self) -> None:
        arena, seen = self._pod.decode.arena, False
        while not self._stop_asked.wait(0.01):
            offer, lent = self._pod.decode.offer, arena.counts()[2]
            seen = seen or offer.job_epoch == 1
            if offer.job_epoch:
                arena.lend(max(0, offer.wanted_chunks - lent), owner=1)
            elif seen and not lent:
                self.offered_nothing = True

    def stop(self) -> None:
        self._stop_asked.set()
        self.join()


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


def lend_what_is_wanted(pod: Pod, worker, epoch: int = 1) -> int:
    wanted = until(lambda: pod.decode.offer.wanted_chunks, pod=pod, worker=worker)
    pod.decode.arena.lend(wanted, owner=epoch)
    return wanted


def started_on_gpu(pod: Pod, *, within: float = 60.0, **training) -> subprocess.Popen:
    """Start a worker of a pod over CUDA, which has everything that decode can lend."""
    worker = pod.start(**training)
    until(lambda: pod.decode.offer.job_epoch == 1, within=within, pod=pod, worker=worker)
    pod.decode.go(units=132)
    lend_what_is_wanted(pod, worker)
    return worker
