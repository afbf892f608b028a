"""Fields of a HarvestSlot, one harvested device. Written by the operator only."""

from __future__ import annotations

from pydantic import Field

from windrow.crd.common import CONDITIONS_BY_TYPE, Condition
from windrow.crd.values import Record, Timestamp


def slot_name(pod_name: str, index: int) -> str:
    """Return the name of a HarvestSlot: the pod's, for the usual pod with one device."""
    return pod_name if index == 0 else f"{pod_name}.{index}"


class HarvestSlotSpec(Record):
    """Facts about the device; fixed while the decode process lives."""

    pod_name: str = Field(description="Decode pod, in this namespace.")
    pod_uid: str = Field(description="UID of that pod.")
    node_name: str = Field(default="", description="Node of that pod.")
    index: int = Field(default=0, ge=0, description="Which device of the pod.")
    engine: str = Field(default="", description="Decode engine.")
    engine_version: str = Field(default="", description="Its version.")
    device: str = Field(default="", description="Device, like `NVIDIA H200` or `host:2-cores`.")
    driver: str = Field(default="", description="host or cuda.")
    model: str = Field(default="", description="Served model, as decode names it.")
    model_fingerprint: str = Field(default="", description="Fingerprint of the served model.")
    compute_units: int = Field(default=0, description="Cores or SMs.")
    finetune_levels: list[int] = Field(
        default_factory=list, description="Compute units that a worker can be given."
    )
    arena_bytes: int = Field(default=0, description="Size of the arena.")
    chunk_bytes: int = Field(default=0, description="Size of a chunk, the unit of lending.")
    chunks: int = Field(default=0, description="Chunks of the arena.")
    tensor_parallel: int = Field(default=1, description="Ranks over which decode is split.")
    endpoint: str = Field(default="", description="Where the engine serves HTTP, for people.")
    max_jobs: int = Field(
        default=1, ge=1, description="Jobs over one base model that may share the slot."
    )


class ChunksStatus(Record):
    """Owners of the arena's chunks."""

    kv: int = Field(default=0, description="Hold keys and values of requests.")
    lent: int = Field(default=0, description="Lent to the worker.")
    reserved: int = Field(default=0, description="Kept free for the next burst.")
    draining: int = Field(default=0, description="On their way back.")
    free: int = Field(default=0, description="Free.")


class SlotJobStatus(Record):
    """The job on a slot."""

    namespace: str = Field(description="Its namespace.")
    name: str = Field(description="Its name.")
    uid: str = Field(description="Its UID.")
    epoch: int = Field(description="Fencing token of this placement.")
    joined_with: int | None = Field(
        default=None,
        description="Other jobs on the slot whose rows pass in the same tasklets. Left out: none, "
        "its rows have turns of their own.",
    )


class SlotFailure(Record):
    """A job whose placement ended here and got no further."""

    job_uid: str = Field(description="UID of the job.")
    namespace: str = Field(description="Its namespace.")
    time: Timestamp = Field(description="When it ended.")


class SlotHealthStatus(Record):
    """Reason why a slot rests, for the operator that leads next as well."""

    rests_until: Timestamp | None = Field(default=None, description="It takes no job before then.")
    rest_reason: str | None = Field(default=None, description="Why it rests.")
    rests: int | None = Field(default=None, description="Rests in a row; each one is longer.")
    failures: list[SlotFailure] | None = Field(
        default=None, description="Failures of the last hour that count towards the next rest."
    )


class HarvestSlotStatus(Record):
    """Report of the sidecar, and the owner of the slot. Figures are absent while it is silent."""

    conditions: list[Condition] | None = Field(
        default=None,
        description="Whether the sidecar is attached and the slot can take jobs.",
        json_schema_extra=CONDITIONS_BY_TYPE,
    )
    policy: str | None = Field(default=None, description="HarvestPolicy that selects the pod.")
    mode: str | None = Field(default=None, description="Its mode as of now (hours and limits).")
    engine_state: str | None = Field(
        default=None,
        description="starting, serving, gone, or leaving: the sidecar was asked to end.",
    )
    ranks: int | None = Field(
        default=None,
        description="Ranks over which decode's model and a worker's are cut. Absent: one.",
    )
    ranks_differ: str | None = Field(
        default=None,
        description="How they differ in computing or in lent memory. Absent: they do not.",
    )
    sharing: str | None = Field(
        default=None,
        description="How decode and the worker share the GPU: spatial (both at once) or temporal "
        "(in turn). Absent on a host.",
    )
    sharing_reason: str | None = Field(default=None, description="Why it is shared so.")
    objective: str | None = Field(default=None, description="TPOT objective, for people.")
    tpot_p50: str | None = Field(default=None, description="Median TPOT, for people.")
    tpot_p99: str | None = Field(default=None, description="99th percentile, for people.")
    decode: str | None = Field(default=None, description="Compute of decode, for people.")
    finetune: str | None = Field(default=None, description="Compute of the worker, for people.")
    lent: str | None = Field(default=None, description="Lent chunks of all, for people.")
    job_name: str | None = Field(default=None, description="namespace/name of each job.")
    job: SlotJobStatus | None = Field(default=None, description="The first job on this slot.")
    jobs: list[SlotJobStatus] | None = Field(
        default=None, description="All jobs on this slot, which share its worker."
    )
    objective_seconds: float | None = Field(default=None, description="TPOT objective.")
    tpot_p50_seconds: float | None = Field(default=None, description="Median TPOT.")
    tpot_p99_seconds: float | None = Field(default=None, description="99th percentile of TPOT.")
    steps: int | None = Field(default=None, description="Decode steps since the engine's start.")
    steps_over_objective: int | None = Field(
        default=None, description="Those that took longer than the objective."
    )
    batch: int | None = Field(default=None, description="Requests in the batch.")
    context_tokens: int | None = Field(default=None, description="Context tokens of the batch.")
    waiting: int | None = Field(default=None, description="Requests that wait.")
    decode_units: int | None = Field(default=None, description="Compute units of decode.")
    finetune_units: int | None = Field(default=None, description="Compute units of the worker.")
    chunks: ChunksStatus | None = Field(default=None, description="Who has the memory.")
    predicted_tokens_per_second: float | None = Field(
        default=None, description="What a worker would get here now, also in mode observe."
    )
    predicted_from: str | None = Field(
        default=None,
        description="What that rests on, the surest first. measured: a worker that ran on this "
        "slot; profiled: one that ran while the latency profile was taken; derived: decode's own "
        "steps and what training costs beside them.",
    )
    compute_utilization: float | None = Field(
        default=None, description="0 to 1, decode and worker together."
    )
    compute_utilization_decode: float | None = Field(
        default=None, description="0 to 1, decode alone."
    )
    memory_utilization: float | None = Field(
        default=None, description="0 to 1 of the arena that is KV or lent."
    )
    breaker: str | None = Field(
        default=None, description="Why harvesting has given up here; empty while it has not."
    )
    health: SlotHealthStatus | None = Field(
        default=None, description="Jobs that failed here lately, and the rest that came of it."
    )
    sidecar_version: str | None = Field(
        default=None, description="Version of Windrow that the sidecar runs."
    )
    last_heartbeat_time: Timestamp | None = Field(
        default=None, description="When the sidecar last reported."
    )
