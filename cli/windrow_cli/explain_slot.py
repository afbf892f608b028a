"""Explain what a slot does now, and why, from what the API server knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from windrow_cli.explain_job import story_of

if TYPE_CHECKING:
    from windrow.views import EventView, SlotView


_BASES = {
    "measured": " (measured here)",
    "profiled": " (by the latency profile; no worker has run here yet)",
    "derived": " (derived from decode's own steps; no worker has run here yet)",
}


@dataclass(frozen=True, slots=True)
class SlotExplanation:
    """Explanation of what a slot does, and why.

    Attributes:
        slot: namespace/name.
        because: reason and message of its condition Ready.
        rule: policy and mode, in words.
        serving: latency of decode against the objective, in words.
        shared: what the worker has, and what a job would get, in words.
        job: namespace/name; empty: none.
        decisions: the command that tells single decisions; its container is `windrow-1` or of a
            higher number where it was attached, `windrow` where it is a native sidecar.
        story: what has happened, oldest first.
    """

    slot: str
    because: str
    rule: str
    serving: str
    shared: str
    job: str
    decisions: str
    story: Sequence[str]


def explain_slot(slot: SlotView, events: Sequence[EventView], now: datetime) -> SlotExplanation:
    """Return the explanation of a slot."""
    heard = slot.reported
    return SlotExplanation(
        slot=f"{slot.namespace}/{slot.name}",
        because=slot.why,
        rule=f"{slot.policy}, mode {slot.mode}" if slot.policy else "no policy selects its pod",
        serving=_serving(slot) if heard else "its sidecar does not report",
        shared=_shared(slot) if heard else "",
        job=_jobs(slot),
        decisions=f"kubectl -n {slot.namespace} exec {slot.pod} -c SIDECAR -- "
        "windrow explain /run/windrow",
        story=story_of(events, now),
    )


def _serving(slot: SlotView) -> str:
    objective = f" of {slot.objective_s * 1e3:.1f} ms" if slot.objective_s else ""
    if not slot.tpot_p99_s:
        tpot = f"idle, objective{objective.removeprefix(' of')}" if objective else "idle"
    else:
        tpot = f"p99 {slot.tpot_p99_s * 1e3:.1f} ms{objective}"
    over = slot.steps_over_objective / slot.steps if slot.steps else 0.0
    late = f", {over:.2%} of its steps over the objective" if slot.steps else ""
    return f"{tpot}, batch {slot.batch}, {slot.waiting} waiting{late}"


def _shared(slot: SlotView) -> str:
    parts = [
        f"{slot.finetune_units} of {slot.compute_units} units and {slot.chunks.lent} of "
        f"{slot.chunks.total} chunks for the worker"
    ]
    if slot.predicted_tokens_per_second:
        basis = _BASES.get(slot.predicted_from, "")
        parts.append(f"{slot.predicted_tokens_per_second:,.0f} tokens/s to gather{basis}")
    if slot.ranks > 1:
        uneven = f" ({slot.ranks_differ})" if slot.ranks_differ else ""
        parts.append(f"decode and worker on {slot.ranks} ranks{uneven}")
    parts += [said for said in (slot.breaker, slot.sharing) if said]
    return "; ".join(parts)


def _jobs(slot: SlotView) -> str:
    if not slot.joined:
        return slot.job
    return f"{slot.job}; the rows of {slot.joined} pass in the same tasklets"


def text_of(explanation: SlotExplanation) -> str:
    """Return an explanation for people."""
    rows = (
        ("policy", explanation.rule),
        ("decode", explanation.serving),
        ("shared", explanation.shared),
        ("job", explanation.job or "none"),
        ("decisions", explanation.decisions),
    )
    lines = [f"{explanation.slot} is {explanation.because}"]
    lines += [f"{name:<9} {words}" for name, words in rows if words]
    lines.append("story")
    lines += [f"  {line}" for line in explanation.story] or [
        "  nothing has happened in the last hour"
    ]
    return "\n".join(lines)
