"""Time to first token and harvest where decode GPUs compute prompts: in the simulator.

An H200 serves Llama-3-8B to the Azure conversation load and computes its prompts itself. A policy
without `objective.ttft` is compared with policies that have one: decode on every SM (`--partition
none`), and on SMs of its own. Simulated figures tell settings apart; they say nothing of a real
device (docs/simulator.md).
Example: python -m benchmarks.first_tokens --json /tmp/first_tokens.json
"""

from __future__ import annotations

from benchmarks.harness import Baseline, Result, arguments, environment, write
from windrow_simulator.figures import PolicyFigures
from windrow_simulator.run import simulate
from windrow_simulator.scenario import ALONE, SimulationSettings, build

FIRST_TOKENS_MS = (0.0, 800.0, 400.0, 200.0)


def main() -> None:
    """Simulate each setting; print and write the figures."""
    options = arguments(__doc__).parse_args()
    env = environment()
    results = []
    for partition in ("none", "green"):
        for ttft_ms in FIRST_TOKENS_MS:
            settings = SimulationSettings(
                gpus=8,
                sample=8,
                seconds=30.0 if options.quick else 180.0,
                warm_up=20.0,
                rate=3.0,
                objectives_ms=(20.0,),
                partition=partition,
                aggregated=True,
                ttft_ms=ttft_ms,
                processes=1,
            )
            alone, beside = simulate(build(settings))
            assert alone.policy == ALONE
            asked = f"ttft {ttft_ms:g} ms" if ttft_ms else "no ttft"
            results += _rows(f"{partition}, {asked}", beside, alone)
    write("first_tokens", results, env, options.json)


def _rows(name: str, beside: PolicyFigures, alone: PolicyFigures) -> list[Result]:
    """Return figures of a setting, each beside that of decode alone."""
    rows = [Result(f"{name}: eta", round(beside.eta, 4), "", "higher")]
    for what, field, unit, scale in (
        ("TTFT p50", "ttft_p50_ms", "ms", 1),
        ("TTFT p99", "ttft_p99_ms", "ms", 1),
        ("steps over the objective", "over", "%", 100),
    ):
        value, before = (round(scale * getattr(of, field), 3) for of in (beside, alone))
        at = Baseline("decode alone", before)
        rows.append(Result(f"{name}: {what}", value, unit, "lower", baseline=at))
    return rows


if __name__ == "__main__":
    main()
