"""SGLang's own scheduler over the arena: the same answers and the same sums, whatever is lent."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.sglang_servers import MODEL
from transformers import AutoModelForCausalLM

from windrow.crd import parse_profile_spec
from windrow.rundir import RunDir

TEXT = (
    b"The for statement is used to iterate over the elements of a sequence, such as a string, a "
    b"tuple or a list, or of another object that supports iteration."
)

DECODE = {
    "disaggregation_mode": "decode",
    "disaggregation_transfer_backend": "fake",
    "disaggregation_decode_retraction_backup": "cpu_tensor",
}
KINDS = {
    "decode": DECODE,
    "decode without overlap": {**DECODE, "disable_overlap_schedule": True},
    "prefill and decode": {},
}


def conversation(n: int, seed: int, *, longest: int = 60) -> list[dict]:
    """Requests that come a few iterations apart, with an idle time in the middle."""
    chance = random.Random(seed)
    return [
        {
            "n": i,
            "at": 3 + 4 * i + chance.randrange(4) + (2 * i >= n) * 3 * longest,
            "tokens": chance.randrange(8, longest),
            "prompt": [*TEXT[: chance.randrange(5, len(TEXT))]],
        }
        for i in range(n)
    ]


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture(scope="module")
def stock(play, kind):
    """Return what SGLang does without the plugin."""
    return play({"server": kind, "requests": conversation(40, 5), "aborts": {"r7": 40, "r20": 99}})


def test_answers_and_sums_are_stock_ones_while_chunks_are_lent_at_random(
    play, kind, stock, run_dir
):
    script = {
        "server": kind,
        "requests": conversation(40, 5),
        "aborts": {"r7": 40, "r20": 99},
        "chaos": 3,  # what is lent is filled with NaN, all of it
        "record": True,  # and check the contract of the step seam
    }
    lending = play(script, run_dir)
    assert lending["iterations_lent"] > 40
    assert lending["most_lent"] > lending["total"] // 2
    assert lending["tokens"] == stock["tokens"]
    assert len(lending["tokens"]) >= 38
    assert lending["ends"] == stock["ends"]
    assert lending["used"] == stock["used"]
    assert lending["idle_lent"] > 10  # SGLang looks for leaks whenever it is idle
    assert lending["available"] == lending["total"] == stock["total"]
    assert lending["off"] == ""
    assert lending["steps"] > 100


def test_without_a_run_directory_nothing_of_sglang_is_touched(stock):
    assert stock["hooks"] == 0
    assert "windrow:" not in stock["log"]


def test_requests_that_find_no_memory_are_retracted_and_answered_all_the_same(play, run_dir):
    server = {**DECODE, "max_total_tokens": 1536}
    script = {"server": server, "requests": conversation(48, 9, longest=120)}
    stock = play(script)
    lending = play({**script, "chaos": 4}, run_dir)
    assert lending["iterations_lent"] > 40
    assert lending["ends"] == stock["ends"]
    assert lending["tokens"] == stock["tokens"]
    assert lending["available"] == lending["total"]


def test_a_worker_that_is_stopped_killed_and_replaced_costs_no_request_and_delays_no_step(
    play, run_dir
):
    script = {"server": DECODE, "requests": [], "endless": True, "worker": 6, "at_most_s": 300}
    played = play(script, run_dir)
    phases = {phase: facts for phase, *facts in played["faults"]}
    assert [*phases] == ["lending", "stopped", "going on", "killed", "a new one", "over"]
    for phase in ("stopped", "killed"):
        lent, steps, without = phases[phase]
        assert lent > 0
        # The worker runs no tasklet meanwhile, so that a step which waited for one would not end.
        assert steps > 20
        assert without <= 1  # the loop's round in which a batch is made launches none
    assert phases["over"][0] > 0  # lent to the new one
    # The new worker still holds what it was lent.
    assert played["available"] + played["lent"] == played["total"]
    assert set(played["ends"].values()) == {"length"}
    assert played["off"] == ""


def test_steps_make_a_profile_with_its_co_run_part_and_contradict_a_wrong_one(play, run_dir):
    script = {"server": DECODE, "requests": [], "endless": True, "profiled": 6, "at_most_s": 300}
    script["at_once"] = [3, 7]
    kept = RunDir(run_dir).profile()

    def learned() -> dict:
        played = play(script, run_dir)
        assert played["off"] == ""
        assert set(played["ends"].values()) == {"length"}
        profile = json.loads(kept.read_text())
        parse_profile_spec(profile)
        beside = [row for row in profile["samples"] if row["finetuneUnits"]]
        assert profile["coRun"]["samples"] == len(beside) > 1
        assert len({max(4, row["batch"]) for row in beside}) > 1
        assert "kinds of steps beside a worker" in played["log"]
        return profile | {"log": played["log"]}

    first = learned()
    assert "the latency profile that was found" not in first.pop("log")
    # A thousand times as long as steps take, so that none can agree on any machine. It lacks the
    # co-run part, and gets it of this start's steps.
    wrong = first | {
        "solo": [
            {**row, "c0Us": 1e3 * row["c0Us"] + 1e6, "b0Us": 0.0, "k0NsPerToken": 0.0}
            for row in first["solo"]
        ]
    }
    del wrong["coRun"]
    kept.write_text(json.dumps(wrong))
    second = learned()
    assert "the latency profile that was found is not used: steps take" in second["log"]
    assert max(row["c0Us"] for row in second["solo"]) < 1e6


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks
def test_a_batch_with_several_adapters_is_answered_as_by_stock_while_chunks_are_lent(
    play, run_dir, tmp_path
):
    for seed, name in enumerate(("tone", "code")):
        write_adapter(tmp_path / name, seed)
    server = {
        **DECODE,
        "enable_lora": True,
        "lora_backend": "torch_native",
        "max_lora_rank": 4,
        "lora_target_modules": ["q_proj", "v_proj", "down_proj"],
        "lora_paths": [f"{name}={tmp_path / name}" for name in ("tone", "code")],
        "max_loras_per_batch": 3,
    }
    requests = [
        {**request, "adapter": ("tone", "code", None)[i % 3]}
        for i, request in enumerate(conversation(24, 5))
    ]
    stock = play({"server": server, "requests": requests})
    lending = play({"server": server, "requests": requests, "chaos": 3}, run_dir)
    assert lending["off"] == ""
    assert lending["iterations_lent"] > 20
    assert lending["tokens"] == stock["tokens"]
    assert lending["used"] == stock["used"]
    # The adapters are in what was answered: without them the same prompts end otherwise.
    plain = [{**request, "adapter": None} for request in requests]
    without = play({"server": server, "requests": plain})["tokens"]
    differ = {request["adapter"] for request in requests if differs(request, stock, without)}
    assert differ == {"tone", "code"}


def differs(request: dict, stock: dict, without: dict) -> bool:
    rid = f"r{request['n']}"
    return bool(stock["tokens"][rid] != without[rid])


def write_adapter(folder: Path, seed: int) -> None:
    """An adapter of rank 4 whose matrices are large enough to change answers."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    config = LoraConfig(
        r=4,
        lora_alpha=16,
        target_modules=["q_proj", "v_proj", "down_proj"],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    get_peft_model(model, config).save_pretrained(folder)
