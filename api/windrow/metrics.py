"""The names and help texts of all Prometheus metrics, in base units.

One file, so that a dashboard, the docs and the code cannot differ. Operator and agent declare their
own collectors from these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its name, what it says, and its labels."""

    name: str
    help: str
    labels: tuple[str, ...] = ()


# From a small model on a laptop (1 ms) to an objective of seconds; four buckets a factor of ten.
TPOT_BUCKETS_SECONDS: Final = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.010, 0.0125, 0.015, 0.020, 0.025, 0.030, 0.040, 0.050,
    0.075, 0.100, 0.150, 0.250, 0.500, 1.0, 2.5,
)  # fmt: skip

_SLOT: Final = ("namespace", "slot")

# --- operator -------------------------------------------------------------------------------------

OPERATOR_JOBS: Final = Metric(
    "windrow_operator_jobs", "FinetuneJobs by the state that kubectl prints.", ("state",)
)
OPERATOR_SLOTS: Final = Metric(
    "windrow_operator_slots",
    "Harvested devices by whether their sidecar is attached.",
    ("attached",),
)
OPERATOR_PLACEMENTS: Final = Metric(
    "windrow_operator_placements_total", "Placements of jobs on slots, repeats included."
)
OPERATOR_LOST: Final = Metric(
    "windrow_operator_placements_lost_total", "Placements that ended because the slot was lost."
)
OPERATOR_STALE: Final = Metric(
    "windrow_operator_stale_workers_total", "Workers that were told to end: their epoch was over."
)
OPERATOR_INJECTIONS: Final = Metric(
    "windrow_operator_injections_total",
    "Pods that were made harvestable, by the rule that matched.",
    ("rule",),
)
OPERATOR_NOT_INJECTED: Final = Metric(
    "windrow_operator_not_injected_total",
    "Decode pods that were left as they came, or got no sidecar, by the reason.",
    ("reason",),
)
OPERATOR_PASS_SECONDS: Final = Metric(
    "windrow_operator_pass_seconds", "Time of one pass over all jobs."
)
OPERATOR_LAST_EVENT: Final = Metric(
    "windrow_operator_last_watch_event_timestamp_seconds", "When a watch last delivered anything."
)
OPERATOR_ATTACH_REFUSED: Final = Metric(
    "windrow_operator_attach_refused_total", "Streams of sidecars that were refused.", ("reason",)
)

# --- slots, as the operator sees them -------------------------------------------------------------

SLOT_TPOT_P99: Final = Metric(
    "windrow_slot_tpot_p99_seconds", "99th percentile of the time per output token.", _SLOT
)
SLOT_OBJECTIVE: Final = Metric(
    "windrow_slot_tpot_objective_seconds", "Objective for the time per output token.", _SLOT
)
SLOT_COMPUTE: Final = Metric(
    "windrow_slot_compute_utilization_ratio",
    "Share of the device's compute in use; part `decode` is decode alone, `all` with the worker.",
    (*_SLOT, "part"),
)
SLOT_MEMORY: Final = Metric(
    "windrow_slot_memory_utilization_ratio", "Share of the arena that is KV or lent.", _SLOT
)
SLOT_TOKENS: Final = Metric(
    "windrow_slot_harvested_tokens_per_second", "Finetune tokens per second on the slot.", _SLOT
)

# --- agent: one device and its decode engine; the label `slot` is its index in the pod ------------


def _of_slot(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, text, ("slot", *labels))


