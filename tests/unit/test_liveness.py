"""Check what counts as an operator that a restart would fix, and what does not."""

from windrow_operator.liveness import LOOKS_WITHIN_S, STEPS_WITHIN_S, Liveness


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def leader():
    clock = Clock()
    liveness = Liveness(clock)
    liveness.leads(yes=True)
    return clock, liveness


def test_an_api_server_that_answers_nothing_for_an_hour_ends_no_operator():
    """Each call ends after its time limit, and so does the step that made it, without success."""
    clock, liveness = leader()
    for minute in range(60):
        for _ in range(6):
            clock.now += 10
            liveness.looked(due=1000)
        if minute % 4 == 3:  # four workers, each in a step of five calls that all time out
            liveness.stepped()
        assert liveness.stalled() == ""


def test_steps_that_are_due_and_never_end_are_a_stall():
    clock, liveness = leader()
    while clock.now <= STEPS_WITHIN_S:
        liveness.looked(due=3)
        assert liveness.stalled() == ""
        clock.now += 10
    liveness.looked(due=3)
    assert "none has ended" in liveness.stalled()
    liveness.stepped()
    assert liveness.stalled() == ""


def test_a_queue_that_is_empty_is_none():
    clock, liveness = leader()
    for _ in range(1000):
        clock.now += 10
        liveness.looked(due=0)
        assert liveness.stalled() == ""


def test_a_leader_that_looks_no_more_is_one_and_a_replica_that_stands_by_is_not():
    clock, liveness = leader()
    clock.now += LOOKS_WITHIN_S + 1
    assert "nobody has looked" in liveness.stalled()
    liveness.leads(yes=False)
    clock.now += 10 * LOOKS_WITHIN_S
    assert liveness.stalled() == ""


def test_watches_that_tell_less_than_a_listing_again_and_again_are_stuck():
    _, liveness = leader()
    for _ in range(2):
        liveness.compared({"pods": 3})
        assert liveness.stalled() == ""
    liveness.compared({})
    for _ in range(3):
        liveness.compared({"pods": 1})
    assert "the watches reported nothing" in liveness.stalled()
