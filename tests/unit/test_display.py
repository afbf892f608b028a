"""A frame shows what the API server says, as a picture and as a line."""

from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console

from windrow.views import Chunks, EventView, JobView, SlotView
from windrow_cli.top import row_of
from windrow_lab.demo.display import Frame, clock, draw, line, memory_cells, sparkline
from windrow_lab.demo.watcher import Watcher

JOB = {
    "metadata": {"namespace": "default", "name": "support-tone", "uid": "u"},
    "spec": {"model": {"name": "m"}},
    "status": {
        "conditions": [
            {"type": "Running", "status": "True", "reason": "Started", "message": "on decode-0"}
        ],
        "progress": {
            "step": 118, "totalSteps": 400, "loss": 2.31,
            "tokensPerSecond": 9840.0, "etaSeconds": 72,
        },
        "slot": "default/decode-0-0",
    },
}  # fmt: skip
SLOT = {
    "metadata": {"namespace": "default", "name": "decode-0-0"},
    "spec": {"podName": "decode-0", "computeUnits": 2},
    "status": {
        "tpotP50Seconds": 0.0098, "tpotP99Seconds": 0.0151, "steps": 70,
        "batch": 6, "contextTokens": 7412,
        "decodeUnits": 1, "finetuneUnits": 1, "jobName": "default/support-tone",
        "chunks": {"kv": 8, "lent": 8, "reserved": 2, "draining": 0, "free": 4},
    },
}  # fmt: skip
EVENT = EventView("2026-01-01T18:02:11Z", "FinetuneJob", "support-tone", "Placed", "here", False)


def frame(**changes) -> Frame:
    fields = {
        "elapsed_s": 42, "kubernetes": "v1.36.3", "policy": "windrow", "objective_ms": 18.0,
        "phase": "serving", "slots": [SlotView.of(SLOT)], "job": JobView.of(JOB),
        "tpot_history": {"decode-0-0": [9.0, 12.0, 15.0]}, "loss_history": [3.0, 2.31],
        "events": [EVENT],
    }  # fmt: skip
    return Frame(**(fields | changes))


def shown(one: Frame, width: int = 140) -> str:
    console = Console(file=StringIO(), width=width, color_system=None)
    console.print(draw(one))
    return console.file.getvalue()


def test_the_picture_shows_pods_memory_job_and_events():
    picture = shown(frame())
    for wanted in (
        "kubernetes v1.36.3   policy windrow   objective 18.0 ms",
        "00:42",
        "decode-0  TPOT p50 9.8 ms  p99 15.1 ms",
        "batch 6  context 7,412  cores 1 decode + 1 finetune",
        "KV 8  lent 8  reserved 2  free 4",
        "9,840 tok/s harvested",
        "support-tone   Running on decode-0-0   step 118/400   ETA 01:12",
        "loss 2.310  █▁",
        "18:02:11  support-tone  Placed: here",
    ):
        assert wanted in picture, picture


def test_in_a_narrow_terminal_no_line_is_broken():
    """A picture that lives would jump with each line that comes and goes."""
    long = EventView(
        "2026-01-01T18:02:11Z", "FinetuneJob", "support-tone", "NoSlot", "no slot " * 20, False
    )
    narrow = frame(events=[EVENT, long], loss_history=[3.0, 2.5] * 12)
    wide, narrow = (shown(narrow, width).splitlines() for width in (140, 80))
    assert len(narrow) == len(wide)
    assert [at for at, line in enumerate(narrow) if "…" in line] == [len(narrow) - 1]


def test_the_line_of_latencies_is_full_at_the_objective_and_each_report_counts_once():
    history = {"decode-0-0": [0.0, 9.0, 18.0, 40.0]}
    assert "p99 15.1 ms  ▁▅██" in shown(frame(tpot_history=history))
    reports = [SLOT | {"status": SLOT["status"] | {"steps": steps}} for steps in (70, 70, 80)]
    read = iter(reports)
    client = SimpleNamespace(
        slots=lambda namespace: [SlotView.of(next(read))], recent_events=lambda namespace: []
    )
    watcher = Watcher(client, Console(file=StringIO()), kubernetes="v1", policy="windrow")
    for _ in reports:
        watcher._read()
    assert watcher.frame().tpot_history["decode-0-0"] == pytest.approx([15.1, 15.1])


def test_where_no_step_ran_there_is_a_dash():
    progress = {"step": 0, "totalSteps": 400, "tokensPerSecond": 0.0}
    job = JobView.of({**JOB, "status": JOB["status"] | {"progress": progress}})
    assert "step -/400" in shown(frame(job=job))
    assert "- tok/s harvested" in shown(frame(job=job))
    assert "step -/400" in line(frame(job=job))
    idle = SlotView.of(
        SLOT | {"status": {"batch": 0, "steps": 0, "jobName": "default/support-tone"}}
    )
    assert "TPOT p50 -  p99 - " in shown(frame(slots=[idle], job=job))
    assert "p99 -, batch" in line(frame(slots=[idle], job=job))
    assert row_of(idle)[2:5] == ("-", "-", "-")


def test_a_slot_that_is_not_heard_of_has_no_figures():
    silent = SlotView.of(SLOT | {"status": {"jobName": "default/support-tone"}})
    assert set(row_of(silent)[1:-1]) == {"-"}
    assert "batch" not in shown(frame(slots=[silent]))
    assert "decode-0: no report yet" in line(frame(slots=[silent]))


def test_a_slot_that_gave_up_says_why():
    broken = SLOT | {"status": SLOT["status"] | {"breaker": "12% of steps too slow"}}
    picture = shown(frame(slots=[SlotView.of(broken)]))
    assert "not harvesting: 12% of steps too slow" in picture


def test_a_slot_without_reports_and_no_job_can_be_drawn():
    bare = SlotView.of({"metadata": SLOT["metadata"], "spec": {"podName": "decode-1"}})
    assert "TPOT p50 -" in shown(frame(slots=[bare], job=None, events=[]))
    assert "starting ..." in shown(frame(slots=[], job=None, phase="starting"))


def test_the_line_says_the_same_in_short():
    assert line(frame()) == (
        "00:42  |  serving  |  decode-0: TPOT p50 9.8 ms, p99 15.1 ms, batch 6, cores 1 decode + 1 "
        "finetune, lent 8 of 22 chunks  |  job support-tone: Running, step 118/400, loss 2.310, "
        "9,840 tok/s"
    )


@pytest.mark.parametrize(
    "chunks",
    [Chunks(kv=8, lent=8, reserved=2, free=4), Chunks(kv=1, free=127), Chunks(lent=128), Chunks()],
)
def test_the_memory_bar_is_full_and_shows_whatever_exists(chunks):
    cells = memory_cells(chunks, 24)
    assert sum(cells) == (24 if chunks.total else 0)
    parts = (chunks.kv, chunks.lent, chunks.reserved + chunks.draining, chunks.free)
    assert [c > 0 for c in cells] == [p > 0 for p in parts]


def test_sparklines_and_clocks():
    assert sparkline([1, 2, 3]) == "▁▅█"
    assert sparkline([]) == ""
    assert sparkline([5.0, 5.0]) == "▁▁"
    assert (clock(42), clock(3642)) == ("00:42", "1:00:42")
