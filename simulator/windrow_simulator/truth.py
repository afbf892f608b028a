"""True times of decode steps, and true speed of the worker: hidden from every policy.

The predictor is fitted on a profile that is taken of this, with its own form (two linear stages).
Here steps follow a roofline with contention for memory, or what was measured, and noise.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from windrow.errors import UserError
from windrow_simulator.hardware import GpuFigures, ModelFigures
from windrow_simulator.worker_rate import joint_rate

GPU_NOISE = 0.015  # that is assumed of a step's time


class Truth(Protocol):
    """A device: times in microseconds, rates in tokens a microsecond."""

    dedicated_rate: float  # of the worker on the whole device, nobody beside it

    def step_us(self, batch: int, context_tokens: int, decode: int, finetune: int) -> float:
        """A step without noise; `finetune`: units that the worker works on meanwhile."""
        ...

    def finetune_rate(self, finetune: int, *, beside_decode: bool) -> float:
        """Return the rate of the worker on so many units."""
        ...


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Assumptions that the roofline needs and no datasheet has.

    Copy and matrix product reach 4.3 TB/s and 790 TFLOP/s on an H200 (90 and 80% of what is
    published), of which decode gets 80% and finetuning 60%. The others are assumed of all GPUs.

    Attributes:
        copy: share of the published bandwidth that a copy reaches.
        gemm: share of the published arithmetic that a matrix product reaches.
        decode: share of a copy's bandwidth that a decode step reaches.
        finetune: share of a matrix product's rate that finetuning reaches.
        overhead_us: of a step, whatever its size.
        sm_gb_s: that an SM reads at most. By it half of an H200's SMs reach its memory's bandwidth,
            as is assumed of it, and the fewer SMs of a GPU do the slower its memory is.
        contention: by how much a decode step's reads slow down per share of the bandwidth that the
            worker takes, before the memory is full.
        shared_sm: what decode gets of an SM that the worker is on, where it is not confined.
        prefill: share of a matrix product's rate that prefill reaches.
        link_gb_s: at which KV comes from prefill.
        queued_tokens_s: that the host queues at most for a worker of `QUEUED_LAYERS` layers which
            can be stopped; infinite: the GPU is all that bounds it.
        plain_tokens_s: the same of a plain process.
        beside: share of a busy worker's rate that is left beside a decode on every SM; 0: by
            `shared_sm`, and decode's reads slow down by `contention`.
        row_tokens: fewer tokens in a tasklet cost the host as much.
        reduce_us: that an all-reduce over a group's GPUs takes, besides its bytes.
        noise: of a step's time, standard deviation of its logarithm.
        noise_beside: the same of a step beside a worker; None: the same figure.
    """

    copy: float = 0.896
    gemm: float = 0.8
    decode: float = 0.8
    finetune: float = 0.6
    overhead_us: float = 600.0
    sm_gb_s: float = 65.2
    contention: float = 0.35
    shared_sm: float = 0.5
    prefill: float = 0.6
    link_gb_s: float = 25.0
    queued_tokens_s: float = math.inf
    plain_tokens_s: float = math.inf
    beside: float = 0.0
    row_tokens: int = 0
    reduce_us: float = 10.0
    noise: float = GPU_NOISE
    noise_beside: float | None = None


QUEUED_LAYERS = 32  # of the model whose rates were measured
ROWS_TOGETHER = 2048  # tokens of a worker's micro-batch, which share an all-reduce


@dataclass(frozen=True, slots=True)
class WorkerQueue:
    """Bound of a worker's rate by its host, which queues its tasklets.

    Attributes:
        rate: tokens a microsecond at most.
        row_tokens: fewer in a tasklet cost the host as much; 0: its cost goes with its tokens.
    """

    rate: float = math.inf
    row_tokens: int = 0

    def bound(self, rate: float, tokens: int = 0) -> float:
        """Return what is left of a rate of the device; `tokens`: of each tasklet, 0: whole rows."""
        part = min(1.0, tokens / self.row_tokens) if tokens and self.row_tokens else 1.0
        return joint_rate(rate, self.rate * part)


