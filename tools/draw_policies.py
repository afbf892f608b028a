"""Draw what each policy does in the same ten seconds: docs/images/policy-NAME.svg.

The policies, predictor, guard and handover are the product's own, driven in simulated time by a
decode whose steps take what the roofline of an H200 says (Llama-3-8B, bf16; the worker stretches a
step by 0.6 of its share of the SMs: an assumption, nothing here was measured on a GPU). Requests
come as the Azure conversation trace has them. `--check` writes nothing and fails where a file is
not what this draws.

Example: python tools/draw_policies.py
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from windrow_lab.load.generator import generate
from windrow_sidecar._core import beside_us
from windrow_sidecar.qos.co_run import CoRunFactors
from windrow_sidecar.qos.control import Controller, EngineTraits
from windrow_sidecar.qos.levels import overlapping_levels
from windrow_sidecar.qos.policies import POLICIES
from windrow_sidecar.qos.predictor import Predictor
from windrow_sidecar.qos.solo import SoloStepModel
from windrow_sidecar.qos.terms import HarvestTerms
from windrow_sidecar.qos.view import Action, Grant, Offer, Phase, View

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
SMS, LAYERS, LEVELS = 132, 32, (16, 32, 48, 64, 96)
# 15.01 GB of weights at 80% of 4.3 TB/s and 0.6 ms around them; 131,072 bytes of KV a token.
SOLO = SoloStepModel(4964.0, 0.0, 0.0381)
TRUE_STRETCH = CoRunFactors(b1=1.0, k1=0.6)
OBJECTIVE_US, RATE, SEED = 9_000, 12.0, 3
WARM_UP_S, SECONDS = 20.0, 10.0
# A backward of one layer on 2 x 1,024 tokens: 2.8 ms on all SMs, by 60% of the peak.
LAYER_US, TOKENS = 2800, 2048


@dataclass(frozen=True, slots=True)
class Step:
    """Result of one step; times in seconds and ms."""

    begin_s: float
    end_s: float
    tpot_ms: float  # 0: decode was idle
    share: float  # of the device that the worker had, on average


@dataclass(slots=True)
class Running:
    """A request in the batch."""

    context: int
    left: int


def replay(name: str) -> list[Step]:
    """Play the load under a policy."""
    levels = overlapping_levels(SMS, LEVELS)
    solo = {SMS: SOLO}
    controller = Controller(
        levels,
        Predictor(levels, solo, TRUE_STRETCH),
        engine=EngineTraits(LAYERS, gaps=True),
    )
    controller.set_terms(HarvestTerms("p", name, "harvest", OBJECTIVE_US, max_compute_percent=75))
    coming = deque(generate(per_second=RATE, seconds=WARM_UP_S + SECONDS, seed=SEED))
    waiting: deque = deque()
    batch: list[Running] = []
    steps: list[Step] = []
    now_us, hold_us, waits_since, epoch = 1_000_000.0, 0.0, 0.0, 0
    begin_us = now_us
    while now_us - begin_us < (WARM_UP_S + SECONDS) * 1e6:
        while coming and coming[0].at_s * 1e6 <= now_us - begin_us:
            waiting.append(coming.popleft())
        admitted = 0
        while waiting and now_us >= hold_us:
            request = waiting.popleft()
            batch.append(Running(request.prompt_tokens, request.output_tokens))
            admitted += request.prompt_tokens
        waits_since = (waits_since or now_us) if waiting else 0.0
        context = sum(r.context for r in batch)
        view = View(
            start_ns=int(now_us * 1000),
            batch=len(batch),
            context_tokens=context,
            waiting=len(waiting),
            admitted_tokens=admitted,
            objective_us=OBJECTIVE_US,
            waited_us=int(now_us - waits_since) if waits_since else 0,
        )
        grant = controller.decide(view, _offer(epoch), int(now_us * 1000), present=True)
        epoch, hold_us = grant.pause_epoch, grant.hold_admission_until_ns / 1000
        took_us, worked_us = _take(grant, view)
        if batch:
            controller.observe(int((now_us + took_us) * 1000), took_us)
        share = grant.finetune_units / SMS * worked_us / took_us
        at_s = (now_us - begin_us) / 1e6 - WARM_UP_S
        if at_s >= 0:
            tpot = took_us / 1000 if batch else 0.0
            steps.append(Step(at_s, at_s + took_us / 1e6, tpot, share))
        now_us += took_us
        for r in batch:
            r.context, r.left = r.context + 1, r.left - 1
        batch = [r for r in batch if r.left > 0]
    return steps


def _offer(epoch: int) -> Offer:
    estimates = [round(LAYER_US * SMS / units) for units in (*LEVELS, SMS)]
    return Offer(
        job_epoch=1,
        phase=Phase.BACKWARD,
        layer_begin=4,
        layer_end=5,
        tokens=TOKENS,
        estimates_us=(*estimates, *(0,) * (8 - len(estimates))),
        pause_epoch_seen=epoch,
    )


def _take(grant: Grant, view: View) -> tuple[float, float]:
    """Return how long the step takes in truth, and for how much of it the worker runs."""
    if not view.batch:
        return 2000.0, 2000.0 if grant.action == Action.GO else 0.0
    alone_us = SOLO.predict_us(view.batch, view.context_tokens)
    if grant.action != Action.GO:
        return alone_us, 0.0
    if grant.gap_until_ns:
        gap_us = grant.gap_until_ns / 1000 - view.start_ns / 1000
        return gap_us + alone_us, gap_us
    beside = alone_us * TRUE_STRETCH.factor(1.0, grant.finetune_units / SMS)
    run_us = beside
    if grant.budget_us:
        run_us = min(beside, grant.budget_us)
    if grant.n_tasklets:
        run_us = min(beside, grant.n_tasklets * LAYER_US * SMS / grant.finetune_units)
    return alone_us + run_us * (1 - alone_us / beside), run_us


assert beside_us(9.0, 5.0, 10.0) == 8.0  # the same formula as in `_take`, solved for the time


WIDTH, HEIGHT, LEFT, TOP = 860, 190, 46, 26
PLOT_W, PLOT_H = WIDTH - LEFT - 50, HEIGHT - TOP - 34
MOST_MS = 12.0


def draw(name: str, steps: list[Step]) -> str:
    """Return the figure: the worker's share as an area, step times as points."""

    def x(second: float) -> str:
        return f"{LEFT + min(second, SECONDS) / SECONDS * PLOT_W:.1f}"

    def y(part: float) -> str:
        return f"{TOP + PLOT_H * (1 - min(1.0, part)):.1f}"

    busy = [s for s in steps if s.tpot_ms]
    over = sum(s.tpot_ms > OBJECTIVE_US / 1000 for s in busy) / max(1, len(busy))
    share = sum(s.share * (s.end_s - s.begin_s) for s in steps) / (steps[-1].end_s)
    title = (
        f"{name}: the worker has {share:.0%} of the device, {over:.1%} of steps over the objective"
    )
    area = [f"M{x(0)},{y(0)}"]
    for begin_s, part in _mean_shares(steps):
        area.append(f"L{x(begin_s)},{y(part)} L{x(begin_s + _BIN_S)},{y(part)}")
    area.append(f"L{x(SECONDS)},{y(0)}Z")
    dots = " ".join(f"M{x(s.end_s)},{y(s.tpot_ms / MOST_MS)}h.1" for s in _every(busy, 600))
    line = y(OBJECTIVE_US / 1000 / MOST_MS)
    ticks = "".join(
        f'<text x="{x(s)}" y="{HEIGHT - 18}" text-anchor="middle">{s}</text>'
        for s in range(0, 11, 2)
    )
    scale = "".join(
        f'<text x="{LEFT - 6}" y="{y(ms / MOST_MS)}" text-anchor="end" dy="4">{ms}</text>'
        f'<text x="{WIDTH - 44}" y="{y(ms / MOST_MS)}" dy="4">{ms / MOST_MS:.0%}</text>'
        for ms in (0, 3, 6, 9, 12)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="11" fill="#444">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>\n'
        f'<text x="{LEFT}" y="16" font-size="13" fill="#111">{title}</text>\n'
        f'<path d="{" ".join(area)}" fill="#8fc79a"/>\n'
        f'<path d="{dots}" stroke="#1f5fa8" stroke-width="2" stroke-linecap="round" fill="none"/>\n'
        f'<path d="M{x(0)},{line}H{x(SECONDS)}" stroke="#c0392b" stroke-dasharray="5 4"/>\n'
        f"{scale}{ticks}\n"
        f'<text x="{LEFT}" y="{HEIGHT - 4}">seconds; blue: time per output token, ms (left); red: '
        f"objective; green: the worker's share of the device (right)</text>\n</svg>\n"
    )


_BIN_S = 0.1


def _mean_shares(steps: list[Step]) -> list[tuple[float, float]]:
    """The worker's mean share in each tenth of a second."""
    bins = [0.0] * round(SECONDS / _BIN_S)
    for s in steps:
        at = min(len(bins) - 1, int(s.begin_s / _BIN_S))
        bins[at] += s.share * (s.end_s - s.begin_s)
    return [(i * _BIN_S, worked / _BIN_S) for i, worked in enumerate(bins)]


def _every(steps: list[Step], most: int) -> list[Step]:
    """The slowest of each group, where there are too many to draw."""
    group = -(-len(steps) // most) or 1
    return [max(steps[i : i + group], key=lambda s: s.tpot_ms) for i in range(0, len(steps), group)]


def main() -> None:
    """Write the files, or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for name in POLICIES:
        picture, path = draw(name, replay(name)), IMAGES / f"policy-{name}.svg"
        if check and (not path.exists() or path.read_text() != picture):
            stale.append(path.name)
        elif not check:
            path.write_text(picture)
            print(picture.split('fill="#111">')[1].split("<")[0])
    if stale:
        sys.exit(f"not as drawn: {', '.join(stale)}; run python tools/draw_policies.py")


if __name__ == "__main__":
    main()
