"""Make the table of a comparison: each arm's medians with intervals, and who has won.

An arm holds the objective where its steps over it are at most `WORSE` more than alone, in the same
round: where the upper end of the interval says so. It breaks it where the lower end is above that,
and is undecided in between. Of the arms that hold it, the one that trains faster than each other
one that holds it, or might, has won, where the intervals of all these differences lie above zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from windrow.errors import WindrowError
from windrow_lab.compare.arms import AGAIN, ALONE, Arm, ComparisonSession, SegmentFigures
from windrow_lab.figures.paired import Interval, ahead_of_all, differences, interval_of
from windrow_lab.machine.pace import SLOWER

WORSE = 0.003  # of the steps
_MEDIANS = (
    "tpot_p50_ms",
    "tpot_p99_ms",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "requests",
    "completed",
    "waited_for_kv",
    "steps",
)


class Impossible(WindrowError):
    """An arm trained faster beside decode than anything alone on the device."""


@dataclass(frozen=True)
class _Rounds:
    """The figures of one arm, one of each round, in the order of the rounds."""

    arm: Arm
    figures: Sequence[SegmentFigures]

    @property
    def serves(self) -> bool:
        return all(at.over is not None for at in self.figures)

    @property
    def trains(self) -> bool:
        return all(at.tokens_per_second is not None for at in self.figures)

    @property
    def over(self) -> list[float]:
        return [at.over or 0.0 for at in self.figures]

    @property
    def rates(self) -> list[float]:
        return [at.tokens_per_second or 0.0 for at in self.figures]


def result_of(
    plan: Mapping[str, Any], sessions: Sequence[ComparisonSession], arms: Sequence[Arm], rounds: int
) -> dict[str, Any]:
    """Return everything that a comparison says, as it goes into JSON."""
    objective_ms = plan["objective"]["milliseconds"]
    found = [at for session in sessions for at in session.figures(arms, objective_ms)]
    by_arm = [
        _Rounds(arm, sorted((at for at in found if at.arm == arm.name), key=lambda at: at.round))
        for arm in arms
    ]
    return {
        **plan,
        "rounds": len({at.round for at in found}),
        "rounds_asked": rounds,
        "turns": {
            "count": sum(len(session.segments) for session in sessions),
            "played_again": sum(not at.counts for session in sessions for at in session.played),
            "slower": sum(at.slower > SLOWER for session in sessions for at in session.segments),
        },
        **_standing(by_arm, plan["kv_tokens"]),
        "segments": [asdict(at) for at in found],
    }


def _standing(by_arm: Sequence[_Rounds], kv_tokens: Mapping[str, int]) -> dict[str, Any]:
    dedicated = {
        of.arm.name: interval_of(of.rates).median for of in by_arm if of.arm.kind == "dedicated"
    }
    reference = max(dedicated, key=lambda name: dedicated[name])
    alone = [
        (a + b) / 2
        for a, b in zip(_named(by_arm, ALONE).over, _named(by_arm, AGAIN).over, strict=True)
    ]
    rows = [
        {**_row(of, dedicated[reference], alone), "kv_tokens": kv_tokens.get(of.arm.kind)}
        for of in by_arm
    ]
    more = {r["arm"]: r["over_more"] for r in rows if r["over_more"] and r["tokens_per_second"]}
    holding = [arm for arm, of in more.items() if of["high"] <= WORSE]
    undecided = [arm for arm, of in more.items() if of["low"] <= WORSE < of["high"]]
    rates = {of.arm.name: of.rates for of in by_arm}
    decided = interval_of(alone).is_decided
    winner = ahead_of_all(rates, holding, undecided) if decided else None
    if decided and len(holding) == 1 and not undecided:
        winner = holding[0]
    best = max(holding, key=lambda name: interval_of(rates[name]).median, default=None)
    return {
        "dedicated": {"arm": reference, "tokens_per_second": dedicated},
        "arms": rows,
        "holding": holding,
        "undecided": undecided,
        "winner": winner,
        "best_holding": best,
        "against_best": {
            name: asdict(
                _share(interval_of(differences(rates[best], rates[name])), dedicated[reference])
            )
            for name in holding
            if best and name != best
        },
    }


def _named(by_arm: Sequence[_Rounds], name: str) -> _Rounds:
    return next(of for of in by_arm if of.arm.name == name)


def _share(interval: Interval, whole: float) -> Interval:
    return Interval(
        interval.median / whole, interval.low / whole, interval.high / whole, interval.confidence
    )


def _row(of: _Rounds, dedicated: float, alone: Sequence[float]) -> dict[str, Any]:
    rate = interval_of(of.rates) if of.trains else None
    row: dict[str, Any] = {
        "arm": of.arm.name,
        "kind": of.arm.kind,
        "meaning": of.arm.meaning,
        "over": asdict(interval_of(of.over)) if of.serves else None,
        "over_more": asdict(interval_of(differences(of.over, alone))) if of.serves else None,
        "tokens_per_second": asdict(rate) if rate else None,
        "eta": asdict(_share(rate, dedicated)) if rate else None,
    }
    for name in _MEDIANS:
        values = [value for at in of.figures if (value := getattr(at, name)) is not None]
        row[name] = interval_of(values).median if values and of.serves else None
    return row


def check(result: Mapping[str, Any]) -> None:
    """Raise Impossible where an arm's share of the dedicated rate is above 1."""
    for row in result["arms"]:
        if row["eta"] and row["eta"]["median"] > 1:
            raise Impossible(
                f"{row['arm']} trained at {row['eta']['median']:.2f} of the dedicated rate: "
                f"{result['dedicated']['arm']} is not what this device can give, so no share here "
                "can be believed. Run it on a quieter machine, or with longer windows."
            )


