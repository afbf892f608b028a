"""Stages that SGLang has to show on a GPU: stock, with the plugin, and with a worker beside it.

No stage depends on another: each starts the server that it needs where none runs and writes
OUT/STAGE.json. Where it fails OUT/STAGE.failed.json names the lines of the logs that say why; the
next one begins all the same. `--driver host` plays them on cores with the tiny model, to see that
everything runs: its figures mean nothing.

stock      time between two tokens without the plugin
plugin     the same with the plugin and nothing harvested: cost of a step at most 1%
worker     a job beside decode, under each objective: steps over it, tokens a second of the worker
pressure   chunks that are lent come back when requests need them, and all of these are answered
bench      SGLang's own bench_serving before, beside and after a job
green      decode confined to its share of the SMs (WINDROW_DECODE_PARTITION=green)
adapter    an adapter is loaded into the server, and answers

For example:
  python -m benchmarks.sglang_gpu --driver host --shape tiny --out out/sglang --budget 600
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from benchmarks.harness import ROOT, Result, environment, write
from benchmarks.light.checkpoint import write_checkpoint
from benchmarks.sglang_stages import stages
from benchmarks.sglang_stages.servers import Bench, StageFailed
from benchmarks.sglang_stages.stages import Servers

Stage = Callable[[Servers], Awaitable[list[Result]]]
STAGES: dict[str, Stage] = {
    "stock": stages.stock,
    "plugin": stages.plugin,
    "worker": stages.worker,
    "pressure": stages.pressure,
    "bench": stages.bench_serving,
    "green": stages.green,
    "adapter": stages.adapter,
}
# A stage is not begun with less left.
LEAST_S = 45.0


def sglang_python() -> Path | None:
    """Return the Python of the environment that has SGLang; None: there is none here."""
    named = os.environ.get("SGLANG_VENV")
    python = (Path(named) if named else ROOT / ".venv-sglang") / "bin" / "python"
    return python if python.exists() else None


def main(argv: list[str] | None = None) -> int:
    """Run the stages; 1 where one has failed."""
    options = _parser().parse_args(argv)
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    python = sglang_python()
    if python is None:
        print("sglang: left out, there is no SGLang here (make sglang, or SGLANG_VENV=FOLDER)")
        _write(options.json, {"leftOut": "there is no SGLang"})
        return 0
    on_gpu = options.driver != "host"
    device = "cuda" if on_gpu else "cpu"
    model = write_checkpoint(out / f"model-{options.shape}", options.shape, device)
    bench = Bench(
        python=python,
        model=model,
        device=device,
        out=out,
        requests=options.requests or (32 if on_gpu else 4),
        context=options.context or (1024 if on_gpu else 64),
        generate=options.generate or (512 if on_gpu else 64),
        kv_tokens=options.kv_tokens or (262_144 if on_gpu else 16_384),
        row_tokens=options.row_tokens or (1024 if on_gpu else 64),
        seconds=options.seconds,
        server_options=tuple(options.server),
        lead_s=3.0 if on_gpu else 1.0,
        up_within_s=options.up_within or (150.0 if on_gpu else 240.0),
        patience=options.patience,
    )
    wanted = options.only or [*STAGES]
    found = asyncio.run(
        _until_ended(bench, {name: STAGES[name] for name in wanted}, options.budget)
    )
    for name, how in found.items():
        print(f"  {name:<9} {how}")
    _write(options.json, found)
    return int(any(how != "passed" for how in found.values()))


async def _until_ended(bench: Bench, planned: dict[str, Stage], budget_s: float) -> dict[str, str]:
    """Run them; SIGTERM, by which a step that takes too long is ended, ends all servers too."""
    running = asyncio.ensure_future(run(bench, planned, budget_s))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    try:
        return await running
    except asyncio.CancelledError:
        return {"ended": "by SIGTERM"}


async def run(bench: Bench, planned: dict[str, Stage], budget_s: float) -> dict[str, str]:
    """Run what fits into so many seconds; return how each went."""
    ends_s, env = time.monotonic() + budget_s, environment()
    servers, found = Servers(bench), {}
    try:
        for name, stage in planned.items():
            left_s = ends_s - time.monotonic()
            if left_s < LEAST_S:
                found[name] = "left out: no time"
                continue
            print(f"{name}: {left_s:.0f} s are left", flush=True)
            failed = bench.out / f"{name}.failed.json"
            failed.unlink(missing_ok=True)
            try:
                results = await asyncio.wait_for(stage(servers), left_s)
            except (StageFailed, OSError, RuntimeError, TimeoutError) as error:
                lines = error.lines if isinstance(error, StageFailed) else servers.trouble()
                why = str(error) or f"not over within {left_s:.0f} s"
                _write(failed, {"stage": name, "why": why, "lines": lines})
                found[name] = f"failed: {why}" + "".join(
                    f"\n            {line['log']}:{line['line']}: {line['text'][:160]}"
                    for line in lines
                )
                continue
            write(f"sglang_{name}", results, env, bench.out / f"{name}.json")
            found[name] = "passed"
    finally:
        await servers.close()
    return found


def _write(to: Path | None, document: object) -> None:
    if to is not None:
        to.write_text(json.dumps(document, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--driver", default="cuda", choices=["cuda", "host"], help="default: %(default)s")
    add("--shape", default="llama-3-8b", help="of the model (default: %(default)s)")
    add("--out", type=Path, default=Path("out/sglang"), help="the folder (default: %(default)s)")
    add("--budget", type=float, default=520.0, metavar="SECONDS", help="default: %(default)s")
    add("--seconds", type=float, default=8.0, help="of each measured load (default: %(default)s)")
    add("--requests", type=int, metavar="N", help="in flight (default: 32, on cores 4)")
    add("--context", type=int, metavar="TOKENS", help="of a prompt (default: 1024, on cores 64)")
    add("--generate", type=int, metavar="TOKENS", help="of an answer (default: 512, on cores 64)")
    add(
        "--kv-tokens",
        type=int,
        metavar="TOKENS",
        help="of the arena (default: 262144, on cores 16384)",
    )
    add(
        "--row-tokens",
        type=int,
        metavar="TOKENS",
        help="of the job's rows (default: 1024, on cores 64)",
    )
    add(
        "--up-within",
        type=float,
        metavar="SECONDS",
        help="of a server (default: 150, on cores 240)",
    )
    add(
        "--patience",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="all that is waited for may take that much longer (default: %(default)s)",
    )
    add(
        "--server",
        action="append",
        default=[],
        metavar="OPTION",
        help="one more of SGLang's server",
    )
    add("--only", nargs="+", choices=[*STAGES], metavar="STAGE", help=f"of {', '.join(STAGES)}")
    add("--json", type=Path, metavar="FILE", help="write there how each stage went")
    return parser


if __name__ == "__main__":
    sys.exit(main())