class RooflineTruth:
    """A named GPU by its published figures, with decode confined to its share or on every SM."""

    def __init__(
        self,
        gpu: GpuFigures,
        served: ModelFigures,
        trained: ModelFigures,
        assumed: Assumptions | None = None,
        *,
        disjoint: bool = True,
        plain: bool = False,
        ranks: int = 1,
    ) -> None:
        """Take the figures of both models, of one rank's part where a group of GPUs shares them.

        Args:
            gpu: each of the group.
            served: the model that decode serves, or a rank's part (see `ModelFigures.cut`).
            trained: the model that is finetuned, as much of it.
            assumed: what no datasheet has.
            disjoint: decode and worker are on SMs of their own.
            plain: the worker is a process that nothing stops.
            ranks: GPUs of the group. Each layer ends in two all-reduces of its rows, for which
                SMs wait; a worker has as many in its backward.
        """
        a = self._assumed = assumed or Assumptions()
        self._gpu, self._served, self._disjoint = gpu, served, disjoint
        self._limit = gpu.bandwidth_gb_s * 1e3 * a.copy  # bytes a microsecond
        self._flops = gpu.tflops * 1e6 * a.gemm  # a microsecond
        row_us = 2 * trained.hidden * 2 * (ranks - 1) / ranks / (gpu.peer_gb_s * 1e3)
        self._reduce_us = 2 * served.layers * a.reduce_us if ranks > 1 else 0.0
        self._reduced_row_us = 2 * served.layers * row_us * served.hidden / trained.hidden
        computed_us = trained.train_flops_per_token / (self._flops * a.finetune)
        exchanged_us = 4 * trained.layers * (row_us + a.reduce_us * (ranks > 1) / ROWS_TOGETHER)
        self._busy_rate = 1 / (computed_us + exchanged_us)
        self.exchange_share = exchanged_us / (computed_us + exchanged_us)  # of the worker's time
        depth = QUEUED_LAYERS / trained.layers / 1e6
        self.dedicated_rate = joint_rate(self._busy_rate, a.plain_tokens_s * depth)
        queued = a.plain_tokens_s if plain else a.queued_tokens_s
        self.queue = WorkerQueue(queued * depth, 0 if plain else a.row_tokens)
        self._traffic = trained.train_bytes_per_token * self._busy_rate / self._limit
        self._weights, self._kv = 2 * served.step_parameters, served.kv_token_bytes
        self._folded: dict[tuple[int, int], tuple[float, float]] = {}

    def step_us(self, batch: int, context_tokens: int, decode: int, finetune: int) -> float:
        """Bytes or operations, whichever take longer, and an overhead."""
        folded = self._folded.get((decode, finetune))
        if folded is None:
            folded = self._folded[decode, finetune] = self._fold(decode, finetune)
        byte_us, request_us = folded
        memory_us = (self._weights + self._kv * context_tokens) * byte_us
        exchanged_us = self._reduce_us + batch * self._reduced_row_us
        return self._assumed.overhead_us + exchanged_us + max(memory_us, batch * request_us)

    def _fold(self, decode: int, finetune: int) -> tuple[float, float]:
        """Microseconds of a byte that is read, and of a request's arithmetic."""
        a, gpu = self._assumed, self._gpu
        # Those that both are on: all of the worker's where decode is on every SM, or what a worker
        # that has not stopped yet still has of those that decode took back.
        shared = max(0, decode + finetune - gpu.sms)
        sms = decode - (1 - a.shared_sm) * shared
        if shared and a.beside:
            return self._taking_turns(finetune)
        share = min(1.0, sms * a.sm_gb_s * 1e3 / self._limit)
        byte_us = 1 / (self._limit * a.decode * share)
        if finetune:
            worker = self._traffic * finetune / gpu.sms
            if not math.isinf(self.queue.rate):
                part = self.queue.bound(self._share(finetune)) / self._busy_rate
                worker = self._traffic * part
            byte_us *= max(1 + a.contention * worker, share * a.decode + worker)
        return byte_us, self._weights / (self._flops * sms / gpu.sms)

    def _taking_turns(self, finetune: int) -> tuple[float, float]:
        """Return the same for SMs that both are on: decode gets the time that the worker leaves."""
        rate = self.queue.bound(self.finetune_rate(finetune, beside_decode=True))
        left = 1 - rate / self._busy_rate
        whole = self._limit * self._assumed.decode
        return 1 / (whole * left), self._weights / (self._flops * left)

    def _share(self, finetune: int) -> float:
        return self._busy_rate * finetune / self._gpu.sms

    def finetune_rate(self, finetune: int, *, beside_decode: bool) -> float:
        """Return the rate by the units, as far as the GPU bounds it (`queue`: as the host does).

        Beside decode it is less by the time that the worker's traffic waits, or its kernels do.
        """
        rate = self._share(finetune)
        if not beside_decode:
            return rate
        if not self._disjoint and self._assumed.beside:
            return joint_rate(rate, self._busy_rate * self._assumed.beside)
        if not self._disjoint:
            rate *= 0.5 + 0.5 * self._assumed.shared_sm
        return rate / (1 + self._assumed.contention * self._traffic * self._assumed.decode)

    def prefill_us(self, tokens: int) -> float:
        """A prompt on a GPU of the same kind that does nothing else."""
        return self.prompt_us(0, tokens, self._gpu.sms, 0)

    def prompt_us(self, begin: int, end: int, decode: int, finetune: int) -> float:
        """Return the time of a prompt's tokens from `begin` to `end` on decode's SMs.

        `finetune`: of the worker, which takes SMs or time from a product that is bound by
        arithmetic.
        """
        model, a, sms = self._served, self._assumed, self._gpu.sms
        pairs = end * end - begin * begin
        attention = 2 * pairs * model.layers * model.heads * model.head_dim
        operations = 2.0 * (end - begin) * model.step_parameters + attention
        shared = max(0, decode + finetune - sms)
        part = (decode - (1 - a.shared_sm) * shared) / sms
        if shared and a.beside:
            rate = self.queue.bound(self.finetune_rate(finetune, beside_decode=True))
            part = 1 - rate / self._busy_rate
        return a.overhead_us + operations / (self._flops * a.prefill * part)

    def transfer_us(self, tokens: int) -> float:
        """KV of a prompt over the network."""
        return 200.0 + tokens * self._served.kv_token_bytes / (self._assumed.link_gb_s * 1e3)


