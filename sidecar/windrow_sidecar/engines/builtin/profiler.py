"""Get a latency profile: what an engine of this kind has left, checked, or a new one.

A profile is in the run directory (a restarted engine finds its own), in a directory with those that
other pods of the namespace have measured, or in the user's cache, where `windrow profile` leaves
it. What an interrupted profile has measured is kept there and is not measured again.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

from windrow.errors import UserError
from windrow.rundir import RunDir, profile_cache, profile_file, stored_profiles
from windrow_sidecar.engines.builtin import profiling
from windrow_sidecar.engines.builtin.llama.config import LlamaConfig
from windrow_sidecar.engines.builtin.loop import LoopParts
from windrow_sidecar.engines.builtin.rates import measure_rates, step_size
from windrow_sidecar.engines.builtin.unfinished import UnfinishedProfile
from windrow_sidecar.engines.profile import (
    CHECK_LIMIT_PERCENT,
    EFFORTS,
    WARM_UP_STEPS,
    Effort,
    Point,
    Subject,
    check_reusable,
    document,
    plan,
    plan_co_run,
    prior_document,
)
from windrow_sidecar.qos.co_run import CoRunSample
from windrow_sidecar.qos.levels import Partitioning
from windrow_sidecar.qos.roofline import roofline_models

_log = logging.getLogger(__name__)

_CHECK_STEPS = 12
_PRIOR_CONTEXT = 128


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of what an engine can run."""

    max_batch: int
    max_tokens: int  # context tokens of a batch
    max_context: int  # of one request


@dataclass(frozen=True, slots=True)
class ProfileStore:
    """Places on this machine that hold profiles.

    Attributes:
        run_dir: of this pod; None: the engine is in none.
        cache: of this user.
        stored: what other pods of the namespace have measured; None: nobody says.
    """

    run_dir: RunDir | None
    cache: Path
    stored: Path | None = None

    @classmethod
    def of(cls, run_dir: RunDir | None) -> ProfileStore:
        """Return the store of this user and pod."""
        return cls(run_dir, profile_cache(os.environ), stored_profiles(os.environ))

    def candidates(self, key: str) -> Iterator[Path]:
        """Files in which a profile of that key may lie."""
        if self.run_dir is not None:
            yield from self.run_dir.profiles()
        for folder in (self.stored, self.cache):
            if folder is not None:
                yield folder / profile_file(key)

    def unfinished(self, key: str, effort: str) -> UnfinishedProfile:
        """Return what an interrupted profile of that key and effort has measured here."""
        kept = self.run_dir.profile() if self.run_dir else self.cache / profile_file(key)
        unfinished = UnfinishedProfile(kept.with_suffix(".part.jsonl"), key, effort)
        unfinished.read()
        return unfinished


