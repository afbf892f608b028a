"""Write and read the event log of a run: one JSON line per decode step and per tasklet.

The figures of a summary are computed from these lines and from nothing else, so that anyone can
compute them again. Times are nanoseconds of CLOCK_MONOTONIC, one clock for all processes.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

_log = logging.getLogger(__name__)

# How often a process that serves or trains writes what it has kept.
FLUSH_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One decode step of one engine.

    A step that follows another without an idle moment starts where that one ended, so that nothing
    that delays a token (admission, a decision, a copy) escapes the figures.
    """

    kind: ClassVar[str] = "step"
    step: int
    start_ns: int
    end_ns: int
    batch: int  # requests that got a token
    context_tokens: int  # sum over the batch, before the step
    admitted: int  # requests that joined before this step
    prefill_tokens: int  # computed in this step; 0 for prompts that arrive with their KV
    waiting: int
    decode_units: int
    finetune_units: int  # granted during the step; 0: paused or no worker
    predicted_us: int  # by the policy, for what it chose; 0: no prediction
    hook_us: float  # what view, decision and grant cost inside the step
    chunks_kv: int
    chunks_lent: int
    tokens: float = 1.0  # that a request got, on average; above 1 where decode speculates

    @property
    def tpot_ns(self) -> float:
        """Time per output token."""
        return (self.end_ns - self.start_ns) / self.tokens


@dataclass(slots=True)  # frozen, it takes three times as long to make, after each tasklet
class TaskletEvent:
    """One tasklet of one worker. Never changed."""

    kind: ClassVar[str] = "tasklet"
    job_uid: str
    epoch: int
    step: int
    phase: str  # "fwd", "loss", "bwd", "opt"
    layer: int
    tokens: (
        int  # real tokens of the micro-batch; counted as harvested with "opt", see `tokens_done`
    )
    tokens_done: int  # real tokens of finished optimizer steps since the job began
    start_ns: int
    end_ns: int
    units: int
    queued_ns: int = 0  # in which the host queued it; 0: its calls did the work


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """One finished request, as the engine saw it."""

    kind: ClassVar[str] = "request"
    id: str
    arrived_ns: int
    first_token_ns: int
    end_ns: int
    prompt_tokens: int
    completion_tokens: int
    error: str


@dataclass(frozen=True, slots=True)
class LossEvent:
    """A loss of one worker: of an optimizer step, or of an evaluation of the held-out rows."""

    kind: ClassVar[str] = "loss"
    job_uid: str
    epoch: int
    step: int  # finished optimizer steps, this one included
    stage: str  # "base", "training", "tuned"
    loss: float  # mean nats per label
    at_ns: int


@dataclass(frozen=True, slots=True)
class MarkEvent:
    """Event of a run: a pause, a lend, a worker that came or went, a phase."""

    kind: ClassVar[str] = "mark"
    at_ns: int
    what: str  # "pause", "resume", "worker-attached", "worker-gone", "measure-begin", ...
    detail: str


Event = StepEvent | TaskletEvent | RequestEvent | LossEvent | MarkEvent
_KINDS: tuple[type[Event], ...] = (StepEvent, TaskletEvent, RequestEvent, LossEvent, MarkEvent)
_BY_KIND: dict[str, type[Event]] = {cls.kind: cls for cls in _KINDS}
_FIELDS = {cls: tuple(field.name for field in fields(cls)) for cls in _KINDS}


class EventLog:
    """Collects events in memory and writes them in one go; `append` never touches the disk.

    Safe for one appending thread and one that flushes. Lines are complete: a reader sees whole
    events only, up to the last flush. What the disk does not take is dropped: a log ends nothing.
    """

    def __init__(self, path: Path, *, source: str) -> None:
        self._path, self._source = path, source
        self._pending: list[Event] = []
        self._write_lock = threading.Lock()
        self._dropped = 0
        path.parent.mkdir(parents=True, exist_ok=True)

    def append(self, event: Event) -> None:
        """Keep one event; costs a list append."""
        self._pending.append(event)

    def flush(self) -> None:
        """Write what has been kept so far."""
        with self._write_lock:
            pending, self._pending = self._pending, []
            if not pending:
                return
            try:
                append_whole(self._path, "".join(self._line(event) for event in pending))
            except OSError as error:
                if not self._dropped:
                    _log.warning("events are dropped: %s", error)
                self._dropped += len(pending)
            else:
                if self._dropped:
                    _log.warning("%d events were dropped", self._dropped)
                self._dropped = 0

    def _line(self, event: Event) -> str:
        # Not `asdict`, which copies deeply: 14 us an event with it, 5 without, on a thread that
        # shares Python's lock with decode.
        values = {name: getattr(event, name) for name in _FIELDS[type(event)]}
        return json.dumps({"kind": event.kind, "source": self._source, **values}) + "\n"


def append_whole(path: Path, lines: str) -> None:
    """Append lines to a file, all of them or none: a disk may be full in the middle of one.

    Raises:
        OSError: they were not written.
    """
    # No link is followed: those who can write to a volume could place one there.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o666), "ab", buffering=0) as out:
        before = out.seek(0, os.SEEK_END)
        left = memoryview(lines.encode())
        try:
            while left:
                left = left[out.write(left) :]
        except OSError:
            out.truncate(before)
            raise


def read_events(folder: Path) -> Iterator[tuple[str, Event]]:
    """Yield (source, event) of each `*.events.jsonl` below `folder`, but for a torn last line."""
    for path in sorted(folder.rglob("*.events.jsonl")):
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                if not line.endswith("\n"):
                    break
                fields: dict[str, Any] = json.loads(line)
                cls = _BY_KIND[fields.pop("kind")]
                yield fields.pop("source"), cls(**fields)
