"""Measure tokens a second of optimizer steps, the same way for our engine and the baseline."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from windrow.crd import FinetuneJobSpec


@dataclass(frozen=True, slots=True)
class Step:
    """Tokens, loss and gradient norm, before clipping, of one finished optimizer step."""

    tokens: int  # real ones
    loss: float
    gradient_norm: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """Steps and seconds, without loading and without the first step, which warms up.

    Attributes:
        layer_program: by which layers ran; "" where they have no choice.
        layer_program_why: why by another one than was asked for.
        graph_bytes: that the driver has taken for graphs of layers.
        graph_bytes_expected: that it was expected to take for one shape on one share.
    """

    engine: str
    units: int
    steps: int
    tokens: int
    seconds: float
    tokens_per_second: float
    step_seconds_median: float
    loss_first: float
    loss_last: float
    gradient_norm_last: float
    layer_program: str = ""
    layer_program_why: str = ""
    graph_bytes: int = 0
    graph_bytes_expected: int = 0

    def write(self, to: Path | None) -> None:
        """Print it as JSON, and write it where a file is named."""
        text = json.dumps(asdict(self), indent=2)
        print(text)
        if to is not None:
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_text(text + "\n")


def measure(
    run_step: Callable[[], Step],
    *,
    engine: str,
    units: int,
    seconds: float | None,
    steps: int | None,
    clock: Callable[[], float] = time.monotonic,
) -> Measurement:
    """Run steps until one of the bounds is reached (at least one step counts)."""
    run_step()
    done: list[Step] = []
    times: list[float] = []
    begun = last = clock()
    while not done or not _enough(len(done), last - begun, steps, seconds):
        done.append(run_step())
        now = clock()
        times.append(now - last)
        last = now
    tokens = sum(step.tokens for step in done)
    return Measurement(
        engine=engine,
        units=units,
        steps=len(done),
        tokens=tokens,
        seconds=last - begun,
        tokens_per_second=tokens / (last - begun),
        step_seconds_median=statistics.median(times),
        loss_first=done[0].loss,
        loss_last=done[-1].loss,
        gradient_norm_last=done[-1].gradient_norm,
    )


def endless(spec: FinetuneJobSpec) -> FinetuneJobSpec:
    """Return a job's spec for a measurement: it never ends, and evaluates nothing."""
    return spec.model_copy(
        update={
            "training": spec.training.model_copy(update={"epochs": None, "max_steps": 10**8}),
            "dataset": spec.dataset.model_copy(update={"eval_fraction": 0.0, "eval_source": None}),
        }
    )


def _enough(done: int, elapsed: float, steps: int | None, seconds: float | None) -> bool:
    return (steps is not None and done >= steps) or (seconds is not None and elapsed >= seconds)