@dataclass(frozen=True, slots=True)
class Profiler:
    """Profiles one engine, before it serves."""

    parts: LoopParts
    splits: Partitioning
    subject: Subject
    bounds: Bounds
    store: ProfileStore

    def read_back(self) -> Mapping[str, Any] | None:
        """A stored profile of this very kind that a few steps bear out; None: there is none."""
        for path in self.store.candidates(self.subject.key):
            try:
                profile: Mapping[str, Any] = json.loads(path.read_text())
                self._check(profile)
            except (OSError, ValueError) as error:
                if not isinstance(error, FileNotFoundError):
                    _log.warning("the profile in %s cannot be read: %s", path, str(error))
            except UserError as error:
                _log.warning("the profile in %s is not used: %s", path, str(error))
            else:
                _log.info("profile: reused from %s, a few measured steps agree with it", path)
                return profile
        return None

    def take(self, effort_name: str, config: LlamaConfig) -> Mapping[str, Any]:
        """Measure and fit."""
        effort = EFFORTS[effort_name]
        began_s = time.monotonic()
        points = plan(self.splits, effort, **asdict(self.bounds))
        unfinished = self.store.unfinished(self.subject.key, effort_name)
        known = {p: unfinished.alone[p] for p in points if p in unfinished.alone}
        measured = profiling.measure(self.parts, points, effort, known=known, keep=unfinished.keep)
        beside = self._beside(effort, config, unfinished)
        profile = document(
            self.subject,
            measured.samples,
            taken_at=datetime.now(UTC),
            co_run=beside,
            noise_percent=measured.noise_percent,
            units=self.splits.units,
        )
        unfinished.remove()
        _log.info(
            "profile: %d points alone, %d beside a load, in %.1f s; steps scatter by %.1f%%",
            len(measured.samples),
            len(beside),
            time.monotonic() - began_s,
            measured.noise_percent,
        )
        return profile

    def prior(self, config: LlamaConfig, device: str, dtype: torch.dtype) -> Mapping[str, Any]:
        """Measure rates, and one kind of step; the profile says that it is made of them."""
        size, partition = step_size(config, dtype), self.parts.partition
        shares = dict.fromkeys(split.decode_units for split in self.splits.splits)
        try:
            rates = measure_rates(partition, shares, size, device, dtype)
        finally:
            partition.activate(self.parts.units)
        context = min(_PRIOR_CONTEXT, self.bounds.max_context // 2, self.bounds.max_tokens)
        few = Effort(1, _CHECK_STEPS - WARM_UP_STEPS, (), (), soft_limit_s=5.0)
        anchors = profiling.measure(self.parts, [Point(n, 1, context) for n in shares], few)
        models = roofline_models(rates, size, anchors.samples)
        return prior_document(self.subject, models, taken_at=datetime.now(UTC))

    def _beside(
        self, effort: Effort, config: LlamaConfig, unfinished: UnfinishedProfile
    ) -> list[CoRunSample]:
        points = plan_co_run(self.splits, effort, **asdict(self.bounds))
        known = [unfinished.beside[p] for p in points if p in unfinished.beside]
        left = [p for p in points if p not in unfinished.beside]
        # The load is one of the host's cores. On a GPU a worker's own steps are measured, once a
        # policy lets it run (`engines.harvest.beside`).
        if not left or self.subject.driver != "host":
            return known
        with load_process(config) as load:
            keep = unfinished.keep_beside
            return known + profiling.measure_beside(self.parts, left, effort, load, keep=keep)

    def _check(self, profile: Mapping[str, Any]) -> None:
        """Compare a few steps on the whole device with what the profile says of them."""
        models = check_reusable(profile, self.subject, self.splits)
        noise = float(profile.get("noisePercent", 0.0))
        points = self._points_of(profile)
        if not points:
            raise UserError("none of its points fits into this engine")
        few = Effort(1, _CHECK_STEPS - WARM_UP_STEPS, (), (), soft_limit_s=5.0)
        model = models[self.splits.units]
        off = [
            abs(s.step_us / model.predict_us(s.batch, s.context_tokens) - 1)
            for s in profiling.measure(self.parts, points, few).samples
        ]
        limit = CHECK_LIMIT_PERCENT + noise
        if 100 * median(off) > limit:
            raise UserError(
                f"steps take {100 * median(off):.0f}% other than it says; {limit:.0f}% would do"
            )

    def _points_of(self, profile: Mapping[str, Any]) -> list[Point]:
        """A point of few requests and one of many, on the whole device, from what was measured."""
        bounds, whole = self.bounds, self.splits.units
        fitting = [
            Point(whole, row["batch"], row["contextTokens"] // row["batch"] - _CHECK_STEPS)
            for row in profile["samples"]
            if (row["units"], row["finetuneUnits"]) == (whole, 0)
            and 0 < row["batch"] <= bounds.max_batch
            and row["contextTokens"] <= bounds.max_tokens
        ]
        fitting = sorted((p for p in fitting if p.context > 0), key=lambda p: p.batch)
        return list(dict.fromkeys((fitting[0], fitting[-1]))) if fitting else []


class LoadProcess:
    """`tasklet_load` in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run_on(self, units: int) -> None:
        """Begin, on so many cores."""
        self._tell(units)

    def pause(self) -> float:
        """End; returns the tokens a second that it computed."""
        self._tell(0)
        tokens, seconds = map(float, self._answer().split())
        return tokens / seconds if seconds else 0.0

    def await_ready(self) -> None:
        """Wait until it has computed its first tasklet."""
        self._answer()

    def _tell(self, units: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{units}\n")
        self._process.stdin.flush()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise UserError(f"the load of the profile has ended with {self._process.wait()}")
        return line


@contextmanager
def load_process(config: LlamaConfig) -> Iterator[LoadProcess]:
    """A load of that model's shape; it ends with the block, and with this process."""
    command = [sys.executable, "-m", "windrow_sidecar.engines.builtin.tasklet_load"]
    for name, value in (
        ("--hidden", config.hidden),
        ("--intermediate", config.intermediate),
        ("--kv", config.kv_width),
        ("--layers", config.layers),
    ):
        command += [name, str(value)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            load = LoadProcess(process)
            load.await_ready()
            yield load
        finally:
            process.kill()