DECODE_STEPS: Final = _of_slot("windrow_decode_steps_total", "Decode steps.")
DECODE_STEPS_OVER: Final = _of_slot(
    "windrow_decode_steps_over_objective_total",
    "Decode steps that took longer than the objective.",
)
DECODE_TPOT: Final = _of_slot(
    "windrow_decode_tpot_seconds", "Time per output token: latency of decode steps."
)
DECODE_TPOT_QUANTILE: Final = _of_slot(
    "windrow_decode_tpot_quantile_seconds",
    "Time per output token over the last second with a step.",
    "quantile",
)
DECODE_OBJECTIVE: Final = _of_slot(
    "windrow_decode_objective_seconds", "Objective in force; 0 without a policy."
)
DECODE_BUSY: Final = _of_slot(
    "windrow_decode_busy_seconds_total", "Time spent inside decode steps."
)
DECODE_BATCH: Final = _of_slot("windrow_decode_batch_requests", "Requests in the running batch.")
DECODE_CONTEXT: Final = _of_slot(
    "windrow_decode_context_tokens", "Context tokens of the running batch."
)
DECODE_WAITING: Final = _of_slot(
    "windrow_decode_waiting_requests", "Requests that have arrived and do not run yet."
)
DECODE_REQUESTS: Final = _of_slot(
    "windrow_decode_requests_completed_total", "Requests that were answered."
)
DECISION: Final = _of_slot(
    "windrow_decision_seconds",
    "What view, decision and grant took of a decode step, over the last second.",
    "quantile",
)
COMPUTE_UNITS: Final = _of_slot(
    "windrow_compute_units",
    "Compute units (cores or SMs): of the device, in use by decode, granted to the worker.",
    "part",
)
COMPUTE_UTILIZATION: Final = _of_slot(
    "windrow_compute_utilization_ratio",
    "Share of the device's compute in use: by decode (what it would be without harvesting), "
    "by the worker, and by both (device).",
    "part",
)
MEMORY_UTILIZATION: Final = _of_slot(
    "windrow_memory_utilization_ratio",
    "Share of the arena in use: as KV (what it would be without harvesting), lent to the worker, "
    "and both (device).",
    "part",
)
CHUNKS: Final = _of_slot("windrow_chunks", "Chunks of the arena by state.", "state")
CHUNK_BYTES: Final = _of_slot("windrow_chunk_bytes", "Size of a chunk.")
HARVESTED_TOKENS: Final = _of_slot(
    "windrow_harvested_tokens_total",
    "Real tokens of finished optimizer steps, of all jobs that ran here.",
)
HARVESTABLE_RATE: Final = _of_slot(
    "windrow_harvestable_tokens_per_second",
    "Finetune tokens a second that a worker would get here now; in mode observe before any runs.",
)
BREAKER_OPEN: Final = _of_slot(
    "windrow_breaker_open", "1 while harvesting has given up on this slot."
)
JOB_INFO: Final = _of_slot(
    "windrow_job_info",
    "1 for each job that a worker runs.",
    "job_namespace",
    "job_name",
    "job_uid",
    "epoch",
)


def _of_job(name: str, text: str) -> Metric:
    return _of_slot(name, text, "job_namespace", "job_name")


JOB_STEP: Final = _of_job("windrow_job_step", "Finished optimizer steps of a job that runs.")
JOB_STEPS: Final = _of_job("windrow_job_steps", "Optimizer steps that the job will do.")
JOB_LOSS: Final = _of_job("windrow_job_loss", "Training loss of the last step.")
JOB_LEARNING_RATE: Final = _of_job("windrow_job_learning_rate", "Of the last step.")
JOB_GRADIENT_NORM: Final = _of_job(
    "windrow_job_gradient_norm", "Of the last step, before clipping."
)
JOB_MEMORY: Final = _of_job(
    "windrow_job_memory_bytes",
    "Most that the job's worker has held: on the device, without one in host memory. Jobs that "
    "share a worker tell the same.",
)
JOB_SKIPPED_ROWS: Final = _of_job(
    "windrow_job_skipped_rows", "Wrong rows of the dataset that are left out."
)
JOB_RATE: Final = _of_job(
    "windrow_job_tokens_per_second",
    "Real tokens a second of the job over the last ten seconds, pauses and turns of others "
    "included.",
)
WORKER_MEMORY: Final = _of_slot(
    "windrow_worker_memory_bytes",
    "Device memory of the worker's tensors over lent chunks: held in blocks, requested by tensors, "
    "and the difference (fragmentation). 0 on the host, where torch has no hook.",
    "part",
)
WORKER_STARTS: Final = _of_slot("windrow_worker_starts_total", "Workers started.")
WORKER_EXITS: Final = _of_slot(
    "windrow_worker_exits_total", "Workers that ended, by the outcome of their last job.", "outcome"
)
OPERATOR_ATTACHED: Final = Metric(
    "windrow_operator_attached", "1 while the stream to the operator is up."
)

AGENT_METRICS: Final = (
    DECODE_STEPS,
    DECODE_STEPS_OVER,
    DECODE_TPOT,
    DECODE_TPOT_QUANTILE,
    DECODE_OBJECTIVE,
    DECODE_BUSY,
    DECODE_BATCH,
    DECODE_CONTEXT,
    DECODE_WAITING,
    DECODE_REQUESTS,
    DECISION,
    COMPUTE_UNITS,
    COMPUTE_UTILIZATION,
    MEMORY_UTILIZATION,
    CHUNKS,
    CHUNK_BYTES,
    HARVESTED_TOKENS,
    HARVESTABLE_RATE,
    BREAKER_OPEN,
    JOB_INFO,
    JOB_STEP,
    JOB_STEPS,
    JOB_LOSS,
    JOB_LEARNING_RATE,
    JOB_GRADIENT_NORM,
    JOB_MEMORY,
    JOB_SKIPPED_ROWS,
    JOB_RATE,
    WORKER_MEMORY,
    WORKER_STARTS,
    WORKER_EXITS,
    OPERATOR_ATTACHED,
)
