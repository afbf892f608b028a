"""Decode process of first light: the built-in engine under a fixed load, run by commands.

Reads a command a line on stdin, answers each with a line on stdout (JSON both), ends with stdin.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from windrow import openmp

# Before torch is loaded.
os.environ.update({**openmp.DECODE, **os.environ})

import torch

from benchmarks.light.arms import FixedShare, Gaps, Granting
from benchmarks.light.load import FixedLoad, Surge, run_load
from windrow.rundir import ENV_RUN_DIR
from windrow_sidecar.engines.builtin import profiling
from windrow_sidecar.engines.builtin.device import open_device
from windrow_sidecar.engines.builtin.llama.config import read_config
from windrow_sidecar.engines.builtin.llama.weights import plan_layout
from windrow_sidecar.engines.builtin.loading import dtype_of, load, make_arena
from windrow_sidecar.engines.builtin.loop import LoopParts
from windrow_sidecar.engines.builtin.settings import EngineSettings
from windrow_sidecar.engines.builtin.step.static_step import StaticDecode
from windrow_sidecar.engines.builtin.threads import Threads
from windrow_sidecar.engines.device import EngineDevice
from windrow_sidecar.engines.fingerprint import model_fingerprint
from windrow_sidecar.engines.harvest import HarvestHook, HarvestSettings
from windrow_sidecar.engines.hook import NullHook, StepHook, StepInput
from windrow_sidecar.heap import settle_heap
from windrow_sidecar.qos.levels import PartitionLevel
from windrow_sidecar.qos.terms import HarvestTerms
from windrow_sidecar.qos.view import Grant

_WARM_UP_STEPS = 5
# A worker that was granted the device begins within this, or never.
_WORKER_BEGINS_WITHIN_S = 60.0
# A policy may keep it paused for good reasons, and a gap be too short for a tasklet.
_ARM_LETS_RUN_WITHIN_S = 3.0
# What may be queued while decode rests: more than a tasklet, so that the device never waits.
_REST_BOUND_US = 50_000
_COPY_BYTES, _COPIES = 1 << 30, 20  # the bytes: where that is little of what is free


class _OnUnits(NullHook):
    """Decode alone, on some units."""

    def __init__(self, units: int) -> None:
        self._decision = Grant(decode_units=units)

    def before_step(self, facts: StepInput) -> Grant:
        """Return the same grant always."""
        return self._decision


class Engine:
    """Engine with everything that commands act on."""

    def __init__(self, options: argparse.Namespace) -> None:
        flags = [f"--model-path={options.model}", f"--random-weights={options.seed}"]
        flags += [f"--device={options.device}", f"--max-running-requests={options.max_batch}"]
        flags += [f"--arena-bytes={options.arena_bytes}", "--decode-step=static"]
        self.settings = EngineSettings.from_command_line(flags, {ENV_RUN_DIR: str(options.run_dir)})
        assert self.settings.run_dir is not None
        began_s = time.monotonic()
        config = read_config(self.settings.model_path)
        threads = Threads()
        self.device: EngineDevice = open_device(self.settings, threads)
        self.arena = make_arena(self.settings, config, self.device)
        geometry = self.arena.geometry
        context = min(config.max_positions, geometry.chunks * geometry.slots_per_chunk)
        self.kept_chunks = math.ceil(options.kv_tokens / geometry.slots_per_chunk)
        fingerprint = model_fingerprint(self.settings.model_path)
        torch.set_flush_denormal(True)  # as the engine does
        self.parts: LoopParts = load(
            self.settings, config, self.device, self.arena, None, context, fingerprint
        )
        if self.device.torch_device.type == "cpu" and not options.all_threads:
            profiling.settle_threads(self.parts, threads, batch=options.max_batch, context=256)
        self.arena.serve(str(self.settings.run_dir.arena_socket()))
        self.ready_s = time.monotonic() - began_s
        dtype = dtype_of(self.settings)
        self.weight_bytes = plan_layout(config, dtype).n_bytes
        self.kv_token_bytes = 2 * config.layers * config.kv_width * dtype.itemsize

    def facts(self) -> dict[str, Any]:
        """Return what the device is, and what starting took."""
        decoder = self.parts.decoder
        captures = decoder.captures if isinstance(decoder, StaticDecode) else None
        on_gpu = self.device.torch_device.type == "cuda"
        return {
            "label": self.device.label,
            "units": self.device.units,
            "splits": [[s.finetune_units, s.decode_units] for s in self.device.splits.splits],
            "group_units": self.device.finetune_levels[0] if self.device.finetune_levels else 0,
            "ready_s": self.ready_s,
            "weight_bytes": self.weight_bytes,
            "kv_token_bytes": self.kv_token_bytes,
            "captures": asdict(captures) if captures else None,
            "copy_gb_s": _copy_gb_s() if on_gpu else None,
        }

    def offer(self) -> dict[str, Any]:
        """Return what the worker shows; it is lent what it wants, for it may be loading."""
        page = Granting(self.arena, self.device.units, self.kept_chunks)
        page.lend()
        return page.offer()._asdict()

    def rest(self, seconds: float) -> dict[str, Any]:
        """Leave the whole device to the worker for so long, from its first tasklet on."""
        units = self.device.units
        whole = PartitionLevel(units, units)
        page = FixedShare(self.arena, units, self.kept_chunks, whole, _REST_BOUND_US)
        at_work = self._worker_runs(page, _WORKER_BEGINS_WITHIN_S, must=True)
        begin_ns = 0
        try:
            while not begin_ns or time.monotonic_ns() - begin_ns < seconds * 1e9:
                page.share()
                if not begin_ns and at_work(_WARM_UP_STEPS + 1):
                    begin_ns = time.monotonic_ns()
                time.sleep(0.01)
            end_ns = time.monotonic_ns()
        finally:
            page.close()
        return {"begin_ns": begin_ns, "end_ns": end_ns}

    def run(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Keep up a load under an arm; see `measure.py` for what a command holds."""
        fixed = FixedLoad(
            command["batch"],
            command["context"],
            command["generated"],
            together=command.get("together", False),
        )
        hook, warmed_up = self._arm(command)
        try:
            steps = run_load(
                self.parts,
                hook,
                fixed,
                warmed_up=warmed_up,
                enough=_resting(
                    _enough(command.get("steps"), command.get("seconds"), command.get("until")),
                    *command.get("rest_s", (0.0, 0.0)),
                ),
                surge=Surge(**command["surge"]) if "surge" in command else None,
            )
        finally:
            # Whatever the hook left undone: nothing of this command may reach into the next.
            if self.arena.peers():
                Granting(self.arena, self.device.units).close()
        return asdict(steps)

    def _arm(self, command: Mapping[str, Any]) -> tuple[StepHook, Callable[[int], bool]]:
        """The hook, and whether what it shares with is at work."""
        arena, units, kind = self.arena, self.device.units, command["arm"]
        objective_us = round(1000 * command.get("objective_ms", 0))
        if kind == "alone":
            return _OnUnits(command.get("units") or units), lambda n: n > _WARM_UP_STEPS
        if kind == "share":
            split = self.device.splits.splits[command["split"]]
            share = FixedShare(arena, units, self.kept_chunks, split, command["bound_us"])
            return share, self._worker_runs(share, _WORKER_BEGINS_WITHIN_S, must=True)
        if kind == "gaps":
            gaps = Gaps(arena, units, self.kept_chunks, objective_us)
            return gaps, self._worker_runs(gaps, _ARM_LETS_RUN_WITHIN_S, must=False)
        hook = HarvestHook(
            arena,
            self.device.splits,
            command["profile"],
            HarvestSettings(
                max_batch=self.settings.max_running, without=frozenset(command.get("without", ()))
            ),
        )
        hook.set_terms(HarvestTerms("first-light", "windrow", "harvest", objective_us))
        hook.worker_lives(command["epoch"])
        page = Granting(arena, units)
        return hook, self._worker_runs(page, _ARM_LETS_RUN_WITHIN_S, must=False)

    def _worker_runs(self, page: Granting, within_s: float, *, must: bool) -> Callable[[int], bool]:
        first, deadline = page.offer().tasklet_id, time.monotonic() + within_s

        def at_work(n: int) -> bool:
            if n <= _WARM_UP_STEPS:
                return False
            if page.offer().tasklet_id > first + 1:
                return True
            if time.monotonic() < deadline:
                return False
            if must:
                raise RuntimeError(f"the worker has begun no tasklet within {within_s:g} s")
            return True

        return at_work


