"""A HarvestPolicy's terms for one slot: objective, policy, limits; checked."""

from __future__ import annotations

from dataclasses import dataclass, replace

from windrow.errors import UserError
from windrow_sidecar.qos.policies import make_policy

MODES = ("harvest", "observe", "off")
SCOPES = ("perStep", "perRequest")
# FineInfer's experiments bound the wait to 0.3 to 0.5 s.
DEFAULT_DEFERRAL_US = 400_000
# Policies that hold requests back.
DEFERRING = ("fineinfer", "iterations")


@dataclass(frozen=True, slots=True)
class HarvestTerms:
    """The objective that is kept, who decides, and the limits that nobody passes."""

    name: str  # of the HarvestPolicy
    policy: str
    mode: str
    objective_us: int
    percentile: float = 99.0
    per_request: bool = False
    max_compute_percent: int = 100
    max_memory_percent: int = 100
    deferral_us: int = DEFAULT_DEFERRAL_US  # how long a policy may hold a request back
    first_token_us: int = 0  # objective of the time to first token; 0: none


# Policies that share a step by units, which decode and finetuning in one process cannot.
_BY_UNITS = ("windrow", "harli", "llmstation", "flexllm")


def in_turns(terms: HarvestTerms) -> HarvestTerms:
    """Return the terms by which decode and finetuning alternate in one process.

    Where a policy would give a share beside the step, finetuning has the time before it, as much as
    the objective leaves; what is done with that time is the engine's (see `hybrid_tokens`).
    """
    return replace(terms, policy="temporal") if terms.policy in _BY_UNITS else terms


def make_terms(
    *,
    name: str,
    policy: str,
    mode: str,
    objective_seconds: float,
    percentile: float,
    scope: str,
    max_compute_percent: int,
    max_memory_percent: int,
    deferral_seconds: float = 0.0,
    first_token_seconds: float = 0.0,
) -> HarvestTerms | None:
    """Check what came over the wire; None when no HarvestPolicy selects the pod.

    The operator writes every number, so 0 is what the policy says: of the arena, that nothing may
    be lent. `deferral_seconds` and `first_token_seconds` are 0 where the policy leaves them out.

    Raises:
        UserError: an unknown policy, mode or scope, or a number out of its range.
    """
    if not name:
        return None
    if mode not in MODES:
        raise UserError(
            f"mode is {mode!r}", field="spec.mode", remedy=f"Choose one of: {', '.join(MODES)}."
        )
    if scope not in ("", *SCOPES):
        raise UserError(
            f"scope is {scope!r}",
            field="spec.objective.scope",
            remedy=f"Choose one of: {', '.join(SCOPES)}.",
        )
    if not 0 < objective_seconds < 3600:
        raise UserError(
            f"the objective is {objective_seconds} s",
            field="spec.objective.tpot",
            remedy="Give a positive time per output token, for example 40ms.",
        )
    for number, least, field in (
        (percentile, 50, "spec.objective.percentile"),
        (max_compute_percent, 1, "spec.limits.maxSmPercent"),
        (max_memory_percent, 0, "spec.limits.maxMemoryPercent"),
    ):
        if not least <= number <= 100:
            raise UserError(
                f"{number:g} is not a percentage from {least} to 100",
                field=field,
                remedy=f"Give a number from {least} to 100.",
            )
    if not 0 <= deferral_seconds <= 60:
        raise UserError(
            f"{deferral_seconds} s is not a time that a request may be held back",
            field="spec.objective.deferralBound",
            remedy="Give one between 1ms and 1m, for example 400ms, or leave it out.",
        )
    if not 0 <= first_token_seconds <= 600:
        raise UserError(
            f"{first_token_seconds} s is not a time to first token",
            field="spec.objective.ttft",
            remedy="Give one between 1ms and 10m, for example 500ms, or leave it out.",
        )
    make_policy(policy)  # which refuses a name that is none
    return HarvestTerms(
        name=name,
        policy=policy,
        mode=mode,
        objective_us=max(1, round(objective_seconds * 1e6)),
        percentile=percentile,
        per_request=scope == "perRequest",
        max_compute_percent=max_compute_percent,
        max_memory_percent=max_memory_percent,
        deferral_us=round(deferral_seconds * 1e6) or DEFAULT_DEFERRAL_US,
        first_token_us=round(first_token_seconds * 1e6),
    )
