"""SGLang's own `bench_serving`, unmodified, against a harvested SGLang: alone, and beside a job.

Brings up the cluster of `windrow up --engine sglang` with one decode pod and plays the same
requests four times with `python -m sglang.bench_serving --fake-prefill`: before anything is
harvested; with a policy whose objective is wide and a job, while the latency profile is learned
from decode's steps (not reported); while the job trains under an objective of so many times the
first run's median TPOT; and when it has gone, since a server's first requests find it cold.
Example: python -m benchmarks.sglang_serving --json /tmp/sglang-serving.json
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import yaml

from benchmarks.harness import ROOT, Baseline, Result, arguments, environment, write
from benchmarks.sglang import PYTHON, windrow

MODEL = "models/windrow-tiny"
API = "windrow.dev/v1alpha1"
# Steps of decode alone that the objective allows, as in `windrow demo`.
FACTOR = 2.0
WIDE_S = 1.0
# A request each 2/3 s, prompts and answers of up to 256 and 128 tokens.
LOAD = (
    *("--dataset-name=random-ids", "--random-input-len=256", "--random-output-len=128"),
    *("--request-rate=1.5", "--seed=7", "--warmup-requests=2", "--disable-tqdm"),
)
BEGUN_WITHIN_S, STEPS = 180.0, 100_000  # more steps than the job gets time for
FIGURES: tuple[tuple[str, str, str, Literal["lower", "higher"]], ...] = (
    ("requests completed", "completed", "", "higher"),
    ("output throughput", "output_throughput", "tokens/s", "higher"),
    ("TPOT, median", "median_tpot_ms", "ms", "lower"),
    ("TPOT, p99", "p99_tpot_ms", "ms", "lower"),
    ("between two tokens, median", "median_itl_ms", "ms", "lower"),
    ("between two tokens, p99", "p99_itl_ms", "ms", "lower"),
    ("to the first token, median", "median_ttft_ms", "ms", "lower"),
)


def main() -> int:
    """Play the load alone and beside a job; print and write both reports."""
    parser = arguments(__doc__)
    parser.add_argument("--requests", type=int, default=90, help="of each run (default: 90)")
    options = parser.parse_args()
    if not PYTHON.exists():
        print("sglang_serving: skipped, there is no SGLang here (make sglang)")
        return 0
    n, env = 10 if options.quick else options.requests, environment()
    # Below the working tree: jobs of a local cluster write nowhere else.
    (ROOT / "out").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="sglang-serving-", dir=ROOT / "out") as name:
        folder = Path(name)
        up = json.loads(windrow("up", "--engine=sglang", "--pods=1", "--json"))
        try:
            results = _compare(up["endpoints"][0], n, folder)
        finally:
            windrow("down")
    write("sglang-serving", results, env, options.json)
    return 0


def _compare(url: str, n: int, folder: Path) -> list[Result]:
    alone = _bench(url, n, folder / "alone.jsonl")
    _submit(_policy(WIDE_S), folder)
    # A sidecar is attached for a job, and only with one does decode learn its profile.
    _submit(_job(folder), folder)
    _bench(url, n, folder / "learning.jsonl")
    objective_s = FACTOR * alone["median_tpot_ms"] / 1000
    _submit(_policy(objective_s), folder)
    _await(lambda: _job_status()["step"] > 0, "the job takes its first step")
    before, began_s = _job_status(), time.monotonic()
    beside = _bench(url, n, folder / "beside.jsonl")
    after, seconds = _job_status(), time.monotonic() - began_s
    windrow("delete", "tone")
    _submit(_policy(objective_s, mode="observe"), folder)
    again = _bench(url, n, folder / "again.jsonl")
    tokens = (after["tokens"] - before["tokens"]) / seconds
    results = [
        Result("objective of a token", round(1000 * objective_s, 2), "ms", "lower"),
        Result("harvested, while the load was played", round(tokens, 1), "tokens/s", "higher"),
    ]
    for title, key, unit, better in FIGURES:
        baseline = Baseline("alone, before", round(alone[key], 2))
        results.append(Result(title, round(beside[key], 2), unit, better, baseline=baseline))
        results.append(Result("  alone, after it", round(again[key], 2), unit, better))
    return results


def _bench(url: str, n: int, out: Path) -> dict[str, Any]:
    """Run SGLang's benchmark; returns what it writes to its output file."""
    command = [str(PYTHON), "-m", "sglang.bench_serving", "--backend=sglang", f"--base-url={url}"]
    command += ["--fake-prefill", f"--model={MODEL}", f"--tokenizer={MODEL}", *LOAD]
    command += [f"--num-prompts={n}", f"--output-file={out}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode or not out.exists():
        raise RuntimeError(f"bench_serving failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    print(done.stdout[done.stdout.find("=====") :])
    report: dict[str, Any] = json.loads(out.read_text().splitlines()[-1])
    return report


def _policy(objective_s: float, mode: str = "harvest") -> dict[str, Any]:
    spec = {
        "mode": mode,
        "selector": {"matchLabels": {"app": "chat"}},
        "objective": {"tpot": f"{objective_s * 1000:.1f}ms", "percentile": 99},
    }
    return {"kind": "HarvestPolicy", "metadata": {"name": "chat"}, "spec": spec}


def _job(folder: Path) -> dict[str, Any]:
    spec = {
        "model": {"name": MODEL},
        "dataset": {"source": "examples/support-tone/train.jsonl", "format": "chat"},
        "training": {
            "maxSteps": STEPS,
            "batchSize": 8,
            "maxSequenceLength": 256,
            "learningRate": "1e-4",
        },
        "output": {"destination": str(folder / "adapter")},
    }
    return {"kind": "FinetuneJob", "metadata": {"name": "tone"}, "spec": spec}


def _submit(body: dict[str, Any], folder: Path) -> None:
    manifest = folder / f"{body['kind']}.yaml"
    manifest.write_text(yaml.safe_dump({"apiVersion": API, **body}))
    windrow("submit", str(manifest))


def _job_status() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(windrow("get", "tone", "--json"))
    return found


def _await(condition: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + BEGUN_WITHIN_S
    while not condition():
        if time.monotonic() > until_s:
            raise RuntimeError(f"not within {BEGUN_WITHIN_S:g} s: {what}: {_job_status()}")
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())
