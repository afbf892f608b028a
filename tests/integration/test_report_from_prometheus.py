"""`windrow report` from a real Prometheus with known samples: what tenants gained, and when."""

from __future__ import annotations

import shutil
import subprocess
from datetime import UTC, datetime, timedelta

import pytest

from windrow.usage import from_prometheus
from windrow_lab.cluster.monitoring import Prometheus

pytestmark = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool (Debian: apt-get install prometheus)"
)

# Minutes ago, and what a slot's counter of tokens stood at. A device second for each ten.
SLOTS = {
    "all the time": ("team-a", {m: 1000 + 10 * (150 - m) for m in range(150, -1, -1)}),
    "gone after half an hour": ("team-b", {m: 5000 + 10 * (150 - m) for m in range(150, 29, -1)}),
    "new": ("team-c", {m: 300 + 60 * (10 - m) for m in range(10, -1, -1)}),
    # Its sidecar began again after 500 of the period, where no bar ends, and came to 400.
    "began again": (
        "team-d",
        {
            **{m: 2000 + 20 * max(0, 60 - m) for m in range(100, 34, -1)},
            **{m: 400 - 10 * m for m in range(34, -1, -1)},
        },
    ),
    # Nobody scraped it for a quarter of an hour.
    "not seen": ("team-e", {m: 10 * (150 - m) for m in range(150, -1, -1) if not 20 < m < 35}),
}


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """A Prometheus that has scraped those slots, and when the last sample was."""
    end = datetime.now(UTC).replace(second=0, microsecond=0)
    folder = tmp_path_factory.mktemp("prometheus")
    lines = []
    for name, each in (
        ("windrow_harvested_tokens_total", 1.0),
        ("windrow_harvested_device_seconds_total", 0.1),
    ):
        lines.append(f"# TYPE {name.removesuffix('_total')} counter")
        for slot, (tenant, values) in SLOTS.items():
            lines += [
                f'{name}{{slot="{slot}",job_namespace="{tenant}"}} {value * each} '
                f"{(end - timedelta(minutes=minutes)).timestamp()}"
                for minutes, value in values.items()
            ]
    samples = folder / "samples.txt"
    samples.write_text("\n".join([*lines, "# EOF", ""]))
    subprocess.run(
        ["promtool", "tsdb", "create-blocks-from", "openmetrics", samples, folder / "samples"],
        check=True,
        capture_output=True,
    )
    (folder / "cluster").mkdir()
    with Prometheus(folder / "cluster", folder) as prometheus:
        yield prometheus.url, end


@pytest.mark.extended
def test_tenants_get_what_their_slots_gained_in_the_period_and_nothing_from_before(known):
    url, end = known
    told = from_prometheus(url, end - timedelta(hours=1), end, 2.0)
    tokens = {one.tenant: one.tokens for one in told.tenants}
    assert tokens["team-a"] == 600
    assert tokens["team-b"] == 300
    assert tokens["team-c"] == 900
    assert tokens["team-e"] == 600
    # What it gained between the last bar and the end of the old process may be lost: two minutes.
    assert 900 - 3 * 20 <= tokens["team-d"] <= 900
    hours = {one.tenant: one.device_hours for one in told.tenants}
    assert hours["team-a"] == pytest.approx(60 / 3600)
    assert told.total.worth == pytest.approx(told.total.tokens / 10 / 3600 * 2.0)


@pytest.mark.extended
def test_the_bars_cover_the_period_and_add_up_to_what_the_table_says(known):
    url, end = known
    begin = end - timedelta(hours=1)
    told = from_prometheus(url, begin, end, None)
    assert sum(bar.tokens for bar in told.bars) == pytest.approx(told.total.tokens)
    of_one = [bar for bar in told.bars if bar.tenant == "team-a"]
    width = of_one[1].begin - of_one[0].begin
    assert abs(of_one[0].begin - begin) < width
    assert abs(of_one[-1].begin + width - end) < timedelta(seconds=1)


@pytest.mark.extended
def test_a_period_in_which_nothing_was_scraped_has_no_tenant(known):
    url, end = known
    told = from_prometheus(url, end - timedelta(days=3), end - timedelta(days=2), None)
    assert (told.tenants, told.bars, told.total.tokens) == ([], [], 0)
