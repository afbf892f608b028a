"""Our resources as the API server holds them, as plain typed values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from windrow.conditions import get_condition, is_finished, state_of
from windrow.plain_text import printable

JsonObject = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class JobView:
    """A FinetuneJob."""

    namespace: str
    name: str
    uid: str
    model: str
    state: str  # one of windrow.conditions.STATES
    reason: str  # of the condition that the state comes from, in CamelCase
    message: str  # of the same
    field: str  # path of what a person is to change, in the spec or the dataset; empty: nothing
    remedy: str  # what to write instead
    finished: bool
    suspended: bool
    step: int
    total_steps: int  # 0: not known yet
    loss: float | None
    tokens: int
    tokens_per_second: float
    eta_s: float | None
    slot: str  # namespace/name, empty while not placed
    epoch: int
    checkpoint_step: int
    adapter_path: str  # empty until it succeeded
    base_eval_loss: float | None
    tuned_eval_loss: float | None

    @property
    def steps_done(self) -> str:
        """`118/400`, for people; a dash where no step ran or nothing is heard of the worker."""
        step = str(self.step) if self.step and self.state != "Silent" else "-"
        return f"{step}/{self.total_steps}" if self.total_steps else step

    @classmethod
    def of(cls, found: JsonObject) -> JobView:
        """Read a FinetuneJob as the API server returns it."""
        found = _printable(found)
        meta, spec, status = found["metadata"], found["spec"], found.get("status") or {}
        conditions = status.get("conditions") or []
        progress = status.get("progress") or {}
        evaluation = status.get("evaluation") or {}
        wrong = status.get("userError") or {}
        state = state_of(conditions)
        explained = get_condition(conditions, _EXPLAINED_BY.get(state, state)) or {}
        return cls(
            namespace=meta["namespace"],
            name=meta["name"],
            uid=meta["uid"],
            model=spec["model"]["name"],
            state=state,
            reason=explained.get("reason", ""),
            message=explained.get("message", ""),
            field=wrong.get("field", ""),
            remedy=wrong.get("remedy", ""),
            finished=is_finished(conditions),
            suspended=bool(spec.get("suspend")),
            step=progress.get("step", 0),
            total_steps=progress.get("totalSteps", 0),
            loss=progress.get("loss"),
            tokens=progress.get("tokens", 0),
            tokens_per_second=progress.get("tokensPerSecond", 0.0),
            eta_s=progress.get("etaSeconds"),
            slot=status.get("slot") or "",
            epoch=status.get("epoch") or 0,
            checkpoint_step=(status.get("checkpoint") or {}).get("step", 0),
            adapter_path=(status.get("adapter") or {}).get("path", ""),
            base_eval_loss=evaluation.get("baseLoss"),
            tuned_eval_loss=evaluation.get("tunedLoss"),
        )


# The condition that explains a state, where the two have different names.
_EXPLAINED_BY = {
    "Invalid": "Accepted",
    "Pending": "Placed",
    "Queued": "Placed",
    "Stopping": "Running",
    "Silent": "Running",
}


@dataclass(frozen=True, slots=True)
class Chunks:
    """Owners of an arena's chunks."""

    kv: int = 0
    lent: int = 0
    reserved: int = 0
    draining: int = 0
    free: int = 0

    @property
    def total(self) -> int:
        """All chunks of the arena."""
        return self.kv + self.lent + self.reserved + self.draining + self.free


@dataclass(frozen=True, slots=True)
class SlotView:
    """A HarvestSlot: one harvested device."""

    namespace: str
    name: str
    pod: str
    node: str
    device: str
    model: str
    endpoint: str
    compute_units: int
    ready: bool
    why: str  # reason and message of the Ready condition
    reported: bool  # False: nothing has been heard lately, and every figure below is none
    policy: str
    mode: str
    objective_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None
    steps: int
    steps_over_objective: int
    batch: int
    context_tokens: int
    waiting: int
    decode_units: int
    finetune_units: int
    chunks: Chunks
    predicted_tokens_per_second: float
    predicted_from: str
    job: str  # namespace/name, empty: none
    breaker: str
    sharing: str  # of a GPU: in which mode, and why; empty: it has none, or nobody has said
    joined: int = 0  # jobs whose rows pass in the same tasklets; 0: each has turns of its own
    ranks: int = 1  # over which decode's model and a worker's are cut
    ranks_differ: str = ""  # how; empty: they do not

    @classmethod
    def of(cls, found: JsonObject) -> SlotView:
        """Read a HarvestSlot as the API server returns it."""
        found = _printable(found)
        meta, spec, status = found["metadata"], found["spec"], found.get("status") or {}
        ready = get_condition(status.get("conditions"), "Ready")
        chunks = status.get("chunks") or {}
        return cls(
            namespace=meta["namespace"],
            name=meta["name"],
            pod=spec["podName"],
            node=spec.get("nodeName", ""),
            device=spec.get("device", ""),
            model=spec.get("model", ""),
            endpoint=spec.get("endpoint", ""),
            compute_units=spec.get("computeUnits", 0),
            ready=ready is not None and ready["status"] == "True",
            why=f"{ready['reason']}: {ready['message']}" if ready else "no report yet",
            reported="steps" in status,
            policy=status.get("policy") or "",
            mode=status.get("mode") or "",
            objective_s=status.get("objectiveSeconds"),
            tpot_p50_s=status.get("tpotP50Seconds"),
            tpot_p99_s=status.get("tpotP99Seconds"),
            steps=status.get("steps") or 0,
            steps_over_objective=status.get("stepsOverObjective") or 0,
            batch=status.get("batch") or 0,
            context_tokens=status.get("contextTokens") or 0,
            waiting=status.get("waiting") or 0,
            decode_units=status.get("decodeUnits") or 0,
            finetune_units=status.get("finetuneUnits") or 0,
            chunks=Chunks(**{name: chunks.get(name, 0) for name in Chunks.__slots__}),
            predicted_tokens_per_second=status.get("predictedTokensPerSecond") or 0.0,
            predicted_from=status.get("predictedFrom") or "",
            job=status.get("jobName") or "",
            breaker=status.get("breaker") or "",
            sharing=f"{status['sharing']} mode: {status.get('sharingReason', '')}"
            if status.get("sharing")
            else "",
            joined=sum("joinedWith" in job for job in status.get("jobs") or ()),
            ranks=status.get("ranks") or 1,
            ranks_differ=status.get("ranksDiffer") or "",
        )


def _printable(found: Any) -> Any:  # noqa: ANN401 - JSON
    """Return JSON whose texts, words of jobs and sidecars, do not act on a terminal."""
    if isinstance(found, str):
        return printable(found)
    if isinstance(found, list):
        return [_printable(each) for each in found]
    if isinstance(found, dict):
        return {name: _printable(each) for name, each in found.items()}
    return found


@dataclass(frozen=True, slots=True)
class EventView:
    """An event about one of our resources."""

    at: str  # RFC 3339, UTC
    kind: str
    name: str
    reason: str
    message: str
    warning: bool
