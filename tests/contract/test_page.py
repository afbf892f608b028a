"""The shared page shows whole records to other processes, wakes who waits, and tells who lives."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from windrow_sidecar import _core
from windrow_sidecar._core import Arena, Inspection
from windrow_sidecar.qos import view


def test_what_is_published_reads_back_with_the_records_of_view_py(served):
    owner, path = served
    peer = Arena.attach(path)
    owner.page.publish_view(view.View(*range(1, 11)))
    read = view.View._make(peer.page.read_view())
    assert (read.step, read.slack_us, read.waited_us) == (1, 9, 10)
    assert read.heartbeat_ns > 0
    assert read == view.View(*range(1, 11), heartbeat_ns=read.heartbeat_ns)

    peer.page.publish_offer(view.Offer(*range(6), (10, 20), *range(7, 15)))
    offer = view.Offer._make(owner.page.read_offer())
    assert offer.estimates_us == (10, 20, *(0,) * (view.LEVELS_MAX - 2))
    assert offer.tokens_done == 14

    owner.page.publish_grant(view.Grant(*range(12)))
    grant = view.Grant._make(peer.page.read_grant())
    assert (grant.action, grant.in_flight_bound_us) == (0, 11)
    peer.close()


def test_negative_fields_survive(arena):
    arena.page.publish_view(view.View(slack_us=-5_000))
    assert view.View._make(arena.page.read_view()).slack_us == -5_000


def test_more_levels_than_the_page_holds_are_refused(arena):
    most = view.LEVELS_MAX
    with pytest.raises(ValueError, match=f"{most + 1} levels"):
        arena.page.publish_offer(view.Offer(estimates_us=(1,) * (most + 1)))


@pytest.mark.parametrize(
    ("record", "error", "said"),
    [
        ((1, 2, 3), ValueError, "3 fields; the page's has 13"),
        (view.View(), ValueError, "11 fields; the page's has 13"),
        (view.Grant(chunks=1.5), TypeError, "chunks is not a 64-bit integer"),
        (view.Grant(chunks=1 << 63), TypeError, "chunks is not a 64-bit integer"),
    ],
)
def test_what_is_no_grant_is_refused_and_the_last_one_stands(arena, record, error, said):
    arena.page.publish_grant(view.Grant(chunks=7))
    with pytest.raises(error, match=said):
        arena.page.publish_grant(record)
    assert view.Grant._make(arena.page.read_grant()).chunks == 7


def test_the_pause_epoch_is_that_of_the_newest_grant(arena):
    arena.page.publish_grant(view.Grant(pause_epoch=41))
    assert arena.page.pause_epoch == 41
    assert arena.page.grant_seq == 1
    assert arena.page.offer_seq == 0


def test_a_wait_returns_at_once_when_there_is_news_and_at_its_timeout_when_not(arena):
    arena.page.publish_grant(view.Grant())
    assert arena.page.wait_grant(0, timeout_s=60) == 1
    began = time.monotonic()
    assert arena.page.wait_grant(1, timeout_s=0.05) == 1
    assert time.monotonic() - began >= 0.05
    assert arena.page.wait_offer(0, timeout_s=0) == 0


def test_a_waiting_thread_lets_others_run_and_wakes_on_a_grant(arena):
    page, woken = arena.page, []
    waiter = threading.Thread(target=lambda: woken.append(page.wait_grant(0, timeout_s=60)))
    waiter.start()
    page.publish_grant(view.Grant())
    waiter.join(timeout=60)
    assert woken == [1]


CHILD_WAIT = """
import signal, sys
from windrow_sidecar._core import Arena, Inspection
class Stop(Exception): pass
def stop(*_): raise Stop
signal.signal(signal.SIGINT, stop)
page = Arena.attach(sys.argv[1]).page
try:
    print("waiting")
    page.wait_grant(0, timeout_s=600)
except Stop:
    print("interrupted")
