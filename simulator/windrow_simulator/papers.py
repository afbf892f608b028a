"""The papers' comparisons on simulated devices of theirs, beside what they published.

Each row is a ratio: absolute rates depend on their kernels, which are not simulated. Policies stand
for systems: `harli`, `static`, `llmstation`, `fineinfer`, `flexllm` under one engine, so that only
the sharing differs; a paper's figure holds its engine's gains as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
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
    rates="published",
    gpu="RTX-6000-Ada",
    gpus=2,
    objectives_ms=(40.0,),
    policy="harli,static,windrow",
    levels=(10, 20, 30, 40, 50, 60, 70, 80, 90),
    max_batch=128,
    max_memory_percent=90,
)
_FLEXLLM_KEPT = 0.76
FLEXLLM = SimulationSettings(
    rates="published",
    gpu="A100-80G",
    gpus=4,
    objectives_ms=(50.0,),
    policy="flexllm,windrow",
    max_batch=128,
)
_STATION = SimulationSettings(
    rates="published",
    gpu="RTX-3090",
    model="llama-2-7b",
    gpus=1,
    policy="llmstation,fineinfer,temporal,windrow",
    max_batch=32,
)
# Requests of instruction data (FineInfer's experiments use Alpaca): a short prompt, a short answer.
# Means from memory of that data set's own figures, rounded.
_INSTRUCTIONS = (60.0, 65.0)
# Few requests come to these GPUs: for so long at least, or a single one decides.
_RARE_SECONDS = 1200.0
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

    def rare(base: SimulationSettings, **changes: Any) -> dict[str, PolicyFigures]:  # noqa: ANN401
        return run(base, **{"seconds": max(seconds, _RARE_SECONDS), **changes})

    return [*_harli(run), *_flexllm(run, traces), *_llmstation(rare), *_fineinfer(rare)]


_Run = Callable[..., dict[str, PolicyFigures]]


def _harli(run: _Run) -> list[PaperRow]:
    setup = "RTX 6000 Ada, TPOT 40 ms, Azure conversations"
    etas, separate, static, ours = [], [], [], []
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
            etas.append(of["harli"].eta)
            # Two GPUs that do both, against one that decodes and one that finetunes.
            separate.append(2 * of["harli"].eta - 1)
            static.append(_ratio(of["harli"].eta, fixed["static"].eta) - 1)
            ours.append(_ratio(of["windrow"].eta, of["harli"].eta))
    return [
        PaperRow(
            "Harli",
            setup,
            "finetuning gained over separate GPUs, mean / best",
            "+46.2% / +92.0%",
            _gains(separate),
            f"Loads of half and all of the trace on two GPUs, both models: eta {_between(etas)}, "
            "where the published gains mean 0.73 and 0.96. The paper's SeparateMode finetunes with "
            "batch 16, its shared GPUs with 2; a rate by SMs knows no batch",
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


def _flexllm(run: _Run, traces: str) -> list[PaperRow]:
    setup = "4 x A100-80G, Llama-3.1-8B, TPOT 50 ms"
    rates = (4.0, 20.0)
    light, heavy = (run(FLEXLLM, rate=per_second / 4) for per_second in rates)
    kept = _ratio(heavy["flexllm"].tokens, light["flexllm"].tokens)
    sharing, tokens, wanted = with_prompts(kept, rates, traces)
    return [
        PaperRow(
            "FlexLLM",
            setup,
            "finetuning kept at 20 requests/s of that at 4",
            "76% (7.2K of 9.4K tokens/s)",
            f"{kept:.0%} ({_thousands(heavy['flexllm'])} of {_thousands(light['flexllm'])})",
            "decode only: prompts are computed elsewhere, where FlexLLM's batches compute them too",
        ),
        PaperRow(
            "FlexLLM",
            setup,
            "the same, with prompts in turns on the same GPUs",
            "76%",
            f"{sharing:.0%}",
            f"by arithmetic: prefill takes its share of the time from both. The trace's prompts "
            f"have {tokens:.0f} tokens; with {wanted:.0f} it would be 76%",
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


def with_prompts(
    kept: float, rates: tuple[float, float], traces: str
) -> tuple[float, float, float]:
    """Return what is kept where prompts take their time from decode and worker alike.

    And the mean tokens of a prompt, and with how many 76% would be kept.
    """
    ground = build(replace(FLEXLLM, traces=traces))
    prefill = ground.prefill
    assert prefill is not None  # of a named GPU
    arrivals = ground.traffic.arrivals(1, 10_000.0, 7)
    prompts = [request.prompt_tokens for request in islice(arrivals, 5000)]

    def with_scaled(scale: float) -> float:
        mean_s = sum(prefill.prefill_us(int(p * scale)) for p in prompts) / len(prompts) / 1e6
        light, heavy = (max(0.0, 1 - rate / 4 * mean_s) for rate in rates)
        return kept * heavy / light

    low, high = 0.0, 1.0  # the less, the more is kept
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if with_scaled(middle) > _FLEXLLM_KEPT else (low, middle)
    mean = sum(prompts) / len(prompts)
    return with_scaled(1.0), mean, mean * low


def _llmstation(run: _Run) -> list[PaperRow]:
    rows = []
    for words, lengths in (("conversations", ()), ("instructions", _INSTRUCTIONS)):
        over_fineinfer, over_turns, idle = [], [], []
        for rate in (0.1, 0.25, 0.5):
            for objective_ms in (50.0, 80.0):
                of = run(_STATION, rate=rate, objectives_ms=(objective_ms,), lengths=lengths)
                over_fineinfer.append(_ratio(of["llmstation"].tokens, of["fineinfer"].tokens))
                over_turns.append(_ratio(of["llmstation"].tokens, of["temporal"].tokens))
                idle.append(1 - of["fineinfer"].busy)
        setup = f"RTX 3090, Llama-2-7B, {words} at 0.1 to 0.5 requests/s, TPOT 50 and 80 ms"
        rows += [
            PaperRow(
                "LLMStation",
                setup,
                "tokens over FineInfer, least / most",
                "2.38-8.17x",
                _range(over_fineinfer),
                f"FineInfer's turns are what decode idles ({_between(idle)} of the time); its "
                "engine and its prefill on the same GPU are not simulated",
            ),
            PaperRow(
                "LLMStation",
                setup,
                "tokens over turns between steps (beside the paper's chunked training)",
                "1.57-2.18x",
                _range(over_turns),
                "gaps before each step, up to its objective: a stronger rival than fixed chunks",
            ),
        ]
    return rows


def _fineinfer(run: _Run) -> list[PaperRow]:
    rows = []
    for rate in (0.1, 0.5, 1.0):
        waits = {
            bound: run(
                _STATION,
                rate=rate,
                lengths=_INSTRUCTIONS,
                objectives_ms=(80.0,),
                policy="fineinfer",
                deferral_ms=bound,
            )["fineinfer"]
            for bound in (1.0, 300.0, 500.0)
        }
        least = waits[1.0].tokens
        gained = [_ratio(waits[bound].tokens, least) - 1 for bound in (300.0, 500.0)]
        rows.append(
            PaperRow(
                "FineInfer",
                f"RTX 3090, Llama-2-7B, {rate:g} instructions a second",
                "tokens gained by holding requests back 0.3 / 0.5 s",
                "+26% / +36%",
                " / ".join(f"{gain:+.0%}" for gain in gained),
                "every request is held as long (Alg. 1), which shifts the time in which decode is "
                "busy and does not shorten it",
            )
        )
        idle = 1 - waits[1.0].busy
        joined = [joining_gain(rate, idle, bound_s) for bound_s in (0.3, 0.5)]
        rows.append(
            PaperRow(
                "FineInfer",
                f"RTX 3090, Llama-2-7B, {rate:g} instructions a second",
                "the same, if who comes while others decode joined them at once",
                "+26% / +36%",
                " / ".join(f"{gain:+.0%}" for gain in joined),
                f"by arithmetic, from the {idle:.0%} of the time that decode idles without holding",
            )
        )
    return rows


def joining_gain(per_second: float, idle: float, bound_s: float) -> float:
    """Return what holding gains where a request is held only while decode is empty.

    Requests come by Poisson, any number decode at a time, and without holding decode is empty for
    `idle` of the time: for 1 / rate, and then busy for so long that this is its share. Holding
    makes each empty time longer by the bound, and those who come meanwhile decode together.
    """
    empty_s = 1 / per_second
    busy_s = empty_s * (1 / idle - 1)
    return (empty_s + bound_s) / (empty_s + bound_s + busy_s) / idle - 1


def _ratio(ours: float, theirs: float) -> float:
    return ours / theirs if theirs > 0 else float("inf")


def _gains(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):+.1%} / {max(values):+.1%}"


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f}-{max(values):.2f}x"


def _between(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def _thousands(figures: PolicyFigures) -> str:
    return f"{figures.tokens_per_second / 1000:.1f}K"
