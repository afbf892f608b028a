"""Answer Kueue's admission checks from the predicted headroom of slots: pure functions.

An AdmissionCheck with the controller `windrow.dev/headroom` keeps the jobs of a ClusterQueue out
of it until a slot would take them. Kueue asks once a job has quota; `Ready` admits it, `Retry`
gives its quota to others for a while.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from windrow.conditions import Status, get_condition, is_true, set_condition, timestamp
from windrow.crd import GROUP
from windrow_operator.model import Base, Holder, Job
from windrow_operator.planning import NoPlacement, place, rate
from windrow_operator.slot_table import SlotTable

Body = Mapping[str, Any]

CONTROLLER: Final = f"{GROUP}/headroom"
# On an AdmissionCheck: a slot that is predicted to leave less does not count.
ANNOTATION_LEAST: Final = f"{GROUP}/least-tokens-per-second"
# A sidecar that is added once a job has quota reports its slot within seconds.
SLOT_COMES: Final = timedelta(seconds=30)
_RETRY_AFTER_S, _LONGEST_RETRY_S = 15, 300


@dataclass(frozen=True, slots=True)
class HeadroomCheck:
    """An AdmissionCheck of ours.

    Attributes:
        name: of the object.
        least: tokens a second that a slot has to be predicted to leave.
        error: why it cannot be answered; empty: it can.
    """

    name: str
    least: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to a check: a state of Kueue, and why."""

    state: str
    message: str


NOT_A_JOB: Final = Answer("Ready", "Not a FinetuneJob: no harvested slot is asked for")


def check_of(body: Body) -> HeadroomCheck | None:
    """Return an AdmissionCheck as it is asked; None: another controller answers it."""
    if (body.get("spec") or {}).get("controllerName") != CONTROLLER:
        return None
    name = str(body["metadata"]["name"])
    said = (body["metadata"].get("annotations") or {}).get(ANNOTATION_LEAST, "0")
    try:
        least = float(said)
    except ValueError:
        least = math.nan
    if not 0 <= least < math.inf:
        return HeadroomCheck(
            name, error=f"{ANNOTATION_LEAST}: {said!r} is not a number of 0 or more"
        )
    return HeadroomCheck(name, least)


def activity(body: Body, check: HeadroomCheck, now: datetime) -> Body | None:
    """Return the status that says whether a check is answered; None: it says so already."""
    held = list((body.get("status") or {}).get("conditions") or ())
    fact: tuple[Status, str, str] = (
        ("False", "BadParameter", check.error)
        if check.error
        else ("True", "Active", "Answered by the Windrow operator from the headroom of slots")
    )
    known = get_condition(held, "Active")
    if known is not None and (known["status"], known["message"]) == (fact[0], fact[2]):
        return None
    generation = int(body["metadata"].get("generation") or 0)
    return {"conditions": set_condition(held, "Active", *fact, generation, now)}


def pending(workload: Body, checks: Mapping[str, HeadroomCheck]) -> list[HeadroomCheck]:
    """Return which of our checks a Workload with quota waits for."""
    held = (workload.get("status") or {}).get("conditions")
    if not is_true(held, "QuotaReserved") or is_true(held, "Evicted"):
        return []
    states = (workload.get("status") or {}).get("admissionChecks") or ()
    return [
        checks[state["name"]]
        for state in states
        if state["name"] in checks and state.get("state") == "Pending"
    ]


def answer(job: Job, least: float, slots: SlotTable) -> Answer:
    """Return whether a slot would take `job` now, and leave it so many tokens a second."""
    choice = place(job, slots)
    if isinstance(choice, NoPlacement):
        return Answer("Retry", choice.message)
    predicted = choice.slot.predicted_tokens_per_second
    if predicted < least:
        return Answer("Retry", f"{choice.message}; the check asks for {rate(least)} tok/s")
    return Answer("Ready", choice.message)


def without_coming(slots: SlotTable, coming: Iterable[Job]) -> SlotTable:
    """Return a copy of `slots` in which jobs that are admitted and wait for a slot have theirs."""
    copy = SlotTable(slots.values())
    copy.policies, copy.off = slots.policies, slots.off
    for job in coming:
        take(copy, job)
    return copy


def take(slots: SlotTable, job: Job) -> None:
    """Give `job` a slot of the table, if there is one: the next job is asked for what is left."""
    choice = place(job, slots)
    if not isinstance(choice, NoPlacement):
        holder = Holder(job.uid, job.key, Base.of(job.spec) if job.spec else None)
        slots.reserve(choice.slot.key, holder)


def may_still_come(workload: Body, now: datetime) -> bool:
    """Return whether the Workload got its quota so recently that a slot may be on its way."""
    quota = get_condition((workload.get("status") or {}).get("conditions"), "QuotaReserved")
    if quota is None:
        return False
    return now - datetime.fromisoformat(quota["lastTransitionTime"]) < SLOT_COMES


def answered(workload: Body, answers: Mapping[str, Answer], now: datetime) -> Body:
    """Return the status of a Workload with answers to checks, by their names."""
    states = []
    for state in (workload.get("status") or {}).get("admissionChecks") or ():
        if (found := answers.get(state["name"])) is not None:
            state = {
                **state,
                "state": found.state,
                "message": found.message,
                "lastTransitionTime": timestamp(now),
            }
            state.pop("requeueAfterSeconds", None)
            if found.state == "Retry":
                tries = min(int(state.get("retryCount") or 0), 8)
                pause_s = min(_RETRY_AFTER_S * 2**tries, _LONGEST_RETRY_S)
                state["requeueAfterSeconds"] = pause_s
        states.append(state)
    return {"admissionChecks": states}
