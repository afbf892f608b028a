"""The simulator: how fast it is, how near to the rooflines policies come, and how true it is.

- speed: 1,000 GPUs for an hour under one policy, wall time and peak memory of all its processes;
- bounds: an H200 with a constant batch under every policy, against the roofline's spatial bound;
- truth: against a real run (`windrow demo --out FOLDER`, then `--run FOLDER`): the same requests,
  profile and policy; what every second stretch of the run teaches is judged on the others;
- gpu: against the committed run of an H200 (in the document only);
- papers: the papers' comparisons beside their published figures (in the document only);
- groups: slots over several GPUs beside slots of one (in the document only).

With `--docs FILE` nothing of this: it writes the tables into that document and the plots beside it,
and what each was made of, with its environment, into `benchmarks/results`.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    ROOT,
    Baseline,
    Result,
    arguments,
    environment,
    into_document,
    markdown,
    write,
)
from benchmarks.harvest import machine

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
GPU_RUN = ROOT / "benchmarks" / "results" / "h200" / "first_light.json"
PUBLISHED = {"rates": "published"}  # policies are compared on the roofline
SPEED = {**PUBLISHED, "gpus": 1000, "policy": "windrow", "rate": 20.0, "objectives_ms": [12.0]}
JOBS = {
    **PUBLISHED,
    **{"gpus": 8, "rate": 8.0, "objectives_ms": [8.0], "seconds": 1800.0},
    **{"jobs": 16, "job_tokens": [1e6, 20e6], "surge": 5.0},
    "priorities": [[0, 0.7], [100, 0.2], [1000, 0.1]],
}
PLAN = {
    **PUBLISHED,
    "gpus": 1000,
    "policy": "all",
    "rate": 20.0,
    "objectives_ms": [10.0, 12.0, 20.0],
}
BOUND_GOAL, SECONDS_GOAL, GIB_GOAL = 0.9, 120.0, 2.0
_COLOURS = ("#2ca02c", "#1f77b4", "#9467bd", "#8c564b", "#ff9f1c", "#17becf", "#e377c2", "#7f7f7f")
_BEGIN, _END = "<!-- {}: written by benchmarks/simulate.py -->", "<!-- /{} -->"


def simulator(settings: dict[str, Any], *options: str) -> dict[str, Any]:
    """Run the simulator as a process, as the command does; returns what it prints."""
    argv = [sys.executable, "-m", "windrow_simulator", f"--settings={json.dumps(settings)}"]
    done = subprocess.run([*argv, *options], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def speed(seconds: float) -> list[Result]:
    """1,000 GPUs for so long under one policy, beside decode alone."""
    began_s = time.monotonic()
    found = simulator({**SPEED, "seconds": seconds})
    took_s = time.monotonic() - began_s
    steps = sum(row["steps"] for row in found["results"])
    ours = found["results"][-1]
    return [
        Result(
            f"1,000 GPUs, {seconds:g} s, windrow and alone: wall time",
            took_s,
            "s",
            "lower",
            SECONDS_GOAL if seconds >= 3600 else None,
        ),
        Result("peak memory of all processes", peak_gib(), "GiB", "lower", GIB_GOAL),
        Result("GPUs simulated step by step", ours["simulated"], "", "higher"),
        Result("steps simulated", steps, "", "higher"),
        Result("eta: half of the 95% interval", ours["eta_error"], "", "lower"),
    ]


def peak_gib() -> float:
    """Largest memory of any child so far, times the processes that a simulation has at once."""
    import resource

    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    return largest * 3  # two workers and the one that collects


def bounds(found: dict[str, Any]) -> list[Result]:
    """Eta of `windrow` over the spatial bound, each point."""
    return [
        Result(
            f"H200, batch {row['batch']}, {row['objective_ms']:g} ms: eta / bound",
            row["eta"]["windrow"] / row["spatial"],
            "",
            "higher",
            BOUND_GOAL,
            baseline=Baseline(*_best_other(row)),
        )
        for row in found["bounds"]
    ]


def _best_other(row: dict[str, Any]) -> tuple[str, float]:
    others = {
        policy: eta / row["spatial"]
        for policy, eta in row["eta"].items()
        if policy != "windrow" and row["over"][policy] <= 0.01
    }
    best = max(others, key=lambda policy: others[policy])
    return best, others[best]


def truth(found: dict[str, Any]) -> list[Result]:
    """Relative differences of simulated and measured figures."""
    return [
        Result(
            f"{row['name']}: simulated {row['simulated']:.3f}, off by",
            100 * row["difference"],
            "%",
            "lower",
            100 * row["goal"],
            baseline=Baseline("measured", row["measured"]),
        )
        for row in found["compared"]
    ]


def plot(
    lines: Mapping[str, Sequence[tuple[float, float]]], title: str, x_title: str, path: Path
) -> None:
    """Write lines with their points as an SVG file; a name that ends in "bound" is dashed."""
    width, height, left, right, top, bottom = 760, 360, 60, 170, 34, 44
    xs = [x for points in lines.values() for x, _ in points]
    most_x, least_x = max(xs), min(xs)
    most_y = max(1e-9, max(y for points in lines.values() for _, y in points))

    def at(x: float, y: float) -> tuple[float, float]:
        # Objectives double from one to the next: a logarithm spreads them evenly.
        share = math.log(x / least_x) / math.log(most_x / least_x) if most_x > least_x else 0.5
        return left + share * (width - left - right), height - bottom - y / most_y * (
            height - top - bottom
        )

    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{left}" y="20" font-size="14">{title}</text>',
    ]
    for i in range(6):
        y = most_y * i / 5
        _, py = at(least_x, y)
        drawn.append(
            f'<path d="M{left} {py:.1f}H{width - right}" stroke="#e7ebef"/>'
            f'<text x="{left - 8}" y="{py + 4:.1f}" text-anchor="end">{y:.2g}</text>'
        )
    for x in sorted(set(xs)):
        px, _ = at(x, 0)
        drawn.append(f'<text x="{px:.1f}" y="{height - 24}" text-anchor="middle">{x:g}</text>')
    drawn.append(f'<text x="{left}" y="{height - 6}">{x_title}</text>')
    for i, (name, points) in enumerate(lines.items()):
        dashed = name.endswith("bound")
        colour = "#d62728" if dashed else _COLOURS[i % len(_COLOURS)]
        where = [at(x, y) for x, y in sorted(points)]
        joined = " ".join(f"{px:.1f},{py:.1f}" for px, py in where)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        drawn.append(
            f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}/>'
        )
        drawn += [
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}"/>' for px, py in where
        ]
        drawn.append(
            f'<text x="{width - right + 14}" y="{top + 18 * i + 12}" fill="{colour}">{name}</text>'
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*drawn, "</svg>"]) + "\n", encoding="utf-8")


def plot_bounds(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """One picture for each batch: eta of every policy over the objective, and the bound."""
    for batch in sorted({row["batch"] for row in rows}):
        of = [row for row in rows if row["batch"] == batch]
        lines = {
            policy: [(row["objective_ms"], row["eta"][policy]) for row in of]
            for policy in of[0]["eta"]
        }
        lines["spatial bound"] = [(row["objective_ms"], row["spatial"]) for row in of]
        title = f"H200, batch {batch}: harvested share of the GPU (eta)"
        plot(lines, title, "objective, ms", folder / f"simulator-batch-{batch}.svg")


def plot_plan(found: dict[str, Any], folder: Path) -> None:
    """Eta and steps over the objective of the cluster, by policy."""
    rows = [row for row in found["results"] if row["policy"] != "alone"]
    for key, name, title in (
        ("eta", "eta", "1,000 H200 under the conversation trace: eta"),
        ("over", "over", "The same: share of steps over the objective"),
    ):
        lines = {
            policy: [(r["objective_ms"], r[key]) for r in rows if r["policy"] == policy]
            for policy in dict.fromkeys(row["policy"] for row in rows)
        }
        plot(lines, title, "objective, ms", folder / f"simulator-cluster-{name}.svg")


def documented(asked: argparse.Namespace) -> None:
    """Write tables and plots of the document, each as soon as it is there."""
    seconds = 30.0 if asked.quick else 180.0
    results = ROOT / "benchmarks" / "results" / machine()
    common = {"seconds": seconds, "traces": str(asked.traces) if asked.traces.is_dir() else ""}

    def put(name: str, shown: dict[str, Any]) -> None:
        """Write a table into the document."""
        said = f"\n\n{shown['said']}" if shown["said"] else ""
        text = markdown(shown["head"], shown["rows"]) + said
        into_document(asked.docs, _BEGIN.format(name), _END.format(name), text)

    def found_of(name: str, settings: dict[str, Any], *options: str) -> dict[str, Any]:
        """Simulate, and keep what was found."""
        before = environment()
        found = simulator(settings, *options)
        kept = copy.deepcopy({"environment": before, "settings": settings, **found})
        keep(results / f"simulate-{name}.json", kept)
        return found

    def cluster() -> None:
        plan = found_of("cluster", {**PLAN, **common})
        put("cluster", plan["tables"][0])
        plot_plan(plan, asked.docs.parent / "images")

    def near_bounds() -> None:
        found = found_of("bounds", {}, "--bounds")
        put("bounds", found["tables"][0])
        put("limits", found["tables"][1])
        plot_bounds(found["bounds"], asked.docs.parent / "images")

    parts: dict[str, Callable[[], None]] = {
        "bounds": near_bounds,
        "jobs": lambda: put("jobs", found_of("jobs", JOBS)["tables"][1]),
        "papers": lambda: put("papers", found_of("papers", common, "--papers")["tables"][0]),
        "groups": lambda: put("groups", found_of("groups", common, "--groups")["tables"][0]),
        "cluster": cluster,
        "gpu": lambda: put("gpu", found_of("gpu", {}, f"--gpu-run={GPU_RUN}")["tables"][0]),
    }
    if asked.run:
        run = f"--run={asked.run}"
        parts["truth"] = lambda: put("truth", found_of("truth", {}, run)["tables"][0])
    wanted = asked.only.split(",") if asked.only else list(parts)
    if unknown := set(wanted) - parts.keys():
        raise SystemExit(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(parts)}")
    for name in wanted:
        parts[name]()


def keep(path: Path, found: dict[str, Any]) -> None:
    """Write figures as JSON, less their course over time and the paths of this machine."""
    for row in found.get("results", []):
        row["timeline"] = []
    for at, name in ((found["settings"], "traces"), (found, "run")):
        if name in at:
            at[name] = Path(at[name]).name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    """Run all parts."""
    parser = arguments(__doc__)
    parser.add_argument("--run", type=Path, help="folder of a demo to compare with")
    parser.add_argument("--docs", type=Path, help="write tables and plots into that document")
    parser.add_argument("--only", default="", help="with --docs: these tables, with commas")
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder of published traces")
    parser.add_argument("--no-speed", action="store_true", help="leave the hour of 1,000 GPUs out")
    parser.add_argument("--speed-only", action="store_true", help="that hour and nothing else")
    asked = parser.parse_args()
    before = environment()
    if asked.speed_only:
        write("simulate-speed", speed(60.0 if asked.quick else 3600.0), before, asked.json)
        return
    if asked.docs:
        documented(asked)
        return
    results = [] if asked.no_speed else speed(60.0 if asked.quick else 3600.0)
    results += bounds(simulator({}, "--bounds"))
    if asked.run:
        results += truth(simulator({}, f"--run={asked.run}"))
    write("simulate", results, before, asked.json)


if __name__ == "__main__":
    main()
