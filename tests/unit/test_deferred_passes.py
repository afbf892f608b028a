"""Decide which passes carry a finetune batch: FineInfer's rule, by times that are measured."""

from __future__ import annotations

from windrow_sidecar.qos.deferred_passes import DeferredPasses


def learned(bound_us: int = 1000, alone: float = 100, iteration: float = 400) -> DeferredPasses:
    plan = DeferredPasses(bound_us)
    plan.ran_alone(alone)
    plan.ran_iteration(iteration, whole=True)
    return plan


def test_a_pass_carries_a_batch_until_a_request_would_reach_its_bound():
    plan = learned()
    assert plan.extra_us == 300
    assert plan.carries([])
    assert plan.carries([0, 699])
    assert not plan.carries([0, 700])


def test_a_request_waits_no_longer_than_its_bound_in_all_its_tokens():
    plan, waited, carried = learned(), 0.0, 0
    for _ in range(100):
        if plan.carries([waited]):
            waited += plan.ran_iteration(400, whole=True)
            carried += 1
        else:
            plan.ran_alone(100)
    assert carried == 3
    assert waited == 900 < plan.bound_us


def test_an_iteration_that_takes_longer_than_the_bound_is_not_taken_again():
    plan = learned(bound_us=200)
    assert not plan.carries([0])
    assert not plan.ever_carries
    assert learned().ever_carries


def test_the_first_iteration_is_tried_and_what_it_may_take_is_bounded():
    plan = DeferredPasses(1000)
    plan.ran_alone(100)
    assert plan.carries([900])
    assert plan.left_us([900, 0]) == 100 + 100
    assert plan.left_us([2000]) == 100
    plan.ran_iteration(5000, whole=False)
    assert not plan.carries([0])


def test_one_that_was_cut_short_takes_at_least_as_long_as_it_has_run():
    plan = learned()
    plan.ran_iteration(300, whole=False)
    assert plan.iteration_us == 400
    plan.ran_iteration(600, whole=False)
    assert plan.iteration_us == 600


def test_an_iteration_that_is_faster_than_decoding_alone_costs_nobody_anything():
    plan = learned(alone=500, iteration=400)
    assert plan.extra_us == 0
    assert plan.ran_iteration(400, whole=True) == 0
