"""First light on a device: the built-in engine decoding beside the finetune worker.

Decode and worker are processes of their own over one arena. Measured are: steps alone and beside
the worker by batch and share (the profile), then a fixed load under each objective, shared in four
ways: `naive` (the same worker as a plain process: no partition, no guard), `gaps` (in turn: the
worker runs only between steps), `windrow` (the product's policy), and decode `alone`; eta is
against the same worker with the device to itself (`dedicated`). What lent memory costs the worker
shows beside a decode without requests. On a GPU eta is also given as a share of what the roofline
allows, in time and in space; figures of the host are held to no goal.

For example:
  python -m benchmarks.first_light --driver host --shape tiny --quick --json light.json
  python -m benchmarks.first_light --driver cuda --shape llama-3-8b --json first_light.json
  python -m benchmarks.first_light --driver cuda --json first_light.json --resume

Every stage is written to FILE.parts/ as soon as it is measured; --resume goes on after the last.
A page with plots is left beside FILE (.html), the logs of all processes in FILE.parts/logs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness import arguments, environment, write
from benchmarks.light.figures import plot, results
from benchmarks.light.measure import Bench, MeasureEffort, Parts
from benchmarks.light.processes import Plan, ProcessEnded, keep_logs, mps
from benchmarks.shapes import SHAPES
from windrow.builtin_engine import n_bytes
from windrow.errors import UserError

EFFORTS = {
    "cuda": MeasureEffort((8, 16, 32), 1024, (512, 2048), 32, 128, (10, 15, 20, 40), 64, 20.0),
    "host": MeasureEffort((2, 4, 8), 1024, (256,), 4, 64, (10, 15, 20, 40), 64, 5.0),
}
ARENA_BYTES = {"cuda": 24 << 30, "host": 384 << 20}
ROW_TOKENS = {"cuda": 1024, "host": 128}  # two rows a batch


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing, then write figures and plot."""
    options = _options(argv)
    driver = options.driver
    effort = _effort(driver, options)
    out: Path = options.json or Path("first_light.json")
    parts_folder = out.with_name(out.name + ".parts")
    console = Console(stderr=True)
    # Also a caller with a time limit finds the logs, and leaves nothing running on a GPU.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    env = environment()
    try:
        _require_gpu(driver)
        parts = _parts(parts_folder, driver, options, effort)
    except UserError as error:
        console.print(f"error: {error}")
        return 2
    # A short path: sockets lie in it, and their names hold 107 bytes.
    with tempfile.TemporaryDirectory(prefix="wr-") as name:
        folder = Path(name)
        try:
            with mps(folder, wanted=driver == "cuda") as (mps_environment, no_mps):
                if driver == "cuda" and no_mps:
                    console.print(in_time_only(no_mps), markup=False)
                plan = _plan(folder, options, effort, mps_environment)
                bench = Bench(plan, parts, effort, console.print)
                try:
                    bench.run()
                finally:
                    bench.close()
        except ProcessEnded as error:
            console.print(f"error: {error}", markup=False)
            return 1
        finally:
            keep_logs(folder, parts_folder / "logs")
    env |= {
        "driver": driver,
        "shape": options.shape,
        "mps": no_mps or "a private daemon",
        "effort": dataclasses.asdict(effort),
    }
    write("first_light", results(parts, effort), env, options.json)
    title = f"First light: {options.shape} on {parts['device']['label']}"
    plot(parts, effort, title, out.with_suffix(".html"))
    return 0


def in_time_only(no_mps: str) -> str:
    """Say what is left out without MPS, and what to do."""
    return (
        f"No MPS daemon: {no_mps}. The GPU is shared in time only: co-run points and the arm "
        "`windrow` are left out, `naive`, `gaps` and `dedicated` are measured. To measure all of "
        "them, put nvidia-cuda-mps-control, of NVIDIA's driver, on PATH and run again without "
        "--resume."
    )


def _require_gpu(driver: str) -> None:
    if driver == "cuda":
        from windrow_sidecar.torch_cuda import require_torch_cuda

        require_torch_cuda("--driver")


def _parts(folder: Path, driver: str, options: argparse.Namespace, effort: MeasureEffort) -> Parts:
    """Return what was measured before, where it may be continued.

    Raises:
        UserError: what is there was measured otherwise.
    """
    setup = {"driver": driver, "shape": options.shape, "effort": dataclasses.asdict(effort)}
    setup["arena_bytes"] = options.arena_bytes
    setup = json.loads(json.dumps(setup))
    parts = Parts(folder, resume=options.resume)
    if "setup" in parts and parts["setup"] != setup:
        raise UserError(
            f"{folder} was measured with {parts['setup']}",
            field="--resume",
            remedy="Give the same options as then, or leave --resume out to start over.",
        )
    parts.keep("setup", setup)
    return parts


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = arguments(summary)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = rest
    add = parser.add_argument
    add("--driver", choices=["host", "cuda"], default="host", help="default: %(default)s")
    add("--shape", choices=sorted(SHAPES), help="default: tiny on the host, llama-3-8b on a GPU")
    add("--resume", action="store_true", help="go on after the last stage that was written")
    add("--seconds", type=float, help="of each arm (default: 20 on a GPU, 5 on the host)")
    add("--batch", type=int, help="of the fixed load (default: 32 on a GPU, 4 on the host)")
    add("--objectives", type=float, nargs="+", metavar="MS", help="default: 10 15 20 40")
    add("--context", type=int, metavar="TOKENS", help="of each request (default: 1024)")
    add(
        "--arena-bytes",
        type=n_bytes,
        metavar="SIZE",
        help="of decode's KV, as 24GiB or 512MiB (default: 24GiB on a GPU, 384MiB on the host)",
    )
    options = parser.parse_args(argv)
    options.arena_bytes = options.arena_bytes or ARENA_BYTES[options.driver]
    options.shape = options.shape or {"host": "tiny", "cuda": "llama-3-8b"}[options.driver]
    return options


def _effort(driver: str, options: argparse.Namespace) -> MeasureEffort:
    effort = EFFORTS[driver]
    if options.quick:
        effort = dataclasses.replace(
            effort, batches=effort.batches[-1:], steps=16, seconds=3.0, objectives_ms=(15, 40)
        )
    asked = {
        "seconds": options.seconds,
        "load_batch": options.batch,
        "context": options.context,
        "contexts": (options.context // 2,) if options.context else None,
        "objectives_ms": tuple(options.objectives) if options.objectives else None,
    }
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    return dataclasses.replace(effort, **given)


def _plan(
    folder: Path, options: argparse.Namespace, effort: MeasureEffort, environ: dict[str, str]
) -> Plan:
    max_batch = max(*effort.batches, effort.load_batch)
    return Plan.of(
        folder,
        options.shape,
        row_tokens=options.context or ROW_TOKENS[options.driver],
        rows_a_step=2,
        device="cuda:0" if options.driver == "cuda" else "cpu",
        arena_bytes=options.arena_bytes,
        max_batch=max_batch,
        kv_tokens=max_batch * (effort.context + effort.generated),
        environment=environ,
    )


if __name__ == "__main__":
    raise SystemExit(main())
