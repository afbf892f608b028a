"""Check what the table of the comparison says follows from each load's result."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from benchmarks.harvest import ALL as LOADS
from benchmarks.harvest import BenchmarkLoad, LoadOutcome

LOAD = LOADS[0]
ROUNDS = 6
# Tokens a second of each arm: the loop is ahead of all, `harli` of the other policies.
RATES = {"windrow": 900.0, "tuned naive": 1000.0, "harli": 950.0, "flexllm": 400.0}


def standing(holding: list[str], undecided: list[str]) -> LoadOutcome:
    def row(arm: str, kind: str, rate: float) -> Mapping[str, object]:
        return {"arm": arm, "kind": kind, "tokens_per_second": {"median": rate}}

    kinds = {"tuned naive": "loop"}
    arms = [row(arm, kinds.get(arm, "policy"), rate) for arm, rate in RATES.items()]
    segments = [
        {"arm": arm, "round": n, "tokens_per_second": rate}
        for n in range(ROUNDS)
        for arm, rate in RATES.items()
    ]
    result = {"holding": holding, "undecided": undecided, "arms": arms, "segments": segments}
    return LoadOutcome(LOAD, result)


@pytest.mark.parametrize(
    ("holding", "undecided", "verdict", "rival", "policy"),
    [
        ([*RATES], [], "holds", "tuned naive", "harli"),
        (["windrow", "flexllm"], ["tuned naive", "harli"], "holds", "flexllm", "flexllm"),
        (["flexllm"], ["windrow", "tuned naive"], "undecided", "tuned naive", "flexllm"),
        (["tuned naive"], ["harli"], "breaks", "tuned naive", None),
        (["windrow"], [], "holds", None, None),
    ],
)
def test_a_rival_is_as_sure_of_the_objective_and_the_fastest_of_those(
    holding: list[str], undecided: list[str], verdict: str, rival: str | None, policy: str | None
) -> None:
    found = standing(holding, undecided)
    assert (found.verdict, found.rival, found.rival_policy) == (verdict, rival, policy)


def test_a_ratio_is_the_median_of_pairs_within_rounds() -> None:
    ratio = standing([*RATES], []).against("tuned naive")
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((0.9, 0.9, 0.9))


@pytest.mark.parametrize("text", ["conv", "conv@0x2", "talk@1x2", "conv@1x-2"])
def test_what_names_no_load_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"load|above zero"):
        BenchmarkLoad.parse(text)
