"""Place a job: choose the slot with the best score among those that can take it.

Free slots come first. Among them the score is the tokens a second that the slot's decode is
predicted to leave, by what it left in the last minutes; it counts more where decode serves the
job's own model, since there the frozen weights are shared, and less for each job on another device
of the node, since those share its cores, memory and network. Where no slot is free, jobs over one
base model share a worker, which carries them together. Every refusal is one sentence, so that a job
that waits can say why; what other tenants call their jobs and pods is never said.
"""

from __future__ import annotations

import itertools
import posixpath
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from windrow.outputs import is_below, is_bucket
from windrow.protocol import PREDICTED_FROM
from windrow_operator import tenancy
from windrow_operator.model import Base, CheckedPolicy, Holder, Job, Slot
from windrow_operator.slot_table import SlotTable, capacity_refusal, unreachable

# A message lists so many slots one by one; a cluster may have thousands, so that those of other
# namespaces are looked for among so many only.
_MODELS_LISTED = 10
SLOTS_LISTED, _LOOKED_AT = 8, 256
# Shared weights need not be loaded, and leave the worker as much more memory.
_WEIGHTS_THERE: Final = 1.25
_NEIGHBOUR: Final = 0.9


@dataclass(frozen=True, slots=True)
class Placement:
    """A slot was found."""

    slot: Slot
    message: str


@dataclass(frozen=True, slots=True)
class NoPlacement:
    """No slot can take the job."""

    message: str


def place(job: Job, slots: SlotTable | Iterable[Slot]) -> Placement | NoPlacement:
    """Return where `job` goes, or why it cannot go anywhere."""
    table = slots if isinstance(slots, SlotTable) else SlotTable(slots)
    best = min(
        (slot for slot in table.candidates(job) if not refusal(job, slot)),
        key=lambda slot: _preference(job, slot, table),
        default=None,
    )
    if best is None:
        return NoPlacement(_explain(job, table))
    return Placement(best, _explain_choice(job, best, table.neighbours(best)))


def _preference(job: Job, slot: Slot, table: SlotTable) -> tuple[object, ...]:
    return (
        job.uid in slot.failed_jobs,
        len(_others(job, slot)),
        -score(job, slot, table.neighbours(slot)),
        not serves_model(job, slot),
        slot.key,
    )


def score(job: Job, slot: Slot, neighbours: int) -> float:
    """Return what `job` may expect of a slot with so many jobs beside it on its node."""
    weights = _WEIGHTS_THERE if serves_model(job, slot) else 1.0
    return slot.predicted_tokens_per_second * weights * _NEIGHBOUR**neighbours


def refusal(job: Job, slot: Slot) -> str:
    """Return why `slot` cannot take `job`, in words that follow its name; empty: it can."""
    return (
        unreachable(slot)
        or admission_refusal(job, slot)
        or capacity_refusal(slot)
        or _unwritable(job, slot)
        or _unreadable(job, slot)
        or _sharing_refusal(job, slot)
    )


def admission_refusal(job: Job, slot: Slot) -> str:
    """Return why the slot's policy does not admit `job` now; empty: it does."""
    if slot.terms is None:
        return "is selected by no valid HarvestPolicy"
    policy = slot.terms.policy
    if slot.terms.mode != "harvest":
        return f"may not be harvested now ({slot.terms.why or f'mode {slot.terms.mode}'})"
    if closed := tenancy.closed_to(job, policy):
        return closed
    if job.namespace in slot.terms.spent:
        return f"gives namespace {job.namespace} no more today by policy {policy.name}"
    return tenancy.class_refusal(job, policy)


def serves_model(job: Job, slot: Slot) -> bool:
    """Return whether decode serves the very model that the job trains."""
    return same_model(job, slot.model)


def same_model(job: Job, model: str) -> bool:
    """Return whether `job` trains `model`, a name or a path."""
    return job.spec is not None and (
        posixpath.normpath(job.spec.model.name) == posixpath.normpath(model)
    )


def served_models(job: Job, table: SlotTable) -> list[str]:
    """Return the models that slots serve which the job may know of, each once, at most ten."""
    found = {slot.model: None for slot in _shown(job, table) if slot.model}
    return sorted(found)[:_MODELS_LISTED]


def _others(job: Job, slot: Slot) -> list[Holder]:
    return [holder for holder in slot.holders if holder.uid != job.uid]


def _sharing_refusal(job: Job, slot: Slot) -> str:
    """Return why `job` cannot share the slot with the jobs on it; empty: it can."""
    others = _others(job, slot)
    if not others:
        return ""
    named = [holder for holder in others if _may_be_named(job, holder)]
    runs = (
        f"runs job{'s' if others[1:] else ''} {_names(job, others)}"
        if named
        else (f"runs {_names(job, others)}")
    )
    if slot.max_jobs == 1:
        return runs
    if len(others) >= slot.max_jobs:
        return f"{runs}, as many as it takes"
    base = Base.of(job.spec) if job.spec else None
    if base is None:
        return f"{runs}, and a quantised base is not shared"
    different = [holder for holder in others if holder.base != base]
    if different:
        which = "" if len(different) == len(others) else f"{_names(job, different)} "
        return f"{runs}, {which}over another base"
    if all(_is_of(job, holder) for holder in others) or _may_share(slot):
        return ""
    return f"{runs}, and its policy lets no two namespaces share a worker (access.shareWorkers)"


