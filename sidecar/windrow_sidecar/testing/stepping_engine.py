"""A decode engine reduced to its arena and the calls of its step hook: no model, no time passes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from windrow.eventlog import EventLog
from windrow.rundir import RunDir
from windrow_sidecar._core import Arena, Geometry
from windrow_sidecar.engines.harvest import HarvestHook, HarvestSettings
from windrow_sidecar.engines.hook import StepInput
from windrow_sidecar.qos.levels import host_levels
from windrow_sidecar.qos.view import Grant

UNITS = 2
# A step of batch 4 takes 4 ms on both cores and 6 ms on one, whatever its context.
PROFILE: dict[str, Any] = {
    "solo": [
        {"units": 1, "c0Us": 2000, "b0Us": 1000, "k0NsPerToken": 0},
        {"units": 2, "c0Us": 2000, "b0Us": 500, "k0NsPerToken": 0},
    ]
}


class SteppingEngine:
    """Engine that steps on request, and takes as long as requested. `slot`: of its pod."""

    def __init__(
        self, folder: Path, settings: HarvestSettings | None = None, *, slot: int = 0
    ) -> None:
        geometry = Geometry(
            layers=2, kv_heads=2, head_dim=32, dtype_bytes=4, block_bytes=131072, chunks=32
        )
        self.arena = Arena.create(geometry, reserved_chunks=2)
        self.socket = str(RunDir(folder, slot).arena_socket())
        self.arena.serve(self.socket)
        name = f"engine-{slot}" if slot else "engine"
        self.log = EventLog(folder / f"{name}.events.jsonl", source=name)
        self.hook = HarvestHook(
            self.arena, host_levels(UNITS), PROFILE, settings or HarvestSettings(), log=self.log
        )
        self._steps = 0

    def step(
        self, batch: int = 4, latency_us: int | Callable[[Grant], int] = 5000, waiting: int = 0
    ) -> Grant:
        """One step of that batch, 500 context tokens each; it may depend on what is granted."""
        self._steps += 1
        now_ns = time.monotonic_ns()
        decision = self.hook.before_step(
            StepInput(
                step=self._steps,
                start_ns=now_ns,
                batch=batch,
                context_tokens=500 * batch,
                waiting=waiting,
                admitted_tokens=0,
                slack_us=0,
            )
        )
        took_us = latency_us(decision) if callable(latency_us) else latency_us
        self.hook.after_step(now_ns + took_us * 1000, took_us)
        return decision

    def close(self) -> None:
        """Revoke, check the table, unmap."""
        self.hook.close()
        self.arena.check()
        self.arena.close()
