"""The table of all Prometheus metrics: name, type, labels, unit, source, meaning.

Both exporters declare their metrics from it, and docs/metrics.md is made from it
(`python tools/generate_docs.py`). What it keeps to:

- `namespace` and `slot` name a HarvestSlot object, wherever they stand; `job_namespace` and
  `job_name` a FinetuneJob. No label holds a UID or an epoch: a series outlives a placement.
- What can be computed from other series is not exported: no quantiles (latencies are histograms),
  no sums, no shares. The parts of a label `part`, `state` or `move` add up.
- A slot's own figures come from its sidecar alone. The operator counts slots, and does not repeat
  them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class MetricType(StrEnum):
    """Type as Prometheus reads a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class MetricSource(StrEnum):
    """Process that exports a metric."""

    SIDECAR = "sidecar"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table.

    Attributes:
        name: as Prometheus stores it; counters end in `_total`.
        type: how Prometheus reads it.
        source: who exports it.
        unit: of its value; "" counts things.
        labels: in the order in which values are given.
        help: what it means, one sentence.
        buckets: upper bounds of a histogram, without infinity.
    """

    name: str
    type: MetricType
    source: MetricSource
    unit: str
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()


# From a small model on a laptop (1 ms) to an objective of seconds.
TPOT_BUCKETS_SECONDS: Final = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.010, 0.0125, 0.015, 0.020, 0.025, 0.030, 0.040, 0.050,
    0.075, 0.100, 0.150, 0.250, 0.500, 1.0, 2.5,
)  # fmt: skip
# Dense around 1, where a step just meets its objective: slots with different ones add up.
OBJECTIVE_RATIO_BUCKETS: Final = (
    0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0,
)  # fmt: skip
# Measured over predicted: 1 is a prediction that was right.
PREDICTOR_RATIO_BUCKETS: Final = (
    0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 2.0, 4.0,
)  # fmt: skip
# A kept decision takes about a microsecond, one that is remade tens of them.
DECISION_BUCKETS_SECONDS: Final = (
    1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2,
)  # fmt: skip
CHUNK_RETURN_BUCKETS_SECONDS: Final = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip
# From a slot that was free to a queue of a day.
PLACEMENT_BUCKETS_SECONDS: Final = (
    0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 24 * 3600.0,
)  # fmt: skip
_CALL_BUCKETS_SECONDS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.5, 5.0, 10.0,
)  # fmt: skip

_SLOT: Final = ("namespace", "slot")
_JOB: Final = ("job_namespace", "job_name")


def _of_slot(
    name: str,
    type: MetricType,  # noqa: A002 - the table's word
    unit: str,
    text: str,
    *labels: str,
    buckets: tuple[float, ...] = (),
) -> Metric:
    return Metric(name, type, MetricSource.SIDECAR, unit, (*_SLOT, *labels), text, buckets)


def _of_operator(
    name: str,
    type: MetricType,  # noqa: A002
    unit: str,
    text: str,
    *labels: str,
    buckets: tuple[float, ...] = (),
) -> Metric:
    return Metric(name, type, MetricSource.OPERATOR, unit, labels, text, buckets)


_COUNTER, _GAUGE, _HISTOGRAM = MetricType.COUNTER, MetricType.GAUGE, MetricType.HISTOGRAM

# --- sidecar: a slot and its decode engine --------------------------------------------------------

SLOT_INFO: Final = _of_slot(
    "windrow_slot_info",
    _GAUGE,
    "",
    "1 for each slot; the labels say what it is, to join other series with.",
    "policy",
    "mode",
    "model",
    "engine",
    "device",
    "node",
)
SLOT_SHARING: Final = _of_slot(
    "windrow_slot_sharing_info",
    _GAUGE,
    "",
    "1 for each slot whose engine has called; the labels say how decode and the worker share the "
    "device (`spatial`: at once, `temporal`: in turn) and why: a reason of the slot's condition "
    "SharedInSpace, or `Cores` where the device is the host's.",
    "sharing",
    "reason",
)
ENGINE_UP: Final = _of_slot(
    "windrow_engine_up", _GAUGE, "", "1 while the slot's decode engine serves, else 0."
)
DECODE_TPOT: Final = _of_slot(
    "windrow_decode_tpot_seconds",
    _HISTOGRAM,
    "seconds",
    "Time per output token: latency of decode steps.",
    buckets=TPOT_BUCKETS_SECONDS,
)
DECODE_TPOT_RATIO: Final = _of_slot(
    "windrow_decode_tpot_objective_ratio",
    _HISTOGRAM,
    "ratio",
    "Latency of decode steps under an objective, over that objective; above 1 a step broke it.",
    buckets=OBJECTIVE_RATIO_BUCKETS,
)
DECODE_OBJECTIVE: Final = _of_slot(
    "windrow_decode_objective_seconds", _GAUGE, "seconds", "Objective in force; 0 without a policy."
)
DECODE_BATCH: Final = _of_slot(
    "windrow_decode_batch_requests", _GAUGE, "requests", "Requests in the running batch."
)
DECODE_CONTEXT: Final = _of_slot(
    "windrow_decode_context_tokens", _GAUGE, "tokens", "Context tokens of the running batch."
)
DECODE_WAITING: Final = _of_slot(
    "windrow_decode_waiting_requests",
    _GAUGE,
    "requests",
    "Requests that have arrived and do not run yet.",
)
LORA_REQUESTS: Final = _of_slot(
    "windrow_lora_requests_info",
    _GAUGE,
    "Unix time",
    "When the engine last reported its LoRA adapters: those on the device and those that requests "
    "in the queue wait for, as their `model`, with commas between. As inference routers of the "
    "Gateway API read it. No series: the engine serves none, or does not report them.",
    "max_lora",
    "running_lora_adapters",
    "waiting_lora_adapters",
)
DECODE_REQUESTS: Final = _of_slot(
    "windrow_decode_requests_completed_total", _COUNTER, "requests", "Requests that were answered."
)
DECODE_FIRST_TOKENS: Final = _of_slot(
    "windrow_decode_first_tokens_total",
    _COUNTER,
    "tokens",
    "First tokens of requests, while the policy has an objective for them.",
)
DECODE_FIRST_TOKENS_OVER: Final = _of_slot(
    "windrow_decode_first_tokens_over_objective_total",
    _COUNTER,
    "tokens",
    "First tokens that came later than the policy's time to first token.",
)
COMPUTE_UNITS: Final = _of_slot(
    "windrow_compute_units", _GAUGE, "units", "Compute units (cores or SMs) of the device."
)
COMPUTE_GRANTED: Final = _of_slot(
    "windrow_compute_granted_units",
    _GAUGE,
    "units",
    "Compute units in use by decode, and granted to the worker.",
    "part",
)
GRANTED_UNIT_SECONDS: Final = _of_slot(
    "windrow_compute_granted_unit_seconds_total",
    _COUNTER,
    "unit seconds",
    "Compute units granted to the worker, times how long.",
)
COMPUTE_UTILIZATION: Final = _of_slot(
    "windrow_compute_utilization_ratio",
    _GAUGE,
    "ratio",
    "Share of the device's compute in use: by decode (what it would be without harvesting) and by "
    "the worker.",
    "part",
)
ARENA: Final = _of_slot(
    "windrow_arena_bytes",
    _GAUGE,
    "bytes",
    "Memory of the arena by the state of its chunks: free, kv, lent, reserved, draining.",
    "state",
)
CHUNK_BYTES: Final = _of_slot("windrow_chunk_bytes", _GAUGE, "bytes", "Size of a chunk.")
CHUNKS_MOVED: Final = _of_slot(
    "windrow_chunks_moved_total",
    _COUNTER,
    "chunks",
    "Chunks that were lent, revoked (asked back), or reclaimed from a worker that was dead.",
    "move",
)
CHUNK_RETURN: Final = _of_slot(
    "windrow_chunk_return_seconds",
    _HISTOGRAM,
    "seconds",
    "From a revocation until the worker had given back all that it was asked for.",
    buckets=CHUNK_RETURN_BUCKETS_SECONDS,
)

RANK_COMPUTED: Final = _of_slot(
    "windrow_rank_computed_seconds_total",
    _COUNTER,
    "seconds",
    "Processor time of the thread that computes decode's steps on a rank; where ranks differ, the "
    "one with most holds the others up. Only of engines over several ranks, whose steps end with "
    "the slowest.",
    "rank",
)
RANK_LENT: Final = _of_slot(
    "windrow_rank_lent_bytes",
    _GAUGE,
    "bytes",
    "Memory of a rank's arena that its worker has; for longer than a step ranks differ where a "
    "worker's rank has not given back what others have. Only of engines over several ranks.",
    "rank",
)

# --- sidecar: what decides ------------------------------------------------------------------------

DECISION: Final = _of_slot(
    "windrow_decision_seconds",
    _HISTOGRAM,
    "seconds",
    "What view, decision and grant took of a decode step.",
    buckets=DECISION_BUCKETS_SECONDS,
)
PREDICTOR_RATIO: Final = _of_slot(
    "windrow_predictor_ratio",
    _HISTOGRAM,
    "ratio",
    "Latency of decode steps beside the worker, measured over predicted; 1 was predicted right.",
    buckets=PREDICTOR_RATIO_BUCKETS,
)
PREDICTOR_MARGIN: Final = _of_slot(
    "windrow_predictor_margin_ratio",
    _GAUGE,
    "ratio",
    "By how much a prediction must stay below the objective.",
)
WORKER_PAUSED: Final = _of_slot(
    "windrow_worker_paused",
    _GAUGE,
    "",
    "1 while the worker is paused, by the reason; no series while it may run.",
    "reason",
)
GUARD_TRIPS: Final = _of_slot(
    "windrow_guard_trips_total",
    _COUNTER,
    "",
    "Pauses after two steps in a row over the objective beside the worker.",
)
BREAKER_OPEN: Final = _of_slot(
    "windrow_breaker_open", _GAUGE, "", "1 while harvesting has given up on this slot, else 0."
)
THROTTLED_PERIODS: Final = _of_slot(
    "windrow_decode_throttled_periods_total",
    _COUNTER,
    "",
    "Periods in which decode's container had used up its CPU limit.",
)
THROTTLED_SECONDS: Final = _of_slot(
    "windrow_decode_throttled_seconds_total",
    _COUNTER,
    "s",
    "Time for which CPU limits have kept decode from running; some of it beside the worker opens "
    "the breaker.",
)
HARVESTABLE: Final = _of_slot(
    "windrow_harvestable_tokens_per_second",
    _GAUGE,
    "tokens per second",
    "Finetune tokens a second that a worker would get here now; what mode `observe` predicts.",
)

# --- sidecar: workers and jobs --------------------------------------------------------------------

HARVESTED_TOKENS: Final = _of_slot(
    "windrow_harvested_tokens_total",
    _COUNTER,
    "tokens",
    "Real tokens of finished optimizer steps, by the namespace of the job.",
    "job_namespace",
)


def _of_job(name: str, unit: str, text: str) -> Metric:
    return _of_slot(name, _GAUGE, unit, text, *_JOB)


JOB_STEP: Final = _of_job("windrow_job_step", "steps", "Finished optimizer steps of a running job.")
JOB_STEPS: Final = _of_job(
    "windrow_job_steps", "steps", "Optimizer steps that the job will do; 0: not known yet."
)
JOB_LOSS: Final = _of_job("windrow_job_loss", "", "Training loss of the last step.")
JOB_LEARNING_RATE: Final = _of_job("windrow_job_learning_rate", "", "Of the last step.")
JOB_GRADIENT_NORM: Final = _of_job(
    "windrow_job_gradient_norm", "", "Of the last step, before clipping."
)
JOB_RATE: Final = _of_job(
    "windrow_job_tokens_per_second",
    "tokens per second",
    "Real tokens a second over the last ten seconds, pauses and turns of other jobs included.",
)
JOB_ETA: Final = _of_job(
    "windrow_job_eta_seconds", "seconds", "Until the last step at the present pace; 0: not known."
)
JOB_MEMORY: Final = _of_job(
    "windrow_job_memory_bytes",
    "bytes",
    "Most that the job's worker has held: on the device, without one in host memory. Jobs that "
    "share a worker tell the same.",
)
JOB_SKIPPED_ROWS: Final = _of_job(
    "windrow_job_skipped_rows", "rows", "Wrong rows of the dataset that are left out."
)
JOB_CUT_ROWS: Final = _of_job(
    "windrow_job_cut_rows", "rows", "Rows that were too long and have lost their end."
)
WORKER_MEMORY: Final = _of_slot(
    "windrow_worker_memory_bytes",
    _GAUGE,
    "bytes",
    "Device memory that the worker holds: in lent chunks requested by tensors and lost to "
    "fragmentation, and beside them what the driver has taken for CUDA graphs. 0 on the host, "
    "where torch has no hook.",
    "part",
)
WORKER_STARTS: Final = _of_slot(
    "windrow_worker_starts_total", _COUNTER, "workers", "Workers started."
)
WORKER_EXITS: Final = _of_slot(
    "windrow_worker_exits_total",
    _COUNTER,
    "workers",
    "Workers that ended, by the outcome of their last job.",
    "outcome",
)
SIDECAR_ATTACHED: Final = Metric(
    "windrow_sidecar_attached",
    _GAUGE,
    MetricSource.SIDECAR,
    "",
    (),
    "1 while the sidecar's stream to the operator is up, else 0.",
)

# --- operator: jobs, slots and policies -----------------------------------------------------------

JOBS: Final = _of_operator(
    "windrow_jobs",
    _GAUGE,
    "jobs",
    "FinetuneJobs by the state that kubectl prints.",
    "job_namespace",
    "state",
)
SLOTS: Final = _of_operator(
    "windrow_slots",
    _GAUGE,
    "slots",
    "Slots by their policy and the reason of their condition Ready; `Serving` can take a job.",
    "namespace",
    "policy",
    "reason",
)
TIME_TO_PLACE: Final = _of_operator(
    "windrow_job_placement_seconds",
    _HISTOGRAM,
    "seconds",
    "From when a job began to wait (its creation, or the end of its last placement) to its slot.",
    "job_namespace",
    buckets=PLACEMENT_BUCKETS_SECONDS,
)
PLACEMENTS: Final = _of_operator(
    "windrow_placements_total", _COUNTER, "placements", "Jobs placed on a slot.", "job_namespace"
)
PLACEMENT_ENDS: Final = _of_operator(
    "windrow_placement_ends_total",
    _COUNTER,
    "placements",
    "Placements that ended, by the reason that the job's condition Placed then has: `Finished`, or "
    "why the job lost its slot.",
    "job_namespace",
    "reason",
)
HARVESTED_SECONDS: Final = _of_operator(
    "windrow_harvested_device_seconds_total",
    _COUNTER,
    "device seconds",
    "Time that workers had a device beside decode; jobs that share a worker share it. Time in "
    "which decode's guard kept the worker paused counts too.",
    "job_namespace",
    "policy_namespace",
    "policy",
)
POLICY_USED: Final = _of_operator(
    "windrow_policy_used_device_seconds",
    _GAUGE,
    "device seconds",
    "Device seconds that jobs have had under the policy today (UTC).",
    "policy_namespace",
    "policy",
)
POLICY_QUOTA: Final = _of_operator(
    "windrow_policy_quota_device_seconds",
    _GAUGE,
    "device seconds",
    "Device seconds that the policy allows a day; no series without a limit.",
    "policy_namespace",
    "policy",
)
STALE_WORKERS: Final = _of_operator(
    "windrow_stale_workers_total",
    _COUNTER,
    "workers",
    "Workers that got an order to end: their epoch was over.",
)

# --- operator: sidecars ---------------------------------------------------------------------------

STREAMS: Final = _of_operator(
    "windrow_attach_streams", _GAUGE, "streams", "Sidecars that are attached to the operator."
)
STREAMS_REFUSED: Final = _of_operator(
    "windrow_attach_refused_total",
    _COUNTER,
    "streams",
    "Streams of sidecars that were refused, by gRPC's status.",
    "reason",
)
HEARTBEAT_AGE: Final = _of_operator(
    "windrow_heartbeat_age_seconds",
    _GAUGE,
    "seconds",
    "Age of the oldest newest heartbeat of all attached slots; 0 without any.",
)

# --- operator: admission --------------------------------------------------------------------------

INJECTED: Final = _of_operator(
    "windrow_pods_injected_total",
    _COUNTER,
    "pods",
    "Decode pods that were made harvestable, by the rule that found them.",
    "rule",
)
NOT_INJECTED: Final = _of_operator(
    "windrow_pods_not_injected_total",
    _COUNTER,
    "pods",
    "Decode pods that were left as they came, or got no sidecar, by the reason.",
    "reason",
)
WEBHOOK: Final = _of_operator(
    "windrow_webhook_seconds",
    _HISTOGRAM,
    "seconds",
    "Time to answer an AdmissionReview; the API server waits for 2 s and then lets the pod pass.",
    buckets=_CALL_BUCKETS_SECONDS,
)

# --- operator: itself -----------------------------------------------------------------------------

LEADER: Final = _of_operator(
    "windrow_operator_leader", _GAUGE, "", "1 while this replica is the one that acts."
)
PASS_SECONDS: Final = _of_operator(
    "windrow_operator_pass_seconds",
    _HISTOGRAM,
    "seconds",
    "Time of one look at what has changed and what is due.",
    buckets=_CALL_BUCKETS_SECONDS,
)
LAST_EVENT: Final = _of_operator(
    "windrow_operator_last_watch_event_timestamp_seconds",
    _GAUGE,
    "Unix time",
    "When a watch last delivered anything.",
)
WATCH_MISSED: Final = _of_operator(
    "windrow_operator_watch_missed_total",
    _COUNTER,
    "objects",
    "Objects of a kind that were found changed or gone before the watch reported it.",
    "kind",
)
API_REQUESTS: Final = _of_operator(
    "windrow_operator_api_requests_total",
    _COUNTER,
    "requests",
    "Calls to the API server by HTTP method, resource (with subresource) and status; 409 is a "
    "conflict, 0 no answer. Writes of status are those of a resource that ends in /status.",
    "method",
    "resource",
    "code",
)
API_SECONDS: Final = _of_operator(
    "windrow_operator_api_request_seconds",
    _HISTOGRAM,
    "seconds",
    "Latency of calls to the API server.",
    "method",
    buckets=_CALL_BUCKETS_SECONDS,
)
CERTIFICATE_EXPIRY: Final = _of_operator(
    "windrow_operator_certificate_expiry_timestamp_seconds",
    _GAUGE,
    "Unix time",
    "When a certificate of the operator ends.",
    "certificate",
)

METRICS: Final = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
SIDECAR_METRICS: Final = tuple(m for m in METRICS if m.source is MetricSource.SIDECAR)
OPERATOR_METRICS: Final = tuple(m for m in METRICS if m.source is MetricSource.OPERATOR)