def _names(job: Job, holders: list[Holder]) -> str:
    """Return jobs in words for the author of `job`: by name those of its own namespace."""
    words = [holder.name for holder in holders if _may_be_named(job, holder)]
    if n_others := len(holders) - len(words):
        words.append(f"{'a job' if n_others == 1 else f'{n_others} jobs'} of another namespace")
    return " and ".join(words)


def _may_be_named(job: Job, holder: Holder) -> bool:
    """Return whether the author of `job` may know what `holder` is called."""
    return not holder.is_known or _is_of(job, holder)


def _is_of(job: Job, holder: Holder) -> bool:
    """Return whether `holder` is known to be of the job's namespace."""
    return holder.namespace == job.namespace


def _may_share(slot: Slot) -> bool:
    """Return whether jobs of several namespaces may run in the slot's worker."""
    spec = slot.terms.policy.spec if slot.terms else None
    return spec is not None and spec.access.share_workers


def _unwritable(job: Job, slot: Slot) -> str:
    """Return why the adapter cannot be written from the slot; empty: it can, as far as is known."""
    if job.spec is None or is_bucket(job.spec.output.destination):
        return ""
    trees = tenancy.with_namespace(slot.outputs, job.namespace)
    if trees and is_below(trees, job.spec.output.destination):
        return ""
    given = (
        f"only below {' and '.join(trees)}"
        if trees
        else "nowhere. Name a bucket, or have a volume added to the policy (spec.sidecar.volumes, "
        "with a persistentVolumeClaim that is not readOnly)"
    )
    return (
        f"cannot write {job.spec.output.destination}: by its policy's volumes its pod may write "
        f"{given}"
    )


def _unreadable(job: Job, slot: Slot) -> str:
    """Return why what the job names cannot be reached from the slot; empty: it can, as far known.

    The sidecar holds the job to the same, where names have addresses and links lead somewhere.
    """
    if slot.terms is None:
        return ""
    served = serves_model(job, slot)
    return tenancy.reach_refusal(job, slot.terms.policy, serves_model=served)


def _explain_choice(job: Job, slot: Slot, neighbours: int) -> str:
    shared = ", shares the served model's weights" if serves_model(job, slot) else ""
    predicted = slot.predicted_tokens_per_second
    # A policy that has just come has no second of decode behind it.
    promise = f"predicts {rate(predicted)} tok/s" if predicted > 0 else "has predicted no rate yet"
    if predicted > 0 and slot.predicted_from in PREDICTED_FROM[1:]:
        promise += " (no worker has run there yet)"
    others = _others(job, slot)
    turns = f", in one worker with {_names(job, others)}" if others else ""
    jobs = f"{neighbours} job{'s' if neighbours > 1 else ''}"
    beside = f", beside {jobs} on other devices of its node" if neighbours else ""
    return f"{_name(job, slot)} {promise}{shared}{turns}{beside}"


def _name(job: Job, slot: Slot) -> str:
    """Return the slot's name, with its namespace where that is not the job's."""
    return slot.key.removeprefix(f"{job.namespace}/")


def rate(tokens_per_second: float) -> str:
    """Return a rate for people: `940`, `9.6k`."""
    if tokens_per_second < 1000:
        return f"{tokens_per_second:.0f}"
    return f"{tokens_per_second / 1000:.1f}k"


def _explain(job: Job, table: SlotTable) -> str:
    shown = list(itertools.islice(_shown(job, table), SLOTS_LISTED + 1))
    if not shown:
        return _explain_none(job, table)
    listed = [f"{_name(job, slot)} {refusal(job, slot)}" for slot in shown[:SLOTS_LISTED]]
    # Those of other namespaces are not counted: how many there are is nobody else's business.
    own = sum(slot.key.startswith(f"{job.namespace}/") for slot in shown[:SLOTS_LISTED])
    more = table.number_of(job.namespace) - own
    if more:
        listed.append(f"and {more} more slots refuse")
    elif len(shown) > SLOTS_LISTED:
        listed.append("and more slots refuse")
    return "; ".join(listed)


def _explain_none(job: Job, table: SlotTable) -> str:
    """Say why no slot is open to the job: of the policies those of the job's own namespace."""
    if table.off:
        return f"There is no slot: {table.off}"
    mine = [policy for policy in table.policies.values() if policy.namespace == job.namespace]
    for policy in mine:
        if policy.spec is None:
            return f"There is no slot yet: policy {policy.name} is not valid: {policy.error}"
    if mine and all(policy.spec and policy.spec.mode == "off" for policy in mine):
        names = ", ".join(policy.name for policy in mine)
        many = "policies {} are" if mine[1:] else "policy {} is"
        return f"There is no slot: {many.format(names)} in mode off"
    return (
        f"No slot is open to namespace {job.namespace} yet: a policy has to select a decode "
        "pod of it, and its sidecar to attach. One of another namespace is open where its "
        "HarvestPolicy admits this namespace (access.namespaceSelector) and the job names that "
        "policy in spec.policies"
    )


def _shown(job: Job, table: SlotTable) -> Iterator[Slot]:
    """Yield slots that may be named: of the job's namespace, and those that both sides agree on."""
    yield from table.of_namespace(job.namespace)
    for slot in itertools.islice(table.values(), _LOOKED_AT):
        elsewhere = slot.key.partition("/")[0] != job.namespace
        policy = slot.terms.policy if slot.terms else None
        if elsewhere and policy is not None and _agree(job, policy):
            yield slot


def _agree(job: Job, policy: CheckedPolicy) -> bool:
    return policy.spec is not None and not tenancy.closed_to(job, policy)