def _enough(
    steps: int | None, seconds: float | None, until: str | None
) -> Callable[[int, int], bool]:
    """Return when to stop: after so many steps, so long, or once a file exists."""

    def enough(n: int, passed_ns: int) -> bool:
        if steps is not None and n >= steps:
            return True
        if seconds is not None and passed_ns >= seconds * 1e9:
            return True
        return until is not None and n % 16 == 0 and Path(until).exists()

    return enough


def _resting(
    enough: Callable[[int, int], bool], busy_s: float, idle_s: float
) -> Callable[[int, int], bool]:
    """The same; between two steps decode idles, each time it has been busy for so long."""
    rested_s = time.monotonic()

    def after_step(n: int, passed_ns: int) -> bool:
        nonlocal rested_s
        if idle_s and time.monotonic() - rested_s > busy_s:
            time.sleep(idle_s)
            rested_s = time.monotonic()
        return enough(n, passed_ns)

    return after_step


def _copy_gb_s() -> float:
    """Bandwidth of a copy within the GPU's memory, reads and writes."""
    n_bytes = min(_COPY_BYTES, torch.cuda.mem_get_info()[0] // 16)
    source = torch.empty(n_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    torch.cuda.synchronize()
    began_s = time.monotonic()
    for _ in range(_COPIES):
        target.copy_(source)
    torch.cuda.synchronize()
    seconds = time.monotonic() - began_s
    del source, target
    torch.cuda.empty_cache()
    return 2 * n_bytes * _COPIES / seconds / 1e9


def _beat(engine: Engine) -> None:
    """Beat between commands, while decode idles."""
    page = engine.arena.page
    while True:
        page.beat(0)
        time.sleep(0.05)


def main() -> None:
    """Serve commands until stdin ends."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.light.decode", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="a directory with a config.json")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--arena-bytes", default="192MiB")
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument(
        "--kv-tokens", type=int, default=0, help="of KV that the arms never lend (default: 0)"
    )
    parser.add_argument(
        "--all-threads",
        action="store_true",
        help="on cores: one for each, useful or not",
    )
    parser.add_argument("--seed", type=int, default=1)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s decode %(levelname)s %(message)s")
    engine = Engine(parser.parse_args())
    threading.Thread(target=_beat, args=(engine,), daemon=True).start()
    # As the server does: no collection in the middle of a step, no thread that holds it up.
    sys.setswitchinterval(0.0005)
    settle_heap()
    gc.disable()
    _answer(engine.facts())
    for line in sys.stdin:
        command = json.loads(line)
        gc.collect()
        match command["do"]:
            case "offer":
                _answer(engine.offer())
            case "rest":
                _answer(engine.rest(command["seconds"]))
            case "run":
                _answer(engine.run(command))


def _answer(document: Mapping[str, Any]) -> None:
    print(json.dumps(document), flush=True)


if __name__ == "__main__":
    main()
