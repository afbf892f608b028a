"""Simulate as a process: settings as JSON on the command line, figures as JSON on standard output.

`windrow simulate` starts it. Exit codes: 0 done, 2 the settings must be fixed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from windrow.errors import UserError
from windrow.protocol import error_line
from windrow_simulator.bounds import against_bounds
from windrow_simulator.figures import plain
from windrow_simulator.gpu_runs import compare
from windrow_simulator.groups import group_rows
from windrow_simulator.page import write_page
from windrow_simulator.papers import paper_rows
from windrow_simulator.replay import replay
from windrow_simulator.run import best_of, described, simulate
from windrow_simulator.scenario import DEFAULT_GPU, SimulationSettings, build
from windrow_simulator.tables import (
    of_bounds,
    of_gpu_run,
    of_groups,
    of_jobs,
    of_limits,
    of_papers,
    of_replay,
    of_simulation,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as a process."""
    parser = argparse.ArgumentParser(prog="python -m windrow_simulator", description=__doc__)
    parser.add_argument("--settings", required=True, help="fields of the settings, as JSON")
    parser.add_argument("--page", type=Path, help="write the page of the run there")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--papers", action="store_true", help="the papers' comparisons instead")
    what.add_argument("--bounds", action="store_true", help="every policy against the roofline")
    what.add_argument("--groups", action="store_true", help="slots over several GPUs instead")
    what.add_argument("--run", type=Path, help="compare with the run of that folder instead")
    what.add_argument("--gpu-run", type=Path, help="compare with that result of first light")
    asked = parser.parse_args(arguments)
    began_s = time.monotonic()
    try:
        fields = json.loads(asked.settings)
        if asked.papers:
            result = _papers(fields)
        elif asked.bounds:
            result = _bounds(fields)
        elif asked.groups:
            rows = group_rows(**_common(fields))
            result = {
                "groups": [asdict(row) for row in rows],
                "tables": [asdict(of_groups(rows))],
            }
        elif asked.run:
            found = replay(asked.run, seed=fields.get("seed", 7))
            result = {**found, "tables": [asdict(of_replay(found))]}
        elif asked.gpu_run:
            arms = compare(asked.gpu_run, seed=fields.get("seed", 7))
            result = {
                "arms": [asdict(arm) for arm in arms],
                "tables": [asdict(of_gpu_run(arms, asked.gpu_run.name))],
            }
        else:
            result = run(fields)
            if asked.page:
                write_page(asked.page, result)
    except UserError as error:
        sys.stdout.write(json.dumps(error_line(error)) + "\n")
        return 2
    result["wall_seconds"] = round(time.monotonic() - began_s, 2)
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


def run(fields: dict[str, Any]) -> dict[str, Any]:
    """Simulate what the settings say; returns everything that is shown of it.

    Raises:
        UserError: settings, profile or trace are not sound.
    """
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    ground = build(SimulationSettings(**values))
    figures = simulate(ground, progress=_say)
    best = best_of(figures, ground.settings.percentile)
    settings = {name: getattr(ground.settings, name) for name in SimulationSettings.__slots__}
    result = {
        "settings": settings,
        "ground": described(ground),
        "results": [plain(f) for f in figures],
        "best": [{"objective_ms": ms, "policy": policy or None} for ms, policy in best.items()],
    }
    tables = [of_simulation(result), *([of_jobs(result)] if ground.has_jobs else [])]
    return {**result, "tables": [asdict(table) for table in tables]}


def _common(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "seconds": fields.get("seconds", 600.0),
        "traces": fields.get("traces", ""),
        "seed": fields.get("seed", 7),
        "processes": fields.get("processes", 2),
        "progress": _say,
    }


def _papers(fields: dict[str, Any]) -> dict[str, Any]:
    rows = paper_rows(**_common(fields))
    return {"papers": [asdict(row) for row in rows], "tables": [asdict(of_papers(rows))]}


def _bounds(fields: dict[str, Any]) -> dict[str, Any]:
    rows = against_bounds(
        gpu=fields.get("gpu") or DEFAULT_GPU,
        model=fields.get("model", "llama-3-8b"),
        seed=fields.get("seed", 7),
        contention=fields.get("contention", 0.35),
        processes=fields.get("processes", 2),
        progress=_say,
    )
    return {"bounds": rows, "tables": [asdict(of_bounds(rows)), asdict(of_limits(rows))]}


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    raise SystemExit(main())
