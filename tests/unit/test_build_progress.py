"""Progress is honest: no estimate from noise, a line every ten seconds without a terminal."""

import io

from rich.console import Console

from windrow_lab.machine.progress import (
    BarProgress,
    LineProgress,
    Task,
    progress_for,
    remaining_seconds,
)


def test_there_is_no_estimate_before_a_tenth_is_done():
    assert remaining_seconds(9, 100, 60.0) is None
    assert remaining_seconds(0, 0, 60.0) is None


def test_the_estimate_goes_on_at_the_pace_so_far():
    assert remaining_seconds(25, 100, 60.0) == 180.0


def test_lines_come_every_ten_seconds():
    now, lines = [0.0], []
    progress = LineProgress(lines.append, clock=lambda: now[0])
    with progress.task("build", total=100) as task:
        for second in range(1, 26):
            now[0] = float(second)
            task.advance()
    assert lines == [
        "build",
        "build, 10/100 packages, 10 s, about 90 s left",
        "build, 20/100 packages, 20 s, about 80 s left",
        "build: 25 s",
    ]


def test_when_all_is_compiled_the_linker_is_named():
    task = Task("build", total=1, clock=lambda: 0.0)
    task.advance()
    assert task.text.endswith("linking")


def test_a_pipe_gets_lines_and_a_terminal_a_bar():
    assert isinstance(progress_for(Console(file=io.StringIO())), LineProgress)
    terminal = Console(file=io.StringIO(), force_terminal=True)
    assert isinstance(progress_for(terminal), BarProgress)
    with progress_for(terminal).task("build", total=2) as task:
        task.advance()
