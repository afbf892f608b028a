"""A summary says what the raw lines say, computed here a second time by plain means."""

import json
import math
import shutil
from pathlib import Path

import pytest

from windrow.errors import UserError
from windrow.eventlog import MarkEvent
from windrow_lab.figures import summary
from windrow_lab.figures.report import (
    Series,
    broken_where_idle,
    figure,
    harvested_rate,
    rows_of,
    thinned,
    write_report,
)

RUN = Path(__file__).parent / "data" / "run"


def lines(pattern: str, kind: str) -> list[dict]:
    found = []
    for path in sorted(RUN.glob(pattern)):
        for line in path.read_text().splitlines():
            try:
                fields = json.loads(line)
            except json.JSONDecodeError:
                continue
            if fields["kind"] == kind:
                found.append(fields)
    return found


@pytest.fixture(scope="module")
def figures() -> dict:
    return summary.summarize(RUN)


@pytest.fixture(scope="module")
def window() -> tuple[int, int]:
    at = {mark["what"]: mark["at_ns"] for mark in lines("run.events.jsonl", "mark")}
    return at["measure-begin"], at["measure-end"]


def test_serving_figures_are_those_of_the_steps_within_the_load(figures, window):
    took = sorted(
        (s["end_ns"] - s["start_ns"]) / 1e6
        for s in lines("pods/**/*.jsonl", "step")
        if window[0] <= s["end_ns"] <= window[1]
    )
    serving = figures["serving"]
    assert 0 < len(took) < 120, "the log has steps outside of the load as well"
    assert serving["steps"] == len(took)
    assert serving["steps_over_objective"] == sum(ms > 12.0 for ms in took) > 0
    median = took[len(took) // 2 - 1 + len(took) % 2]
    assert serving["tpot_ms"]["p50"] == round(median, 3)
    assert serving["tpot_ms"]["p99"] == round(took[-(len(took) // 100) - 1], 3)
    assert serving["objective_ms"] == 12.0


def test_requests_count_until_the_last_is_answered_unless_they_failed_or_came_before(figures):
    assert figures["serving"]["requests_completed"] == 9
    assert figures["serving"]["requests_failed"] == 1


def test_harvest_is_the_rate_between_optimizer_steps_within_the_load(figures, window):
    steps = [t for t in lines("pods/**/*.jsonl", "tasklet") if t["phase"] == "opt"]
    inside = [t for t in steps if window[0] <= t["end_ns"] <= window[1]]
    tokens = inside[-1]["tokens_done"] - inside[0]["tokens_done"]
    rate = tokens / ((inside[-1]["end_ns"] - inside[0]["end_ns"]) / 1e9)
    alone = [t for t in lines("dedicated/*.jsonl", "tasklet") if t["phase"] == "opt"]
    dedicated = (alone[-1]["tokens_done"] - alone[0]["tokens_done"]) / (
        (alone[-1]["end_ns"] - alone[0]["end_ns"]) / 1e9
    )
    assert figures["harvest"]["tokens"] == steps[-1]["tokens_done"]
    assert figures["harvest"]["tokens_per_second"] == pytest.approx(rate, abs=0.05)  # a tenth
    assert figures["harvest"]["eta"] == pytest.approx(rate / dedicated, abs=5e-5)  # four places


def test_losses_are_the_first_and_last_of_training_and_of_each_evaluation(figures):
    assert figures["job"] == {
        "steps": 9,
        "loss": {"first": 3.0, "last": 1.4},
        "eval_loss": {"base": 3.1, "tuned": 1.9},
    }


def test_a_run_whose_load_never_ended_says_so(tmp_path):
    log = summary.run_log(tmp_path)
    log.append(MarkEvent(1, summary.LOAD_BEGIN, json.dumps({"objective_ms": 9.0})))
    log.flush()
    with pytest.raises(UserError, match="measure-end"):
        summary.summarize(tmp_path)


def test_the_marks_of_a_load_are_read_back():
    marks = summary.load_marks(5, seconds=2, drained_ns=3_000_000_000, objective_ms=9.5)
    window = summary.window_of(("run", mark) for mark in marks)
    assert window == summary.SummaryWindow(5, 2_000_000_005, 9.5, 3_000_000_000)
    assert window.holds(2_000_000_005)
    assert not window.holds(2_000_000_006)


def test_a_run_without_harvest_has_no_eta_and_no_losses(tmp_path):
    shutil.copytree(RUN, tmp_path / "run")
    for worker in (tmp_path / "run").rglob("worker.events.jsonl"):
        worker.unlink()
    found = summary.summarize(tmp_path / "run")
    assert found["harvest"]["eta"] is None
    assert found["job"]["loss"] == {"first": None, "last": None}
    assert ("Held-out loss", "not measured base, not measured tuned") in rows_of(found)


def test_percentiles_are_nearest_ranks():
    assert summary.percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
    assert summary.percentile([1.0, 2.0, 3.0, 4.0], 0.99) == 4.0
    assert summary.percentile([5.0], 0.01) == 5.0


def test_the_report_opens_without_network_and_holds_every_plot(figures, tmp_path):
    shutil.copytree(RUN, tmp_path / "run")
    page = write_report(tmp_path / "run", figures, rows_of(figures)).read_text()
    assert "<script src=" not in page
    for title in (
        "Time of each decode step",
        "Harvested tokens",
        "Memory of decode-0",
        "Training loss",
    ):
        assert title in page
    assert "objective, 12" in page
    assert "width=device-width" in page


def test_the_plotted_step_times_keep_the_slowest_steps():
    events = summary.Events.read(RUN / summary.PODS)
    window = summary.SummaryWindow(0, 2**62, 12.0, 2**62)
    steps = [step for _, step in events.steps]
    many = thinned(steps * 100, window)
    assert len(many.x) <= 4000
    assert max(many.y) == max((s.end_ns - s.start_ns) / 1e6 for s in steps)


def test_a_line_has_a_hole_where_decode_was_idle():
    broken = broken_where_idle(Series([1.0, 1.1, 3.0], [5.0, 6.0, 7.0]))
    assert broken.x == [1.0, 1.1, 1.1, 3.0]
    assert [broken.y[i] for i in (0, 1, 3)] == [5.0, 6.0, 7.0]
    assert math.isnan(broken.y[2])
    assert broken_where_idle(Series([], [])) == Series([], [])


def test_the_plotted_rate_is_tokens_over_time_between_steps(figures):
    events = summary.Events.read(RUN / summary.PODS)
    window = summary.window_of(summary.Events.read(RUN).marks)
    rate = harvested_rate(events.tasklets, window)
    assert rate.y[0] == pytest.approx(301 / 0.180)
    assert rate.y[-1] == 0.0
    assert len(figure(events, window, figures).data) == 5
