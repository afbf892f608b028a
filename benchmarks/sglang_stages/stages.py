"""Stages: each starts what it needs, plays a load, and returns figures or raises StageFailed."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import Baseline, Result
from benchmarks.sglang_stages.servers import Bench, Pod, Process, StageFailed, trouble_in
from benchmarks.sglang_stages.streams import Heard, SteadyLoad, ask, play
from windrow.eventlog import StepEvent, TaskletEvent
from windrow.proto import attach_pb2
from windrow_sidecar.compute.sharing import ENV_PARTITION

OBJECTIVES_MS = (10.0, 15.0, 20.0)
# On cores steps have other lengths: times a token's own.
FACTORS = (2.0, 3.0)
WIDE_MS = 1000.0
_LEARNED = "latency profile from"


class Servers:
    """Servers that stages share while they live; one of a kind at a time, since a GPU holds one."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._pod: Pod | None = None
        self.token_ms: float | None = None  # stock's time between two tokens, where it is known

    async def get(
        self,
        name: str,
        *options: str,
        plugin: bool = True,
        environment: dict[str, str] | None = None,
    ) -> Pod:
        """Return the server of that name: the one that runs, or a new one in its place."""
        if self._pod is not None and self._pod.name == name and self._pod.lives:
            return self._pod
        await self.close()
        self._pod = await Pod.start(
            self.bench, name, *options, plugin=plugin, environment=environment
        )
        return self._pod

    async def close(self) -> None:
        """End the one that runs."""
        pod, self._pod = self._pod, None
        if pod is not None:
            await pod.close()

    def trouble(self) -> list[dict[str, Any]]:
        """Return the lines of the running server's logs that report an error."""
        logs: list[Path] = self._pod.logs if self._pod is not None else []
        return [line for log in logs for line in trouble_in(log)]


async def stock(servers: Servers) -> list[Result]:
    """Time stock SGLang."""
    pod = await servers.get("stock", plugin=False)
    gaps, heard = await _load(pod)
    servers.token_ms = median(gaps)
    answer = await _short_answer(pod)
    (servers.bench.out / "stock.ids.json").write_text(json.dumps(answer))
    return [*_token_rows("stock", gaps), _done("stock", heard)]


async def plugin(servers: Servers) -> list[Result]:
    """Time SGLang with the plugin and no policy: KV is in the arena, nothing is harvested."""
    pod = await servers.get("plugin")
    gaps, heard = await _load(pod)
    rows = [*_token_rows("plugin idle", gaps), _done("plugin idle", heard)]
    if servers.token_ms:
        cost = 100 * (median(gaps) / servers.token_ms - 1)
        at = Baseline("stock, ms", servers.token_ms)
        rows.append(Result("cost of the plugin", cost, "%", "lower", goal=1.0, baseline=at))
    ids, before = await _short_answer(pod), servers.bench.out / "stock.ids.json"
    if before.exists():
        theirs = json.loads(before.read_text())
        same = next((n for n, (a, b) in enumerate(zip(ids, theirs, strict=False)) if a != b), None)
        equal = len(theirs) if same is None else same
        of = f"of {len(theirs)}"
        rows.append(Result("tokens equal to stock's", equal, of, "higher", goal=len(theirs)))
    if servers.bench.device == "cuda" and not pod.server.says("Capture"):
        raise pod.failed("no CUDA graph was captured over the arena")
    return rows


async def worker(servers: Servers) -> list[Result]:
    """Train beside decode under each objective."""
    pod = await servers.get("plugin")
    await _train(pod)
    own_ms = await _own_ms(pod)
    on_gpu = servers.bench.device == "cuda"
    objectives = OBJECTIVES_MS if on_gpu else [factor * own_ms for factor in FACTORS]
    rows = []
    async with _steady(pod) as load:
        for objective_ms in objectives:
            pod.harvest(objective_ms)
            await asyncio.sleep(1.5)
            steps, tasklets = await _watch(pod, servers.bench.seconds)
            rows += _beside_rows(f"objective {objective_ms:.1f} ms", steps, tasklets, objective_ms)
        _no_errors(pod, load.heard)
    pod.harvest(WIDE_MS)
    steps, tasklets = await _watch(pod, servers.bench.seconds)
    rows.append(Result("worker, decode idle", _rate(tasklets), "tokens/s", "higher"))
    return rows


