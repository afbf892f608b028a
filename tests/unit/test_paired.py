"""Intervals of medians hold as often as they say, and only decided ones name a winner."""

import random
from statistics import median

import pytest

from windrow_lab.figures.paired import ahead_of_all, differences, interval_of, order_of


@pytest.mark.parametrize(
    ("n", "ranks", "confidence"),
    # The chance that the median of n values is between two of their order statistics, from the
    # binomial distribution: 1 - 2 * sum(C(n, i), i < k) / 2^n.
    [
        (5, (1, 5), 1 - 2 / 32),
        (6, (1, 6), 1 - 2 / 64),
        (8, (1, 8), 1 - 2 / 256),
        (9, (2, 8), 1 - 2 * 10 / 512),
        (12, (3, 10), 1 - 2 * (1 + 12 + 66) / 4096),
    ],
)
def test_the_interval_is_the_narrowest_exact_one(n, ranks, confidence):
    found = interval_of(random.Random(n).sample([float(i) for i in range(1, n + 1)], n))
    assert (found.low, found.high) == ranks
    assert found.confidence == pytest.approx(confidence)
    assert found.is_decided == (confidence >= 0.95)


def test_the_interval_holds_as_often_as_it_says_for_a_lopsided_distribution():
    draw = random.Random(3)
    tries, true_median = 4000, median([0.0, 0.0]) + 0.6931471805599453  # of an exponential: ln 2
    held = 0
    for _ in range(tries):
        found = interval_of([draw.expovariate(1.0) for _ in range(6)])
        held += found.low <= true_median <= found.high
    # 96.875%; four standard errors of a share of 4,000 tries.
    assert held / tries == pytest.approx(0.96875, abs=4 * (0.96875 * 0.03125 / tries) ** 0.5)


def test_one_value_has_no_interval_and_none_has_no_median():
    assert interval_of([3.0]).confidence == 0
    with pytest.raises(ValueError, match="no value"):
        interval_of([])


def test_a_winner_is_ahead_of_each_other_one_in_all_of_six_rounds():
    ours = [10.0, 11.0, 12.0, 13.0, 14.0, 15.0]
    behind = [v - 0.5 for v in ours]
    values = {"ours": ours, "tuned": behind, "static": [v - 3 for v in ours]}
    assert ahead_of_all(values, ["ours", "tuned", "static"]) == "ours"
    assert ahead_of_all({**values, "tuned": [*behind[:5], 15.5]}, ["ours", "tuned"]) is None
    five = {name: of[:5] for name, of in values.items()}
    assert ahead_of_all(five, ["ours", "tuned"]) is None, "93.75% are no 95%"
    assert ahead_of_all(values, ["ours"]) is None, "there is nobody to be ahead of"


def test_differences_are_taken_within_the_rounds():
    assert differences([3.0, 5.0], [1.0, 9.0]) == [2.0, -4.0]
    with pytest.raises(ValueError, match="argument 2 is longer"):
        differences([1.0], [1.0, 2.0])


def test_each_round_plays_every_arm_once_in_an_order_of_its_own_and_the_same_when_repeated():
    names = ["alone", "a", "b", "c", "d", "again"]
    orders = [order_of(names, first=["alone"], last=["again"], seed=7, round_=n) for n in range(20)]
    assert all(sorted(order) == sorted(names) for order in orders)
    assert all((order[0], order[-1]) == ("alone", "again") for order in orders)
    assert len({tuple(order) for order in orders}) > 5
    assert orders[3] == order_of(names, first=["alone"], last=["again"], seed=7, round_=3)
