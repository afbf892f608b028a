"""A log that the disk does not take ends nothing, and what is in it are whole lines."""

from __future__ import annotations

import contextlib
import resource

import pytest

from windrow.eventlog import EventLog, MarkEvent, append_whole, read_events


@contextlib.contextmanager
def files_up_to(n_bytes):
    """Writing more to a file fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_lines_are_appended_whole_or_not_at_all(tmp_path):
    file = tmp_path / "lines"
    append_whole(file, "one\n")
    with files_up_to(6), pytest.raises(OSError, match="too large"):
        append_whole(file, "two\nthree\n")
    append_whole(file, "four\n")
    assert file.read_text() == "one\nfour\n"


def test_events_that_the_disk_does_not_take_are_dropped_and_counted(tmp_path, caplog):
    log = EventLog(tmp_path / "log.events.jsonl", source="test")
    for n, limit in enumerate((4096, 200, 200, 4096)):
        log.append(MarkEvent(n, "pause", "x" * 40))
        with files_up_to(limit):
            log.flush()
    assert [event.at_ns for _, event in read_events(tmp_path)] == [0, 3]
    assert [record.message for record in caplog.records][1:] == ["2 events were dropped"]
    assert "events are dropped: [Errno 27]" in caplog.records[0].message
