"""Measure where the host time of a recompute plan goes, over the shim: arms in turns.

The dedicated worker's eager layers without a plan; with autograd's hooks that hand each tensor
back; under a plan that keeps everything; under one that keeps half, which runs operations again.

Example: python -m benchmarks.plan_cost --json /tmp/plan_cost.json
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from benchmarks import host_cost
from benchmarks.harness import ROOT, Baseline, Result, arguments, environment, middle, write

LAYERS, ROUNDS, ROUNDS_QUICK, WARM = 8, 24, 6, 3
ARMS = ("no plan", "hooks alone", "a plan that keeps all", "a plan that keeps half")
GOAL = 1.25


def inside(folder: Path, rounds: int) -> None:
    """Run the arms in this process, and write found.json."""
    from benchmarks import host_arms as arms
    from windrow.eventlog import EventLog
    from windrow_sidecar.compute.whole_device import WholeDevice
    from windrow_sidecar.finetune.colocated.slot_device import slot_device
    from windrow_sidecar.finetune.model.loading import load_base
    from windrow_sidecar.finetune.model.precision import WeightForm
    from windrow_sidecar.finetune.recompute.checkpointed_layers import ALL
    from windrow_sidecar.finetune.standalone.dedicated import open_alone
    from windrow_sidecar.heap import settle_heap

    arms.right_at_load()
    job = arms.job_of(folder, 1, host_cost.ROW_TOKENS, LAYERS)
    _, arena = arms.lent(folder, LAYERS)
    ground = slot_device(arena, arms.EPOCH, WholeDevice("finetune", 2))
    assert ground.memory is not None
    ground.memory.settle()
    ground.partition.activate(arms.UNITS)
    form = WeightForm.of(job.spec)
    base = load_base(Path(job.spec.model.name), form=form, device=ground.device, random_weights=1)
    marks, events = arms.Marks(), EventLog(folder / "events.jsonl", source="dedicated")
    session = open_alone(job, ground.device, base)
    stream = session.stream
    arms.marked(stream, marks)
    step = arms.standalone(session, ground.device, events)
    planned: Any = stream.parts.stack.around_layer
    followed, keep_for = planned.forward, session.activation_budget.keep_for
    graphs = session.activation_budget.parts(1 << 20)["graphs"] / (1 << 20)
    budgets = {ARMS[2]: ALL, ARMS[3]: graphs / LAYERS / 2}
    chosen = [ARMS[0]]

    def keep(tokens: int) -> None:
        keep_for(tokens)
        planned.bytes_per_token = budgets.get(chosen[0])

    def hooked(layer: int) -> AbstractContextManager[Any]:
        del layer
        return torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept)

    stream._keep_for = keep
    settle_heap()
    found: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for n in range(WARM + rounds):
        for arm in ARMS:
            chosen[0] = arm
            planned.forward = hooked if arm == ARMS[1] else followed
            stream.replan()
            step()
            layer = marks.of_layer()
            if n >= WARM:
                found[arm].append(layer.both / 1e3)
    (folder / "found.json").write_text(json.dumps(found))


def main() -> int:
    """Measure in a process over the shim, and write the figures."""
    if sys.argv[1:2] == ["--inside"]:
        inside(Path(sys.argv[2]), int(sys.argv[3]))
        return 0
    options = arguments(__doc__).parse_args()
    rounds = ROUNDS_QUICK if options.quick else ROUNDS
    with tempfile.TemporaryDirectory(prefix="wc-") as name:
        environ = host_cost._environment(Path(name))
        folder = Path(name) / "arms"
        folder.mkdir()
        command = [sys.executable, "-m", "benchmarks.plan_cost", "--inside", str(folder)]
        done = subprocess.run(
            [*command, str(rounds)],
            cwd=ROOT,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"the arms ended with {done.returncode}:\n{done.stderr[-4000:]}")
        found: dict[str, list[float]] = json.loads((folder / "found.json").read_text())
    us = {arm: middle(times) for arm, times in found.items()}
    plain = us[ARMS[0]][0]
    results = [
        Result(f"{arm}: host time of a layer", value, "us", "lower", None, spread)
        for arm, (value, spread) in us.items()
    ]
    for arm in ARMS[1:]:
        goal = GOAL if arm == ARMS[3] else None
        ratio = us[arm][0] / plain
        against = Baseline(ARMS[0], plain)
        results.append(Result(f"{arm} against {ARMS[0]}", ratio, "x", "lower", goal, None, against))
    facts = {"layers": LAYERS, "row_tokens": host_cost.ROW_TOKENS, "rounds": rounds}
    write("plan_cost", results, environment() | facts, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
