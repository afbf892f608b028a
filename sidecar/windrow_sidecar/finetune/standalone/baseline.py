"""The baseline: a plain training loop over the same job with peft and torch alone.

It is written as people write it, and well: rows padded to the longest of the batch, one forward and
backward per step, fused AdamW, all threads that it is given.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from windrow.errors import UserError
from windrow.eventlog import EventLog, MarkEvent, TaskletEvent
from windrow.outputs import OWN_FOLDER
from windrow_sidecar.compute.device import ComputeDevice
from windrow_sidecar.compute.finding import find_device
from windrow_sidecar.finetune.adapter.adapters import add_adapter, trainable
from windrow_sidecar.finetune.data.split import IGNORED, BatchPlan, Example
from windrow_sidecar.finetune.job.assembly import JobSpec, read_examples, read_job
from windrow_sidecar.finetune.standalone.dedicated import base_of, take_units
from windrow_sidecar.finetune.standalone.measurement import Step, endless, measure
from windrow_sidecar.finetune.training.optimizer import Schedule, adamw


class PlainLoop:
    """A plain training loop over rows that are learnt as they are, one optimizer step a call.

    Raises:
        UserError: the job's method needs another loss.
    """

    def __init__(
        self,
        job: JobSpec,
        events: EventLog,
        units: int,
        device: ComputeDevice,
        *,
        checkpointing: bool = False,
        random_weights: int | None = None,
    ) -> None:
        training, self._device = job.spec.training, device
        if training.method != "sft":
            # Trained on as they come, the rows of a pair would both be learnt.
            raise UserError(
                f"the plain loop knows no loss for training.method {training.method}",
                field="spec.training.method",
                remedy="Measure it with `windrow finetune --seconds`, or write method: sft.",
            )
        # What comes from here on is the loop's own: a device would have to hold it.
        events.append(
            MarkEvent(time.monotonic_ns(), "resident-before-model", str(resident_bytes()))
        )
        base, spec = base_of(job, device, random_weights=random_weights), job.spec
        self._rows = read_examples(job, base).train
        self._model = add_adapter(base.model, spec).train()
        if checkpointing:
            self._model.gradient_checkpointing_enable({"use_reentrant": False})
        self._parameters = list(trainable(self._model).values())
        self._plan = BatchPlan(len(self._rows), training.batch_size, training.seed)
        self._adamw = adamw(self._parameters, training.optimizer)
        total = self._plan.total_steps(epochs=training.epochs, max_steps=training.max_steps)
        self._schedule = Schedule(
            training.schedule, training.learning_rate, total, training.warmup_ratio
        )
        self._job, self._events, self._units = job, events, units
        self._steps = self._tokens = 0

    def step(self) -> Step:
        """Train on the next batch."""
        start_ns = time.monotonic_ns()
        rows = [self._rows[row] for row in self._plan.rows_of(self._steps)]
        ids, mask, labels = (x.to(self._device.torch) for x in collate(rows))
        self._adamw.zero_grad(set_to_none=True)
        loss = self._model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(
            self._parameters, self._job.spec.training.optimizer.max_gradient_norm
        )
        for group in self._adamw.param_groups:
            group["lr"] = self._schedule.rate(self._steps)
        self._adamw.step()
        self._device.mark().wait()
        done = Step(sum(row.length for row in rows), float(loss.detach()), float(norm))
        self._tokens += done.tokens
        job = self._job
        self._events.append(
            TaskletEvent(
                job.uid,
                job.epoch,
                self._steps,
                "opt",
                0,
                done.tokens,
                self._tokens,
                start_ns,
                time.monotonic_ns(),
                self._units,
            )
        )
        self._events.flush()  # it may be stopped or killed at any moment
        self._steps += 1
        return done


def resident_bytes() -> int:
    """Return the memory that this process holds now, its libraries included."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def collate(rows: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, attention mask and labels, each [rows, longest], padded on the right."""
    width = max(row.length for row in rows)
    pads = [width - row.length for row in rows]
    ids = [row.ids + (0,) * pad for row, pad in zip(rows, pads, strict=True)]
    mask = [[1] * row.length + [0] * pad for row, pad in zip(rows, pads, strict=True)]
    labels = [row.labels + (IGNORED,) * pad for row, pad in zip(rows, pads, strict=True)]
    return torch.tensor(ids), torch.tensor(mask), torch.tensor(labels)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the loop; writes the same JSON as `worker --standalone --seconds`."""
    parser = argparse.ArgumentParser(
        prog="python -m windrow_sidecar.finetune.standalone.baseline", description=__doc__
    )
    parser.add_argument("--job", type=Path, required=True, help="FinetuneJob manifest or job.json")
    parser.add_argument("--seconds", type=float, help="stop after so long")
    parser.add_argument("--steps", type=int, help="stop after so many steps")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda, or cuda:N")
    parser.add_argument("--units", type=int, help="cores or SMs to use (default: all)")
    parser.add_argument(
        "--gradient-checkpointing", action="store_true", help="keep only activations between layers"
    )
    parser.add_argument(
        "--idle-class", action="store_true", help="run as SCHED_IDLE, behind whatever else wants to"
    )
    parser.add_argument("--random-weights", type=int, metavar="SEED", help="make weights up")
    parser.add_argument("--json", type=Path, help="write what was measured there")
    parser.add_argument("--log-dir", type=Path, help="event log goes there")
    options = parser.parse_args(argv)
    if options.seconds is None and options.steps is None:
        parser.error("wanted: --seconds or --steps")
    if options.idle_class:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    try:
        device = find_device(options.device)
        units = take_units(device, options.units)
        job = read_job(options.job)
        folder = options.log_dir or job.destination / OWN_FOLDER / job.uid
        events = EventLog(folder / f"baseline-{os.getpid()}.events.jsonl", source="baseline")
        loop = PlainLoop(
            replace(job, spec=endless(job.spec)),
            events,
            units,
            device,
            checkpointing=options.gradient_checkpointing,
            random_weights=options.random_weights,
        )
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    measured = measure(
        loop.step, engine="peft", units=units, seconds=options.seconds, steps=options.steps
    )
    events.flush()
    measured.write(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
