"""SGLang's real scheduler in one process, driven iteration by iteration by a script.

`python scheduler_process.py SCRIPT.json RESULT.json` under SGLang's own environment. Nothing of the
scheduler is replaced but its ends: requests come from the script at the iteration that it names,
and what would go to the tokenizer is kept. So arrivals, batches and lending are the same each time.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from array import array
from pathlib import Path
from pkgutil import resolve_name

sys.path.append(str(Path(__file__).resolve().parents[1]))  # of support: pytest is not here
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
MODEL = Path(__file__).resolve().parents[2] / "models" / "windrow-tiny"
QUIET = 400  # iterations for which nothing happens
SERVER = {
    "model_path": str(MODEL),
    "dtype": "float32",
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "skip_tokenizer_init": True,
    "disable_cuda_graph": True,
    "disable_radix_cache": True,
    "max_total_tokens": 4096,
    "page_size": 16,
    "max_running_requests": 8,
    "num_reserved_decode_tokens": 16,
    "random_seed": 1,
}


def make_scheduler(server: dict):
    import sglang.srt.managers.scheduler as module  # first, as where SGLang starts its scheduler
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import PortArgs, ServerArgs

    load_plugins()
    stock = stock_functions()
    args = ServerArgs(**{**SERVER, **server})
    if args.lora_paths:
        from sglang.srt.lora.lora_registry import LoRARef

        pairs = (path.split("=") for path in args.lora_paths)
        args.lora_paths = [
            LoRARef(lora_name=name, lora_path=path, pinned=False) for name, path in pairs
        ]
        args.lora_target_modules = set(args.lora_target_modules)
    ports = PortArgs.init_new(args)
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    module.configure_scheduler_process(args, 0)
    return module.Scheduler(args, ports), stock


def stock_functions() -> dict:
    """SGLang's own functions, by path, of those that the plugin hooks."""
    from windrow_sidecar.engines.sglang import compat

    return {path: resolve_name(path) for path, _ in compat.NAMES}


