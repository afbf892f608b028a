"""Rates of layer programs count only where an arm has learnt what plain PEFT learns."""

from __future__ import annotations

import math

import pytest

from benchmarks.layer_programs import CHECKPOINTED, GOAL_ON_GPU, PEFT, refused, results_of


def found(rate, loss=2.0, norm=0.5, **more):
    return {
        "tokens_per_second": rate,
        "loss_last": loss,
        "gradient_norm_last": norm,
        "layer_program": "",
        "layer_program_why": "",
        **more,
    }


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (found(9.0), ""),
        (found(9.0, norm=0.0), "gradient norm is 0.0"),
        (found(9.0, norm=math.nan), "gradient norm is nan"),
        (found(9.0, loss=math.inf), "its loss is inf"),
        (found(9.0, loss=2.1), "plain PEFT's is 2.0000"),
        ({"error": "no such GPU"}, "it failed: no such GPU"),
    ],
)
def test_a_rate_without_learning_does_not_count(one, said):
    why = refused(one, found(5.0))
    assert said in why
    assert bool(why) == bool(said)


def test_programs_are_held_against_the_faster_loop_and_say_what_they_ran():
    graphs = {"layer_program": "graphs", "graph_bytes": 30, "graph_bytes_expected": 60}
    runs = {
        PEFT: [found(5.0), found(6.0)],
        CHECKPOINTED: [found(7.0)],
        "eager": [found(8.0, layer_program="eager")],
        "packed": [found(20.0, norm=0.0, layer_program="eager", layer_program_why="DoRA")],
        "graphs": [found(14.0, **graphs)],
    }
    results, facts = results_of(runs, on_gpu=True)
    by_name = {result.name: result for result in results}
    assert by_name["dedicated, graphs"].goal == GOAL_ON_GPU * 7.0
    assert by_name["dedicated, graphs"].met
    assert by_name["dedicated, graphs"].baseline.name == CHECKPOINTED
    assert by_name["dedicated, packed"].value == 0.0, "it has learnt nothing"
    assert facts["packed"] == {
        "not_counted": ["its gradient norm is 0.0"],
        "ran": "eager",
        "why": "DoRA",
    }
    assert by_name["graphs: the driver's memory"].value == 30
    assert results_of(runs, on_gpu=False)[0][4].goal is None
