"""Alerts about a slot and its job fire for their causes on a real run, and clear when those end."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading

import pytest
from alerting import Alerts, write_hurried_rules
from farm import OBJECTIVE_FACTOR, Requests, until

from windrow_lab.cluster import manifests
from windrow_lab.cluster.monitoring import Prometheus

pytestmark = [
    pytest.mark.paired,
    pytest.mark.extended,
    pytest.mark.timeout(420),
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="no prometheus (Debian: apt-get install prometheus)",
    ),
]

PODS = 1
POD = "decode-0"
SHORTEST_MS = 0.1  # that a policy may ask for, and shorter than any step
ENOUGH = 5.0  # the objective in p99 of decode's own steps: the worker beside them does not break it


@pytest.fixture(scope="module")
def alerts(farm, tmp_path_factory):
    data = tmp_path_factory.mktemp("prometheus")
    rules = write_hurried_rules(data / "rules.yaml")
    with Prometheus(farm.cluster.directory, data, rules=rules) as prometheus:
        until("both are targets", lambda: len(prometheus.find_targets()) == 2)
        yield Alerts(prometheus)


@contextlib.contextmanager
def held_up(pids, run_s, stop_s):
    """Take decode's cores away again and again, as a neighbour on the host does."""
    ended = threading.Event()

    def strike():
        while not ended.wait(run_s):
            for sent, pause_s in ((signal.SIGSTOP, stop_s), (signal.SIGCONT, 0)):
                for pid in pids:
                    os.kill(pid, sent)
                ended.wait(pause_s)

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def breaker(farm):
    (slot,) = farm.client.slots()
    return slot.breaker


def test_each_alert_fires_for_its_cause_and_clears(farm, alerts):
    alone_ms = farm.objective_ms / OBJECTIVE_FACTOR
    # Nothing is predicted by `static`: whether the worker may run is the guard's affair alone.
    bearable = manifests.harvest_policy("farm", ENOUGH * alone_ms, "static")
    farm.client.apply_policy(bearable)
    farm.submit("seen", steps=2000)
    with Requests(farm.endpoint(POD)) as requests:
        farm.at_step("seen", 1)

        stop_s = 1.2 * ENOUGH * alone_ms / 1e3
        pids = farm.decode_pids(POD)
        with (
            contextlib.ExitStack() as neighbour,
            alerts.caused("WindrowObjectiveBroken"),
            alerts.caused("WindrowBreakerOpen"),
        ):
            # Steps between two strikes, so that no two late ones in a row pause the worker: decode
            # would be as late alone, and no breaker opens for what the worker has no part in.
            neighbour.enter_context(held_up(pids, 4 * alone_ms / 1e3, stop_s))
            until("the slot says why", lambda: "beside the worker broke" in breaker(farm))
        for name in ("WindrowObjectiveBroken", "WindrowBreakerOpen"):
            until(f"{name} clears", lambda name=name: name not in alerts.fired(0))
        farm.at_step("seen", farm.job("seen").step + 1)

        with alerts.caused("WindrowJobWithoutProgress"):
            unbearable = manifests.harvest_policy("farm", SHORTEST_MS, "windrow")
            farm.client.apply_policy(unbearable)
        farm.client.apply_policy(bearable)
        farm.at_step("seen", farm.job("seen").step + 1)
        until("it clears", lambda: "WindrowJobWithoutProgress" not in alerts.fired(0))
    assert requests.failures == []
    farm.client.delete("seen")
