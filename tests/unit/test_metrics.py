"""The table of metrics: its names, the exporters that keep to it, the page that is made from it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from windrow import metrics as m
from windrow_operator.metrics import Metrics, resource_of

ROOT = Path(__file__).resolve().parents[2]
ENDINGS = {"seconds": "_seconds", "bytes": "_bytes", "ratio": "_ratio"}


def test_the_page_is_made_from_the_table():
    checked = [sys.executable, str(ROOT / "tools" / "generate_docs.py"), "--check"]
    assert subprocess.run(checked).returncode == 0, "run `python tools/generate_docs.py`"


@pytest.mark.parametrize("metric", m.METRICS, ids=lambda metric: metric.name)
def test_names_and_labels_keep_prometheus_conventions(metric):
    assert re.fullmatch(r"windrow_[a-z_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.type is m.MetricType.COUNTER)
    if ending := ENDINGS.get(metric.unit):
        assert metric.name.removesuffix("_total").endswith(ending)
    assert (metric.buckets != ()) == (metric.type is m.MetricType.HISTOGRAM)
    assert list(metric.buckets) == sorted(set(metric.buckets))
    # A series outlives a placement; quantiles are computed after the scrape.
    assert not {"uid", "job_uid", "epoch", "quantile", "le", "job", "instance"} & set(metric.labels)
    assert metric.help.endswith(".")


def test_slot_is_a_harvestslot_by_name_and_the_operator_has_no_series_for_each_of_them():
    for metric in m.SIDECAR_METRICS:
        assert ("slot" in metric.labels) == ("namespace" in metric.labels), metric.name
        assert ("job_name" in metric.labels) <= ("slot" in metric.labels), metric.name
    for metric in m.OPERATOR_METRICS:
        assert not {"slot", "job_name", "pod", "node"} & set(metric.labels), metric.name


def test_names_are_given_once():
    names = [metric.name for metric in m.METRICS]
    assert len(names) == len(set(names))


def test_the_operator_serves_its_rows_of_the_table_and_no_other():
    families = {family.name: family for family in Metrics().registry.collect()}
    wanted = {metric.name.removesuffix("_total"): metric for metric in m.OPERATOR_METRICS}
    assert families.keys() == wanted.keys()
    assert {name: family.type for name, family in families.items()} == {
        name: str(metric.type) for name, metric in wanted.items()
    }


@pytest.mark.parametrize(
    ("path", "resource"),
    [
        ("/api/v1/namespaces", "namespaces"),
        ("/api/v1/namespaces/serving", "namespaces"),
        ("/api/v1/pods?labelSelector=a%3Db", "pods"),
        (
            "/api/v1/namespaces/serving/pods/decode-0/ephemeralcontainers",
            "pods/ephemeralcontainers",
        ),
        ("/apis/windrow.dev/v1alpha1/finetunejobs", "finetunejobs"),
        ("/apis/windrow.dev/v1alpha1/namespaces/a/finetunejobs/j/status", "finetunejobs/status"),
        ("/apis/authentication.k8s.io/v1/tokenreviews", "tokenreviews"),
    ],
)
def test_calls_are_counted_by_resource_never_by_name(path, resource):
    assert resource_of(path) == resource


def test_jobs_that_share_a_device_share_its_seconds():
    metrics = Metrics()
    policy = SimpleNamespace(namespace="serving", name="chat")
    metrics.harvested(6.0, policy, ["team-a", "team-b", "team-a"])
    metrics.harvested(6.0, policy, [])

    def seconds(tenant):
        labels = {"job_namespace": tenant, "policy_namespace": "serving", "policy": "chat"}
        return metrics.registry.get_sample_value("windrow_harvested_device_seconds_total", labels)

    assert (seconds("team-a"), seconds("team-b")) == (4.0, 2.0)
