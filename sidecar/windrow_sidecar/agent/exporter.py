"""Export the slots' state as Prometheus metrics, read at each scrape."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from windrow.errors import UserError
from windrow.proto import agent_pb2
from windrow.rundir import ENV_METRICS_PORT
from windrow_sidecar.agent.job_run import JobRun
from windrow_sidecar.agent.settings import AgentSettings
from windrow_sidecar.agent.slot import AgentSlot

_log = logging.getLogger(__name__)

PORT_FILE = "metrics.port"  # below the run directory: where the endpoint listens

Rows = Sequence[tuple[tuple[str, ...], float]]


class Exporter(Collector):
    """The agent's Prometheus endpoint over all slots."""

    def __init__(
        self, slots: Callable[[], Iterable[AgentSlot]], attached: Callable[[], bool]
    ) -> None:
        self._slots, self._attached = slots, attached
        self._close: Callable[[], None] = lambda: None

    def start(self, settings: AgentSettings) -> int:
        """Listen, and write the port to the run directory; returns it.

        Raises:
            UserError: the port is taken.
        """
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
        slots = list(self._slots())
        yield _gauge(m.OPERATOR_ATTACHED, [((), float(self._attached()))])
        yield from _decode(slots)
        yield from _device(slots)
        yield from _jobs(slots)


def _decode(slots: list[AgentSlot]) -> Iterator[Family]:
    def each(of: Callable[[AgentSlot], float]) -> Rows:
        return [((str(s.index),), of(s)) for s in slots]

    yield _counter(m.DECODE_STEPS, each(lambda s: s.stats.steps))
    yield _counter(m.DECODE_STEPS_OVER, each(lambda s: s.stats.steps_over_objective))
    yield _counter(m.DECODE_BUSY, each(lambda s: s.stats.busy_seconds))
    yield _counter(m.DECODE_REQUESTS, each(lambda s: s.stats.requests_completed))
    yield _gauge(m.DECODE_OBJECTIVE, each(lambda s: s.stats.objective_seconds))
    yield _gauge(m.DECODE_BATCH, each(lambda s: s.stats.batch))
    yield _gauge(m.DECODE_CONTEXT, each(lambda s: s.stats.context_tokens))
    yield _gauge(m.DECODE_WAITING, each(lambda s: s.stats.waiting))
    yield _gauge(m.BREAKER_OPEN, each(lambda s: float(bool(s.stats.breaker))))
    yield _gauge(m.HARVESTABLE_RATE, each(lambda s: s.stats.predicted_tokens_per_second))
    yield _tpot(slots)
    yield _gauge(
        m.DECODE_TPOT_QUANTILE,
        [
            ((str(s.index), q), value)
            for s in slots
            for q, value in (("0.5", s.stats.tpot_p50_seconds), ("0.99", s.stats.tpot_p99_seconds))
        ],
    )
    yield _gauge(
        m.DECISION,
        [
            ((str(s.index), q), value)
            for s in slots
            for q, value in (
                ("0.5", s.stats.decision_p50_seconds),
                ("0.99", s.stats.decision_p99_seconds),
            )
        ],
    )


def _tpot(slots: list[AgentSlot]) -> Family:
    metric = m.DECODE_TPOT
    family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    bounds = [*(str(bound) for bound in m.TPOT_BUCKETS_SECONDS), "+Inf"]
    for slot in slots:
        if len(slot.stats.tpot_histogram) == len(bounds):
            cumulative = accumulate(slot.stats.tpot_histogram)
            family.add_metric(
                [str(slot.index)],
                buckets=list(zip(bounds, map(float, cumulative), strict=True)),
                sum_value=slot.stats.tpot_sum_seconds,
            )
    return family


