"""Check how the engine chooses its number of threads."""

from __future__ import annotations

import pytest

from windrow_sidecar.engines.builtin.threads import candidates, most_useful


@pytest.mark.parametrize(
    ("cores", "tried"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])]
)
def test_powers_of_two_and_all_cores_are_tried(cores, tried):
    assert candidates(cores) == tried


def test_threads_that_win_little_are_left_to_others():
    assert most_useful(2, {1: 10.0, 2: 9.2}.__getitem__) == 1
    assert most_useful(2, {1: 10.0, 2: 8.2}.__getitem__) == 1


def test_threads_that_win_much_are_used():
    assert most_useful(8, {1: 10.0, 2: 6.0, 4: 5.6, 8: 5.5}.__getitem__) == 2
    assert most_useful(8, {1: 10.0, 2: 9.5, 4: 5.0, 8: 3.0}.__getitem__) == 8
