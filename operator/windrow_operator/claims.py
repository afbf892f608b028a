"""Bound what a sidecar says: pure functions over messages.

A sidecar speaks for its own pod, and what it says of that is a claim. Figures are cut to what the
hardware could do, numbers and words to what the API server takes, lists to what one pod can have.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Final

from windrow.plain_text import printable
from windrow.proto import attach_pb2 as pb
from windrow.rundir import MOST_SLOTS

# The largest message that a sidecar sends is a profile, which a ConfigMap has to hold.
MOST_MESSAGE_BYTES: Final = 2**20
# Of words that go into a status or an object: no sentence of ours is longer.
MOST_TEXT: Final = 2048
_MOST_LEVELS: Final = 1024
_MOST_VERSION: Final = 64
# Jobs that a hello or a heartbeat may name: those of all slots, and stale ones of before.
MOST_RUNNING: Final = 4 * MOST_SLOTS
# The API server's integers end at 2**63; floats are exact to 2**53, and nothing counts further.
_MOST_COUNT: Final = 2**53
_REASON: Final = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]{0,126}[A-Za-z0-9_])?")

# Dense bfloat16 operations a second: no device of today does more, and no core of a host.
_DEVICE_FLOPS: Final = 2.5e15
_CORE_FLOPS: Final = 2e11
_MOST_CORES: Final = 1024
# Forward and backward of one token over one parameter, and the smallest models that are served: on
# a GPU ten million parameters, on a host a hundred thousand.
_FLOPS_PER_PARAMETER: Final = 4
_FEWEST_ON_DEVICE: Final = 1e7
_FEWEST_ON_HOST: Final = 1e5


def slots_of(hello: pb.SidecarHello) -> list[pb.SlotFacts]:
    """Return the slots of a hello that one pod can have: the first of each index, below the most.

    A slot whose words or numbers are longer than any of ours is left out.
    """
    found: dict[int, pb.SlotFacts] = {}
    for facts in hello.slots[: 4 * MOST_SLOTS]:
        if facts.index < MOST_SLOTS and facts.index not in found and _is_sane(facts):
            _clean(facts)
            found[facts.index] = facts
    return list(found.values())


def _is_sane(facts: pb.SlotFacts) -> bool:
    # All fields, so that one which is added is bounded as well.
    return all(_fits(value) for _, value in facts.ListFields())


def _clean(message: pb.SlotFacts | pb.SlotHeartbeat) -> None:
    """Take out of its words, in place, what would act on the terminal of their reader."""
    for field, value in message.ListFields():
        if isinstance(value, str):
            setattr(message, field.name, printable(value))


def _fits(value: object) -> bool:
    """Return whether the value of a field, a word, a number or several, can be of a slot."""
    if isinstance(value, str):
        return len(value) <= MOST_TEXT
    if isinstance(value, Sequence):
        return len(value) <= _MOST_LEVELS and all(map(_fits, value))
    return not isinstance(value, int) or value <= _MOST_COUNT


def version(said: str) -> str:
    """Return a version that was said, cut: it is in the status of each slot."""
    return printable(said[:_MOST_VERSION])


def most_tokens_per_second(facts: pb.SlotFacts) -> float:
    """Return what the slot's hardware can train at most, whatever its sidecar reports."""
    if facts.driver == "host":
        cores = min(max(1, facts.compute_units), _MOST_CORES)
        return cores * _CORE_FLOPS / (_FLOPS_PER_PARAMETER * _FEWEST_ON_HOST)
    return _DEVICE_FLOPS / (_FLOPS_PER_PARAMETER * _FEWEST_ON_DEVICE)


def rate(said: float, most: float) -> float:
    """Return a rate that was said, cut to what can be; NaN, which is not a rate, stays."""
    return said if math.isnan(said) else min(max(0.0, said), most)


def bound(beat: pb.SlotHeartbeat, most_rate: float) -> None:
    """Cut the words and numbers of a heartbeat, in place, to what a slot's status can hold.

    Args:
        beat: as its sidecar has sent it.
        most_rate: tokens that the slot's hardware can train in a second.
    """
    said = rate(beat.predicted_tokens_per_second, most_rate)
    _clean(beat)
    for field, value in beat.ListFields():
        if isinstance(value, str) and len(value) > MOST_TEXT:
            setattr(beat, field.name, text(value))
        elif type(value) is int and value > _MOST_COUNT:
            setattr(beat, field.name, _MOST_COUNT)
        elif isinstance(value, float) and math.isnan(finite(value)):
            setattr(beat, field.name, math.nan)
    beat.predicted_tokens_per_second = said


def count(said: int) -> int:
    """Return a number that was said, as far as the API server can hold it."""
    return min(said, _MOST_COUNT)


def finite(said: float) -> float:
    """Return a number that was said; NaN for what is none."""
    return said if math.isfinite(said) and abs(said) <= _MOST_COUNT else math.nan


def text(said: str) -> str:
    """Return words that were said, cut, without what acts on the terminal of their reader."""
    return printable(said if len(said) <= MOST_TEXT else f"{said[: MOST_TEXT - 3]}...")


def reason(said: str) -> str:
    """Return a reason that a condition can hold; empty: none was said."""
    return said if not said or _REASON.fullmatch(said) else "WorkerError"


def running(jobs: Iterable[pb.RunningJob]) -> list[pb.RunningJob]:
    """Return the jobs that a message names, as many as a pod can have."""
    return list(jobs)[:MOST_RUNNING]
