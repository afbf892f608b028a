"""The interface of a policy: a pure function from view, offer and context to a grant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

from windrow_sidecar.qos.levels import Partitioning, PartitionLevel
from windrow_sidecar.qos.view import Action, Grant, Offer, Phase, View

# `Context.current` while decode and worker take turns on the whole device.
IN_TURNS = -1
# One forward, and a backward that costs twice as much: what a micro-batch does in each layer.
PASSES = 3


class Context(NamedTuple):
    """Context of a policy besides view and offer; everything it has for a memory.

    A named tuple, since each decision makes one: a frozen dataclass takes five times as long.

    Attributes:
        levels: the splits of this device.
        allowed: only the first so many splits are within the limits; at least 1 (decode alone).
        idle_units: what the worker may have while decode computes nothing, within the limits.
        predicted_us: of the next step under each split, without margin.
        margin: of the prediction, relative: predictor's and guard's together.
        current: index of the split that was granted last; 0 while the worker is paused, `IN_TURNS`
            while both take turns.
        per_request: the objective is judged over a request's whole life, not step by step.
        in_flight_bound_us: how much work the worker may have launched at any time.
        solo_us: of the next step on the units that decode has under each split, without a worker.
        layers: of decode's model.
        gaps: the engine can begin a step later than it could (`Grant.gap_until_ns`).
        deferral_us: how long a request may be held back before it is admitted.
        chunk_bytes: of the arena; 0: unknown.
        taught: enough steps beside a share throughout have said what a worker costs.
    """

    levels: Partitioning
    allowed: int
    idle_units: int
    predicted_us: Sequence[float]
    margin: float
    current: int
    per_request: bool
    in_flight_bound_us: int
    solo_us: Sequence[float]
    layers: int = 1
    gaps: bool = False
    deferral_us: int = 400_000
    chunk_bytes: int = 0
    taught: bool = True


class Policy(Protocol):
    """Decides before a step of decode, in the decode process: it has microseconds.

    What runs there is its twin in `csrc/src/policies.cpp`, which a test holds equal to it.

    Attributes:
        option: the variant that was asked for instead of the default; "" where it is the default.
    """

    name: ClassVar[str]

    @property
    def option(self) -> str:  # noqa: D102 - see above
        ...

    def decide(self, view: View, offer: Offer, ctx: Context) -> Grant:
        """Answer without side effects, and never with more than `ctx` allows."""
        ...


def has_work(offer: Offer) -> bool:
    """Return whether a worker is there that could run its next tasklet."""
    return offer.job_epoch > 0 and not offer.starving


def bound_us(view: View, ctx: Context) -> float:
    """Return the bound of a prediction with which the step stays within the objective."""
    return view.objective_us / (1 + ctx.margin)


def tasklet_us(offer: Offer, ctx: Context, units: int) -> int:
    """Return how long the worker's next tasklet takes on so many units; 0: not known."""
    return offer.estimates_us[ctx.levels.offered_index(units)]


def iteration_us(offer: Offer, ctx: Context) -> float:
    """Return about how long a micro-batch takes on the whole device, both ways; 0: not known.

    From the next tasklet's layers: both sides have the same model, and all layers cost alike.
    """
    layers = offer.layer_end - offer.layer_begin
    if layers < 1 or not ctx.idle_units:
        return 0.0
    weight = 2 if offer.phase == Phase.BACKWARD else 1
    return PASSES * ctx.layers * tasklet_us(offer, ctx, ctx.idle_units) / (layers * weight)


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


def is_for_one_step(grant: Grant) -> bool:
    """Return whether one step uses up a grant; any other holds until something changes."""
    return bool(
        grant.budget_us or grant.n_tasklets or grant.gap_until_ns or grant.hold_admission_until_ns
    )


def beside_us(bound: float, solo: float, beside: float) -> float:
    """Return how long a worker may run beside one step that must take no longer than `bound`.

    A step that takes `solo` alone and `beside` with the worker at its side throughout takes
    solo + w * (1 - solo / beside) when the worker runs for w of it.
    """
    if solo >= bound:
        return 0.0
    return beside if beside <= bound else (bound - solo) * beside / (beside - solo)


def in_turns(view: View, ctx: Context, gap_us: float) -> Grant:
    """The worker on all that the limits leave it until `gap_us` from the step's start; then decode.

    Its tasklets are half of the gap at most, or little of it could be used.
    """
    return Grant(
        Action.GO,
        ctx.idle_units,
        ctx.levels.units,
        predicted_us=int(ctx.solo_us[0] + gap_us),
        in_flight_bound_us=max(1, min(ctx.in_flight_bound_us, int(gap_us / 2))),
        gap_until_ns=view.start_ns + int(gap_us * 1000),
    )


def effective_units(grant: Grant, view: View, offer: Offer, ctx: Context) -> float:
    """Units that the worker has under a grant, on average over the step: those of turns in part."""
    if grant.action != Action.GO:
        return 0.0
    part = 1.0
    step_us = max(1, grant.predicted_us)
    if grant.gap_until_ns:
        part = (grant.gap_until_ns - view.start_ns) / 1000 / step_us
    elif grant.budget_us:
        part = grant.budget_us / step_us
    elif grant.n_tasklets and (one_us := tasklet_us(offer, ctx, grant.finetune_units)):
        part = grant.n_tasklets * one_us / step_us
    return grant.finetune_units * min(1.0, part)


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