@dataclass(frozen=True, slots=True)
class Worker:
    """The rates of a worker that was measured, tokens a second.

    Attributes:
        dedicated: on all units, nobody beside it.
        beside: by its units, while decode works.
        idle: by its units, while decode does not.
        stretch: by how much a decode step is longer beside it than alone, by its units.
    """

    dedicated: float
    beside: Mapping[int, float]
    idle: Mapping[int, float] = field(default_factory=dict)
    stretch: Mapping[int, float] = field(default_factory=dict)


class MeasuredTruth:
    """A device that was profiled: the medians that were measured, interpolated, not their fit."""

    def __init__(self, profile: Mapping[str, Any], units: int, worker: Worker) -> None:
        self._units, self._worker = units, worker
        self.dedicated_rate = worker.dedicated / 1e6
        self._solo = {int(row["units"]): row for row in profile["solo"]}
        # The fit is corrected by what the medians near a point say of it.
        self._offs: dict[int, list[tuple[float, float, float]]] = {}
        for row in profile.get("samples") or ():
            if row.get("finetuneUnits"):
                continue
            fitted = self._fit_us(row["units"], row["batch"], row["contextTokens"])
            at = (math.log(max(1, row["batch"])), math.log(max(1, row["contextTokens"])))
            self._offs.setdefault(row["units"], []).append((*at, row["stepUs"] / fitted))

    def step_us(self, batch: int, context_tokens: int, decode: int, finetune: int) -> float:
        """The fit times its error nearby, times what the worker stretches."""
        us = self._fit_us(decode, batch, context_tokens) * self._error(
            decode, batch, context_tokens
        )
        return us * _at(self._worker.stretch, finetune, 1.0) if finetune else us

    def finetune_rate(self, finetune: int, *, beside_decode: bool) -> float:
        """Return the rate measured on so many units; by proportion where that was not."""
        proportion = self._worker.dedicated * finetune / self._units
        table = self._worker.beside if beside_decode else self._worker.idle
        return _at(table, finetune, proportion) / 1e6

    def _fit_us(self, units: int, batch: int, context_tokens: int) -> float:
        row = self._solo.get(units)
        if row is None:
            raise UserError(
                f"it has no solo model for {units} units",
                field="--profile",
                remedy=f"It knows {sorted(self._solo)}: take it again on this device.",
            )
        constant = row["c0Us"] + row["b0Us"] * max(batch, 4)
        return float(constant + row["k0NsPerToken"] * context_tokens / 1e3)

    def _error(self, units: int, batch: int, context_tokens: int) -> float:
        points = self._offs.get(units)
        if not points:
            return 1.0
        x, y = math.log(max(1, batch)), math.log(max(1, context_tokens))
        weights = [1 / (0.05 + (x - px) ** 2 + (y - py) ** 2) ** 2 for px, py, _ in points]
        return sum(w * p[2] for w, p in zip(weights, points, strict=True)) / sum(weights)


