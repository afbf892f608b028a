"""Growth and drift of a long run, from its losses and its memory; and how they are drawn."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from benchmarks.endurance import EnduranceRun, compare, growth, largest_rise, plot


def ran(slope=0.0, drift=0.0, noise=0.0) -> EnduranceRun:
    """1,000 steps whose memory jumps at first, then rises by so much in all."""
    memory = [
        (step, (0.0 if step < 200 else 50.0) + slope * step / 1000 + noise * (step // 50 % 3) / 2)
        for step in range(50, 1001, 50)
    ]
    return EnduranceRun([2.0 + drift] * 500 + [1.0 + drift] * 500, memory)


def test_what_is_touched_at_first_is_no_growth_and_what_rises_after_it_is():
    assert growth(ran().memory) == (pytest.approx(0.0), pytest.approx(0.0))
    assert growth(ran(slope=10.0).memory)[0] == pytest.approx(8.0)
    grown, noise = growth(ran(noise=1.0).memory)
    assert abs(grown) < noise < 1.5


def test_one_rise_is_told_and_is_no_growth():
    once = ran()
    once = EnduranceRun(
        once.losses, [(s, mib + (4.0 if s > 700 else 0.0)) for s, mib in once.memory]
    )
    assert growth(once.memory)[0] == pytest.approx(0.0)
    assert largest_rise(once.memory) == pytest.approx(4.0)


def test_what_allocators_have_handed_out_is_judged_by_itself():
    kept, idle = [(s, s / 1000) for s in range(100)], [(s, 7.0) for s in range(100)]
    ours = EnduranceRun(
        ran().losses, ran().memory, heap=kept, blocks=[(s, 40 * mib) for s, mib in kept]
    )
    assert [result.met for result in compare(ours, ran())[-2:]] == [True, False]
    ours = EnduranceRun(ran().losses, ran().memory, heap=idle, blocks=idle)
    assert [result.value for result in compare(ours, ran())[-2:]] == [0.0, 0.0]


def test_a_run_that_grows_or_drifts_misses_its_goal():
    def met(**how):
        return [result.met for result in compare(ran(**how), ran())[:3]]

    assert met() == [True, True, True]
    assert met(slope=10.0) == [False, True, True]
    assert met(drift=0.1) == [True, False, False]


def test_the_plot_shows_both_runs_in_both_panels(tmp_path):
    plot(ran(slope=3.0), ran(), tmp_path / "out.svg")
    drawn = ElementTree.parse(tmp_path / "out.svg").getroot()
    lines = drawn.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 4
    for line in lines:
        places = [tuple(map(float, at.split(","))) for at in line.get("points").split()]
        assert len(places) >= 10
        assert all(70 <= x <= 830 and 60 <= y <= 526 for x, y in places)
