"""Export the slots' state as Prometheus metrics, read at each scrape."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.core import (
    Metric as Family,
)
from prometheus_client.registry import Collector

from windrow import metrics as m
from windrow.conditions import Reason
from windrow.crd import slot_name
from windrow.errors import UserError
from windrow.proto import agent_pb2
from windrow.rundir import ENV_METRICS_PORT
from windrow_sidecar.agent.job_run import JobRun
from windrow_sidecar.agent.settings import AgentSettings
from windrow_sidecar.agent.slot import AgentSlot

_log = logging.getLogger(__name__)

_REASONS = frozenset(map(str, Reason))
PORT_FILE = "metrics.port"  # below the run directory: where the endpoint listens

Rows = Sequence[tuple[tuple[str, ...], float]]
Key = tuple[str, str]  # namespace and name of a HarvestSlot


class Exporter(Collector):
    """The agent's Prometheus endpoint over all slots.

    Args:
        settings: of the agent: whose slots they are, and where to listen.
        slots: those that there are at a scrape.
        attached: whether the stream to the operator is up.
    """

    def __init__(
        self,
        settings: AgentSettings,
        slots: Callable[[], Iterable[AgentSlot]],
        attached: Callable[[], bool],
    ) -> None:
        self._settings, self._slots, self._attached = settings, slots, attached
        self._close: Callable[[], None] = lambda: None

    def start(self) -> int:
        """Listen, and write the port to the run directory; returns it.

        Raises:
            UserError: the port is taken.
        """
        settings = self._settings
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            server, thread = start_http_server(
                settings.metrics_port, settings.metrics_address, registry
            )
        except OSError as error:
            raise UserError(
                f"cannot listen on port {settings.metrics_port}: {error.strerror}",
                field=ENV_METRICS_PORT,
                remedy="Choose another port, or 0 for any free one.",
            ) from error
        port_file = settings.run_dir.root / PORT_FILE
        port_file.write_text(f"{server.server_port}\n", encoding="ascii")

        def close() -> None:
            server.shutdown()
            server.server_close()
            thread.join()
            port_file.unlink(missing_ok=True)

        self._close = close
        _log.info("metrics on http://%s:%d", settings.metrics_address, server.server_port)
        return server.server_port

    def close(self) -> None:
        """Stop listening; idempotent."""
        self._close()
        self._close = lambda: None

    def collect(self) -> Iterator[Family]:
        """All families; called by the endpoint's thread."""
        settings = self._settings
        slots = {
            (settings.pod_namespace, slot_name(settings.pod_name, slot.index)): slot
            for slot in self._slots()
        }
        yield _gauge(m.SIDECAR_ATTACHED, [((), float(self._attached()))])
        yield _gauge(
            m.SLOT_INFO,
            [((*key, *_info(slot), settings.node_name), 1) for key, slot in slots.items()],
        )
        yield _gauge(
            m.SLOT_SHARING,
            [((*key, *_sharing(slot)), 1) for key, slot in slots.items() if slot.hello],
        )
        yield from _decode(slots)
        yield from _device(slots)
        yield from _decisions(slots)
        yield from _jobs(slots)


def _info(slot: AgentSlot) -> tuple[str, str, str, str, str]:
    """The labels `policy` to `device` of a slot."""
    hello, policy = slot.hello or agent_pb2.EngineHello(), slot.policy
    mode = policy.mode if policy.name else "off"
    return policy.name, mode, hello.model, hello.engine, hello.device


def _sharing(slot: AgentSlot) -> tuple[str, str]:
    """The labels `sharing` and `reason` of a slot."""
    if slot.on_host:
        return "spatial", "Cores"
    shared = slot.shared()
    if shared is None:
        return "temporal", str(Reason.NO_WORKER_YET)
    # Decode and worker may be of another release: each new word would be a series.
    return shared.mode, shared.code if shared.code in _REASONS else str(Reason.REASON_NOT_SAID)


