"""One cluster for all tests of a module: starting it costs more than any of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import timedelta

import pytest
from _pytest.terminal import TerminalReporter
from closing import STEPS_HIT
from farm import MODEL, POLICY, Farm, bearable_ms, left_over
from rich.console import Console

from windrow.client import WindrowClient
from windrow_lab.cluster import manifests, serving
from windrow_lab.cluster.local import ClusterSettings, LocalCluster
from windrow_lab.machine.devices import devices, usable_cores

# Of a line of the table: heading, and the property that its test records.
_FIGURES = (("placements", "placements"), ("requests", "requests"), ("steps late", "late"))


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """Say what was broken, how it went and how long it took, a fault a line."""
    told = [
        report
        for outcome in ("passed", "failed", "skipped")
        for report in terminalreporter.getreports(outcome)
        if report.when == "call" and "/faults/" in report.nodeid
    ]
    if not told:
        return
    terminalreporter.write_sep("=", "faults")
    heads = "".join(f"{head:>12}" for head, _ in _FIGURES)
    terminalreporter.write_line(f"{'':<48}{'':<8}{'s':>7}{heads}")
    for report in told:
        _, _, case = report.nodeid.rpartition("::")
        name = case.partition("[")[2].rstrip("]") or case.removeprefix("test_")
        noted = dict(report.user_properties)
        figures = "".join(f"{noted.get(key, '-'):>12}" for _, key in _FIGURES)
        terminalreporter.write_line(
            f"{name[:47].replace('_', ' '):<48}{report.outcome:<8}{report.duration:>7.1f}{figures}"
        )
    outcomes = Counter(report.outcome for report in told)
    counted = ", ".join(f"{n} {outcome}" for outcome, n in outcomes.items())
    minutes = sum(report.duration for report in told) / 60
    cores = len(usable_cores())
    terminalreporter.write_line(
        f"{len(told)} faults: {counted}; {minutes:.1f} min on {cores} cores. Steps late: the most "
        f"in a row of one pod, of which {STEPS_HIT} are allowed."
    )


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
        serving.observe(client, pods, POLICY, "windrow", timedelta(seconds=60))
        serving.create(client, pods)
        serving.await_ready(client, pods, timedelta(seconds=120))
        serving.await_observed(client, pods, timedelta(seconds=60))
        objective_ms = bearable_ms(pods, events)
        client.apply_policy(manifests.harvest_policy(POLICY, objective_ms, "windrow"))
        serving.await_slots(client, pods, timedelta(seconds=60))
        yield Farm(cluster, client, pods, events, out, objective_ms)
        directory = cluster.directory
    assert left_over(directory) == []
    assert not directory.exists()
