"""Measurements of an unfinished latency profile, kept so that nothing is measured twice."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from windrow_sidecar.engines.profile import CoRunPoint, MeasuredPoint, Point
from windrow_sidecar.qos.co_run import CoRunSample
from windrow_sidecar.qos.solo import SoloSample

_log = logging.getLogger(__name__)

# What a machine did an hour ago says little of it now.
_KEPT_S = 3600.0


@dataclass(slots=True)
class UnfinishedProfile:
    """The points of a profile that are measured, in a file of a line each.

    `key`, `effort`: lines of another profile in the file are not read.

    Attributes:
        alone: points of decode alone.
        beside: points of decode beside a load.
        kept: whether the file can be written.
    """

    path: Path
    key: str
    effort: str
    alone: dict[Point, MeasuredPoint] = field(default_factory=dict)
    beside: dict[CoRunPoint, CoRunSample] = field(default_factory=dict)
    kept: bool = True

    def read(self) -> None:
        """Read what an interrupted profile has left, unless it is too old."""
        try:
            if time.time() - self.path.stat().st_mtime > _KEPT_S:
                self.remove()
                return
            lines = self.path.read_text().splitlines()
        except OSError:  # there is none, or it cannot be read
            return
        for line in lines:
            try:
                row = json.loads(line)
                if (row["key"], row["effort"]) == (self.key, self.effort):
                    self._take(row)
            except (ValueError, KeyError, TypeError):
                continue  # a line that was being written
        if found := len(self.alone) + len(self.beside):
            _log.info("profile: %d points are known from an interrupted one", found)

    def keep(self, point: Point, measured: MeasuredPoint) -> None:
        """A point of decode alone is measured."""
        self.alone[point] = measured
        self._write({"point": asdict(point), "measured": asdict(measured)})

    def keep_beside(self, point: CoRunPoint, sample: CoRunSample) -> None:
        """A point of decode beside a load is measured."""
        self.beside[point] = sample
        self._write({"beside": asdict(point), "measured": asdict(sample)})

    def remove(self) -> None:
        """The profile is whole: forget its points."""
        if self.kept:
            self.path.unlink(missing_ok=True)

    def _take(self, row: Mapping[str, Any]) -> None:
        measured = row["measured"]
        if "beside" in row:
            alone = Point(**row["beside"]["alone"])
            step = SoloSample(**measured["step"])
            self.beside[CoRunPoint(**row["beside"] | {"alone": alone})] = CoRunSample(
                **measured | {"step": step}
            )
        else:
            sample = SoloSample(**measured["sample"])
            self.alone[Point(**row["point"])] = MeasuredPoint(**measured | {"sample": sample})

    def _write(self, row: Mapping[str, Any]) -> None:
        if not self.kept:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps({"key": self.key, "effort": self.effort, **row}) + "\n")
        except OSError as error:  # a profile is worth more than what an interrupted one would keep
            # As text: a log that keeps its records would keep the frames, with their tensors.
            _log.warning("profile: points are not kept, if it is interrupted: %s", str(error))
            self.kept = False
