"""Hold the chart's dashboards against the types that a new release of Grafana publishes.

    python tools/dashboards/check_types.py

Grafana's builder for Python makes them by its schema of 10.1, the oldest release that can load
them; @grafana/schema has the types of a release of now. TypeScript compares: a dashboard, and of
each panel the options and the fields of its own kind. Without npm nothing is checked, and a line
says so.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BOARDS = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "windrow" / "dashboards"
PACKAGES = ("@grafana/schema@13.2.3", "typescript@7.0.2")
# Where the types of a kind of panel lie; a number's options are all that it has of its own.
_CONFIG = "@grafana/schema/dist/esm/raw/composable/{}/panelcfg/x/{}PanelCfg_types.gen"
_KINDS = {
    "bargauge": "BarGauge",
    "heatmap": "Heatmap",
    "stat": "Stat",
    "state-timeline": "StateTimeline",
    "timeseries": "TimeSeries",
}
_WITH_FIELDS = {"heatmap", "state-timeline", "timeseries"}
# Enumerations are written as their values in JSON.
_PLAIN = """
type Plain<T> = T extends string ? `${T}` : T extends number | boolean | null | undefined ? T
  : T extends (infer U)[] ? Plain<U>[] : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;
"""


def typed(board: dict[str, Any]) -> str:
    """Return a dashboard as a program that compiles only where it fits the types."""
    lines = ["import type { Dashboard } from '@grafana/schema';"]
    for kind, name in _KINDS.items():
        module = _CONFIG.format(kind.replace("-", ""), name)
        lines.append(f"import type * as {name} from '{module}';")
    lines += [_PLAIN, f"const board: Plain<Dashboard> = {json.dumps(board)};"]
    for number, panel in enumerate(_panels(board)):
        kind = panel["type"]
        options, custom = panel.get("options"), panel["fieldConfig"]["defaults"].get("custom")
        title = json.dumps(panel["title"])
        if options is not None:
            wanted = f"Partial<Plain<{_KINDS[kind]}.Options>>"
            lines.append(f"const options{number}: {wanted} = {json.dumps(options)}; // {title}")
        if custom is not None and kind in _WITH_FIELDS:
            wanted = f"Partial<Plain<{_KINDS[kind]}.FieldConfig>>"
            lines.append(f"const fields{number}: {wanted} = {json.dumps(custom)}; // {title}")
    return "\n".join(lines) + "\n"


def _panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from (panel for panel in board["panels"] if panel["type"] != "row")


def main() -> int:
    """Check all dashboards; returns 1 where one does not fit."""
    npm = shutil.which("npm")
    if npm is None:
        print("no npm: the dashboards are not compared with Grafana's types")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        install = [npm, "install", "--silent", "--no-audit", "--no-fund", *PACKAGES]
        if subprocess.run(install, cwd=folder).returncode:
            print("npm does not give Grafana's types: the dashboards are not compared with them")
            return 0
        names = []
        for board in sorted(BOARDS.glob("*.json")):
            file = Path(folder, f"{board.stem}.ts")
            file.write_text(typed(json.loads(board.read_text())))
            names.append(file.name)
        strict = ["--noEmit", "--strict", "--skipLibCheck", "--moduleResolution", "bundler"]
        compiler = Path(folder, "node_modules", ".bin", "tsc")
        done = subprocess.run([compiler, *strict, "--module", "esnext", *names], cwd=folder)
        version = json.loads(Path(folder, "node_modules/@grafana/schema/package.json").read_text())
    if done.returncode == 0:
        print(f"{len(names)} dashboards fit the types of Grafana {version['version']}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
