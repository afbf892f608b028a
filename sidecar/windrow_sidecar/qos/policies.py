"""The policies by their names. `csrc/src/policies.cpp` defines each: source, rule, departures.

Engines, simulator and tools run the same ones; here they are asked one at a time, for tests and
drawings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from windrow.errors import UserError
from windrow_sidecar import _core
from windrow_sidecar.qos.levels import Partitioning
from windrow_sidecar.qos.view import Grant, Offer, View

POLICIES: tuple[str, ...] = _core.POLICIES
# Constants of policies and predictor, by their names in `policies.h`. A controller and a predictor
# take them when they are made, so that a benchmark can try another value.
FIGURES: dict[str, float] = dict(_core.DECISION_FIGURES)
# `Context.current` while decode and worker take turns on the whole device.
IN_TURNS = -1


class Context(NamedTuple):
    """Facts that a policy may know besides view and offer (`PolicyContext` in `policies.h`).

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
        due_ns: when the first waiting request is due, where any has a bound of its own; 0: none.
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
    due_ns: int = 0
    chunk_bytes: int = 0
    taught: bool = True


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy of that name, asked without a slot."""

    name: str

    def decide(self, view: View, offer: Offer, ctx: Context) -> Grant:
        """Return its answer. It has no side effects, and no more than `ctx` allows."""
        levels = ctx.levels
        answer = _core.ask_policy(
            self.name,
            view,
            offer,
            figures=FIGURES,
            units=levels.units,
            splits=levels.pairs,
            offered=levels.offered,
            **{name: value for name, value in ctx._asdict().items() if name != "levels"},
        )
        return Grant._make(answer)


def make_policy(name: str) -> Policy:
    """Return the policy of that name.

    Raises:
        UserError: there is none.
    """
    if name not in POLICIES:
        raise UserError(
            f"there is no policy {name!r}",
            field="spec.policy",
            remedy=f"Choose one of: {', '.join(sorted(POLICIES))}.",
            reason="UnknownPolicy",
        )
    return Policy(name)