async def pressure(servers: Servers) -> list[Result]:
    """Fill the KV pool while chunks are lent: they come back, and nobody's request fails."""
    pod = await servers.get("plugin")
    await _train(pod)
    pod.harvest(WIDE_MS)
    await pod.until(lambda: _lent(pod) > 0, 60, "a worker holds chunks")
    lent, bench, heard = _lent(pod), servers.bench, Heard()
    # All of the pool but what the batch grows by.
    each = bench.kv_tokens // bench.requests - bench.generate - 64
    context = min(each, bench.context)
    wanted = max(bench.requests, bench.kv_tokens // (context + bench.generate))
    began_s = time.monotonic()
    asked = (ask(pod.port, heard, context=context, generate=bench.generate) for _ in range(wanted))
    fell = asyncio.create_task(
        pod.until(lambda: _lent(pod) < lent, 120, "chunks are given back for requests")
    )
    try:
        await asyncio.gather(*asked)
    except RuntimeError as error:
        raise pod.failed(f"a request failed while chunks were lent: {error}") from error
    finally:
        came_back = fell.done() and fell.exception() is None
        fell.cancel()
    return [
        Result("chunks lent before", lent, "chunks", "higher"),
        Result("chunks asked back meanwhile", float(came_back), "1: yes", "higher"),
        Result("requests answered", heard.done, f"of {wanted}", "higher", goal=wanted),
        Result("all of them took", time.monotonic() - began_s, "s", "lower"),
    ]


async def bench_serving(servers: Servers) -> list[Result]:
    """Play SGLang's own benchmark before, beside and after a job."""
    pod = await servers.get("plugin")
    pod.operator.set_policy(name="chat", policy="windrow", mode="off", objective_seconds=1.0)
    before = await _bench(pod, "before")
    await _train(pod)
    pod.harvest(2 * before["median_tpot_ms"])
    beside = await _bench(pod, "beside")
    pod.operator.set_policy(name="chat", policy="windrow", mode="off", objective_seconds=1.0)
    await asyncio.sleep(2.0)
    after = await _bench(pod, "after")
    rows = []
    for when, found in (("before", before), ("beside a job", beside), ("after", after)):
        rows += [
            Result(f"{what[:-3]} {when}", found[what], "ms", "lower")
            for what in ("median_tpot_ms", "p99_tpot_ms", "median_itl_ms", "p99_itl_ms")
        ]
    return rows


async def green(servers: Servers) -> list[Result]:
    """Confine decode to its share of the SMs; on cores it is confined by CPU sets anyway."""
    on_gpu = servers.bench.device == "cuda"
    environment = {ENV_PARTITION: "green"} if on_gpu else {}
    pod = await servers.get("green", environment=environment)
    await _train(pod)
    objective_ms = 15.0 if on_gpu else FACTORS[-1] * await _own_ms(pod)
    async with _steady(pod) as load:
        pod.harvest(objective_ms)
        await asyncio.sleep(1.5)
        steps, tasklets = await _watch(pod, servers.bench.seconds)
        _no_errors(pod, load.heard)
    confined = sum(1 for step in steps if step.decode_units < max(s.decode_units for s in steps))
    rows = _beside_rows(f"confined, objective {objective_ms:.1f} ms", steps, tasklets, objective_ms)
    rows.append(Result("steps on a part of the units", confined, f"of {len(steps)}", "higher"))
    return rows


async def adapter(servers: Servers) -> list[Result]:
    """Load an adapter into a server that serves adapters, and have it answer."""
    folder = servers.bench.out / "adapter"
    _write_adapter(servers.bench, folder)
    options = ["--enable-lora", "--max-lora-rank=16", "--lora-target-modules", "q_proj", "v_proj"]
    if servers.bench.device == "cpu":
        options.append("--lora-backend=torch_native")
    pod = await servers.get("lora", *options)
    began_s = time.monotonic()
    await _post(pod, "/load_lora_adapter", {"lora_name": "tone", "lora_path": str(folder)})
    loaded_s = time.monotonic() - began_s
    heard = Heard()
    try:
        await ask(pod.port, heard, context=32, generate=16, seed=5, lora_path="tone")
    except RuntimeError as error:
        raise pod.failed(f"the adapter does not answer: {error}") from error
    if not heard.ids:
        raise pod.failed("the adapter's answer has no token")
    return [
        Result("adapter loaded", loaded_s, "s", "lower"),
        Result("tokens by the adapter", len(heard.ids), "tokens", "higher", goal=16),
    ]


# What stages are made of:


async def _load(pod: Pod) -> tuple[list[float], Heard]:
    gaps, heard = await play(pod.port, **pod.bench.load)
    _no_errors(pod, heard)
    if not gaps:
        raise pod.failed("no token came")
    return gaps, heard


def _steady(pod: Pod) -> SteadyLoad:
    bench = pod.bench
    return SteadyLoad(
        pod.port, requests=bench.requests, context=bench.context, generate=bench.generate
    )


def _no_errors(pod: Pod, heard: Heard) -> None:
    if heard.errors:
        raise pod.failed(f"{len(heard.errors)} requests failed, the first: {heard.errors[0]}")


async def _short_answer(pod: Pod) -> list[int]:
    heard = Heard()
    await ask(pod.port, heard, context=32, generate=48, seed=99, rid="answer-1")
    if not heard.ids:
        raise pod.failed("a short answer has no token")
    return heard.ids


async def _train(pod: Pod) -> None:
    """Have a job on its way, and decode know its latency profile. Harmless where that is so."""
    pod.harvest(WIDE_MS)
    if not pod.assigned:
        # As an operator does: a job is placed on a slot that has reported.
        await pod.until(lambda: pod.operator.has_engine, 60, "the sidecar reports its slot")
        pod.assigned = True
        pod.operator.assign(_job(pod))
    async with _steady(pod) as load:
        await pod.until(lambda: _failed(pod) or _has_begun(pod), 240, "the job takes a step")
        await pod.until(lambda: pod.server.says(_LEARNED), 240, "decode knows its profile")
        _no_errors(pod, load.heard)
    if why := _failed(pod):
        raise pod.failed(f"the job failed: {why}")


def _has_begun(pod: Pod) -> bool:
    jobs = [beat.job for beat in pod.operator.heartbeats if beat.HasField("job")]
    return bool(jobs) and jobs[-1].progress.step >= 1


def _failed(pod: Pod) -> str:
    event = pod.operator.event(attach_pb2.JobEvent.FAILED)
    return event.detail[:400] if event is not None else ""


def _lent(pod: Pod) -> int:
    beats = pod.operator.heartbeats
    return int(beats[-1].chunks_lent) if beats else 0


async def _own_ms(pod: Pod) -> float:
    """Return how long decode's steps take under the load while no worker computes."""
    pod.operator.set_policy(name="chat", policy="windrow", mode="off", objective_seconds=1.0)
    async with _steady(pod):
        await asyncio.sleep(1.5)
        steps, _ = await _watch(pod, 4.0)
    if not steps:
        raise pod.failed("decode's event log has no steps")
    return median((step.end_ns - step.start_ns) / 1e6 for step in steps)


async def _watch(pod: Pod, seconds: float) -> tuple[list[StepEvent], list[TaskletEvent]]:
    begin_s = time.monotonic()
    await asyncio.sleep(seconds)
    end_s = time.monotonic()
    await asyncio.sleep(1.5)  # logs are flushed once a second
    return pod.events(begin_s, end_s)


def _rate(tasklets: list[TaskletEvent]) -> float:
    """Return tokens a second between the first and the last tasklet, as the worker counts them."""
    if len(tasklets) < 2:
        return 0.0
    done = tasklets[-1].tokens_done - tasklets[0].tokens_done
    return 1e9 * done / (tasklets[-1].end_ns - tasklets[0].end_ns)


def _token_rows(name: str, gaps: list[float]) -> list[Result]:
    ordered = sorted(gaps)
    return [
        Result(f"{name}: between two tokens, {word}", ordered[int(q * len(ordered))], "ms", "lower")
        for word, q in (("p50", 0.5), ("p99", 0.99))
    ]


def _done(name: str, heard: Heard) -> Result:
    return Result(f"{name}: requests answered", heard.done, "requests", "higher")


def _beside_rows(
    name: str, steps: list[StepEvent], tasklets: list[TaskletEvent], objective_ms: float
) -> list[Result]:
    took = sorted((step.end_ns - step.start_ns) / 1e6 for step in steps) or [0.0]
    over = 100 * sum(1 for each in took if each > objective_ms) / len(took)
    units = sorted({step.finetune_units for step in steps})
    return [
        Result(f"{name}: step p50", took[len(took) // 2], "ms", "lower"),
        Result(f"{name}: step p99", took[int(0.99 * len(took))], "ms", "lower"),
        Result(f"{name}: steps over", over, "%", "lower", goal=1.0),
        Result(f"{name}: worker", _rate(tasklets), "tokens/s", "higher"),
        Result(f"{name}: most units of the worker", units[-1] if units else 0, "units", "higher"),
    ]


def _job(pod: Pod) -> dict[str, Any]:
    """Return an endless job over rows of equal length."""
    bench = pod.bench
    assert pod.run_dir is not None
    tokens = bench.row_tokens
    rows, letters = pod.run_dir / "rows.jsonl", "the quick brown fox jumps over the lazy dog "
    with rows.open("w") as out:
        for row in range(64):
            text = (letters[row % len(letters) :] + letters) * (tokens // len(letters) + 2)
            out.write(json.dumps({"text": text[: tokens + 8]}) + "\n")
    return {
        "model": {"name": str(bench.model)},
        "dataset": {"source": str(rows), "format": "text"},
        "adapter": {
            "type": "lora",
            "lora": {"rank": 16, "alpha": 32, "targetModules": "all-linear"},
        },
        "training": {
            "maxSteps": 1_000_000,
            "batchSize": 2,
            "maxSequenceLength": tokens,
            "learningRate": "1e-4",
        },
        "checkpoint": {"everySteps": 1_000_000, "keep": 1},
        "output": {"destination": str(pod.run_dir / "adapters")},
    }


async def _bench(pod: Pod, name: str) -> dict[str, Any]:
    bench = pod.bench
    report, log = bench.out / f"bench-{name}.jsonl", bench.out / f"bench-{name}.log"
    report.unlink(missing_ok=True)
    on_gpu = bench.device == "cuda"
    words = [str(bench.python), "-m", "sglang.bench_serving", "--backend=sglang", "--fake-prefill"]
    words += [f"--base-url=http://127.0.0.1:{pod.port}", f"--model={bench.model}"]
    words += [f"--tokenizer={bench.model}", "--dataset-name=random-ids", "--disable-tqdm"]
    words += [f"--random-input-len={bench.context}", f"--random-output-len={bench.generate}"]
    words += [f"--num-prompts={96 if on_gpu else 12}", f"--request-rate={8 if on_gpu else 2}"]
    words += [f"--output-file={report}", "--seed=7", "--warmup-requests=2"]
    process = Process.start(log, words, {})
    try:
        await pod.until(lambda: not process.lives, 180, f"bench_serving {name} has ended")
    finally:
        process.end()
    if process.popen.returncode or not report.exists():
        raise StageFailed(f"bench_serving {name} failed", [log, *pod.logs])
    found: dict[str, Any] = json.loads(report.read_text().splitlines()[-1])
    return found


async def _post(pod: Pod, path: str, body: dict[str, Any]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", pod.port)
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    writer.write(head.encode() + text)
    answer = await reader.read(-1)
    writer.close()
    if b" 200 " not in answer.split(b"\r\n", 1)[0]:
        raise pod.failed(f"{path}: {answer[-300:].decode(errors='replace')}")


def _write_adapter(bench: Bench, folder: Path) -> None:
    """Write an adapter of rank 16 over the attention's q and v, as peft does."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((bench.model / "config.json").read_text())
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    widths = {
        "q_proj": config["num_attention_heads"] * head_dim,
        "v_proj": config["num_key_value_heads"] * head_dim,
    }
    draw = torch.Generator().manual_seed(2)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, width in widths.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(16, hidden, generator=draw) / 16
            tensors[f"{at}.lora_B.weight"] = torch.randn(width, 16, generator=draw) / 16
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "base_model_name_or_path": str(bench.model),
                "r": 16,
                "lora_alpha": 16,
                "lora_dropout": 0.0,
                "target_modules": [*widths],
                "bias": "none",
                "fan_in_fan_out": False,
                "inference_mode": True,
            }
        )
    )