class Alternation:
    """Stock SGLang and what the plugin puts in its place, in turn in one process.

    Blocks of stock alternate with blocks of one of `ARMS`: SGLang's functions hooked and its
    allocator ours ("hooks"), KV in the arena ("kv"), weights in shared memory ("weights"), or all
    of it ("plugin"). In stock's blocks functions, allocator and memory are as SGLang has them.
    Nothing may be lent.
    """

    ARMS = ("plugin", "hooks", "kv", "weights")

    def __init__(self, scheduler, stock: dict, block: int) -> None:
        import torch

        self.block, self.left, self.turns, self.arm = block, block, 0, "plugin"
        self.allocator = scheduler.token_to_kv_pool_allocator
        self.pool = self.allocator.get_kvcache()
        functions = [(path, own, resolve_name(path)) for path, own in stock.items()]
        hooked = [(path, own, ours) for path, own, ours in functions if own is not ours]
        assert len(hooked) >= 10, f"only {len(hooked)} functions are hooked"
        self.functions = {
            on: [(*owner_of(path), (own, ours)[on]) for path, own, ours in hooked]
            for on in (False, True)
        }
        self.classes = {True: type(self.allocator), False: type(self.allocator).__mro__[1]}
        ours = [*self.pool.k_buffer], [*self.pool.v_buffer]
        layers, shape = len(ours[0]), ours[0][0].shape
        # As MHATokenToKVPool has it: K and V of a layer beside each other.
        fused = [torch.zeros(2, *shape, dtype=ours[0][0].dtype) for _ in range(layers)]
        self.buffers = {True: ours, False: ([f[0] for f in fused], [f[1] for f in fused])}
        self.in_arena = True
        own: dict[int, torch.Tensor] = {}  # tied parameters stay tied
        parameters = [*plugin().weights.model.parameters()]
        for parameter in parameters:
            own.setdefault(parameter.data_ptr(), parameter.data.clone())
        self.weights = {
            on: [(p, p.data if on else own[p.data_ptr()]) for p in parameters]
            for on in (False, True)
        }

    def turn(self) -> None:
        """Called once an iteration."""
        self.left -= 1
        if self.left:
            return
        self.left, self.turns = self.block, self.turns + 1
        arms = self.ARMS
        self.arm = "stock" if self.turns % 2 else arms[self.turns // 2 % len(arms)]
        hooks, kv, weights = (self.arm in ("plugin", part) for part in arms[1:])
        for owner, name, function in self.functions[hooks]:
            setattr(owner, name, function)
        self.allocator.__class__ = self.classes[hooks]
        if kv != self.in_arena:
            self.in_arena = kv
            for mine, other in zip(self.buffers[kv], self.buffers[not kv], strict=True):
                for buffer, old in zip(mine, other, strict=True):
                    buffer.copy_(old)
            self.pool.k_buffer, self.pool.v_buffer = (list(b) for b in self.buffers[kv])
        for parameter, data in self.weights[weights]:
            parameter.data = data


def owner_of(path: str) -> tuple:
    owner, _, name = path.rpartition(".")
    return resolve_name(owner), name


class Outputs:
    """Sink of the scheduler's answers."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.updates: list[list] = []
        self.health = 0  # answers to /health

    def send_output(self, output, recv_obj=None) -> None:
        self.health += type(output).__name__ == "HealthCheckOutput"
        if type(output).__name__ == "UpdateWeightFromDiskReqOutput":
            self.updates.append([output.success, output.message])
        for i, rid in enumerate(getattr(output, "rids", None) or []):
            if rid.startswith(HEALTH):
                self.health += bool((getattr(output, "finished_reasons", None) or [None])[i])
                continue
            ids = getattr(output, "output_ids", None)
            if ids is not None:
                self.tokens.setdefault(rid, []).extend(int(t) for t in ids[i] or [])
            reasons = getattr(output, "finished_reasons", None)
            if reasons and reasons[i]:
                self.ends[rid] = reasons[i]["type"]


HEALTH = "HEALTH_CHECK"  # what SGLang's /health names its request


def request(spec: dict):
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(max_new_tokens=spec["tokens"], temperature=0, ignore_eos=True)
    params.normalize(None)
    extra = {}
    if spec.get("disaggregated"):
        extra = {"bootstrap_host": "2.2.2.2", "bootstrap_port": 8998, "bootstrap_room": spec["n"]}
    return TokenizedGenerateReqInput(
        rid=spec.get("rid", f"r{spec['n']}"),
        input_text=None,
        input_ids=array("q", spec["prompt"]),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=params,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
        lora_id=spec.get("lora_id"),
        **extra,
    )


class Script:
    """Feeds the scheduler's loop, and looks at it once an iteration."""

    def __init__(self, scheduler, script: dict, stock: dict) -> None:
        self.scheduler, self.script = scheduler, script
        self.alternation = None
        if script.get("alternate"):
            self.alternation = Alternation(scheduler, stock, script["alternate"])
        self.outputs = Outputs()
        self.waiting = sorted(script["requests"], key=lambda r: r["at"])
        self.disaggregated = scheduler.server_args.disaggregation_mode == "decode"
        if self.disaggregated:
            transfer_known_kv(scheduler)
        self.aborts = dict(script.get("aborts", {}))
        self.n_requests = len(self.waiting)
        self.iteration = self.idle = self.quiet = self.health_asked = 0
        self.used: list[int] = []
        self.retracted: set[str] = set()
        self.most_lent = self.lendings = self.idle_lent = 0
        self.last_ns = time.thread_time_ns()
        # Batch, CPU time of the iteration before, and which arm it was.
        self.iterations_us: list[list[int]] = []
        self.chaos = None
        if script.get("chaos"):
            self.chaos = Chaos(scheduler, script["chaos"])
        self.recording = record_steps() if script.get("record") else None
        if script.get("worker"):
            self.chaos = Worker(scheduler, script["worker"], self.outputs)
        if script.get("profiled"):
            self.chaos = Profiled(script["profiled"])
        self.began_s = time.monotonic()
        for name in ("send_to_tokenizer", "send_to_detokenizer"):
            getattr(scheduler.ipc_channels, name).send_output = self.outputs.send_output

    def ingest(self, *_args, **_kwargs) -> list:
        """Stands for the scheduler's receiving end; called once an iteration."""
        from sglang.srt.managers.io_struct import AbortReq, UpdateWeightFromDiskReqInput

        self.iteration += 1
        scheduler = self.scheduler
        arrived = []
        while self.waiting and self.waiting[0]["at"] <= self.iteration:
            spec = self.waiting.pop(0)
            if (adapter := spec.get("adapter")) is not None:
                loaded = {ref.lora_name: ref.lora_id for ref in scheduler.server_args.lora_paths}
                spec = {**spec, "lora_id": loaded[adapter]}
            arrived.append(request({**spec, "disaggregated": self.disaggregated}))
        if self.iteration % self.script.get("health_every", 1 << 60) == 0:
            self.health_asked += 1
            spec = {"n": 0, "rid": f"{HEALTH}_{self.iteration}", "tokens": 1, "prompt": [0]}
            arrived.append(request({**spec, "disaggregated": self.disaggregated}))
        if self.iteration == self.script.get("update_weights_at"):
            arrived.append(
                UpdateWeightFromDiskReqInput(
                    model_path=scheduler.server_args.model_path, load_format="auto"
                )
            )
        arrived += [AbortReq(rid=r) for r, at in self.aborts.items() if at == self.iteration]
        scheduler.process_input_requests(arrived)
        if self.chaos is not None:
            self.chaos.stir(self.iteration)
        self.used.append(scheduler.pool_stats_observer.get_pool_stats().full_num_used)
        lent = getattr(scheduler.token_to_kv_pool_allocator, "lent_tokens", 0)
        self.lendings += lent > 0
        self.idle_lent += lent > 0 and scheduler.is_fully_idle()
        self.most_lent = max(self.most_lent, lent)
        if self.disaggregated:
            self.retracted.update(
                r.rid for r in scheduler.disagg_decode_prealloc_queue.retracted_queue
            )
        now_ns = time.thread_time_ns()  # of this thread: other work on the machine does not count
        batch = scheduler.running_batch.batch_size()
        arm = "" if self.alternation is None else self.alternation.arm
        self.iterations_us.append([batch, (now_ns - self.last_ns) / 1000, arm])
        if self.alternation is not None:
            self.alternation.turn()
        if self.iteration % 1000 == 0:
            done = f"{len(self.outputs.ends)} of {self.n_requests} requests have ended"
            said = f"{done}, iteration {self.iteration}"
            Path(sys.argv[2]).with_name("progress").write_text(said)
        self._maybe_end()
        self.last_ns = time.thread_time_ns()
        return arrived

    def _maybe_end(self) -> None:
        # SGLang 0.5.23 tells nobody of the end of some aborted requests, about one of a hundred.
        is_idle = not self.waiting and self.scheduler.is_fully_idle()
        self.idle = self.idle + 1 if is_idle else 0
        done = len(self.outputs.ends) >= self.n_requests or self.idle > QUIET
        if isinstance(self.chaos, Worker | Profiled):
            done = self.chaos.is_over
        elif until := self.script.get("until_file"):
            done = Path(until).exists()
        late = time.monotonic() - self.began_s > self.script.get("at_most_s", 240)
        if self.script.get("endless") and not done and not self.waiting:
            self._again()
        if done or late:
            self.waiting.clear()
            if self.chaos is not None:
                self.chaos.calm()
            self.quiet += 1
            if self.quiet > QUIET or late:
                self.scheduler.gracefully_exit = True

    def _again(self) -> None:
        """Keep three requests in the batch for as long as it takes, or as many as the script says.

        Several numbers take turns, for 20 requests each.
        """
        self.turn = getattr(self, "turn", 0) + 1
        numbers = self.script.get("at_once", [3])
        if self.turn - len(self.outputs.ends) <= numbers[self.turn // 20 % len(numbers)]:
            prompt = list(b"The for statement is used to iterate over")
            again = {"n": self.turn, "at": 0, "tokens": 24 + self.turn % 9, "prompt": prompt}
            self.waiting.append(again)
        else:
            self.turn -= 1


class Chaos:
    """A worker's side of lending at random, in this process: it fills what it is lent with NaN."""

    OWNER = 7

    def __init__(self, scheduler, seed: int) -> None:
        from windrow_sidecar._core import Arena

        self.random = random.Random(seed)
        self.allocator = scheduler.token_to_kv_pool_allocator
        self.arena = plugin().arena
        self.peer = Arena.attach(str(plugin().run_dir.arena_socket()))
        self.scheduler = scheduler

    def stir(self, iteration: int) -> None:
        if iteration % 3:
            return
        import torch

        now_ns = time.monotonic_ns()
        self.allocator.settle(now_ns)
        if self.random.random() < 0.6:
            self.allocator.set_free(self.random.randrange(1, 6), keep_pages=8)
            self.allocator.settle(now_ns)
            for chunk in self.arena.lend(self.random.randrange(1, 6), owner=self.OWNER):
                at, n = self.peer.chunk_offset(chunk), self.peer.geometry.chunk_bytes
                torch.from_dlpack(self.peer.tensor(at, n)).fill_(0xFF)
        else:
            self.arena.revoke(self.random.randrange(1, 8))
            for chunk in self.peer.draining(self.OWNER):
                self.peer.give_back(chunk, owner=self.OWNER)
        self.allocator.chunks.refresh()

    def calm(self) -> None:
        self.arena.revoke(self.arena.geometry.chunks)
        for chunk in self.peer.draining(self.OWNER):
            self.peer.give_back(chunk, owner=self.OWNER)
        self.allocator.chunks.refresh()


class Worker:
    """A worker process beside the scheduler: lent to, then stopped, then killed, then a new one.

    Every fault comes at an iteration at which chunks are lent, and ends only after requests have
    been answered meanwhile: a step that waited for the other side would wait for ever.

    Attributes:
        seen: phase, tokens lent at its beginning, steps launched within it, and the longest run of
            iterations that had a batch and launched none.
    """

    OWNER, ANSWERS, STOPPED_S = 5, 4, 5.0

    def __init__(self, scheduler, wanted: int, outputs: Outputs) -> None:
        self.scheduler, self.allocator = scheduler, scheduler.token_to_kv_pool_allocator
        self.outputs, self.seen, self.wanted, self.owner = outputs, [], wanted, self.OWNER
        self.without = 0
        self._turn("lending")
        self.process = start_worker(self.owner, wanted)
        harvest_always()

    def stir(self, _iteration: int) -> None:
        self._count()
        lent, answered = self.allocator.lent_tokens, len(self.outputs.ends) - self.answers
        goes_on = answered >= self.ANSWERS
        if self.phase == "lending" and lent:
            self._turn("stopped", signal.SIGSTOP)
        elif (
            self.phase == "stopped" and goes_on and time.monotonic() > self.since_s + self.STOPPED_S
        ):
            self._turn("going on", signal.SIGCONT)
        elif self.phase == "going on" and lent and goes_on:
            self._turn("killed", signal.SIGKILL)
            self.process.wait()
        elif self.phase == "killed" and not lent and goes_on:
            self.owner += 1
            self.process = start_worker(self.owner, self.wanted)
            self._turn("a new one")
        elif self.phase == "a new one" and lent and goes_on:
            self._turn("over")

    def calm(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    @property
    def is_over(self) -> bool:
        return self.phase == "over"

    def _count(self) -> None:
        facts, steps = self.seen[-1], plugin().harvest._number - self.step
        none = steps == facts[2] and not self.scheduler.running_batch.is_empty()
        self.without = self.without + 1 if none else 0
        facts[2:] = [steps, max(facts[3], self.without)]

    def _turn(self, phase: str, number: int = 0) -> None:
        if number:
            self.process.send_signal(number)
        self.seen.append([phase, self.allocator.lent_tokens, 0, 0])
        self.without = 0
        self.phase, self.answers, self.since_s = phase, len(self.outputs.ends), time.monotonic()
        self.step = plugin().harvest._number


class Profiled:
    """A worker beside the scheduler until steps have made a latency profile, with a co-run part.

    No agent is there: what its link would do once a second is done here every 50 iterations.
    """

    def __init__(self, wanted: int) -> None:
        self.process = start_worker(1, wanted)
        self.is_over = False
        harvest_always()

    def stir(self, iteration: int) -> None:
        if iteration % 50 or self.is_over:
            return
        link, kept = plugin().harvest._parts.link, plugin().run_dir.profile()
        link._stats()
        before = kept.read_bytes() if kept.exists() else b""
        link._look_beside()
        self.is_over = kept.exists() and kept.read_bytes() != before

    def calm(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def start_worker(epoch: int, wanted: int) -> subprocess.Popen:
    """Start a worker that takes so many chunks; it has attached."""
    socket = str(plugin().run_dir.arena_socket())
    words = ["windrow_sidecar.testing.page_worker", socket, str(epoch), str(wanted)]
    process = subprocess.Popen([sys.executable, "-m", *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "attached\n"
    return process


def harvest_always() -> None:
    """Put a policy in force whose objective every step keeps."""
    from windrow_sidecar.qos.terms import make_terms

    terms = make_terms(
        name="chat",
        policy="windrow",
        mode="harvest",
        objective_seconds=2.0,
        percentile=99,
        scope="perStep",
        max_compute_percent=100,
        max_memory_percent=80,
    )
    plugin().harvest._parts.inner.set_terms(terms)


def hooks() -> int:
    """Return how many places of SGLang the plugin has hooked."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return len(HookRegistry._patched)


def record_steps():
    """Put a hook in place that keeps its calls; returns it."""
    from dataclasses import replace

    from support.step_seam import RecordingHook

    from windrow_sidecar.engines.hook import FailClosed

    harvest, recording = plugin().harvest, RecordingHook()
    harvest._parts.inner.set_terms(None)  # something new to decide, which nobody takes up
    harvest._parts = replace(harvest._parts, hook=FailClosed(recording))
    return recording


def transfer_known_kv(scheduler) -> None:
    """Let SGLang's fake transfer write KV that depends on the place in the prompt alone."""
    import torch
    from sglang.srt.disaggregation.fake.conn import FakeKVReceiver

    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    stock, size = FakeKVReceiver.send_metadata, pool.page_size
    noise = torch.randn(64, size, *pool.k_buffer[0].shape[1:], generator=torch.manual_seed(3))

    def send_metadata(receiver, kv_indices, *args, **kwargs):
        for i, page in enumerate(kv_indices):
            for buffer in (*pool.k_buffer, *pool.v_buffer):
                buffer[int(page) * size : (int(page) + 1) * size] = noise[i]
        return stock(receiver, kv_indices, *args, **kwargs)

    FakeKVReceiver.send_metadata = send_metadata


def plugin():
    """The plugin of this process."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from windrow_sidecar.engines.sglang.compat import SCHEDULER

    return HookRegistry._hooks[f"{SCHEDULER}.__init__"][0][1].__self__


def steps_of(recording) -> int:
    from support.step_seam import check_calls

    return check_calls(recording.calls)


def main() -> None:
    script = json.loads(Path(sys.argv[1]).read_text())
    scheduler, stock = make_scheduler(script.get("server", {}))
    started_s = time.process_time()
    played = Script(scheduler, script, stock)
    scheduler.ingest_requests = played.ingest
    scheduler.run_event_loop()
    result = {
        "tokens": played.outputs.tokens,
        "ends": played.outputs.ends,
        "used": played.used,
        "iterations": played.iteration,
        "most_lent": played.most_lent,
        "iterations_lent": played.lendings,
        "idle_lent": played.idle_lent,
        "iterations_us": played.iterations_us if script.get("timed") else None,
        "hooks": hooks(),
        "available": scheduler.token_to_kv_pool_allocator.available_size(),
        "lent": getattr(scheduler.token_to_kv_pool_allocator, "lent_tokens", 0),
        "total": scheduler.max_total_num_tokens,
        "started_cpu_s": started_s,
        "health": [played.outputs.health, played.health_asked],
        "steps": steps_of(played.recording) if played.recording else None,
        "updates": played.outputs.updates,
        "retracted": len(played.retracted),
        "faults": getattr(played.chaos, "seen", []),
        "off": plugin().off if os.environ.get("WINDROW_RUN_DIR") else None,
    }
    Path(sys.argv[2]).write_text(json.dumps(result))
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)  # threads of libraries would hold the end up


if __name__ == "__main__":
    main()
