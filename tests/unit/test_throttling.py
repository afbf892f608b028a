"""Count what CPU limits cost decode."""

from windrow_sidecar.cgroup import Throttled
from windrow_sidecar.engines.harvest.link import Throttling


def test_counters_that_begin_again_in_another_group_take_nothing_back():
    read = iter(
        [Throttled(5, 1.0), Throttled(7, 1.5), Throttled(0, 0.0), Throttled(1, 0.25)],
    )
    watched = Throttling(lambda: next(read))
    assert watched.beside_the_worker(1.0) == 0.5
    assert watched.beside_the_worker(2.0) == 0.0
    assert watched.total == Throttled(2, 0.5)
    assert watched.beside_the_worker(3.0) == 0.25
    assert watched.total == Throttled(3, 0.75)