"""


def test_a_signal_interrupts_a_wait(served, child):
    _, path = served
    worker = child(CHILD_WAIT, path)
    assert worker.stdout.readline() == "waiting\n"
    worker.send_signal(signal.SIGINT)
    assert worker.stdout.readline() == "interrupted\n", worker.communicate(timeout=60)


CHILD_PING = """
import sys
from windrow_sidecar._core import Arena, Inspection
from windrow_sidecar.qos.view import Offer
page = Arena.attach(sys.argv[1]).page
rounds = int(sys.argv[2])
for seen in range(rounds):
    while page.wait_grant(seen, timeout_s=60) == seen:
        sys.exit("a wake-up was lost")
    page.publish_offer(Offer(tokens_done=page.read_grant()[1]))
"""


def test_two_processes_answer_each_other_without_losing_a_wake_up(served, child):
    owner, path = served
    rounds = 2_000
    worker = child(CHILD_PING, path, rounds)
    for n in range(1, rounds + 1):
        owner.page.publish_grant(view.Grant(finetune_units=n))
        assert owner.page.wait_offer(n - 1, timeout_s=60) == n
        assert view.Offer._make(owner.page.read_offer()).tokens_done == n
    assert worker.wait(timeout=60) == 0, worker.communicate()


CHILD_HAMMER = """
import sys
from windrow_sidecar._core import Arena, Inspection
from windrow_sidecar.qos.view import LEVELS_MAX, Offer
page = Arena.attach(sys.argv[1]).page
print("hammering")
n = 0
while True:
    n += 1
    page.publish_offer(Offer(*[n] * 6, (n,) * LEVELS_MAX, *[n] * 8))
"""


def test_no_reader_sees_a_torn_record_even_when_its_writer_is_killed(served, child):
    owner, path = served
    worker = child(CHILD_HAMMER, path)
    assert worker.stdout.readline() == "hammering\n"
    last, reads = 0, 0
    while last < 30_000 or reads < 30_000:
        offer = owner.page.read_offer()
        n = offer[0]
        assert offer[:-1] == (*[n] * 6, (n,) * view.LEVELS_MAX, *[n] * 8)
        assert n >= last
        last, reads = n, reads + 1
    worker.send_signal(signal.SIGKILL)
    worker.wait(timeout=60)
    offer = owner.page.read_offer()
    n = offer[0]
    assert offer[:-1] == (*[n] * 6, (n,) * view.LEVELS_MAX, *[n] * 8)
    age = owner.page.heartbeat_age_ns(1)
    assert owner.page.heartbeat_age_ns(1) > age  # it beats no more


def test_a_grant_stands_until_there_is_a_newer_one_or_decode_falls_silent(arena):
    page, long_ns = arena.page, 10**12
    page.publish_grant(view.Grant())
    seen = page.grant_seq
    assert page.grant_stands(seen, long_ns)
    assert not page.grant_stands(seen, -1)  # any silence is too long
    page.publish_grant(view.Grant())
    assert not page.grant_stands(seen, long_ns)
    assert page.grant_stands(page.grant_seq, long_ns)


def test_a_heartbeat_is_refreshed_by_publishing_and_by_beating(arena):
    page = arena.page
    never = page.heartbeat_age_ns(1)
    page.beat(1)
    assert page.heartbeat_age_ns(1) < never
    before = _core.monotonic_ns()
    page.publish_view(view.View())
    assert before <= view.View._make(page.read_view()).heartbeat_ns <= _core.monotonic_ns()
    with pytest.raises(ValueError, match="0 is decode"):
        page.beat(2)


def test_counters_count_for_both_sides(served):
    owner, path = served
    peer = Arena.attach(path)
    seen = Inspection.open(path)
    assert owner.page.add(0, 5) == 5
    assert seen.counter(0) == 5
    assert peer.page.add(0, -2) == 3
    with pytest.raises(IndexError, match="counter 16"):
        owner.page.add(16, 1)
    peer.close()