def _at(table: Mapping[int, float], units: int, otherwise: float) -> float:
    return table.get(units, otherwise)


@dataclass(frozen=True, slots=True)
class Residuals:
    """Measured over modelled latencies, in the order of the steps they are of.

    Attributes:
        alone: of steps without a worker beside them.
        beside: of steps with one.
        admitting: of steps alone that a request joined; its KV comes in during them.
        admitting_beside: of such steps with a worker.
        moments_ns: when each was, in simulated time, for each of these four; (): whenever.
    """

    alone: tuple[float, ...]
    beside: tuple[float, ...] = ()
    admitting: tuple[float, ...] = ()
    admitting_beside: tuple[float, ...] = ()
    moments_ns: tuple[tuple[int, ...], ...] = ()

    def of(self, beside: bool, admitting: bool) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """Return those of one kind of steps, and when; where there are none, the nearest kind's."""
        kinds = (self.alone, self.beside, self.admitting, self.admitting_beside)
        wanted = [2 * admitting + beside, int(beside), 0]
        kind = next((n for n in wanted if kinds[n]), 0)
        return kinds[kind], self.moments_ns[kind] if self.moments_ns else ()


class Noise:
    """Noise of a step: a factor on what the model says, drawn as it was measured.

    Args:
        residuals: to draw from; where their moments are known, from those of about the same
            moment, since what else runs on a machine comes and goes.
        seed: the same seed draws the same factors.
        run: steps of a kind come from the same stretch of the measurement for so many steps, since
            disturbances last.
    """

    def __init__(self, residuals: Residuals, seed: int, *, run: int = 1) -> None:
        if not residuals.alone:
            raise UserError("no residual to draw from", field="noise", remedy="Give at least one.")
        self._draw, self._run = random.Random(seed), run
        kinds = [residuals.of(beside, new) for beside in (False, True) for new in (False, True)]
        self._kinds = kinds
        self._at, self._left = [0] * 4, [0] * 4

    def factor(self, *, beside: bool = False, admitting: bool = False, now_ns: int = 0) -> float:
        """Return the factor of the next step, which begins at that moment."""
        kind = 2 * beside + admitting
        ratios, moments_ns = self._kinds[kind]
        if self._left[kind] <= 0:
            low, high = _around(moments_ns, now_ns) if moments_ns else (0, len(ratios))
            self._at[kind] = low + int(self._draw.random() * (high - low))
            self._left[kind] = self._run
        self._left[kind] -= 1
        at = self._at[kind] = (self._at[kind] + 1) % len(ratios)
        return ratios[at]


# Steps of so long around a moment are of about the same moment, and so many at least.
_ABOUT_NS, _ABOUT_STEPS = 8_000_000_000, 64


def _around(moments_ns: Sequence[int], now_ns: int) -> tuple[int, int]:
    """Return which of the moments are about now: from one on, up to another."""
    low = bisect_left(moments_ns, now_ns - _ABOUT_NS)
    high = bisect_left(moments_ns, now_ns + _ABOUT_NS)
    missing = _ABOUT_STEPS - (high - low)
    if missing > 0:
        low, high = max(0, low - missing), min(len(moments_ns), high + missing)
    return low, max(high, low + 1)


def gpu_noise(seed: int, spread: float = GPU_NOISE, beside: float | None = None) -> Noise:
    """Return a GPU's noise: `spread` around the median, 1 step in 250 up to half longer.

    `beside`: of steps beside a worker; None: the same.
    """
    alone = _drawn(spread)
    residuals = Residuals(alone) if beside is None else Residuals(alone, _drawn(beside))
    return Noise(residuals, seed)


def _drawn(spread: float) -> tuple[float, ...]:
    draw = random.Random(20231116)
    ratios = [math.exp(draw.gauss(0.0, spread)) for _ in range(4096)]
    for i in range(0, len(ratios), 250):
        ratios[i] *= 1 + 0.5 * draw.random()
    return tuple(ratios)
