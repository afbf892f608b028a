"""Simulate as a process: settings as JSON on the command line, figures as JSON on standard output.

`windrow simulate` starts it. Exit codes: 0 done, 2 the settings must be mended.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from windrow.errors import UserError
from windrow_simulator.figures import plain
from windrow_simulator.page import write_page
from windrow_simulator.run import best_of, described, simulate
from windrow_simulator.scenario import SimulationSettings, build


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as a process."""
    parser = argparse.ArgumentParser(prog="python -m windrow_simulator", description=__doc__)
    parser.add_argument(
        "--settings", required=True, help="fields of `SimulationSettings` as a JSON object"
    )
    parser.add_argument("--page", type=Path, help="write the page of the run there")
    asked = parser.parse_args(arguments)
    try:
        result = run(json.loads(asked.settings))
        if asked.page:
            write_page(asked.page, result)
    except UserError as error:
        sys.stdout.write(json.dumps({"error": str(error)}) + "\n")
        return 2
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


def run(fields: dict[str, Any]) -> dict[str, Any]:
    """Simulate what the settings say; returns everything that is shown of it.

    Raises:
        UserError: settings, profile or trace are not sound.
    """
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    ground = build(SimulationSettings(**values))
    began_s = time.monotonic()
    figures = simulate(ground, progress=_say)
    best = best_of(figures, ground.settings.percentile)
    return {
        "settings": {name: getattr(ground.settings, name) for name in SimulationSettings.__slots__},
        "ground": described(ground),
        "results": [plain(f) for f in figures],
        "best": [{"objective_ms": ms, "policy": policy or None} for ms, policy in best.items()],
        "wall_seconds": round(time.monotonic() - began_s, 2),
    }


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    raise SystemExit(main())
