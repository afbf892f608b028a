"""A Prometheus with the project's alerts, in a hurry: windows and waits of seconds."""

from __future__ import annotations

import contextlib
import re
import time

import httpx
from waiting import wait_until

from windrow_lab.cluster.monitoring import rules_file


def write_hurried_rules(path):
    """Write the rules to `path` as they are, but for their times; return it."""
    rules = rules_file().read_text()
    shorter = re.sub(r"\[\d+[mh]\]", "[10s]", re.sub(r"offset \d+[mh]", "offset 10s", rules))
    path.write_text(re.sub(r"for: \d+[mh]", "for: 1s", shorter))
    return path


class Alerts:
    """Return what has fired so far, as Prometheus remembers it."""

    def __init__(self, prometheus):
        self._prometheus = prometheus

    def fired(self, within_s=1800.0):
        """Return what has fired within that time; 0: what fires now."""
        expression = 'ALERTS{alertstate="firing"}'
        if within_s:
            expression = f"count_over_time({expression}[{max(1, round(within_s))}s])"
        url, query = f"{self._prometheus.url}/api/v1/query", {"query": expression}
        answer = httpx.get(url, params=query, trust_env=False)
        return {one["metric"]["alertname"] for one in answer.json()["data"]["result"]}

    def await_all(self, *names, seconds):
        wait_until(
            lambda: set(names) <= self.fired(),
            f"{set(names) - self.fired()} fire; so far: {self.fired()}",
            seconds=seconds,
        )

    @contextlib.contextmanager
    def caused(self, name):
        """Wait until an alert fires that does not fire before what is done within."""
        wait_until(lambda: name not in self.fired(0), f"{name} does not fire yet")
        begun = time.monotonic()
        yield
        wait_until(lambda: name in self.fired(time.monotonic() - begun), f"{name} fires")
