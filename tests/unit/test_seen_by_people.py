"""Check what `top`, `explain` and `report` show for given slots, jobs and answers of Prometheus."""

from __future__ import annotations

import io
import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from rich.console import Console

import windrow_cli as cli
from windrow.errors import Transient, UserError
from windrow.usage import UsageBar, UsageReport, from_prometheus, from_status, parse_period
from windrow.views import EventView, JobView, SlotView
from windrow_cli import top
from windrow_cli.explain_job import explain_job, text_of
from windrow_cli.report import write_page

NOW = datetime(2026, 1, 2, 12, tzinfo=UTC)


def slot(name, **status):
    ready = {"type": "Ready", "status": "True", "reason": "Serving", "message": "takes a job"}
    told = {
        "conditions": [ready],
        "policy": "chat",
        "objectiveSeconds": 0.02,
        "tpotP99Seconds": 0.01,
        "steps": 1000,
        "stepsOverObjective": 3,
        "batch": 4,
        "decodeUnits": 1,
        "finetuneUnits": 1,
        "chunks": {"kv": 10, "lent": 20, "free": 10},
        **status,
    }
    return SlotView.of(
        {
            "metadata": {"namespace": "serving", "name": name},
            "spec": {"podName": name, "computeUnits": 2},
            "status": {k: v for k, v in told.items() if v is not None},
        }
    )


def job(
    name="tone", reason="Started", message="On decode-0", status="True", kind="Running", **more
):
    return JobView.of(
        {
            "metadata": {"namespace": "team-a", "name": "tone", "uid": "u"},
            "spec": {"model": {"name": "m"}},
            "status": {
                "conditions": [
                    {"type": "Accepted", "status": "True", "reason": "Valid", "message": ""},
                    {"type": kind, "status": status, "reason": reason, "message": message},
                ],
                "slot": "serving/decode-0",
                "progress": {"step": 10, "totalSteps": 40, "loss": 1.5, "tokensPerSecond": 900},
            },
        }
    )


def shown(slots, jobs=(), history=None, sort="name", width=140):
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(top.Screen(slots, jobs, history or {}, sort))
    return console.export_text()


def test_the_display_has_a_line_for_each_slot_and_job_with_bars():
    slots = [slot("decode-0", jobName="team-a/tone"), slot("decode-1", tpotP99Seconds=0.03)]
    text = shown(slots, [job()], {"serving/decode-0": [0.2, 0.6, 1.2]})
    assert "2 slots, 1 harvesting, 900 tokens/s" in text
    line = next(line for line in text.splitlines() if line.startswith("decode-0"))
    assert "10.0ms" in line
    assert "20.0ms" in line
    assert "▂▄█" in line
    # Half of the units and three quarters of the chunks are somebody's.
    assert "█" * 12 in line
    assert "█" * 9 + "░" * 3 in line
    assert "team-a/tone" in line
    assert "10/40" in text
    assert "███░░░░░░░░░" in text


def test_slots_stand_in_the_order_that_was_asked_for():
    slots = [slot("a"), slot("b", tpotP99Seconds=0.03), slot("c", stepsOverObjective=500)]

    def order(sort):
        return [
            line[0]
            for line in shown(slots, sort=sort).splitlines()
            if line[:2] in ("a ", "b ", "c ")
        ]

    assert order("name") == ["a", "b", "c"]
    assert order("tpot")[0] == "b"
    assert order("over")[0] == "c"


def test_a_slot_that_is_not_heard_of_shows_why_and_no_figures():
    ready = {"type": "Ready", "status": "False", "reason": "Silent", "message": "no heartbeat"}
    text = shown([slot("a", steps=None, conditions=[ready])])
    line = next(line for line in text.splitlines() if line.startswith("a "))
    assert "Silent: no heartbeat" in line
    assert "ms" not in line


def test_a_line_is_red_where_the_objective_was_broken():
    line = top.sparkline([0.5, 1.0, 1.01])
    assert [str(span.style) for span in line.spans] == ["green", "green", "red"]


