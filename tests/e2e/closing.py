"""Invariants after every fault, checked against the event logs of decode pods and workers."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

from windrow.eventlog import Event, MarkEvent, StepEvent, TaskletEvent

# A hit may cost decode so many steps; the next one is within the objective again.
STEPS_HIT = 2
_CAME, _GONE = "worker-attached", "worker-gone"  # as decode marks it in its log


def assert_ran_once(tasklets: Sequence[TaskletEvent]) -> None:
    """No two placements of a job overlap in time, and each is of one worker.

    One worker runs one tasklet after the other and each step once; a second one under the same
    epoch would show as an overlap or as a step that comes again.
    """
    assert tasklets, "the job left no tasklet in the event log"
    epochs: dict[int, list[TaskletEvent]] = defaultdict(list)
    for event in sorted(tasklets, key=lambda event: event.start_ns):
        epochs[event.epoch].append(event)
    for epoch, events in epochs.items():
        for before, after in itertools.pairwise(events):
            assert before.end_ns <= after.start_ns, f"two workers in epoch {epoch}: {after}"
        steps = [event.step for event in events if event.phase == "opt"]
        assert steps == sorted(set(steps)), f"steps of epoch {epoch} ran twice: {steps}"
    spans = {e: (events[0].start_ns, events[-1].end_ns) for e, events in sorted(epochs.items())}
    for (_, ended), (began, _) in itertools.pairwise(spans.values()):
        assert ended <= began, f"two workers at once: {spans}"


def assert_went_on(tasklets: Sequence[TaskletEvent], steps: int, every: int) -> None:
    """The job did all its `steps`, each placement from the last checkpoint of the one before.

    With a checkpoint after every `every` steps, no more than so many are done again. What a worker
    that was killed had not yet written of its log is missing there.
    """
    done = [(event.epoch, event.step) for event in tasklets if event.phase == "opt"]
    assert done, "the job left no step in the event log"
    assert done[-1][1] == max(step for _, step in done) == steps - 1, f"the last step: {done[-1]}"
    for (before, last), (epoch, first) in itertools.pairwise(done):
        if epoch != before:
            assert first > last - every, f"epoch {epoch} began at {first}, after step {last}"


def late_in_a_row(events: Sequence[Event], objective_ms: float) -> int:
    """Return how many decode steps one after the other took longer than the objective, at most."""
    found = [event for event in events if isinstance(event, StepEvent)]
    steps = sorted(found, key=lambda event: event.start_ns)
    assert steps, "decode left no step in the event log"
    late = [(event.end_ns - event.start_ns) / 1e6 > objective_ms for event in steps]
    return max((len(list(g)) for is_late, g in itertools.groupby(late) if is_late), default=0)


def assert_kept_pace(events: Sequence[Event], objective_ms: float) -> None:
    """Decode was never late for more than two steps in a row."""
    in_a_row = late_in_a_row(events, objective_ms)
    assert in_a_row <= STEPS_HIT, f"{in_a_row} steps in a row took over {objective_ms:.0f} ms"


def gone_ns(events: Sequence[Event]) -> int | None:
    """Return when the last worker was gone for decode; 0: none came; None: one is there."""
    marks = [e for e in events if isinstance(e, MarkEvent) and e.what in (_CAME, _GONE)]
    last = max(marks, key=lambda mark: mark.at_ns, default=None)
    if last is None:
        return 0
    return last.at_ns if last.what == _GONE else None


def assert_alone(events: Sequence[Event], units: int) -> None:
    """Two steps after the last worker was gone decode has all units, and in the end all memory."""
    since_ns = gone_ns(events)
    assert since_ns is not None, "for decode there still is a worker"
    steps = [e for e in events if isinstance(e, StepEvent) and e.start_ns > since_ns]
    after = sorted(steps, key=lambda event: event.start_ns)[STEPS_HIT:]
    assert after, "decode took no step after the worker was gone"
    for event in after:
        has = (event.decode_units, event.finetune_units)
        assert has == (units, 0), f"decode does not have the whole device: {event}"
    assert after[-1].chunks_lent == 0, f"decode does not have all its memory: {after[-1]}"
