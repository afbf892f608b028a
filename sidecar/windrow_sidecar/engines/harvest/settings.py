"""Settings that an engine gives to the harvest hook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from windrow.rundir import RunDir
from windrow_sidecar.engines.harvest.ablation import Protection
from windrow_sidecar.qos.predictor import PredictorForm

# What KV asks for before lent memory is back (`csrc/include/windrow/lending.h`): the growth of
# running requests, which is Harli's formula; or the prompts that arrive meanwhile as well.
ReserveFormula = Literal["traffic", "harli"]


@dataclass(frozen=True, slots=True)
class HarvestSettings:
    """Times in nanoseconds unless named otherwise.

    Attributes:
        max_batch: requests that decode runs at once; each needs a KV slot a step.
        drain_us: how long a worker takes to give back chunks after its tasklet ended, until it has
            been measured.
        reserve: which formula sizes the reserve of free chunks.
        admission_window_ns: over which arriving context tokens are summed for the reserve.
        worker_stale_ns: a worker whose heart has not beaten for so long counts as gone.
        regrant_ns: a grant that does not change is published again after so long.
        steady_ns: how long a decision holds while batch, admissions, policy and guard say nothing
            new. What it may miss meanwhile is a worker that starves, wants chunks or falls silent.
        lending_every_ns: how often lending is planned while nothing presses.
        run_dir: where the decisions are kept for `windrow explain`; None: nowhere.
        predictor: what steps teach it (`qos.predictor`).
        without: protections that are off, for tests and benchmarks that show what each is for.
        gaps: the engine begins a step no earlier than `Grant.gap_until_ns` says.
        layers: of decode's model; 0: as many as the arena has.
        in_turns: decode and finetuning alternate in one process (see `qos.terms.in_turns`).
    """

    max_batch: int = 64
    drain_us: int = 50_000
    reserve: ReserveFormula = "traffic"
    admission_window_ns: int = 50_000_000
    worker_stale_ns: int = 1_000_000_000
    regrant_ns: int = 50_000_000
    steady_ns: int = 80_000_000
    lending_every_ns: int = 20_000_000
    run_dir: RunDir | None = None
    gaps: bool = False
    layers: int = 0
    in_turns: bool = False
    predictor: PredictorForm = "windrow"
    without: frozenset[Protection] = frozenset()