def _device(slots: list[AgentSlot]) -> Iterator[Family]:
    units: list[tuple[tuple[str, ...], float]] = []
    compute, memory, chunks = units.copy(), units.copy(), units.copy()
    for slot in slots:
        index = str(slot.index)
        free, kv, lent, reserved, draining = slot.chunks()
        total = max(1, free + kv + lent + reserved + draining)
        device = slot.hello.compute_units if slot.hello else 0
        used = slot.utilization
        units += [
            ((index, "device"), device),
            ((index, "decode"), slot.stats.decode_units),
            ((index, "finetune"), slot.stats.finetune_units),
        ]
        compute += [
            ((index, "device"), used.decode + used.finetune),
            ((index, "decode"), used.decode),
            ((index, "finetune"), used.finetune),
        ]
        memory += [
            ((index, "device"), (kv + lent + draining) / total),
            ((index, "kv"), kv / total),
            ((index, "lent"), (lent + draining) / total),
        ]
        chunks += [
            ((index, "free"), free),
            ((index, "kv"), kv),
            ((index, "lent"), lent),
            ((index, "reserved"), reserved),
            ((index, "draining"), draining),
        ]
    yield _gauge(m.COMPUTE_UNITS, units)
    yield _gauge(m.COMPUTE_UTILIZATION, compute)
    yield _gauge(m.MEMORY_UTILIZATION, memory)
    yield _gauge(m.CHUNKS, chunks)
    yield _gauge(
        m.CHUNK_BYTES, [((str(s.index),), float(s.hello.chunk_bytes)) for s in slots if s.hello]
    )


def _jobs(slots: list[AgentSlot]) -> Iterator[Family]:
    yield _counter(m.HARVESTED_TOKENS, [((str(s.index),), s.jobs.harvested_tokens) for s in slots])
    yield _counter(m.WORKER_STARTS, [((str(s.index),), s.jobs.worker_starts) for s in slots])
    yield _counter(
        m.WORKER_EXITS,
        [((str(s.index), how), n) for s in slots for how, n in sorted(s.jobs.worker_exits.items())],
    )
    runs = [(str(s.index), run) for s in slots for run in s.jobs.going]
    jobs = [(i, r.assign) for i, r in runs]
    yield _gauge(
        m.JOB_INFO,
        [((i, j.job_namespace, j.job_name, j.job_uid, str(j.epoch)), 1) for i, j in jobs],
    )

    def each(of: Callable[[JobRun], float]) -> Rows:
        return [((i, r.assign.job_namespace, r.assign.job_name), of(r)) for i, r in runs]

    def known(of: Callable[[JobRun], float]) -> Rows:
        """Leave out what no step has told yet."""
        return [row for row in each(of) if not math.isnan(row[1])]

    yield _gauge(m.JOB_STEP, each(lambda r: r.meter.latest.step))
    yield _gauge(m.JOB_STEPS, each(lambda r: r.meter.latest.total_steps))
    yield _gauge(m.JOB_LOSS, known(lambda r: r.meter.latest.loss))
    yield _gauge(m.JOB_LEARNING_RATE, known(lambda r: r.meter.latest.learning_rate))
    yield _gauge(m.JOB_GRADIENT_NORM, known(lambda r: r.meter.latest.grad_norm))
    yield _gauge(m.JOB_MEMORY, each(lambda r: r.meter.latest.memory_bytes))
    yield _gauge(m.JOB_SKIPPED_ROWS, each(lambda r: r.meter.latest.skipped_rows))
    yield _gauge(m.JOB_RATE, each(lambda r: r.meter.tokens_per_second))
    # Of the process, so each of its jobs tells the same.
    workers = {i: r.meter.latest for i, r in reversed(runs)}
    yield _gauge(m.WORKER_MEMORY, [row for i in workers for row in _memory_rows(i, workers[i])])


def _memory_rows(slot: str, latest: agent_pb2.WorkerProgress) -> Rows:
    held, requested = latest.allocator_held_bytes, latest.allocator_requested_bytes
    return [
        ((slot, "held"), held),
        ((slot, "requested"), requested),
        ((slot, "fragmentation"), held - requested),
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
