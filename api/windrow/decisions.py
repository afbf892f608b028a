"""Read the ring in which a decode engine keeps its last decisions.

A file of fixed size: a header (magic, bytes of a record, how many there is room for, how many were
written ever, nanoseconds from CLOCK_MONOTONIC to the wall clock), then the records, oldest first
once the ring is full. All little-endian.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from windrow.errors import UserError

MAGIC: Final = b"wrdecid2"
CAPACITY: Final = 8192  # 80 s of decisions at ten milliseconds each, and 1.6 MB
HEADER: Final = struct.Struct("<8sIIQq")
_REASON_BYTES: Final = 40
RECORD: Final = struct.Struct(f"<qqiqiqqqfffB3xQBBBBHHIQIQQIIQQ{_REASON_BYTES}s")
_PHASES: Final = ("none", "forward", "loss", "backward", "optimizer")


def ring_bytes() -> int:
    """Size of the file."""
    return HEADER.size + CAPACITY * RECORD.size


def pack_reason(text: str) -> bytes:
    """Return the reason as the record holds it: cut to its field."""
    return text.encode()[:_REASON_BYTES]


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision: what it rested on, what was granted, how the steps under it went.

    Times in microseconds, but for `at_ns` (CLOCK_MONOTONIC). `at`: the same, of the wall clock.
    """

    at: datetime
    at_ns: int
    step: int
    batch: int
    context_tokens: int
    waiting: int
    admitted_tokens: int
    objective_us: int
    slack_us: int
    margin: float
    alone_us: float
    predicted_us: float
    extrapolated: bool  # batch or context lie outside of what was profiled
    job_epoch: int
    phase: str
    starving: bool
    resident_layers: int  # whose weights the worker has in memory; 255: that many or more
    granted: bool
    finetune_units: int
    decode_units: int
    n_tasklets: int
    budget_us: int
    window_tokens: int
    gap_us: int
    hold_admission_us: int
    steps: int
    steps_over: int
    longest_us: int
    mean_us: float
    why_paused: str

    def sentence(self) -> str:
        """The decision for people."""
        if not self.batch:
            seen = "decode was idle"
        else:
            seen = (
                f"batch {self.batch}, {self.context_tokens:,} context tokens; alone a step takes "
                f"{self.alone_us / 1000:.1f} ms, the objective is {self.objective_us / 1000:g} ms"
                f" with a margin of {self.margin:.0%}"
            )
        if self.extrapolated:
            seen += " (outside of the profile)"
        if not self.granted:
            answer = f"the worker paused: {self.why_paused or 'nothing fits'}"
            if self.starving:
                answer += f", with the weights of {self.resident_layers} layers in memory"
        else:
            answer = f"the worker got {self.finetune_units} units, decode {self.decode_units}"
            for value, what in (
                (self.gap_us, f"for {self.gap_us / 1000:.1f} ms before the step"),
                (self.n_tasklets, f"for {self.n_tasklets} tasklets"),
                (self.budget_us, f"for {self.budget_us / 1000:.1f} ms"),
                (self.window_tokens, f"in windows of {self.window_tokens} tokens"),
            ):
                answer += f", {what}" if value else ""
        if self.hold_admission_us:
            answer += f"; requests wait for {self.hold_admission_us / 1000:.0f} ms"
        if not self.steps:
            return f"{seen}: {answer}"
        took = f"{self.steps} steps took {self.mean_us / 1000:.1f} ms on average"
        if self.predicted_us and self.granted:
            took += f" (predicted {self.predicted_us / 1000:.1f})"
        over = f", {self.steps_over} over the objective" if self.steps_over else ""
        return f"{seen}: {answer}; {took}, {self.longest_us / 1000:.1f} at most{over}"


def read_decisions(path: Path) -> list[Decision]:
    """Return all decisions that a ring holds, oldest first.

    Raises:
        UserError: there is no such file, or it is not a ring of this release.
    """
    try:
        ring = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror})",
            field="SLOT",
            remedy="Name the run directory of a decode pod that has a HarvestPolicy.",
        ) from error
    if len(ring) < HEADER.size or HEADER.unpack_from(ring)[:3] != (MAGIC, RECORD.size, CAPACITY):
        raise UserError(
            f"{path} is not a ring of decisions of this release",
            field="SLOT",
            remedy="Use the windrow command of the release that the engine runs.",
        )
    *_, written, offset_ns = HEADER.unpack_from(ring)
    first = max(0, written - CAPACITY)
    return [
        _decision(RECORD.unpack_from(ring, HEADER.size + n % CAPACITY * RECORD.size), offset_ns)
        for n in range(first, written)
    ]


def _decision(row: tuple, offset_ns: int) -> Decision:  # type: ignore[type-arg]
    (at_ns, step, batch, context, waiting, admitted, objective, slack, *more) = row
    (margin, alone_us, predicted_us, extrapolated, epoch, phase, starving, layers, *more) = more
    (action, finetune, decode, tasklets, budget, window, gap, hold, *more) = more
    (steps, over, longest, total, why) = more
    return Decision(
        at=datetime.fromtimestamp((at_ns + offset_ns) / 1e9, UTC),
        at_ns=at_ns,
        step=step,
        batch=batch,
        context_tokens=context,
        waiting=waiting,
        admitted_tokens=admitted,
        objective_us=objective,
        slack_us=slack,
        margin=margin,
        alone_us=alone_us,
        predicted_us=predicted_us,
        extrapolated=bool(extrapolated),
        job_epoch=epoch,
        phase=_PHASES[phase] if phase < len(_PHASES) else str(phase),
        starving=bool(starving),
        resident_layers=layers,
        granted=bool(action),
        finetune_units=finetune,
        decode_units=decode,
        n_tasklets=tasklets,
        budget_us=budget,
        window_tokens=window,
        gap_us=gap,
        hold_admission_us=hold,
        steps=steps,
        steps_over=over,
        longest_us=longest,
        mean_us=total / steps if steps else 0.0,
        why_paused=why.rstrip(b"\0").decode(errors="replace"),
    )


def as_json(decision: Decision) -> str:
    """Return a decision as one line of JSON."""
    return json.dumps(asdict(decision) | {"at": decision.at.isoformat()})


def around(decisions: Sequence[Decision], at: datetime, seconds: float) -> list[Decision]:
    """Return those within so many seconds before and after `at`."""
    return [d for d in decisions if abs((d.at - at).total_seconds()) <= seconds]
