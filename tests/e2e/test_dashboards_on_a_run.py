"""Every panel of every dashboard shows something of a real run that a real Prometheus scraped."""

from __future__ import annotations

import importlib.util
import math
import shutil
import sys
import time
from pathlib import Path

import httpx
import pytest
from farm import Requests, until
from kubernetes import config
from kubernetes.client import CoreV1Api

from windrow.metrics import (
    LORA_REQUESTS,
    RANK_COMPUTED,
    RANK_LENT,
    SIDECAR_METRICS,
    MetricType,
)
from windrow_lab.cluster import manifests
from windrow_lab.cluster.monitoring import Prometheus

pytestmark = [
    pytest.mark.paired,
    pytest.mark.extended,
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="no prometheus (Debian: apt-get install prometheus)",
    ),
]

PODS = 1
OF_RANKS = (RANK_COMPUTED.name, RANK_LENT.name)  # an engine of one rank, as here, says nothing
ROOT = Path(__file__).resolve().parents[2]
BOARDS = sorted((ROOT / "deploy" / "helm" / "windrow" / "dashboards").glob("*.json"))

spec = importlib.util.spec_from_file_location("query", ROOT / "tools" / "dashboards" / "query.py")
query = importlib.util.module_from_spec(spec)
sys.modules["query"] = query
spec.loader.exec_module(query)


def ask(prometheus, expr):
    answer = httpx.get(f"{prometheus.url}/api/v1/query", params={"query": expr}).json()
    return answer["data"]["result"]


