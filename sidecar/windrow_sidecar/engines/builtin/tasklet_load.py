"""Imitate a worker's load for the co-run profile: the matrix products of tasklets, no training.

A process of its own, as a worker is one: on the worker's cores, in the idle scheduling class, with
as many threads. It computes what the linear modules of a layer compute forward and back, layer
after layer, so that its weights pass through the caches as a job's do; of LoRA's own products,
attention and the optimizer, a few percent together, it knows nothing.

Each line on standard input is a number of cores; 0 pauses, and is answered with what was computed:
tokens (through the whole model, forward and back) and seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import sys
import time
from collections.abc import Sequence

import torch

from windrow_sidecar.compute.host import HostPartition

# As a tasklet of a small model has; more of them change nothing about what decode feels.
TOKENS = 128
# Weights of so many bytes are made; layers beyond use the same again.
_MOST_BYTES = 1 << 30


def main(argv: Sequence[str] | None = None) -> None:
    """Obey standard input until it ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--hidden", "--intermediate", "--kv", "--layers"):
        parser.add_argument(name, type=int, required=True)
    shape = parser.parse_args(argv)
    with contextlib.suppress(OSError):
        os.nice(19)
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    partition = HostPartition.from_affinity("finetune")
    load = TaskletLoad(shape.hidden, shape.intermediate, shape.kv, shape.layers)
    load.run_one()
    _say("ready")
    tokens, busy_s, units = 0.0, 0.0, 0
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], 0.0 if units else None)
        if ready:
            line = sys.stdin.readline()
            if not line:
                return
            units = int(line)
            if units:
                partition.activate(units)
                tokens, busy_s = 0.0, 0.0
            else:
                _say(f"{tokens} {busy_s}")
            continue
        begin_s = time.monotonic()
        tokens += load.run_one()
        busy_s += time.monotonic() - begin_s


class TaskletLoad:
    """The linear modules of `layers` layers; weights are random."""

    def __init__(self, hidden: int, intermediate: int, kv: int, layers: int) -> None:
        shapes = [(hidden, hidden)] * 2 + [(kv, hidden)] * 2
        shapes += [(intermediate, hidden)] * 2 + [(hidden, intermediate)]
        self._layers = layers
        of_a_layer = 4 * sum(rows * columns for rows, columns in shapes)
        copies = max(1, min(layers, _MOST_BYTES // of_a_layer))
        self._weights = [[torch.randn(shape) * 0.02 for shape in shapes] for _ in range(copies)]
        self._inputs = {n: torch.randn(TOKENS, n) for n in (hidden, intermediate, kv)}
        self._next = 0

    @torch.inference_mode()
    def run_one(self) -> float:
        """One layer, forward and back; returns tokens of the whole model that this amounts to."""
        weights = self._weights[self._next % len(self._weights)]
        self._next += 1
        for weight in weights:
            out = self._inputs[weight.shape[1]] @ weight.T
            out @ weight
        return TOKENS / self._layers


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
