"""Content of the three dashboards: variables, rows and panels, as plain data.

`tools/generate_dashboards.py` makes Grafana's JSON of it. `$__rate_interval` and `$__range` are
Grafana's own. Series whose names hold colons are recorded by
deploy/helm/windrow/rules/windrow.rules.yaml.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Query:
    """A PromQL query and how its series are called."""

    expr: str
    legend: str = "__auto"


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        title: what it shows.
        queries: of it.
        kind: timeseries, stacked (a timeseries whose series add up), stat, bars, heatmap, states.
        unit: Grafana's id of the unit of all queries.
        width: of 24.
        text: what to make of it.
    """

    title: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    unit: str = "short"
    width: int = 8
    text: str = ""


@dataclass(frozen=True)
class Row:
    """Panels under a heading, left to right."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Variable:
    """A choice at the top of a dashboard.

    Attributes:
        name: as `$name` in queries.
        label: for people.
        query: of values, for Prometheus' variable editor; empty: a text box.
        default: of a text box.
        multi: whether several, or all, can be chosen.
    """

    name: str
    label: str
    query: str = ""
    default: str = ""
    multi: bool = True


@dataclass(frozen=True)
class Board:
    """A dashboard."""

    uid: str
    title: str
    text: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...] = field(default=())


# On every board, first; a store of one cluster may have no such label.
CLUSTER = Variable("cluster", "cluster", "label_values(windrow_operator_leader, cluster)")

TOKENS = "windrow:harvested_tokens:rate5m"
WHERE = 'namespace=~"$namespace", policy=~"$policy", model=~"$model"'
SLOTS = 'namespace=~"$namespace"'
# The labels of what a slot is, for series that have its name alone.
JOIN = (
    "* on (namespace, slot) group_left (policy, model) "
    f"max by (namespace, slot, policy, model) (windrow_slot_info{{{WHERE}}})"
)
RATIO = f"windrow:tpot_objective_ratio_bucket:rate5m{{{WHERE}}}"


def gained(series: str) -> str:
    """Return by how much a counter grew over the dashboard's range.

    `increase` misses what a series had when it appeared, which is all of it where it counts rare
    events. A series that is new, or was reset, counts from zero.
    """
    return f"(({series} - ({series} offset $__range)) >= 0 or {series})"


RANGE_SECONDS = gained(
    'windrow_harvested_device_seconds_total{policy_namespace=~"$namespace", policy=~"$policy"}'
)

HARVEST = Board(
    "windrow-harvest",
    "Windrow / Harvest",
    "What harvesting gives, to whom, and what serving feels of it.",
    (
        Variable("namespace", "serving namespace", "label_values(windrow_slot_info, namespace)"),
        Variable("policy", "policy", "label_values(windrow_slot_info, policy)"),
        Variable("model", "model", "label_values(windrow_slot_info, model)"),
        Variable("price", "price of a device hour", default="2"),
        Variable("dedicated", "tokens/s of a whole device", default="0"),
    ),
    (
        Row(
            "Now",
            (
                Panel(
                    "Tokens a second",
                    (Query(f"sum({TOKENS}{{{WHERE}}})"),),
                    "stat",
                    "suffix: tok/s",
                    4,
                    "Finetune tokens a second, of finished optimizer steps.",
                ),
                Panel(
                    "Device hours gathered",
                    (Query(f"sum({RANGE_SECONDS}) / 3600"),),
                    "stat",
                    "suffix: h",
                    4,
                    "Time that workers had a device beside decode, over the dashboard's range. "
                    "Time in which decode's guard kept them paused counts too.",
                ),
                Panel(
                    "Worth",
                    (Query(f"sum({RANGE_SECONDS}) / 3600 * $price"),),
                    "stat",
                    "currencyUSD",
                    4,
                    "Device hours at the price above. A harvested hour is not a whole device's: "
                    "multiply by eta.",
                ),
                Panel(
                    "Steps over the objective",
                    (
                        Query(
                            f"1 - sum(windrow:tpot_objective_ratio_bucket:rate5m{{{WHERE}, "
                            f'le="1.0"}}) / sum(windrow:tpot_objective_ratio_bucket:rate5m{{{WHERE}'
                            ', le="+Inf"})'
                        ),
                    ),
                    "stat",
                    "percentunit",
                    4,
                    "Share of all decode steps. A percentile of 99 allows at most 1%.",
                ),
                Panel(
                    "Slots that harvest",
                    (
                        Query(
                            "count(count by (namespace, slot) (windrow_job_step"
                            f"{{{SLOTS}}})) or vector(0)",
                            "harvest",
                        ),
                        Query(f"sum(windrow_slots{{{SLOTS}}})", "slots"),
                    ),
                    "stat",
                    "short",
                    4,
                ),
                Panel(
                    "Eta",
                    (
                        Query(
                            f"sum({TOKENS}{{{WHERE}}}) / (count(count by (namespace, slot) "
                            f""
                            f"(last_over_time(windrow_job_step{{{SLOTS}}}[5m]))) "
                            "* (vector($dedicated) > 0))"
                        ),
                    ),
                    "stat",
                    "percentunit",
                    4,
                    "Tokens a second beside decode, as a share of those of a whole device. Set "
                    "`tokens/s of a whole device` above, as `windrow finetune` shows it.",
                ),
            ),
        ),
        Row(
            "What is gathered",
            (
                Panel(
                    "Tokens a second by tenant",
                    (
                        Query(
                            f"sum by (job_namespace) ({TOKENS}{{{WHERE}}})",
                            "{{job_namespace}}",
                        ),
                    ),
                    "stacked",
                    "suffix: tok/s",
                    8,
                ),
                Panel(
                    "Tokens a second by policy",
                    (
                        Query(
                            f"sum by (namespace, policy) ({TOKENS}{{{WHERE}}})",
                            "{{namespace}}/{{policy}}",
                        ),
                    ),
                    "stacked",
                    "suffix: tok/s",
                    8,
                ),
                Panel(
                    "Tokens a second by model",
                    (Query(f"sum by (model) ({TOKENS}{{{WHERE}}})", "{{model}}"),),
                    "stacked",
                    "suffix: tok/s",
                    8,
                ),
                Panel(
                    "Gathered, and what there would be to gather",
                    (
                        Query(f"sum({TOKENS}{{{WHERE}}})", "gathered"),
                        Query(
                            f"sum(windrow_harvestable_tokens_per_second {JOIN})",
                            "harvestable (what `observe` predicts)",
                        ),
                    ),
                    "timeseries",
                    "suffix: tok/s",
                    12,
                    "Slots in mode `observe` show what harvesting would give before it is on.",
                ),
                Panel(
                    "Device hours by tenant and policy",
                    (
                        Query(
                            "sum by (job_namespace, policy_namespace, policy) "
                            f"({RANGE_SECONDS}) / 3600",
                            "{{job_namespace}} on {{policy_namespace}}/{{policy}}",
                        ),
                    ),
                    "bars",
                    "suffix: h",
                    12,
                    "Over the dashboard's range; jobs that share a worker share its time.",
                ),
            ),
        ),
        Row(
            "What serving feels",
            (
                Panel(
                    "TPOT over the objective, all slots",
                    (
                        Query(
                            f"histogram_quantile(0.5, sum by (le) ({RATIO}))", "p50 of all steps"
                        ),
                        Query(
                            f"histogram_quantile(0.99, sum by (le) ({RATIO}))", "p99 of all steps"
                        ),
                        Query("vector(1)", "objective"),
                    ),
                    "timeseries",
                    "percentunit",
                    8,
                    "100% is the objective of each slot's own policy.",
                ),
                Panel(
                    "Steps by latency over the objective",
                    (
                        Query(
                            "sum by (le) (increase(windrow_decode_tpot_objective_ratio_bucket"
                            f"{{{SLOTS}}}[$__rate_interval]))",
                            "{{le}}",
                        ),
                    ),
                    "heatmap",
                    "percentunit",
                    8,
                ),
                Panel(
                    "Worst slots: share of steps over the objective",
                    (
                        Query(
                            f"topk(5, windrow:steps_over_objective:ratio_rate5m{{{SLOTS}}})",
                            "{{namespace}}/{{slot}}",
                        ),
                    ),
                    "timeseries",
                    "percentunit",
                    8,
                ),
            ),
        ),
        Row(
            "Devices",
            (
                Panel(
                    "Compute in use, without and with harvesting",
                    (
                        Query(
                            f'avg(windrow_compute_utilization_ratio{{{SLOTS}, part="decode"}})',
                            "decode alone",
                        ),
                        Query(
                            "avg(sum by (namespace, slot) (windrow_compute_utilization_ratio"
                            f"{{{SLOTS}}}))",
                            "with harvesting",
                        ),
                    ),
                    "timeseries",
                    "percentunit",
                    8,
                ),
                Panel(
                    "Arena memory by use",
                    (Query(f"sum by (state) (windrow_arena_bytes{{{SLOTS}}})", "{{state}}"),),
                    "stacked",
                    "bytes",
                    8,
                ),
                Panel(
                    "Slots by readiness",
                    (Query(f"sum by (reason) (windrow_slots{{{SLOTS}}})", "{{reason}}"),),
                    "stacked",
                    "short",
                    8,
                    "`Serving` can take a job; the others are reasons of the slot's condition.",
                ),
                Panel(
                    "Slots by how their device is shared, and why",
                    (
                        Query(
                            f"sum by (sharing, reason) (windrow_slot_sharing_info{{{SLOTS}}})",
                            "{{sharing}}: {{reason}}",
                        ),
                    ),
                    "stacked",
                    "short",
                    8,
                    "`spatial`: decode and worker at once; `temporal`: in turn, for a reason of "
                    "the slot's condition SharedInSpace.",
                ),
                Panel(
                    "Decode pods prepared, and left as they came",
                    (
                        Query(
                            f"sum by (rule) ({gained('windrow_pods_injected_total')})",
                            "prepared, found by {{rule}}",
                        ),
                        Query(
                            f"sum by (reason) ({gained('windrow_pods_not_injected_total')})",
                            "left: {{reason}}",
                        ),
                    ),
                    "bars",
                    "short",
                    8,
                    "The operator's events say why a pod was left.",
                ),
                Panel(
                    "Quota used today",
                    (
                        Query(
                            'windrow_policy_used_device_seconds{policy_namespace=~"$namespace", '
                            'policy=~"$policy"}',
                            "used by {{policy_namespace}}/{{policy}}",
                        ),
                        Query(
                            'windrow_policy_quota_device_seconds{policy_namespace=~"$namespace", '
                            'policy=~"$policy"}',
                            "limit of {{policy_namespace}}/{{policy}}",
                        ),
                    ),
                    "timeseries",
                    "s",
                    8,
                    "Device seconds since midnight UTC; without a limit there is no second line.",
                ),
            ),
        ),
    ),
)

ONE = 'namespace="$namespace", slot="$slot"'
COMPUTED = f"windrow_rank_computed_seconds_total{{{ONE}}}[$__rate_interval]"  # of a rank


def _quantile(q: float, metric: str) -> str:
    return (
        f"histogram_quantile({q}, sum by (le) (rate({metric}_bucket{{{ONE}}}[$__rate_interval])))"
    )


SLOT = Board(
    "windrow-slot",
    "Windrow / Slot",
    "One device: its decode steps against the objective, what is shared, and who decides why.",
    (
        Variable(
            "namespace", "namespace", "label_values(windrow_slot_info, namespace)", multi=False
        ),
        Variable(
            "slot",
            "slot",
            'label_values(windrow_slot_info{namespace="$namespace"}, slot)',
            multi=False,
        ),
    ),
    (
        Row(
            "Decode",
            (
                Panel(
                    "TPOT against the objective",
                    (
                        Query(_quantile(0.5, "windrow_decode_tpot_seconds"), "p50"),
                        Query(_quantile(0.99, "windrow_decode_tpot_seconds"), "p99"),
                        Query(f"windrow_decode_objective_seconds{{{ONE}}} > 0", "objective"),
                    ),
                    "timeseries",
                    "s",
                    12,
                ),
                Panel(
                    "Steps by latency over the objective",
                    (
                        Query(
                            "sum by (le) (increase(windrow_decode_tpot_objective_ratio_bucket"
                            f"{{{ONE}}}[$__rate_interval]))",
                            "{{le}}",
                        ),
                    ),
                    "heatmap",
                    "percentunit",
                    12,
                ),
                Panel(
                    "Requests",
                    (
                        Query(f"windrow_decode_batch_requests{{{ONE}}}", "in the batch"),
                        Query(f"windrow_decode_waiting_requests{{{ONE}}}", "waiting"),
                    ),
                    "timeseries",
                    "short",
                    8,
                ),
                Panel(
                    "Context of the batch",
                    (Query(f"windrow_decode_context_tokens{{{ONE}}}", "tokens"),),
                    "timeseries",
                    "suffix: tok",
                    8,
                ),
                Panel(
                    "Steps a second",
                    (
                        Query(
                            "sum(rate(windrow_decode_tpot_seconds_count"
                            f"{{{ONE}}}[$__rate_interval]))",
                            "steps",
                        ),
                    ),
                    "timeseries",
                    "short",
                    8,
                ),
            ),
        ),
        Row(
            "What is shared",
            (
                Panel(
                    "Compute units granted",
                    (
                        Query(f"windrow_compute_granted_units{{{ONE}}}", "{{part}}"),
                        Query(f"windrow_compute_units{{{ONE}}}", "device"),
                    ),
                    "timeseries",
                    "short",
                    8,
                    "Cores or SMs. Decode may use what the worker is not granted.",
                ),
                Panel(
                    "Compute in use",
                    (Query(f"windrow_compute_utilization_ratio{{{ONE}}}", "{{part}}"),),
                    "stacked",
                    "percentunit",
                    8,
                ),
                Panel(
                    "Memory of the arena",
                    (Query(f"windrow_arena_bytes{{{ONE}}}", "{{state}}"),),
                    "stacked",
                    "bytes",
                    8,
                    "KV always wins: what it wants is revoked (draining) and comes back.",
                ),
                Panel(
                    "Chunks moved a minute",
                    (
                        Query(
                            f"60 * rate(windrow_chunks_moved_total{{{ONE}}}[$__rate_interval])",
                            "{{move}}",
                        ),
                    ),
                    "timeseries",
                    "short",
                    8,
                ),
                Panel(
                    "How soon revoked chunks come back",
                    (
                        Query(
                            f"{gained(f'windrow_chunk_return_seconds_sum{{{ONE}}}')} / "
                            f"({gained(f'windrow_chunk_return_seconds_count{{{ONE}}}')} > 0)",
                            "mean of the range",
                        ),
                    ),
                    "stat",
                    "s",
                    8,
                    "Empty while nothing was revoked.",
                ),
                Panel(
                    "Finetune tokens a second",
                    (
                        Query(
                            f"sum by (job_name) (windrow_job_tokens_per_second{{{ONE}}})",
                            "{{job_name}}",
                        ),
                        Query(f"windrow_harvestable_tokens_per_second{{{ONE}}}", "harvestable"),
                    ),
                    "timeseries",
                    "suffix: tok/s",
                    8,
                ),
            ),
        ),
        Row(
            "Ranks, where decode's model is over several",
            (
                Panel(
                    "Computing of each rank, of the slowest one's",
                    (
                        Query(
                            f"rate({COMPUTED}) / scalar(max(rate({COMPUTED})))",
                            "rank {{rank}}",
                        ),
                    ),
                    "timeseries",
                    "percentunit",
                    12,
                    "Processor time of decode's steps, which end with the slowest rank. Empty for "
                    "an engine of one rank.",
                ),
                Panel(
                    "Lent memory, by rank",
                    (Query(f"windrow_rank_lent_bytes{{{ONE}}}", "rank {{rank}}"),),
                    "timeseries",
                    "bytes",
                    12,
                    "Ranks lend the same chunks. One that stays above the others has a worker's "
                    "rank that has not given back what it was asked for.",
                ),
            ),
        ),
        Row(
            "Who decides, and why",
            (
                Panel(
                    "Why the worker is paused",
                    (
                        # A pause between two points of the panel is seen too.
                        Query(
                            f"max_over_time(windrow_worker_paused{{{ONE}}}[$__rate_interval])",
                            "{{reason}}",
                        ),
                    ),
                    "states",
                    "short",
                    12,
                    "No bar: it may run.",
                ),
                Panel(
                    "How the device is shared, and why",
                    (
                        Query(
                            f"windrow_slot_sharing_info{{{ONE}}}",
                            "{{sharing}}: {{reason}}",
                        ),
                    ),
                    "states",
                    "short",
                    12,
                    "`temporal`: the worker runs while decode has no request. The reason is one of "
                    "the slot's condition SharedInSpace, which says what to do.",
                ),
                Panel(
                    "Guard and breaker",
                    (
                        Query(
                            f"60 * rate(windrow_guard_trips_total{{{ONE}}}[$__rate_interval])",
                            "guard's pauses a minute",
                        ),
                        Query(f"windrow_breaker_open{{{ONE}}}", "breaker open"),
                    ),
                    "timeseries",
                    "short",
                    8,
                ),
                Panel(
                    "Predictor: measured over predicted",
                    (
                        Query(_quantile(0.5, "windrow_predictor_ratio"), "p50"),
                        Query(_quantile(0.95, "windrow_predictor_ratio"), "p95"),
                        Query(f"1 + windrow_predictor_margin_ratio{{{ONE}}}", "1 + margin"),
                    ),
                    "timeseries",
                    "percentunit",
                    8,
                    "The margin follows the 95th percentile.",
                ),
                Panel(
                    "What a decision takes of a step",
                    (
                        Query(_quantile(0.5, "windrow_decision_seconds"), "p50"),
                        Query(_quantile(0.99, "windrow_decision_seconds"), "p99"),
                    ),
                    "timeseries",
                    "s",
                    8,
                ),
            ),
        ),
    ),
)

OF_JOBS = 'job_namespace=~"$job_namespace", job_name=~"$job"'
TENANT = 'job_namespace=~"$job_namespace"'
NAME = "{{job_namespace}}/{{job_name}}"


def _of_job(metric: str) -> tuple[Query, ...]:
    return (Query(f"max by (job_namespace, job_name) ({metric}{{{OF_JOBS}}})", NAME),)


JOBS = Board(
    "windrow-jobs",
    "Windrow / Jobs",
    "The queue, how jobs get on, and what moved them; below, the operator itself.",
    (
        Variable("job_namespace", "namespace", "label_values(windrow_jobs, job_namespace)"),
        Variable(
            "job",
            "job",
            'label_values(windrow_job_step{job_namespace=~"$job_namespace"}, job_name)',
        ),
    ),
    (
        Row(
            "Queue",
            (
                Panel(
                    "Jobs by state",
                    (Query(f"sum by (state) (windrow_jobs{{{TENANT}}})", "{{state}}"),),
                    "stacked",
                    "short",
                    8,
                ),
                Panel(
                    "Time to place",
                    tuple(
                        Query(
                            f"histogram_quantile({q}, sum by (le) ("
                            f"{gained(f'windrow_job_placement_seconds_bucket{{{TENANT}}}')}))",
                            f"p{q * 100:g}",
                        )
                        for q in (0.5, 0.95)
                    ),
                    "stat",
                    "s",
                    8,
                    "Of the dashboard's range.",
                ),
                Panel(
                    "How placements ended",
                    (
                        Query(
                            "sum by (reason) "
                            f"({gained(f'windrow_placement_ends_total{{{TENANT}}}')})",
                            "{{reason}}",
                        ),
                    ),
                    "bars",
                    "short",
                    8,
                    "`Finished`, or why a job lost its slot and goes on elsewhere.",
                ),
            ),
        ),
        Row(
            "Progress",
            (
                Panel("Loss", _of_job("windrow_job_loss"), width=8),
                Panel(
                    "Progress",
                    (
                        Query(
                            f"max by (job_namespace, job_name) (windrow_job_step{{{OF_JOBS}}} "
                            f"/ (windrow_job_steps{{{OF_JOBS}}} > 0))",
                            NAME,
                        ),
                    ),
                    "timeseries",
                    "percentunit",
                    8,
                ),
                Panel("Time left", _of_job("windrow_job_eta_seconds"), unit="s", width=8),
                Panel(
                    "Tokens a second",
                    _of_job("windrow_job_tokens_per_second"),
                    unit="suffix: tok/s",
                    width=8,
                    text="Pauses included.",
                ),
                Panel("Gradient norm", _of_job("windrow_job_gradient_norm"), width=8),
                Panel("Learning rate", _of_job("windrow_job_learning_rate"), width=8),
                Panel(
                    "Most memory held", _of_job("windrow_job_memory_bytes"), unit="bytes", width=8
                ),
                Panel("Rows left out", _of_job("windrow_job_skipped_rows"), width=4),
                Panel("Rows cut", _of_job("windrow_job_cut_rows"), width=4),
                Panel(
                    "Workers that ended, by outcome",
                    (
                        Query(
                            f"sum by (outcome) ({gained('windrow_worker_exits_total')})",
                            "{{outcome}}",
                        ),
                    ),
                    "bars",
                    "short",
                    8,
                ),
            ),
        ),
        Row(
            "The operator",
            (
                Panel(
                    "Leader, streams, oldest heartbeat",
                    (
                        Query("sum(windrow_operator_leader)", "leaders"),
                        Query("sum(windrow_attach_streams)", "streams"),
                        Query("max(windrow_heartbeat_age_seconds)", "oldest heartbeat, s"),
                    ),
                    "timeseries",
                    "short",
                    8,
                ),
                Panel(
                    "Calls to the API server a second",
                    (
                        Query(
                            "sum by (method, resource) "
                            "(rate(windrow_operator_api_requests_total[$__rate_interval]))",
                            "{{method}} {{resource}}",
                        ),
                    ),
                    "stacked",
                    "reqps",
                    8,
                    "Of the operator's own; its watches are not counted.",
                ),
                Panel(
                    "Calls that failed a second, conflicts among them",
                    (
                        Query(
                            "sum by (code) (rate(windrow_operator_api_requests_total"
                            '{code!~"2.."}[$__rate_interval])) or '
                            'label_replace(vector(0), "code", "none", "", "")',
                            "{{code}}",
                        ),
                    ),
                    "timeseries",
                    "reqps",
                    8,
                ),
                Panel(
                    "Latency, p99",
                    tuple(
                        Query(
                            "histogram_quantile(0.99, sum by (le) "
                            f"(rate({metric}_bucket[$__rate_interval])))",
                            name,
                        )
                        for metric, name in (
                            ("windrow_operator_api_request_seconds", "API server"),
                            ("windrow_operator_pass_seconds", "pass over all jobs"),
                        )
                    ),
                    "timeseries",
                    "s",
                    8,
                ),
                Panel(
                    "Webhook",
                    (
                        Query(
                            "histogram_quantile(0.99, sum by (le) "
                            f"({gained('windrow_webhook_seconds_bucket')}))",
                            "p99 of the range",
                        ),
                    ),
                    "stat",
                    "s",
                    8,
                    "The API server waits for 2 s, then the pod passes as it came.",
                ),
                Panel(
                    "Certificates end in",
                    (
                        Query(
                            "windrow_operator_certificate_expiry_timestamp_seconds - time()",
                            "{{certificate}}",
                        ),
                    ),
                    "stat",
                    "s",
                    8,
                ),
            ),
        ),
    ),
)

BOARDS = (HARVEST, SLOT, JOBS)