def skipped_pod():
    """A decode pod of an engine that cannot be driven."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "other",
            "namespace": manifests.NAMESPACE,
            "labels": {"windrow.dev/inject": "enabled"},
        },
        "spec": {
            "containers": [
                {"name": "vllm", "image": "vllm", "command": ["vllm", "serve", "/models/chat"]}
            ]
        },
    }


def asks_for_long(endpoint):
    body = {"model": "m", "prompt": "A coffee machine", "max_tokens": 500}
    answer = httpx.post(f"{endpoint}/v1/completions", json=body, timeout=60)
    return answer.raise_for_status().json()["usage"]["completion_tokens"]


@pytest.fixture(scope="module")
def scraped(farm, tmp_path_factory):
    """A job from submission to end under requests, with a policy that tightens meanwhile."""
    begin = time.time()
    data = tmp_path_factory.mktemp("prometheus")
    with Prometheus(farm.cluster.directory, data) as prometheus:
        policy = manifests.harvest_policy("farm", farm.objective_ms, "windrow")
        policy["spec"]["access"] = {**policy["spec"].get("access", {}), "gpuSecondsPerDay": 3600}
        farm.client.apply_policy(policy)
        until("both are targets", lambda: len(prometheus.find_targets()) == 2)
        farm.submit("seen", steps=16)
        # A worker that loads its libraries has only the time that decode and this machine leave.
        until("its first step", lambda: farm.job("seen").step >= 1, within_s=240)
        # Decode alone cannot keep this, so the worker pauses; without requests no step is late.
        bearable, policy["spec"]["objective"] = policy["spec"]["objective"], {"tpot": "0.1ms"}
        farm.client.apply_policy(policy)
        paused = "max_over_time(windrow_worker_paused[5m]) > 0"
        until("a pause is scraped", lambda: ask(prometheus, paused))
        policy["spec"]["objective"] = bearable
        farm.client.apply_policy(policy)
        with Requests(farm.endpoint("decode-0")) as requests:
            with config.new_client_from_config(str(farm.cluster.kubeconfig)) as api:
                CoreV1Api(api).create_namespaced_pod(
                    manifests.NAMESPACE, skipped_pod(), dry_run="All"
                )
            # What is lent beyond the limit comes back.
            until("chunks are lent", lambda: farm.lent_chunks("decode-0") > 1)
            policy["spec"]["limits"] = {"maxMemoryPercent": 1}
            farm.client.apply_policy(policy)
            returned = "windrow_chunk_return_seconds_count > 0"
            until("revoked chunks come back", lambda: ask(prometheus, returned))
            del policy["spec"]["limits"]
            farm.client.apply_policy(policy)
            # Longer than a scrape's interval, so that one meets it.
            until(
                "a request is seen in the batch",
                lambda: (
                    asks_for_long(farm.endpoint("decode-0"))
                    and ask(prometheus, "max_over_time(windrow_decode_batch_requests[5m]) > 0")
                ),
            )
        farm.succeeded("seen")
        ended = 'windrow_worker_exits_total{outcome="succeeded"}'
        until("the worker has ended", lambda: ask(prometheus, ended))
        finished = 'windrow_placement_ends_total{reason="Finished"}'
        until("the end of the placement is counted", lambda: ask(prometheus, finished))
        assert requests.failures == []
        yield prometheus, begin, time.time()


def variables(board, prometheus):
    """Return what a person would choose."""
    if board.stem == "slot":
        (slot,) = ask(prometheus, "windrow_slot_info")
        metric = slot["metric"]
        return {"cluster": ".*", "namespace": metric["namespace"], "slot": metric["slot"]}
    everything = ("cluster", "namespace", "policy", "model", "job_namespace", "job")
    return {**dict.fromkeys(everything, ".*"), "price": "2", "dedicated": "3000"}


# Shares of something: of a device, of all steps, of a job.
AT_MOST_ONE = ("Compute in use", "Steps over the objective", "Progress")


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.stem)
def test_no_panel_is_empty_and_its_figures_are_possible(scraped, farm, board):
    prometheus, begin, end = scraped
    asking = query.Asking(prometheus.url, begin, end, variables(board, prometheus))
    empty = []
    for target in query.targets_of(board):
        series = asking.series(target)
        values = [value for one in series for _, value in one.points]
        if any(name in target.expr for name in OF_RANKS):
            assert not values, target.title
            continue
        if not values:
            empty.append(f"{target.title} ({target.legend}): {target.expr}")
            continue
        assert all(math.isfinite(value) for value in values), target.title
        assert min(values) >= 0, target.title
        if target.title in AT_MOST_ONE:
            assert max(values) <= 1.05, target.title
        if target.unit == "s" and "TPOT" in target.title:
            # Seconds they are, not milliseconds, on a machine however busy.
            assert 1e-4 < max(values) <= farm.objective_ms / 1e3 + 5
    assert empty == []


def test_counts_of_the_run_are_those_of_its_job(scraped, farm):
    prometheus, *_ = scraped

    def value(expr):
        (found,) = ask(prometheus, expr)
        return float(found["value"][1])

    assert value("sum(windrow_harvested_tokens_total)") > 0
    assert value("sum(windrow_placements_total)") == 1
    assert value("sum(windrow_job_placement_seconds_count)") == 1
    assert value('sum(windrow_jobs{state="Succeeded"})') == 1
    assert value("windrow_operator_leader") == 1
    assert value("windrow_attach_streams") == 1
    assert 0 < value("sum(windrow_harvested_device_seconds_total)") < 300
    assert value('windrow_pods_not_injected_total{reason="OtherEngine"}') == 1


# What a run in which nothing goes wrong, on the host, has none of.
QUIET = {
    "windrow_guard_trips_total",
    "windrow_breaker_open",
    "windrow_decode_throttled_periods_total",
    "windrow_decode_throttled_seconds_total",
    "windrow_decode_waiting_requests",
    "windrow_job_skipped_rows",
    "windrow_job_cut_rows",
    "windrow_lora_requests_info",
    "windrow_worker_memory_bytes",
    *OF_RANKS,
    # The run's policy has no time to first token: its prompts come from elsewhere.
    "windrow_decode_first_tokens_total",
    "windrow_decode_first_tokens_over_objective_total",
}


def test_each_row_of_the_sidecars_table_was_written_in_the_run(scraped):
    prometheus, *_ = scraped

    def most(metric):
        name = f"{metric.name}_count" if metric.type is MetricType.HISTOGRAM else metric.name
        found = ask(prometheus, f"max(max_over_time({name}[1h]))")
        return float(found[0]["value"][1]) if found else None

    written = {metric.name: most(metric) for metric in SIDECAR_METRICS}
    assert {name for name, value in written.items() if not value} <= QUIET
    # The built-in engine serves no adapters, and here it has one rank.
    missing = {LORA_REQUESTS.name, *OF_RANKS}
    assert {name for name, value in written.items() if value is None} <= missing


def test_the_labels_of_a_slot_are_namespace_and_name_of_its_harvestslot(scraped, farm):
    prometheus, *_ = scraped
    found = {
        (one["metric"]["namespace"], one["metric"]["slot"])
        for one in ask(prometheus, '{__name__=~"windrow_.+", slot!=""}')
    }
    assert found == {(slot.namespace, slot.name) for slot in farm.client.slots()}


def test_a_skipped_pod_raises_its_alert_and_no_other_alert_fires(scraped):
    prometheus, *_ = scraped
    until(
        "WindrowDecodePodsSkipped fires",
        lambda: ask(prometheus, 'ALERTS{alertname="WindrowDecodePodsSkipped",alertstate="firing"}'),
    )
    firing = {one["metric"]["alertname"] for one in ask(prometheus, 'ALERTS{alertstate="firing"}')}
    assert firing == {"WindrowDecodePodsSkipped"}
