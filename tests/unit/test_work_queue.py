"""Check whose turn it is, and that what has changed is neither missed nor looked at twice."""

import asyncio

from windrow_operator.work_queue import Changes, DueKeys, WorkQueue, in_pieces


async def test_the_smallest_rank_has_its_turn_first_and_a_key_is_there_once():
    queue = WorkQueue()
    for key, rank in (("low", 2), ("high", 1), ("low", 0)):
        queue.add(key, rank)
    assert [await queue.take(), await queue.take()] == ["high", "low"]


async def test_a_key_that_a_worker_has_is_told_of_when_it_is_given_back():
    queue = WorkQueue()
    queue.add("a", 1)
    assert await queue.take() == "a"
    queue.add("a", 1)
    queue.add("b", 2)
    assert await queue.take() == "b", "nobody else has `a` meanwhile"
    assert queue.done("a")
    assert not queue.done("b")
    await queue.drained()


async def test_a_worker_waits_for_work_and_whoever_waits_for_the_end_for_the_last_one():
    queue = WorkQueue()
    await queue.drained()
    taking = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    queue.add("a", 1)
    assert await taking == "a"
    ending = asyncio.create_task(queue.drained())
    await asyncio.sleep(0)
    assert not ending.done()
    queue.done("a")
    await ending


def test_of_two_times_the_earlier_one_counts():
    schedule = DueKeys()
    for key, at in (("a", 5.0), ("a", 3.0), ("a", 9.0), ("b", 4.0)):
        schedule.put(key, at)
    assert schedule.next_at() == 3.0
    assert schedule.take_due(2.9) == []
    assert schedule.take_due(4.0) == ["a", "b"]
    assert schedule.next_at() is None
    assert schedule.take_due(10.0) == []


def test_each_reader_is_told_of_a_change_once():
    changes = Changes("one", "other")
    changes.mark("a")
    changes.mark_all(["b", "a"])
    assert changes.take("one") == ["a", "b"]
    assert changes.take("one") == []
    changes.mark("c")
    assert changes.take("other") == ["a", "b", "c"]


async def test_others_have_their_turn_between_pieces_and_what_comes_meanwhile_is_left_out():
    things, turns = dict.fromkeys(range(1000)), 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            things[1000 + turns] = None
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    seen = [thing async for thing in in_pieces(things)]
    beside.cancel()
    assert seen == list(range(1000))
    assert turns >= 4
