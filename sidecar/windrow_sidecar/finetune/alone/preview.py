"""What a step of a job would run: its tasklets as data, with bytes and times of this machine.

`windrow plan` starts this and prints it. The model's layers run once up and down on the step's
first micro-batch, so that bytes and times are measured, not guessed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from windrow.errors import UserError
from windrow_sidecar.finetune.alone.dedicated import MICRO_BATCH_TOKENS, take_cores
from windrow_sidecar.finetune.alone.measurement import endless
from windrow_sidecar.finetune.base.model import find_model, load_base
from windrow_sidecar.finetune.checkpoints.checkpoint import Position
from windrow_sidecar.finetune.job import Job, Session, open_session, read_job
from windrow_sidecar.finetune.layers.boundaries import TorchBoundaries
from windrow_sidecar.finetune.plan.estimates import Estimates
from windrow_sidecar.finetune.plan.grain import Grain, Paced, WholeRows, Windows
from windrow_sidecar.finetune.plan.orders import ORDERS
from windrow_sidecar.finetune.stream import MicroLimits
from windrow_sidecar.finetune.tasklets import PHASE_WORDS, Tasklet
from windrow_sidecar.qos.view import Phase

# Times a micro-batch runs: the first one finds cold caches.
ROUNDS = 3


class Preview:
    """A job that is looked at, not run.

    Args:
        job: the job.
        grain: how tasklets are cut; a bound in microseconds asks for what keeps to it.
        order: one of `ORDERS`.
        micro_batches: that visit a layer together.
        units: cores in use.
    """

    def __init__(
        self, job: Job, grain: Grain | int, order: str, micro_batches: int, units: int
    ) -> None:
        self._units, self._estimates = units, Estimates()
        self._grain: Grain = WholeRows()
        self._micro_batches = micro_batches
        base = load_base(find_model(job.spec.model.name, job.spec.model.revision))
        self.session: Session = open_session(
            replace(job, spec=endless(job.spec)),
            base,
            boundaries=TorchBoundaries(),
            limits=self._limits,
            grain=lambda: self._grain,
            order=ORDERS[order],
        )
        windows = not self.session.stream.windows_refused
        self._measure(grain if isinstance(grain, Windows) and windows else WholeRows())
        if isinstance(grain, int):
            grain = Paced(self._estimates, grain, units, windows)
        self._grain = grain if windows or isinstance(grain, Paced) else WholeRows()
        hidden = int(base.config.hidden_size)
        self._boundary_bytes = hidden * next(base.model.parameters()).element_size()

    def tasklets(self) -> list[dict[str, Any]]:
        """Return the tasklets of the first step in their order."""
        return [self._described(tasklet) for tasklet in self.session.stream.plan()]

    def _limits(self) -> MicroLimits:
        tokens = MICRO_BATCH_TOKENS["cpu"]
        if isinstance(self._grain, Paced):
            tokens = self._grain.tokens(Phase.BACKWARD)
        return MicroLimits(tokens, micro_batches=self._micro_batches)

    def _described(self, tasklet: Tasklet) -> dict[str, Any]:
        return {
            "phase": PHASE_WORDS[tasklet.phase],
            "layers": [tasklet.layer, tasklet.layer_end],
            "tokens": [tasklet.window.begin, tasklet.window.end],
            "rows": list(tasklet.micro.rows) if tasklet.micro else [],
            "bytes": self._bytes(tasklet),
            "estimate_us": self._estimates.estimate_us(tasklet, self._units),
        }

    def _bytes(self, tasklet: Tasklet) -> int:
        """How many bytes more are held after the tasklet than before."""
        of_layer = round((self._boundary_bytes + self._saved) * tasklet.tokens * tasklet.parts)
        return {Phase.FORWARD: of_layer, Phase.BACKWARD: -of_layer}.get(tasklet.phase, 0)

    def _measure(self, grain: Grain) -> None:
        """Learn times and bytes on the first group, which leaves no trace."""
        stream, self._grain = self.session.stream, grain
        start = {name: tensor.clone() for name, tensor in stream.tensors().items()}
        held = _Held({p.untyped_storage().data_ptr() for p in self.session.model.parameters()})
        for _ in range(ROUNDS):
            while (tasklet := stream.peek()) is not None:
                held.watch(tasklet)
                begun = time.perf_counter_ns()
                with torch.autograd.graph.saved_tensors_hooks(held.note, lambda saved: saved):
                    stream.run(tasklet)
                elapsed_us = (time.perf_counter_ns() - begun) / 1e3
                self._estimates.learn(tasklet, self._units, elapsed_us)
                if tasklet.phase is Phase.BACKWARD and stream.between_micro_batches:
                    break
            stream.restore(Position(step=0), {**start})
        self._saved = held.per_token


class _Held:
    """What autograd keeps of forwards, apart from parameters (by their memory)."""

    def __init__(self, parameters: set[int]) -> None:
        self._parameters = parameters
        self._n_bytes = self._tokens = 0
        self._known: set[int] | None = None  # of the forward that runs

    def watch(self, tasklet: Tasklet) -> None:
        """Say what runs next."""
        forward = tasklet.phase is Phase.FORWARD
        self._tokens += tasklet.tokens * tasklet.parts if forward else 0
        self._known = set(self._parameters) if forward else None

    def note(self, tensor: Tensor) -> Tensor:
        """Count a tensor once (a hook of autograd)."""
        at = tensor.untyped_storage().data_ptr()
        if self._known is not None and at not in self._known:
            self._known.add(at)
            self._n_bytes += tensor.numel() * tensor.element_size()
        return tensor

    @property
    def per_token(self) -> float:
        """Bytes for each token of each layer."""
        return self._n_bytes / max(1, self._tokens)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m windrow_sidecar.finetune.alone.preview", description=__doc__
    )
    parser.add_argument("--job", type=Path, required=True, help="FinetuneJob manifest")
    parser.add_argument("--model", help="another model directory")
    parser.add_argument("--order", choices=ORDERS, default="layer-major")
    parser.add_argument("--window", type=int, default=0, help="tokens of a row; 0: whole rows")
    parser.add_argument("--bound-ms", type=float, default=0.0, help="on what is in flight")
    parser.add_argument("--micro-batches", type=int, default=1, help="that visit a layer together")
    parser.add_argument("--units", type=int, help="cores to use (default: all)")
    options = parser.parse_args(argv)
    units = take_cores(options.units)
    grain: Grain | int = Windows(options.window) if options.window else WholeRows()
    if options.bound_ms:
        grain = round(options.bound_ms * 1e3)
    try:
        job = read_job(options.job)
        if options.model:
            model = job.spec.model.model_copy(update={"name": options.model})
            job = replace(job, spec=job.spec.model_copy(update={"model": model}))
        preview = Preview(job, grain, options.order, options.micro_batches, units)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    plan = {
        "model": job.spec.model.name,
        "order": options.order,
        "layers": preview.session.stream.depth,
        "units": units,
        "windows_refused": preview.session.stream.windows_refused,
        "tasklets": preview.tasklets(),
    }
    print(json.dumps(plan))
    return 0


if __name__ == "__main__":
    sys.exit(main())