def test_an_unknown_order_is_refused_with_those_that_there_are(capsys):
    assert cli.run(["top", "--sort", "size"]) == cli.EXIT_USAGE
    assert "Choose one of name, tpot" in capsys.readouterr().err


# --- explain --------------------------------------------------------------------------------------


def event(seconds_ago, reason, message, *, warning=False):
    at = (NOW - timedelta(seconds=seconds_ago)).isoformat()
    return EventView(at, "FinetuneJob", "tone", reason, message, warning)


def test_a_job_is_explained_by_reason_meaning_advice_slot_and_story():
    events = [
        event(7300, "NoSlot", "no slot can take it"),
        event(90, "Placed", "on decode-0"),
        event(5, "SlotLost", "its pod is gone", warning=True),
    ]
    waiting = job(kind="Placed", status="False", reason="NoSlot", message="2 slots: 2 busy")
    told = explain_job(waiting, [], events, slot("decode-0"), NOW)
    text = text_of(told)
    assert text.startswith("team-a/tone is Pending: NoSlot: 2 slots: 2 busy")
    assert "No slot can take the job" in text
    assert "windrow top" in text
    assert "p99 10.0 ms of 20.0 ms" in text
    assert "   2h   NoSlot: no slot can take it" in text
    assert "   5s ! SlotLost: its pod is gone" in text


def test_without_events_the_conditions_tell_the_story():
    turn = {
        "type": "Placed",
        "status": "True",
        "message": "on decode-0",
        "lastTransitionTime": "2026-01-02T11:00:00Z",
    }
    told = explain_job(job(), [turn], [], None, NOW)
    assert list(told.story) == ["   1h   Placed True: on decode-0"]
    assert told.slot == ""


# --- report ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "period"),
    [("7d", timedelta(days=7)), ("90m", timedelta(minutes=90)), ("1.5h", timedelta(minutes=90))],
)
def test_periods(text, period):
    assert parse_period(text) == period


@pytest.mark.parametrize("text", ["", "7", "d", "-1d", "0h", "7 years"])
def test_what_is_no_period_is_refused(text):
    with pytest.raises(UserError, match="is not a period"):
        parse_period(text)


def ran(namespace, tokens, start, end=None):
    status = {"startTime": start, "progress": {"tokens": tokens}}
    return {
        "metadata": {"namespace": namespace},
        "status": {**status, "completionTime": end} if end else status,
    }


def test_status_counts_jobs_that_ran_in_the_period_and_knows_no_device_hours():
    jobs = [
        ran("team-a", 100, "2026-01-01T00:00:00Z", "2026-01-02T01:00:00Z"),
        ran("team-a", 50, "2026-01-02T06:00:00Z"),
        ran("team-b", 70, "2025-12-01T00:00:00Z", "2025-12-02T00:00:00Z"),
        {"metadata": {"namespace": "team-c"}},
    ]
    found = from_status(jobs, NOW - timedelta(days=1), NOW, price=2.0)
    assert [(t.tenant, t.tokens, t.device_hours, t.worth) for t in found.tenants] == [
        ("team-a", 150, None, None)
    ]
    assert found.total.worth is None


def test_the_page_opens_without_a_network_and_escapes_names(tmp_path):
    bars = [UsageBar(NOW, "<b>", 1.5, 100.0)]
    write_page(
        UsageReport(NOW, NOW, "a test", 2.0, from_status([], NOW, NOW, 2.0).tenants, bars),
        tmp_path / "page.html",
    )
    page = (tmp_path / "page.html").read_text()
    assert "<script src" not in page
    assert "<link" not in page
    assert "What was harvested" in page


@pytest.fixture
def no_prometheus():
    """A server that answers everything with a page."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>hello</html>")

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_what_is_no_prometheus_is_told_from_one_that_does_not_answer(no_prometheus):
    with pytest.raises(UserError, match="is not a Prometheus server"):
        from_prometheus(no_prometheus, NOW, NOW, None)
    with pytest.raises(Transient):
        from_prometheus("http://127.0.0.1:1", NOW, NOW, None)
