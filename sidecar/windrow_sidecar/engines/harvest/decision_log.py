"""Keep the last decisions with their inputs, prediction and outcome, in a ring that outlives us.

The ring is a file of fixed size, mapped into memory: `windrow explain` reads it while decode
serves, or after it has died, and says why the worker did not run. Decode's thread only collects
(`HarvestStep`); another thread packs what it has once a second. `windrow.decisions` has the format
and reads it.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import time
from typing import NamedTuple

from windrow.decisions import (
    CAPACITY,
    HEADER,
    MAGIC,
    RECORD,
    Decision,
    as_json,
    pack_reason,
    read_decisions,
    ring_bytes,
)
from windrow.rundir import RunDir
from windrow_sidecar.qos.control import Decided

_log = logging.getLogger(__name__)
_BEFORE_A_BREACH = 200


class Outcome(NamedTuple):
    """Result of the steps under the decision before it."""

    steps: int
    over: int
    longest_us: int
    sum_us: int


_UNKNOWN = Outcome(0, 0, 0, 0)


def _byte(value: int) -> int:
    """Return the value as a record holds it: a worker's garbled offer has a record, too."""
    return min(max(0, value), 255)


class Decisions:
    """The ring of one slot. `drain` is called by one thread, everything else by decode's."""

    def __init__(self, run_dir: RunDir) -> None:
        self._path, self._breaches = run_dir.decision_log(), run_dir.breach_log()
        draft = self._path.with_suffix(".new")
        with draft.open("wb+") as file:
            file.truncate(ring_bytes())
            self._map = mmap.mmap(file.fileno(), ring_bytes())
        self._offset_ns = time.time_ns() - time.monotonic_ns()
        self._pending: list[Decided | Outcome] = []
        self._written = 0
        self._open: Decided | None = None  # its outcome is not known yet
        self._breach = ""
        self._write_header()
        os.replace(draft, self._path)  # readers see a whole ring or none

    def keep(self, entry: Decided | Outcome) -> None:
        """Keep a decision, or how the steps under the one before it went."""
        self._pending.append(entry)

    def breached(self, reason: str) -> None:
        """The guard has acted: what led there is to be kept for longer than the ring has it."""
        self._breach = reason

    def drain(self) -> None:
        """Write what has been kept; after a breach, what led there too."""
        pending, self._pending = self._pending, []
        for entry in pending:
            if isinstance(entry, Decided):
                self._open = entry
                self._written += 1
                self._pack(entry, _UNKNOWN)
            elif self._open is not None:
                self._pack(self._open, entry)
        if pending:
            self._write_header()
        if self._breach:
            reason, self._breach = self._breach, ""
            self._keep_breach(reason)

    def _write_header(self) -> None:
        HEADER.pack_into(self._map, 0, MAGIC, RECORD.size, CAPACITY, self._written, self._offset_ns)

    def _keep_breach(self, reason: str) -> None:
        """The last breach replaces the one before, so that the file stays small."""
        try:
            lines = [json.dumps({"breach": reason}), *map(as_json, self._tail())]
            draft = self._breaches.with_suffix(".new")
            draft.write_text("\n".join(lines) + "\n")
            os.replace(draft, self._breaches)
        except OSError as error:
            _log.warning("cannot keep the decisions before a breach: %s", error)

    def _tail(self) -> list[Decision]:
        return read_decisions(self._path)[-_BEFORE_A_BREACH:]

    def _pack(self, decided: Decided, outcome: Outcome) -> None:
        view, offer, grant = decided.view, decided.offer, decided.grant
        at = HEADER.size + (self._written - 1) % CAPACITY * RECORD.size
        RECORD.pack_into(
            self._map,
            at,
            decided.at_ns,
            view.step,
            view.batch,
            view.context_tokens,
            view.waiting,
            view.admitted_tokens,
            view.objective_us,
            view.slack_us,
            decided.margin,
            decided.alone_us,
            grant.predicted_us,
            decided.extrapolated,
            max(0, offer.job_epoch),
            *map(_byte, (offer.phase, offer.starving, offer.resident_layers)),
            grant.action,
            grant.finetune_units,
            grant.decode_units,
            grant.n_tasklets,
            grant.budget_us,
            grant.window_tokens,
            max(0, grant.gap_until_ns - decided.at_ns) // 1000,
            max(0, grant.hold_admission_until_ns - decided.at_ns) // 1000,
            outcome.steps,
            outcome.over,
            outcome.longest_us,
            outcome.sum_us,
            pack_reason(decided.why_paused),
        )
