"""The winner of a comparison follows from the intervals alone, and a share above 1 is refused."""

from io import StringIO

import pytest
from rich.console import Console

from windrow_lab.compare import comparison_page, comparison_table
from windrow_lab.compare.arms import (
    AGAIN,
    ALONE,
    DEDICATED,
    NAIVE,
    TUNED,
    Segment,
    SegmentFigures,
    arms_of,
)

ARMS = [
    arm
    for arm in arms_of(["windrow", "static"])
    if arm.name in (ALONE, NAIVE, TUNED, "windrow", "static", AGAIN, DEDICATED)
]
PLAN = {
    "asked": {"trace": None, "like": "azure-conv-2023-like", "window_s": 8.0, "lead_s": 2.5},
    "objective": {"milliseconds": 10.0, "rule": "2 x the median solo step"},
    "rate": 0.6,
    "requests": 20,
    "kv_tokens": {"alone": 60_000, "loop": 36_000, "policy": 55_000},
    "environment": {"cpu": "a cpu", "cores": 2},
}
# Share of the steps over the objective, and tokens a second, in the median round.
MIDDLE = {
    ALONE: (0.001, None),
    AGAIN: (0.003, None),
    NAIVE: (0.30, 2000.0),
    TUNED: (0.003, 1500.0),
    "windrow": (0.002, 1800.0),
    "static": (0.002, 900.0),
    DEDICATED: (None, 2500.0),
}


def segment(n, arm, **found):
    return Segment(n, arm, "", "job", (0, 8_000_000_000), (0, 8_000_000_000), 2.0, **found)


class Rounds:
    """Stands for a session: every arm's middle, moved a little from round to round.

    Where the share is a list, it is that of each round.
    In its first round the machine was slow when static played: once again, and slow still.
    """

    def __init__(self, rounds=6, middle=MIDDLE):
        self._rounds, self._middle = rounds, middle
        slow = [segment(0, "static", slower=1.3, counts=counts) for counts in (False, True)]
        usual = [segment(n, "windrow", slower=1.02) for n in range(rounds)]
        self.played = (*slow, *usual)
        self.segments = tuple(at for at in self.played if at.counts)

    def figures(self, arms, objective_ms):
        assert objective_ms == 10.0
        return [
            SegmentFigures(
                round=n,
                arm=arm.name,
                steps=1000,
                over=over[n] if isinstance(over, list) else over and over + n * 1e-5,
                tpot_p50_ms=None if over is None else 5.0,
                tpot_p99_ms=None if over is None else 9.0,
                ttft_p50_ms=None if over is None else 20.0,
                ttft_p99_ms=None if over is None else 40.0,
                requests=None if over is None else 20,
                waited_for_kv=None if over is None else 0,
                tokens_per_second=None if rate is None else rate + 10 * n,
            )
            for n in range(self._rounds)
            for arm in arms
            if (found := self._middle[arm.name])
            for over, rate in [found]
        ]

    def steps_of(self, _round, _arm):
        return None


def result(rounds=6, **changed):
    middle = {**MIDDLE, **changed}
    return comparison_table.result_of(PLAN, [Rounds(rounds, middle)], ARMS, rounds)


def row(found, arm):
    return next(row for row in found["arms"] if row["arm"] == arm)


def test_the_fastest_of_those_that_hold_the_objective_wins():
    found = result()
    assert found["winner"] == "windrow"
    assert set(found["holding"]) == {TUNED, "windrow", "static"}
    # Alone is what both of its turns say: 0.002; naive is 29.8 points above it.
    assert row(found, NAIVE)["over_more"]["median"] == pytest.approx(0.298)
    assert row(found, "windrow")["eta"]["median"] == pytest.approx(1825 / 2525)
    assert found["against_best"][TUNED]["low"] == pytest.approx(300 / 2525)
    assert "windrow trains fastest" in comparison_table.sentence(found)


def test_nobody_wins_where_the_fastest_is_not_ahead_in_every_round_or_rounds_are_few():
    # Ahead in the median only: 1,800 against 1,800.
    found = result(**{TUNED: (0.002, 1800.0)})
    assert found["winner"] is None
    assert "no winner" in comparison_table.sentence(found)
    few = result(rounds=5)
    assert few["winner"] is None
    assert "no 95% interval" in comparison_table.sentence(few)


def test_an_arm_that_breaks_the_objective_cannot_win_however_fast():
    found = result(windrow=(0.006, 2400.0))
    assert "windrow" not in found["holding"]
    assert found["winner"] == TUNED
    nobody = result(windrow=(0.5, 1.0), static=(0.5, 1.0), **{TUNED: (0.5, 1.0)})
    assert nobody["winner"] is None
    assert "No arm" in comparison_table.sentence(nobody)


def test_nobody_wins_over_an_arm_of_which_the_rounds_do_not_say_whether_it_holds():
    # In one of six rounds far more than alone's 0.2%, else none; as fast as the fastest that holds.
    over = [0.0] * 5 + [0.01]
    found = result(static=(over, 1800.0))
    assert found["undecided"] == ["static"]
    assert set(found["holding"]) == {TUNED, "windrow"}
    assert found["winner"] is None
    assert "do not say whether static would" in comparison_table.sentence(found)
    slower = result(static=(over, 900.0))
    assert slower["undecided"] == ["static"]
    assert slower["winner"] == "windrow"
    alone = result(static=(over, 2000.0), windrow=(0.5, 1.0), **{TUNED: (0.5, 1.0)})
    assert alone["holding"] == []
    assert "for certain" in comparison_table.sentence(alone)


def test_more_than_the_dedicated_rate_is_an_error_of_the_benchmark():
    comparison_table.check(result())
    with pytest.raises(comparison_table.Impossible, match=r"naive trained at 1\.1"):
        comparison_table.check(result(**{NAIVE: (0.3, 2900.0)}))


def test_table_and_page_show_every_arm_with_its_intervals(tmp_path):
    found = result()
    console = Console(file=StringIO(), width=220, color_system=None)
    console.print(comparison_table.table(found))
    shown = console.file.getvalue()
    page = comparison_page.write_page(tmp_path, found, [Rounds()]).read_text()
    assert "<script src=" not in page
    for wanted in ("windrow", "+29.80 [+29.80, +29.80]", "1,825 [1,800, 1,850]", "36,000"):
        assert wanted in shown, shown
        assert wanted in page
    assert found["turns"] == {"count": 7, "played_again": 1, "slower": 1}
    assert "Before or after 1 of 7 turns the machine was slower" in page
    names = {trace.name for trace in comparison_page.frontier(found).data}
    assert names == {NAIVE, TUNED, "windrow", "static"}
