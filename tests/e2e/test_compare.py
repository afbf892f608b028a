"""A comparison from an empty machine to its page, a round of four arms; and it goes on again."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from windrow_lab.compare import baselines, rounds
from windrow_lab.compare import run as compare
from windrow_lab.compare.arms import (
    AGAIN,
    ALONE,
    DEDICATED,
    DEDICATED_PEFT,
    SEGMENTS,
    TUNED,
    ComparisonSession,
    folder_of,
)
from windrow_lab.compare.run import CompareSettings
from windrow_lab.demo.run import DemoSettings
from windrow_lab.load.client import schedule

pytestmark = [pytest.mark.paired, pytest.mark.long]

MIB = 1 << 20
LOOP_BYTES, WORKER_BYTES = 200 * MIB, 60 * MIB
RATE, LEAD_S, WINDOW_S = 0.5, 1.0, 3.0
FACTOR, PLACE = 4.0, "x4"  # of one of two objectives, and the folder of what is said of it
FUSED = "flexllm fused"  # its job runs in decode's process, of a pod of its own
ARMS = {ALONE, TUNED, "windrow", FUSED, AGAIN, DEDICATED, DEDICATED_PEFT}
HARVESTED = {"windrow", FUSED}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One round for two objectives at a rate that any machine serves.

    What it stands on is given, to save a minute.
    """
    out = tmp_path_factory.mktemp("compare") / "run"
    out.mkdir()
    kept = out.parent / "footing.json"
    kept.write_text(
        json.dumps(
            {
                "pass_us": 1e9,  # never slower than that
                "peft_best_form": {},
                "memory": baselines.memory(LOOP_BYTES, WORKER_BYTES),
            }
        )
    )
    how = CompareSettings(
        rounds=1,
        lead_s=1.0,
        window_s=3.0,
        arms=(TUNED, "windrow", FUSED),
        factors=(FACTOR, 2 * FACTOR),
        footing=kept,
    )
    settings = DemoSettings(out=out, rate=RATE, busy=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "MachinePace", _SlowOnce)
        _play(settings, how)
    before = (out / PLACE / compare.RESULT).read_bytes()
    _play(settings, how)
    after = (out / PLACE / compare.RESULT).read_bytes()
    assert after == before, "nothing was missing, nothing was played"
    return out


class _SlowOnce:
    """The pace of a machine that was ten times as slow after the first turn, and never else."""

    def __init__(self, _cores: object) -> None:
        self._asked = 0

    def now_us(self) -> float:
        self._asked += 1
        return 1e10 if self._asked == 2 else 1e9


def _play(settings: DemoSettings, how: CompareSettings) -> None:
    compare.run(settings, how, Console(file=StringIO()))


def test_every_arm_has_played_the_same_requests_and_has_its_figures(out):
    (session,) = ComparisonSession.all_of(out)
    assert {at.arm for at in session.segments} == ARMS
    noted = [json.loads(line) for line in (session.folder / SEGMENTS).read_text().splitlines()]
    assert [(at["arm"], at["slower"]) for at in noted if not at["counts"]] == [(ALONE, 10.0)]
    result = json.loads((out / PLACE / compare.RESULT).read_text())
    found = {at["arm"]: at for at in result["segments"]}
    assert set(found) == ARMS
    served = ARMS - {DEDICATED, DEDICATED_PEFT}
    assert all(found[arm]["steps"] > 0 for arm in served)
    plan = json.loads((out / compare.PLAN).read_text())
    sent = schedule(
        seconds=LEAD_S + WINDOW_S + rounds.TAIL_S,
        rate=RATE,
        seed=7,
        endpoints=1,
        trace=None,
        busy=True,
    )
    assert plan["requests"] == len(sent)
    due = {(request.at_s, request.prompt_tokens) for request in sent}
    for arm in served:
        assert found[arm]["requests"] > 0
        turn = f"{arm} {PLACE}" if arm in HARVESTED else arm
        answers = json.loads(
            (session.folder / "loads" / f"0-{folder_of(turn)}" / "load.json").read_text()
        )
        assert {(answer["at_s"], answer["prompt_tokens"]) for answer in answers} <= due
    for arm in ARMS - {ALONE, AGAIN}:
        assert found[arm]["tokens_per_second"] >= 0
    for arm in HARVESTED | {DEDICATED}:
        assert found[arm]["tokens_per_second"] > 0
    assert result["winner"] is None, "one round names none"


def test_a_policy_plays_for_each_objective_and_what_knows_none_counts_for_both(out):
    tight, loose = (
        json.loads((out / place / compare.RESULT).read_text()) for place in (PLACE, "x8")
    )
    assert loose["objective"]["milliseconds"] == pytest.approx(
        2 * tight["objective"]["milliseconds"],
        abs=0.2,  # of each a tenth, upwards
    )
    of_tight, of_loose = ({at["arm"]: at for at in of["segments"]} for of in (tight, loose))
    assert of_tight["windrow"] != of_loose["windrow"]
    for arm in (TUNED, DEDICATED):
        assert of_tight[arm]["tokens_per_second"] == of_loose[arm]["tokens_per_second"]
    (session,) = ComparisonSession.all_of(out)
    assert len(session.segments) == len(ARMS) + len(HARVESTED)


def test_what_a_trainer_holds_is_missing_from_decodes_arena(out):
    result = json.loads((out / PLACE / compare.RESULT).read_text())
    tokens = {row["arm"]: row["kv_tokens"] for row in result["arms"]}
    kv_bytes = 2 * 6 * 4 * 32 * 4  # K and V, layers, heads, head, float32: the demo's model
    lost = (tokens[ALONE] - tokens[TUNED]) * kv_bytes
    assert lost == pytest.approx(LOOP_BYTES, abs=kv_bytes)  # whole tokens
    assert (tokens[ALONE] - tokens["windrow"]) * kv_bytes == pytest.approx(
        WORKER_BYTES,
        abs=2 * MIB,  # whole MiB
    )
    page = (out / PLACE / "report.html").read_text()
    assert all(arm in page for arm in ARMS)
