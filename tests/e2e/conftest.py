"""One cluster for all tests of a module: starting it costs more than any of them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
from farm import MODEL, Farm, bearable_ms, left_over
from rich.console import Console

from windrow.client import WindrowClient
from windrow.local import manifests, serving
from windrow.local.cluster import ClusterSettings, LocalCluster
from windrow.local.devices import devices, usable_cores


@pytest.fixture(scope="module")
def farm(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Farm]:
    """Decode pods, `PODS` of the module or two, under an objective that they can keep."""
    out = tmp_path_factory.mktemp("farm")
    events = out / "pods"
    settings = ClusterSettings(log_dir=out / "logs", event_log_root=events, outputs=(out,))
    with LocalCluster(settings, console=Console(stderr=True)) as cluster:
        client = WindrowClient(cluster.kubeconfig)
        n = getattr(request.module, "PODS", 2)
        pods = serving.plan_pods(devices(usable_cores(), n), MODEL)
        serving.observe(client, pods, "farm", "windrow", timedelta(seconds=60))
        serving.create(client, pods)
        serving.await_ready(client, pods, timedelta(seconds=120))
        serving.await_observed(client, pods, timedelta(seconds=60))
        objective_ms = bearable_ms(pods, events)
        client.apply_policy(manifests.harvest_policy("farm", objective_ms, "windrow"))
        serving.await_slots(client, pods, timedelta(seconds=60))
        yield Farm(cluster, client, pods, events, out, objective_ms)
        directory = cluster.directory
    assert left_over(directory) == []
    assert not directory.exists()
