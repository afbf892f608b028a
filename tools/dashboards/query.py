"""Ask a Prometheus what Grafana would ask it for a dashboard's panels."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

INSTANT = "instant"


@dataclass(frozen=True)
class Series:
    """One line, bar or number: its name, its points (Unix time, value)."""

    name: str
    points: list[tuple[float, float]]


@dataclass(frozen=True)
class PanelTarget:
    """A query of a panel, as the dashboard's JSON has it."""

    panel: Mapping[str, Any]
    expr: str
    legend: str
    instant: bool

    @property
    def title(self) -> str:
        """Title of the panel."""
        return str(self.panel["title"])

    @property
    def unit(self) -> str:
        """Unit of the panel."""
        return str(self.panel["fieldConfig"]["defaults"].get("unit", ""))


@dataclass(frozen=True)
class Asking:
    """Server to ask, and the time to ask about.

    Attributes:
        url: of Prometheus.
        begin: of the range, Unix time.
        end: of the range.
        variables: value of each of the dashboard's.
        step_s: between two points.
    """

    url: str
    begin: float
    end: float
    variables: Mapping[str, str]
    step_s: float = 2.0

    def series(self, target: PanelTarget) -> list[Series]:
        """Return what a target shows; raises AssertionError with Prometheus' words on an error."""
        query = self._substitute(target.expr)
        asked: dict[str, Any] = {"query": query}
        if target.instant:
            path, asked = "query", {**asked, "time": self.end}
        else:
            path = "query_range"
            asked |= {"start": self.begin, "end": self.end, "step": self.step_s}
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=asked, timeout=30).json()
        assert answer["status"] == "success", f"{target.title}: {answer.get('error')}: {query}"
        found = answer["data"]["result"]
        return [Series(_name(target.legend, one["metric"]), _points(one)) for one in found]

    def _substitute(self, expr: str) -> str:
        known = {
            "__rate_interval": f"{max(15, round(4 * self.step_s))}s",
            "__range": f"{max(1, round(self.end - self.begin))}s",
            **self.variables,
        }
        return re.sub(r"\$(\w+)", lambda found: known[found[1]], expr)


def targets_of(board: Path) -> Iterator[PanelTarget]:
    """Return every query of a dashboard's file, in the order of its panels."""
    for panel in json.loads(board.read_text())["panels"]:
        for target in panel.get("targets") or ():
            yield PanelTarget(
                panel, target["expr"], target.get("legendFormat", ""), bool(target.get(INSTANT))
            )


def _points(one: Mapping[str, Any]) -> list[tuple[float, float]]:
    rows = one.get("values") or [one["value"]]
    points = [(float(at), float(value)) for at, value in rows]
    return [(at, value) for at, value in points if value == value]  # NaN: nothing is known


def _name(legend: str, labels: Mapping[str, str]) -> str:
    if legend in ("", "__auto"):
        inner = ", ".join(f"{k}={v}" for k, v in labels.items() if k != "__name__")
        return labels.get("__name__", "") + (f" {inner}" if inner else "")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), legend)
