"""Choose the TPOT objective of a load: twice the step of decode alone, at its 90th percentile.

The batch that a load makes depends on how fast steps are, so it is not read off the arrivals: the
schedule is played through the profile's solo model, step by step, with decode alone on the device.
The percentile is of its busy time, and of the step rather than of the batch: where prompts are long
and answers short, a step follows the context, and one at the p90 batch with a median context is one
that decode alone passes in a quarter of its steps.

A profile is taken in quiet, step after step with the same batch. Under a load that arrives over
HTTP the same steps take longer (1.2 to 1.7 times as long on two cores: clients and front use the
caches in between), so the model is first brought to the pace of live steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from windrow.crd import LatencyProfileSpec, SoloModel
from windrow.errors import UserError
from windrow.eventlog import StepEvent
from windrow_lab.load.trace import TraceRequest

FACTOR = 2.0
PERCENTILE = 0.9
# A decode instance in the middle of its range: the Azure trace keeps 5.8 requests in the batch
# of an unthrottled instance. Far above, a small device is merely overloaded; far below, it is idle
# and any way of sharing looks well.
WANTED_BATCH = 6.0
# What has to stay in range is the batch of the machine's slow minutes: shared cores change their
# pace by a quarter from one minute to the next. A step of this engine grows with its batch almost
# from the first request on (a GPU's does not), so a batch near saturation follows the pace many
# times over, and then not even decode alone holds twice its own step.
SLOW_MINUTES = 1.25
HIGHEST_RATE = 4.0


@dataclass(frozen=True)
class LoadShape:
    """Shape of decode's load, were it alone."""

    mean_batch: float  # over busy time
    p90_step_us: float  # that 90% of busy time stays within; with its batch and context:
    p90_batch: int
    p90_context_tokens: int
    steps: int
    busy_s: float


@dataclass(frozen=True)
class Objective:
    """A TPOT objective and how it came about."""

    milliseconds: float
    shape: LoadShape
    pace: float  # live steps against the profile's

    @property
    def solo_ms(self) -> float:
        """The step of decode alone that the rule takes a multiple of."""
        return self.shape.p90_step_us / 1000

    def told(self, factor: float) -> dict[str, Any]:
        """Return how the rule came to it, with that factor, as the files of a run have it."""
        return {
            "rule": f"{factor:g} x the step of decode alone at the 90th percentile of its busy "
            "time, at the pace of live steps",
            "pace": round(self.pace, 3),
            "solo_step_ms": round(self.solo_ms, 3),
            "p90_batch": self.shape.p90_batch,
            "p90_context_tokens": self.shape.p90_context_tokens,
            "predicted_mean_batch": round(self.shape.mean_batch, 2),
        }

    def times(self, factor: float) -> Objective:
        """Return the objective of the same load that is `factor` times the solo step."""
        return replace(self, milliseconds=_rounded_up(factor * self.solo_ms))


def solo_model(profile: LatencyProfileSpec) -> SoloModel:
    """Return the model of decode alone on the whole device."""
    if not profile.solo:
        raise UserError(
            "holds no solo model",
            field=f"LatencyProfile {profile.key}",
            remedy="Delete it: the next decode pod of this kind takes it again.",
        )
    return max(profile.solo, key=lambda model: model.units)


def pace_of(steps: Iterable[StepEvent], model: SoloModel) -> float:
    """Return how many times as long as the model says steps of decode alone take, at the median.

    Steps that admitted a request are left out, as the profile leaves them out, and so are those on
    a part of the device. Without any step: 1.
    """
    ratios = [
        (step.end_ns - step.start_ns) / 1e3 / model.predict_us(step.batch, step.context_tokens)
        for step in steps
        if not step.admitted and not step.prefill_tokens and step.decode_units >= model.units
    ]
    return median(ratios) if ratios else 1.0


def at_pace(model: SoloModel, pace: float) -> SoloModel:
    """Return the model of steps that take `pace` times as long."""
    slower = {name: getattr(model, name) * pace for name in ("c0_us", "b0_us", "k0_ns_per_token")}
    return model.model_copy(update=slower)


def play(requests: Sequence[TraceRequest], model: SoloModel) -> LoadShape:
    """Play one device's schedule through the model.

    Each step gives every request of the batch one token; arrivals join at the next step.
    """
    batches: list[tuple[int, int, float]] = []  # batch, context tokens, seconds
    ends_at: dict[int, int] = {}  # step -> how many requests end with it
    leaving_context: dict[int, int] = {}
    now_s, step, batch, context, next_arrival = 0.0, 0, 0, 0, 0
    while batch or next_arrival < len(requests):
        if not batch:
            now_s = max(now_s, requests[next_arrival].at_s)
        while next_arrival < len(requests) and requests[next_arrival].at_s <= now_s:
            request = requests[next_arrival]
            tokens = max(1, request.output_tokens)
            last = step + tokens - 1
            ends_at[last] = ends_at.get(last, 0) + 1
            leaving_context[last] = leaving_context.get(last, 0) + request.prompt_tokens + tokens
            batch += 1
            context += request.prompt_tokens
            next_arrival += 1
        seconds = model.predict_us(batch, context) / 1e6
        batches.append((batch, context, seconds))
        now_s += seconds
        context += batch - leaving_context.pop(step, 0)
        batch -= ends_at.pop(step, 0)
        step += 1
    return _shape(batches)


def _shape(batches: list[tuple[int, int, float]]) -> LoadShape:
    busy_s = sum(seconds for _, _, seconds in batches)
    if not batches:
        raise UserError(
            "no request arrives", field="--seconds", remedy="Ask for a longer run or more load."
        )
    reached_s, at_p90 = 0.0, batches[0]
    for at_p90 in sorted(batches, key=lambda step: step[2]):
        reached_s += at_p90[2]
        if reached_s >= PERCENTILE * busy_s:
            break
    return LoadShape(
        mean_batch=sum(batch * seconds for batch, _, seconds in batches) / busy_s,
        p90_step_us=at_p90[2] * 1e6,
        p90_batch=at_p90[0],
        p90_context_tokens=at_p90[1],
        steps=len(batches),
        busy_s=busy_s,
    )


def bearable_rate(
    schedule_at: Callable[[float], Sequence[TraceRequest]], model: SoloModel
) -> float:
    """Return the highest rate at which the mean batch of busy time stays in range, slow or not.

    `schedule_at` gives one device's schedule at a rate. Steps of 5%, so that small differences
    between two profiles of one machine seldom change the load.
    """
    slow = at_pace(model, SLOW_MINUTES)
    lowest, highest = 1, round(20 * HIGHEST_RATE)
    while lowest < highest:
        middle = (lowest + highest + 1) // 2
        requests = schedule_at(middle / 20)
        if requests and play(requests, slow).mean_batch > WANTED_BATCH:
            highest = middle - 1
        else:
            lowest = middle
    return lowest / 20


def objective_for(
    requests: Sequence[TraceRequest], model: SoloModel, pace: float = 1.0, factor: float = FACTOR
) -> Objective:
    """Return `factor` times the p90 solo step of one device's schedule.

    Rounded up to a tenth of a millisecond. `pace`: see `pace_of`. Raises UserError for an empty
    schedule.
    """
    live = at_pace(model, pace)
    shape = play(requests, live)
    return Objective(_rounded_up(factor * shape.p90_step_us / 1000), shape, pace)


def _rounded_up(milliseconds: float) -> float:
    return math.ceil(milliseconds * 10 - 1e-9) / 10