def _decode(slots: Mapping[Key, AgentSlot]) -> Iterator[Family]:
    def each(of: Callable[[AgentSlot], float]) -> Rows:
        return [(key, of(slot)) for key, slot in slots.items()]

    yield _gauge(m.ENGINE_UP, each(lambda s: float(s.engine_state == "serving")))
    yield _histogram(
        m.DECODE_TPOT,
        {
            key: agent_pb2.Histogram(counts=s.stats.tpot_histogram, sum=s.stats.tpot_sum_seconds)
            for key, s in slots.items()
        },
    )
    yield _histogram(
        m.DECODE_TPOT_RATIO, {key: s.stats.tpot_objective_ratio for key, s in slots.items()}
    )
    yield _gauge(m.DECODE_OBJECTIVE, each(lambda s: s.stats.objective_seconds))
    yield _gauge(m.DECODE_BATCH, each(lambda s: s.stats.batch))
    yield _gauge(m.DECODE_CONTEXT, each(lambda s: s.stats.context_tokens))
    yield _gauge(m.DECODE_WAITING, each(lambda s: s.stats.waiting))
    yield _gauge(
        m.LORA_REQUESTS,
        [
            ((*key, *_adapters(s.stats.adapters)), s.reported_at_s)
            for key, s in slots.items()
            if s.stats.HasField("adapters")
        ],
    )
    yield _counter(m.DECODE_REQUESTS, each(lambda s: s.stats.requests_completed))
    yield _counter(m.DECODE_FIRST_TOKENS, each(lambda s: s.stats.first_tokens))
    yield _counter(m.DECODE_FIRST_TOKENS_OVER, each(lambda s: s.stats.first_tokens_over_objective))


def _adapters(served: agent_pb2.ServedAdapters) -> tuple[str, str, str]:
    """Return the labels of the model server protocol: how many fit, which are there, which wait."""
    return str(served.most_on_device), ",".join(served.on_device), ",".join(served.waited_for)


def _device(slots: Mapping[Key, AgentSlot]) -> Iterator[Family]:
    granted: list[tuple[tuple[str, ...], float]] = []
    used, arena, moved = granted.copy(), granted.copy(), granted.copy()
    for key, slot in slots.items():
        stats, chunk_bytes = slot.stats, slot.hello.chunk_bytes if slot.hello else 0
        granted += [
            ((*key, "decode"), stats.decode_units),
            ((*key, "finetune"), stats.finetune_units),
        ]
        used += [
            ((*key, "decode"), slot.utilization.decode),
            ((*key, "finetune"), slot.utilization.finetune),
        ]
        states = ("free", "kv", "lent", "reserved", "draining")
        arena += [
            ((*key, state), float(count * chunk_bytes))
            for state, count in zip(states, slot.chunks(), strict=True)
        ]
        moved += [
            ((*key, "lent"), stats.chunks_lent),
            ((*key, "revoked"), stats.chunks_revoked),
            ((*key, "reclaimed"), stats.chunks_reclaimed),
        ]
    known = [(key, slot.hello) for key, slot in slots.items() if slot.hello]
    yield _gauge(m.COMPUTE_UNITS, [(key, hello.compute_units) for key, hello in known])
    yield _gauge(m.COMPUTE_GRANTED, granted)
    yield _counter(
        m.GRANTED_UNIT_SECONDS, [(key, s.stats.granted_unit_seconds) for key, s in slots.items()]
    )
    yield _gauge(m.COMPUTE_UTILIZATION, used)
    yield _gauge(m.ARENA, arena)
    yield _gauge(m.CHUNK_BYTES, [(key, float(hello.chunk_bytes)) for key, hello in known])
    yield _counter(m.CHUNKS_MOVED, moved)
    ranks = [
        ((*key, str(rank)), stats, slot.hello.chunk_bytes if slot.hello else 0)
        for key, slot in slots.items()
        for rank, stats in enumerate(slot.stats.ranks)
    ]
    yield _counter(m.RANK_COMPUTED, [(key, rank.computed_seconds) for key, rank, _ in ranks])
    yield _gauge(m.RANK_LENT, [(key, float(rank.chunks_lent * each)) for key, rank, each in ranks])
    yield _histogram(
        m.CHUNK_RETURN, {key: s.stats.chunk_return_seconds for key, s in slots.items()}
    )


