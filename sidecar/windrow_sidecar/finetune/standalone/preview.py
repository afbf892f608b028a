"""Show the tasklets of one step of a job, with bytes and times of this machine.

`windrow plan` starts this and prints it. The model's layers run up and down on the step's first
group, and the optimizer steps, so that bytes and times are measured, not guessed.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from windrow.errors import UserError, WindrowError
from windrow.protocol import error_line
from windrow_sidecar.compute.device import ComputeDevice
from windrow_sidecar.compute.finding import find_device
from windrow_sidecar.finetune.adapter.layer_programs import wanted_program
from windrow_sidecar.finetune.data.outside import agree_on_authorities
from windrow_sidecar.finetune.engine.orders import ORDERS
from windrow_sidecar.finetune.engine.sizing import (
    Estimates,
    Paced,
    TaskletSizing,
    WholeRows,
    Windows,
)
from windrow_sidecar.finetune.job.assembly import (
    MICRO_BATCH_TOKENS,
    JobSpec,
    TaskletRuntime,
    TrainingSession,
    open_session,
    read_job,
)
from windrow_sidecar.finetune.model.boundaries import TorchBoundaries
from windrow_sidecar.finetune.recompute.activation_budget import SavedBytes
from windrow_sidecar.finetune.standalone.dedicated import base_of, take_units
from windrow_sidecar.finetune.standalone.measurement import endless
from windrow_sidecar.finetune.tasklets import PHASE_WORDS, MicroBatch, MicroLimits, Tasklet
from windrow_sidecar.finetune.training.checkpoint import Position
from windrow_sidecar.qos.view import Phase

log = logging.getLogger(__name__)

# Times a micro-batch runs. Bytes are counted the first time, which finds cold caches, and times are
# taken from the others.
ROUNDS = 3


class Preview:
    """A loaded job whose step is planned and measured, not trained.

    Args:
        job: the job.
        sizing: how tasklets are cut; a bound in microseconds asks for what keeps to it.
        order: one of `ORDERS`.
        micro_batches: that visit a layer together.
        units: of the device, in use.
        device: that would compute.
    """

    def __init__(
        self,
        job: JobSpec,
        sizing: TaskletSizing | int,
        order: str,
        micro_batches: int,
        units: int,
        device: ComputeDevice,
    ) -> None:
        self._units, self._device, self._estimates = units, device, Estimates()
        self._sizing: TaskletSizing = WholeRows()
        self._micro_batches = micro_batches
        base = base_of(job, device)
        self.session: TrainingSession = open_session(
            replace(job, spec=endless(job.spec)),
            base,
            TaskletRuntime(
                TorchBoundaries(),
                self._limits,
                sizing=lambda: self._sizing,
                windows=not isinstance(sizing, WholeRows),
                order=ORDERS[order],
                device=device,
                program=wanted_program(),
            ),
        )
        windows = not self.session.stream.parts.stack.windows_refused
        self._measure(sizing if isinstance(sizing, Windows) and windows else WholeRows())
        if isinstance(sizing, int):
            sizing = Paced(self._estimates, sizing, units, windows, queues=device.queues)
        self._sizing = sizing if windows or isinstance(sizing, Paced) else WholeRows()
        self._boundary_bytes = int(base.config.hidden_size) * base.dtype.itemsize
        self._plan = list(self.session.stream.plan())

    @property
    def most_tokens(self) -> int:
        """Padded tokens that are on their way at the same time, at most."""
        on_their_way: dict[MicroBatch, int] = {}
        most = 0
        for tasklet in self._plan:
            if tasklet.micro is None:
                continue
            on_their_way[tasklet.micro] = tasklet.micro.padded_tokens
            most = max(most, sum(on_their_way.values()))
            last = tasklet.layer == 0 and tasklet.window.begin == 0
            if tasklet.phase is Phase.BACKWARD and last:
                del on_their_way[tasklet.micro]
        return most

    def memory(self) -> dict[str, int]:
        """Return what the largest group of the step takes at its peak: bytes by what they are."""
        return self.session.activation_budget.parts(self.most_tokens)

    def graphs(self) -> dict[str, Any] | None:
        """Return what the driver takes for graphs of layers, and how that is known; None: none."""
        found = self.session.stream.parts.stack.graphs
        if found is None or found.refused:
            return None
        measured = found.driver_bytes
        return {"driver_bytes": measured or found.expected_bytes, "measured": bool(measured)}

    def tasklets(self) -> list[dict[str, Any]]:
        """Return the tasklets of the first step in their order."""
        return [self._described(tasklet) for tasklet in self._plan]

    def _limits(self) -> MicroLimits:
        tokens = MICRO_BATCH_TOKENS[self._device.torch.type]
        if isinstance(self._sizing, Paced):
            tokens = self._sizing.tokens(Phase.BACKWARD)
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
        """Return how many bytes more are held after the tasklet than before."""
        a_token = self._boundary_bytes + self._saved
        if tasklet.is_window:
            a_token += self.session.activation_budget.window_bytes_per_token
        of_layer = round(a_token * tasklet.tokens * tasklet.parts)
        return {Phase.FORWARD: of_layer, Phase.BACKWARD: -of_layer}.get(tasklet.phase, 0)

    def _measure(self, sizing: TaskletSizing) -> None:
        """Learn times and bytes on the first group and the optimizer; they leave no trace."""
        stream, self._sizing = self.session.stream, sizing
        start = {name: tensor.clone() for name, tensor in stream.tensors().items()}
        held = SavedBytes(self.session.model)
        for n in range(ROUNDS):
            while (tasklet := stream.peek()) is not None:
                # In the first round alone: it takes time, and compiled layers run eagerly then.
                if n == 0 and tasklet.phase is Phase.FORWARD:
                    with held.watching(tasklet.tokens * tasklet.parts):
                        stream.run(tasklet)
                elif n == 0:
                    stream.run(tasklet)
                else:
                    self._time(tasklet)
                if tasklet.phase is Phase.BACKWARD and stream.between_micro_batches:
                    break
            stream.restore(Position(step=0), {**start})
        self._saved = held.per_token
        rows = {row for at in stream.plan() if at.micro for row in at.micro.rows}
        for _ in range(ROUNDS):
            # Where every row is through, the optimizer is next.
            stream.restore(Position(step=0, committed_rows=tuple(rows)), {**start})
            step = stream.peek()
            assert step is not None
            self._time(step)
        stream.restore(Position(step=0), {**start})

    def _time(self, tasklet: Tasklet) -> None:
        begun = self._device.mark()
        self.session.stream.run(tasklet)
        ended = self._device.mark()
        ended.wait()
        elapsed_us = (ended.at_ns() - begun.at_ns()) / 1e3
        self._estimates.learn(tasklet, self._units, elapsed_us)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan as JSON, or an error."""
    parser = argparse.ArgumentParser(
        prog="python -m windrow_sidecar.finetune.standalone.preview", description=__doc__
    )
    parser.add_argument("--job", type=Path, required=True, help="FinetuneJob manifest")
    parser.add_argument("--model", help="another model directory")
    parser.add_argument("--order", choices=ORDERS, default="layer-major")
    parser.add_argument("--window", type=int, default=0, help="tokens of a row; 0: whole rows")
    parser.add_argument("--bound-ms", type=float, default=0.0, help="on what is in flight")
    parser.add_argument("--micro-batches", type=int, default=1, help="that visit a layer together")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda, or cuda:N")
    parser.add_argument("--units", type=int, help="cores or SMs to use (default: all)")
    options = parser.parse_args(argv)
    sizing: TaskletSizing | int = Windows(options.window) if options.window else WholeRows()
    if options.bound_ms:
        sizing = round(options.bound_ms * 1e3)
    agree_on_authorities()
    try:
        device = find_device(options.device)
        units = take_units(device, options.units)
        job = read_job(options.job)
        if options.model:
            model = job.spec.model.model_copy(update={"name": options.model})
            job = replace(job, spec=job.spec.model_copy(update={"model": model}))
        preview = Preview(job, sizing, options.order, options.micro_batches, units, device)
    except Exception as error:
        # The edge of the process. Its parent reads one stream; the other holds whatever
        # libraries say as they end.
        if not isinstance(error, WindrowError):
            log.exception("no plan")
        print(json.dumps(error_line(error)))
        return 2 if isinstance(error, UserError) else 1
    plan = {
        "model": job.spec.model.name,
        "device": device.name,
        "order": options.order,
        "layers": preview.session.stream.parts.stack.depth,
        "units": units,
        "layer_program": preview.session.stream.parts.stack.program,
        "layer_program_why": preview.session.program_why,
        "graphs": preview.graphs(),
        "packing": preview.session.packing_told,
        "windows_refused": preview.session.stream.parts.stack.windows_refused,
        "tokens_at_once": preview.most_tokens,
        "memory": preview.memory(),
        "tasklets": preview.tasklets(),
    }
    print(json.dumps(plan))
    return 0


if __name__ == "__main__":
    sys.exit(main())