def table(result: Mapping[str, Any]) -> Table:
    """Return the table for a screen."""
    objective = result["objective"]["milliseconds"]
    shown = Table(
        title=f"The same load, shared in different ways: {result['rounds']} rounds, "
        f"objective {objective:g} ms",
        title_justify="left",
    )
    for title in ("", *TITLES):
        shown.add_column(title, justify="left" if not title else "right")
    for row in result["arms"]:
        won = row["arm"] == result["winner"]
        style = "bold green" if won else ""
        shown.add_row(*cells(row), style=style)
    shown.caption = CAPTION
    return shown


TITLES = (
    "TPOT p50",
    "p99 ms",
    "over objective",
    "more than alone, points",
    "TTFT p50",
    "p99 ms",
    "KV tokens",
    "waited for KV",
    "finetune tok/s",
    "eta",
)
CAPTION = (
    "medians over the rounds; [from, to]: the 95% interval of the median, of paired differences "
    "in 'more than alone'"
)
NONE = "-"


def cells(row: Mapping[str, Any]) -> list[str]:
    """Return an arm's line, as text."""

    def plain(key: str, form: str) -> str:
        return NONE if row[key] is None else format(row[key], form)

    over = NONE if row["over"] is None else f"{row['over']['median']:.2%}"
    return [
        row["arm"],
        plain("tpot_p50_ms", ".1f"),
        plain("tpot_p99_ms", ".1f"),
        over,
        points(row["over_more"]),
        plain("ttft_p50_ms", ".0f"),
        plain("ttft_p99_ms", ".0f"),
        plain("kv_tokens", ","),
        plain("waited_for_kv", ".0f"),
        _ranged(row["tokens_per_second"], ",.0f"),
        _ranged(row["eta"], ".2f"),
    ]


def points(of: Mapping[str, float] | None) -> str:
    """Return a median of shares with its interval, as text in points."""
    return _ranged(of, "+.2f", 100)


def _ranged(of: Mapping[str, float] | None, form: str, factor: float = 1.0) -> str:
    if of is None:
        return NONE
    middle, low, high = (format(of[k] * factor, form) for k in ("median", "low", "high"))
    return f"{middle} [{low}, {high}]"


def sentence(result: Mapping[str, Any]) -> str:
    """Say in a sentence or two who has won, or why nobody has, and which arms are undecided."""
    holding, undecided = result["holding"], ", ".join(result["undecided"])
    bound = f"{100 * WORSE:g} points of alone"
    unknown = f" These rounds do not say whether {undecided} would keep within {bound}."
    return _winner(result, holding, bound) + (unknown if undecided else "")


def _winner(result: Mapping[str, Any], holding: Sequence[str], bound: str) -> str:
    if not holding:
        sure = " for certain" if result["undecided"] else ""
        return f"No arm that trains keeps its steps over the objective within {bound}{sure}."
    if result["winner"]:
        if len(holding) == 1:
            return f"{result['winner']} alone holds the objective."
        return f"{result['winner']} trains fastest of those that hold the objective."
    held = ", ".join(holding)
    confidence = result["arms"][0]["over"]["confidence"]
    if confidence < 0.95:
        return f"{result['rounds']} rounds give no 95% interval: no winner among {held}."
    return f"The intervals name no winner among those that hold the objective: {held}."
