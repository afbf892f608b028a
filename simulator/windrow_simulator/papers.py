"""The papers' comparisons on simulated devices of theirs, beside what they published.

Each row is a ratio: absolute rates depend on their kernels, which are not simulated. Policies stand
for systems: `harli`, `static`, `llmstation`, `fineinfer`, `flexllm` under one engine, so that only
the sharing differs; a paper's figure holds its engine's gains as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from windrow_simulator.figures import PolicyFigures
from windrow_simulator.run import simulate
from windrow_simulator.scenario import SimulationSettings, build


@dataclass(frozen=True, slots=True)
class PaperRow:
    """A published figure and the simulated one. `note`: why they differ, as far as is known."""

    paper: str
    setup: str
    measure: str
    published: str
    simulated: str
    note: str


_HARLI = SimulationSettings(
    gpu="RTX-6000-Ada",
    gpus=2,
    objectives_ms=(40.0,),
    policy="harli,static,windrow",
    levels=(10, 20, 30, 40, 50, 60, 70, 80, 90),
    max_batch=128,
    max_memory_percent=90,
)
_FLEXLLM = SimulationSettings(
    gpu="A100-80G", gpus=4, objectives_ms=(50.0,), policy="flexllm,windrow", max_batch=128
)
_STATION = SimulationSettings(
    gpu="RTX-3090",
    model="llama-2-7b",
    gpus=1,
    policy="llmstation,fineinfer,temporal,windrow",
    max_batch=32,
)
# Of the whole trace, 5.53 requests a second, on the decode GPUs together.
_AZURE_PER_SECOND = 5.53

Say = Callable[[str], None]


def paper_rows(
    *,
    seconds: float = 600.0,
    traces: str = "",
    seed: int = 7,
    processes: int = 2,
    progress: Say = lambda text: None,
) -> list[PaperRow]:
    """Simulate every comparison; returns its rows.

    `traces`: folder of the published traces; "": generated ones like them.
    """
    common = {"seconds": seconds, "traces": traces, "seed": seed, "processes": processes}

    def run(base: SimulationSettings, **changes: Any) -> dict[str, PolicyFigures]:  # noqa: ANN401
        values = {**common, **changes}
        return {f.policy: f for f in simulate(build(replace(base, **values)), progress=progress)}

    return [*_harli(run), *_flexllm(run), *_llmstation(run), *_fineinfer(run)]


_Run = Callable[..., dict[str, PolicyFigures]]


def _harli(run: _Run) -> list[PaperRow]:
    setup = "RTX 6000 Ada, TPOT 40 ms, Azure conversations"
    separate, static, ours = [], [], []
    for model in ("llama-3-8b", "qwen2.5-7b"):
        for share in (0.5, 1.0):
            rate = _AZURE_PER_SECOND * share / 2
            of = run(_HARLI, model=model, train=model, rate=rate)
            fixed = run(
                _HARLI,
                model=model,
                train=model,
                rate=rate,
                policy="static",
                max_sm_percent=40,
                max_memory_percent=40,
            )
            # Two GPUs that do both, against one that decodes and one that finetunes.
            separate.append(2 * of["harli"].eta - 1)
            static.append(_ratio(of["harli"].eta, fixed["static"].eta) - 1)
            ours.append(_ratio(of["windrow"].eta, of["harli"].eta))
    note = (
        "Loads of half and all of the trace on two GPUs, both models; the paper's SeparateMode "
        "finetunes with batch 16, which a rate by SMs does not see"
    )
    return [
        PaperRow(
            "Harli",
            setup,
            "finetuning gained over separate GPUs, mean / best",
            "+46.2% / +92.0%",
            _gains(separate),
            note,
        ),
        PaperRow(
            "Harli",
            setup,
            "gained over a static split (60% of SMs and memory to decode)",
            "+75.1% / +120.5%",
            _gains(static),
            "the same engine on both sides; the paper's static split trains with batch 2",
        ),
        PaperRow(
            "Harli",
            setup,
            "windrow over harli, tokens",
            "-",
            f"{sum(ours) / len(ours):.2f}x",
            "not in the paper",
        ),
    ]


def _flexllm(run: _Run) -> list[PaperRow]:
    setup = "4 x A100-80G, Llama-3.1-8B, TPOT 50 ms"
    light, heavy = (run(_FLEXLLM, rate=per_second / 4) for per_second in (4.0, 20.0))
    kept = _ratio(heavy["flexllm"].tokens, light["flexllm"].tokens)
    note = "decode only: prompts are computed elsewhere, where FlexLLM's batches compute them too"
    return [
        PaperRow(
            "FlexLLM",
            setup,
            "finetuning kept at 20 requests/s of that at 4",
            "76% (7.2K of 9.4K tokens/s)",
            f"{kept:.0%} ({_thousands(heavy['flexllm'])} of {_thousands(light['flexllm'])})",
            note,
        ),
        PaperRow(
            "FlexLLM",
            setup,
            "against 75% serving and 25% finetuning GPUs, 4 / 20 requests/s",
            "2.5-6.8x / 1.9-4.8x",
            f"{light['flexllm'].eta * 4:.1f}x / {heavy['flexllm'].eta * 4:.1f}x",
            "the paper's ranges are over three models",
        ),
        PaperRow(
            "FlexLLM",
            setup,
            "steps over the objective, 4 / 20 requests/s",
            "-",
            f"{light['flexllm'].over:.2%} / {heavy['flexllm'].over:.2%}",
            "",
        ),
    ]


def _llmstation(run: _Run) -> list[PaperRow]:
    setup = "RTX 3090, Llama-2-7B, up to 0.5 requests/s"
    over_fineinfer, over_turns = [], []
    for rate in (0.1, 0.25, 0.5):
        for objective_ms in (50.0, 80.0):
            of = run(_STATION, rate=rate, objectives_ms=(objective_ms,))
            over_fineinfer.append(_ratio(of["llmstation"].tokens, of["fineinfer"].tokens))
            over_turns.append(_ratio(of["llmstation"].tokens, of["temporal"].tokens))
    return [
        PaperRow(
            "LLMStation",
            setup + ", TPOT 50 and 80 ms",
            "tokens over FineInfer, least / most",
            "2.38-8.17x",
            _range(over_fineinfer),
            "FineInfer's engine and its prefill on the same GPU are not simulated: its turns are",
        ),
        PaperRow(
            "LLMStation",
            setup + ", TPOT 50 and 80 ms",
            "tokens over turns between steps (beside the paper's chunked training)",
            "1.57-2.18x",
            _range(over_turns),
            "gaps before each step, up to its objective: a stronger rival than fixed chunks",
        ),
    ]


def _fineinfer(run: _Run) -> list[PaperRow]:
    setup = "RTX 3090, Llama-2-7B, 0.1 requests/s"
    waits = {
        bound: run(_STATION, rate=0.1, objectives_ms=(80.0,), policy="fineinfer", deferral_ms=bound)
        for bound in (1.0, 300.0, 500.0)
    }
    least = waits[1.0]["fineinfer"].tokens
    gained = [_ratio(waits[bound]["fineinfer"].tokens, least) - 1 for bound in (300.0, 500.0)]
    return [
        PaperRow(
            "FineInfer",
            setup,
            "tokens gained by holding requests back 0.3 / 0.5 s",
            "+26% / +36%",
            " / ".join(f"{gain:+.0%}" for gain in gained),
            "the gain is from batches that end, so from how often decode idles",
        )
    ]


def _ratio(ours: float, theirs: float) -> float:
    return ours / theirs if theirs > 0 else float("inf")


def _gains(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):+.1%} / {max(values):+.1%}"


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f}-{max(values):.2f}x"


def _thousands(figures: PolicyFigures) -> str:
    return f"{figures.tokens_per_second / 1000:.1f}K"
