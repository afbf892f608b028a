"""What a policy is: a pure function from view, offer and context to a decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from windrow_sidecar.qos.levels import Partitioning, PartitionLevel
from windrow_sidecar.qos.view import Action, Grant, Offer, View


@dataclass(frozen=True, slots=True)
class Context:
    """What a policy may know besides view and offer; everything it has for a memory.

    Attributes:
        levels: the splits of this device.
        allowed: only the first so many splits are within the limits; at least 1 (decode alone).
        idle_units: what the worker may have while decode is idle, within the limits.
        predicted_us: of the next step under each split, without margin.
        margin: of the prediction, relative: predictor's and guard's together.
        current: index of the split that was granted last; 0 while the worker is paused.
        since_switch_ns: how long ago that changed.
        per_request: the objective is judged over a request's whole life, not step by step.
        in_flight_bound_us: how much work the worker may have launched at any time.
    """

    levels: Partitioning
    allowed: int
    idle_units: int
    predicted_us: Sequence[float]
    margin: float
    current: int
    since_switch_ns: int
    per_request: bool
    in_flight_bound_us: int


class Policy(Protocol):
    """Decides before a step of decode, in the decode process: it has microseconds."""

    name: ClassVar[str]

    def decide(self, view: View, offer: Offer, ctx: Context) -> Grant:
        """Answer without side effects, and never with more than `ctx` allows."""
        ...


def has_work(offer: Offer) -> bool:
    """Whether a worker is there that could run its next tasklet."""
    return offer.job_epoch > 0 and not offer.starving


def alone(ctx: Context) -> Grant:
    """Decode on all units, the worker paused."""
    return Grant(Action.PAUSE, 0, ctx.levels.units, predicted_us=int(ctx.predicted_us[0]))


def share(ctx: Context, index: int) -> Grant:
    """Both at work under that split."""
    split: PartitionLevel = ctx.levels.splits[index]
    return Grant(
        Action.GO,
        split.finetune_units,
        split.decode_units,
        predicted_us=int(ctx.predicted_us[index]),
        in_flight_bound_us=ctx.in_flight_bound_us,
    )


def decode_idle(ctx: Context) -> Grant:
    """The worker gets what the limits let it have, if they leave it anything.

    Decode keeps its narrowest share, so that its first step meets no second team on its units.
    """
    if not ctx.idle_units:
        return alone(ctx)
    return Grant(
        Action.GO,
        ctx.idle_units,
        min(s.decode_units for s in ctx.levels.splits[: ctx.allowed]),
        in_flight_bound_us=ctx.in_flight_bound_us,
    )
