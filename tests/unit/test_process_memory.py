"""Check what the operator does about Python's collector: what has ended goes."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable

from windrow_operator.memory import _EVERYTHING_AFTER, ProcessMemory

_CASES: dict[str, Callable[[], None]] = {}
_RUN = """
import gc, runpy, sys
gc.disable()
runpy.run_path(sys.argv[1])["_CASES"][sys.argv[2]]()
"""


def in_a_small_process(test: Callable[[], None]) -> Callable[[], None]:
    """Run a test in a process of its own: everything there is collected, which takes seconds where
    other tests have imported torch.
    """
    _CASES[test.__name__] = test

    @functools.wraps(test)
    def run() -> None:
        command = [sys.executable, "-W", "error", "-c", _RUN, __file__, test.__name__]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr

    return run


class _Stream:
    """Refers to itself like one of gRPC's, so that only the collector is rid of it."""

    def __init__(self) -> None:
        self.itself = self


def ended_after(memory: ProcessMemory, streams: int) -> weakref.ref[_Stream]:
    """A stream that a collection among so many has set aside, and that has ended since."""
    stream = _Stream()
    memory.collect(streams)
    return weakref.ref(stream)


@in_a_small_process
def test_what_lives_for_long_is_passed_over():
    memory = ProcessMemory()
    before = gc.get_freeze_count()
    lives = [_Stream() for _ in range(1000)]
    memory.collect(1000)
    assert gc.get_freeze_count() >= before + len(lives)
    assert not any(isinstance(seen, _Stream) for seen in gc.get_objects())


@in_a_small_process
def test_what_has_ended_since_the_last_call_goes():
    memory = ProcessMemory()
    memory.collect(10)
    ended = weakref.ref(_Stream())
    memory.collect(10)
    assert ended() is None


@in_a_small_process
def test_streams_that_were_set_aside_go_once_many_have_ended():
    memory = ProcessMemory()
    streams = [_Stream() for _ in range(10)]
    for _ in range(2):  # they have come, and what came with them has gone
        memory.collect(len(streams))
    ended = [weakref.ref(stream) for stream in streams[:5]]
    del streams[:5]
    memory.collect(9)
    assert all(stream() is not None for stream in ended), "too few are worth a long pause"
    memory.collect(8)
    assert all(stream() is None for stream in ended)


@in_a_small_process
def test_what_is_old_is_collected_when_it_is_asked_for_alone():
    before = gc.get_threshold()
    try:
        ProcessMemory().take_over()
        young, middle, old = gc.get_threshold()
    finally:
        gc.set_threshold(*before)
    assert min(young, middle) > 0, "young ones are collected as ever"
    assert young * middle * old > 10**9


@in_a_small_process
def test_few_that_have_ended_go_in_the_end():
    memory = ProcessMemory()
    ended = ended_after(memory, 100)
    for _ in range(_EVERYTHING_AFTER):
        memory.collect(99)
    assert ended() is None


@in_a_small_process
def test_memory_is_given_back_when_much_has_moved_and_not_at_rest():
    memory = ProcessMemory()
    assert [memory.collect(1000) for _ in range(3)] == [True, True, False], "they have come"
    assert not memory.collect(1050)
    assert [memory.collect(1101) for _ in range(3)] == [True, True, False]
    assert [memory.collect(900) for _ in range(3)] == [True, True, False]
    assert [memory.collect(900) for _ in range(_EVERYTHING_AFTER)].count(True) == 1


@in_a_small_process
def test_what_came_with_many_streams_goes_a_minute_later():
    memory = ProcessMemory()
    ended = ended_after(memory, 100)
    assert ended() is not None, "it is set aside"
    memory.collect(100)
    assert ended() is None
