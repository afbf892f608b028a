"""A run says that its figures mean nothing where its machine was busy, and only there."""

from dataclasses import replace

import pytest

from windrow.eventlog import TaskletEvent
from windrow_lab.demo.disturbance import MachineSample, disturbances
from windrow_lab.figures.report import rows_of

QUIET = MachineSample(at_s=0.0, pass_us=5000.0, busy_share=0.03, stolen_s=7.0)
LATER = replace(QUIET, at_s=100.0, pass_us=5200.0)


def trained(*step_ms: float) -> list[TaskletEvent]:
    """Return the optimizer steps of a trainer, of a hundred tokens and so many milliseconds."""
    made, at_ns = [], 0
    for number, ms in enumerate(step_ms, 1):
        at_ns += int(ms * 1e6)
        made.append(
            TaskletEvent(
                job_uid="u", epoch=1, step=number, phase="opt", layer=0, tokens=0,
                tokens_done=100 * number, start_ns=at_ns - 1000, end_ns=at_ns, units=2,
            )
        )  # fmt: skip
    return made


STEADY = trained(*[100.0] * 20)


def test_a_quiet_machine_is_not_mentioned():
    assert disturbances(QUIET, LATER, STEADY, cores=2) == []


@pytest.mark.parametrize(
    ("before", "after", "dedicated", "said"),
    [
        (replace(QUIET, busy_share=0.5), LATER, STEADY, "Before the run, other processes used 50%"),
        (QUIET, replace(LATER, busy_share=0.11), STEADY, "After the run, other processes used 11%"),
        (QUIET, replace(LATER, pass_us=5600.0), STEADY, "1.12 times as long"),
        (replace(QUIET, pass_us=6000.0), LATER, STEADY, "1.15 times as long"),
        # 30 s of 2 cores and 100 s.
        (QUIET, replace(LATER, stolen_s=37.0), STEADY, "gave 15% of its cores"),
        (QUIET, LATER, trained(*[100.0] * 12, *[130.0] * 8), "1.25 times as fast"),
    ],
)
def test_each_disturbance_is_a_sentence(before, after, dedicated, said):
    (found,) = disturbances(before, after, dedicated, cores=2)
    assert said in found


def test_the_first_steps_of_the_reference_run_and_a_run_of_few_steps_say_nothing():
    assert disturbances(QUIET, LATER, trained(*[300.0] * 4, *[100.0] * 16), cores=2) == []
    assert disturbances(QUIET, LATER, trained(100.0, 300.0, 100.0), cores=2) == []


def test_pods_that_share_cores_are_a_disturbance():
    (found,) = disturbances(QUIET, LATER, STEADY, cores=2, oversubscribed=True)
    assert "shared the cores" in found


def test_the_first_row_of_a_disturbed_summary_says_so():
    tpot = {"p50": 1.0, "p99": 2.0}
    summary = {
        "serving": {
            "tpot_ms": tpot, "objective_ms": 9.0, "steps": 3, "steps_over_objective": 0,
            "share_over_objective": 0.0, "requests_completed": 1, "requests_failed": 0,
        },
        "harvest": {
            "tokens": 1, "tokens_per_second": 1.0, "eta": 1.43,
            "dedicated_tokens_per_second": 1.0,
        },
        "job": {
            "steps": 1, "loss": {"first": 1.0, "last": 1.0},
            "eval_loss": {"base": None, "tuned": None},
        },
    }  # fmt: skip
    assert rows_of(summary)[0][0] == "Job"
    (label, value), *_ = rows_of({**summary, "disturbances": ["The machine was slow."]})
    assert label == "These figures mean nothing: the machine was busy"
    assert value == "The machine was slow."


def test_a_sample_is_taken_of_this_machine():
    sample = MachineSample.take({0})
    assert 0 <= sample.busy_share <= 1
    assert sample.pass_us > 0