def _decisions(slots: Mapping[Key, AgentSlot]) -> Iterator[Family]:
    def each(of: Callable[[AgentSlot], float]) -> Rows:
        return [(key, of(slot)) for key, slot in slots.items()]

    yield _histogram(m.DECISION, {key: s.stats.decision_seconds for key, s in slots.items()})
    yield _histogram(m.PREDICTOR_RATIO, {key: s.stats.predictor_ratio for key, s in slots.items()})
    yield _gauge(m.PREDICTOR_MARGIN, each(lambda s: s.stats.predictor_margin))
    yield _gauge(
        m.WORKER_PAUSED,
        [((*key, s.stats.paused), 1) for key, s in slots.items() if s.stats.paused],
    )
    yield _counter(m.GUARD_TRIPS, each(lambda s: s.stats.guard_trips))
    yield _gauge(m.BREAKER_OPEN, each(lambda s: float(bool(s.stats.breaker))))
    yield _counter(m.THROTTLED_PERIODS, each(lambda s: s.stats.throttled_periods))
    yield _counter(m.THROTTLED_SECONDS, each(lambda s: s.stats.throttled_seconds))
    yield _gauge(m.HARVESTABLE, each(lambda s: s.stats.predicted_tokens_per_second))


def _jobs(slots: Mapping[Key, AgentSlot]) -> Iterator[Family]:
    yield _counter(
        m.HARVESTED_TOKENS,
        [
            ((*key, tenant), tokens)
            for key, s in slots.items()
            for tenant, tokens in sorted(s.jobs.harvested_tokens.items())
        ],
    )
    yield _counter(m.WORKER_STARTS, [(key, s.jobs.worker_starts) for key, s in slots.items()])
    yield _counter(
        m.WORKER_EXITS,
        [
            ((*key, how), n)
            for key, s in slots.items()
            for how, n in sorted(s.jobs.worker_exits.items())
        ],
    )
    runs = [(key, run) for key, s in slots.items() for run in s.jobs.going]

    def each(of: Callable[[JobRun], float]) -> Rows:
        return [((*key, r.assign.job_namespace, r.assign.job_name), of(r)) for key, r in runs]

    def known(of: Callable[[JobRun], float]) -> Rows:
        """Leave out what no step has reported yet."""
        return [row for row in each(of) if not math.isnan(row[1])]

    yield _gauge(m.JOB_STEP, each(lambda r: r.meter.latest.step))
    yield _gauge(m.JOB_STEPS, each(lambda r: r.meter.latest.total_steps))
    yield _gauge(m.JOB_LOSS, known(lambda r: r.meter.latest.loss))
    yield _gauge(m.JOB_LEARNING_RATE, known(lambda r: r.meter.latest.learning_rate))
    yield _gauge(m.JOB_GRADIENT_NORM, known(lambda r: r.meter.latest.grad_norm))
    yield _gauge(m.JOB_RATE, each(lambda r: r.meter.tokens_per_second))
    yield _gauge(m.JOB_ETA, each(lambda r: r.meter.eta_s))
    yield _gauge(m.JOB_MEMORY, each(lambda r: r.meter.latest.memory_bytes))
    yield _gauge(m.JOB_SKIPPED_ROWS, each(lambda r: r.meter.latest.skipped_rows))
    yield _gauge(m.JOB_CUT_ROWS, each(lambda r: r.meter.latest.cut_rows))
    # Of the process, so each of its jobs tells the same.
    workers = {key: r.meter.latest for key, r in reversed(runs)}
    yield _gauge(
        m.WORKER_MEMORY, [row for key, latest in workers.items() for row in _memory(key, latest)]
    )


def _memory(key: Key, latest: agent_pb2.WorkerProgress) -> Rows:
    held, requested = latest.allocator_held_bytes, latest.allocator_requested_bytes
    return [
        ((*key, "requested"), requested),
        ((*key, "fragmentation"), held - requested),
        ((*key, "graphs"), latest.graph_bytes),
    ]


def _gauge(metric: m.Metric, rows: Rows) -> Family:
    family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
    for labels, value in rows:
        family.add_metric(labels, value)
    return family


def _counter(metric: m.Metric, rows: Rows) -> Family:
    family = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
    for labels, value in rows:
        family.add_metric(labels, value)
    return family


def _histogram(metric: m.Metric, rows: Mapping[Key, agent_pb2.Histogram]) -> Family:
    """Return a histogram; leave out what no engine has reported yet, or one with other buckets."""
    family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    bounds = [*(str(bound) for bound in metric.buckets), "+Inf"]
    for labels, counted in rows.items():
        if len(counted.counts) == len(bounds):
            cumulative = map(float, accumulate(counted.counts))
            family.add_metric(
                labels, buckets=list(zip(bounds, cumulative, strict=True)), sum_value=counted.sum
            )
    return family
