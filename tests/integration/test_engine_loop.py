"""The decode loop over a real arena and a real (random) model, driven step by step."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.decode_bench import DecodeBench
from support.faults import FaultyDriver
from support.step_seam import RecordingHook, check_calls

from windrow.errors import InvariantBroken
from windrow.eventlog import EventLog, RequestEvent, StepEvent, read_events
from windrow.rundir import RunDir, profile_file
from windrow_sidecar.compute.host import HostPartition
from windrow_sidecar.compute.partition import UnknownLevel
from windrow_sidecar.engines import turns as turns_module
from windrow_sidecar.engines.builtin.kv.paging import PagePool
from windrow_sidecar.engines.builtin.llama.riding import Product
from windrow_sidecar.engines.builtin.loop import DecodeLoop, LoopParts
from windrow_sidecar.engines.builtin.profiler import Bounds, Profiler, ProfileStore
from windrow_sidecar.engines.builtin.profiling import measure
from windrow_sidecar.engines.builtin.scheduler import Scheduler
from windrow_sidecar.engines.builtin.web.channel import SocketChannel
from windrow_sidecar.engines.builtin.web.messages import Cancel, Output, Submit
from windrow_sidecar.engines.builtin.web.token_batcher import TokenBatcher
from windrow_sidecar.engines.hook import FailClosed, NullHook, StepInput
from windrow_sidecar.engines.profile import (
    CoRunPoint,
    Effort,
    MeasuredPoint,
    Point,
    Subject,
    host_splits,
)
from windrow_sidecar.engines.turns import Turns
from windrow_sidecar.qos.co_run import CoRunSample
from windrow_sidecar.qos.deferred_passes import DeferredPasses
from windrow_sidecar.qos.solo import SoloSample
from windrow_sidecar.qos.view import Grant
from windrow_sidecar.testing.models import save_random_llama


class OneThread:
    """The device of these tests: nothing to split, and no team of threads that others hold up."""

    total_units = 2

    def activate(self, level: int) -> None:
        if level not in (1, 2):
            raise UnknownLevel("decode", level, (1, 2), "threads")
        torch.set_num_threads(1)


class Clock:
    """Goes on by a microsecond whenever it is looked at."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000

    def __call__(self) -> int:
        self.now_ns += 1000
        return self.now_ns


class Bench:
    """A loop, and both ends of what it talks to."""

    def __init__(self, model_dir: Path, log_dir: Path, *, chunks: int = 16, **options: int) -> None:
        self.decode = DecodeBench(model_dir, chunks=chunks)
        self.arena, cache = self.decode.arena, self.decode.cache
        scheduler = Scheduler(
            PagePool(self.arena, pages_per_chunk=cache.pages_per_chunk),
            cache,
            max_running=options.get("max_running", 16),
            reserve_tokens=options.get("reserve_tokens", 16),
        )
        self.log = EventLog(log_dir / "engine.events.jsonl", source="engine")
        self.log_dir = log_dir
        self.parts = LoopParts(
            scheduler=scheduler,
            model=self.decode.model,
            decoder=self.decode.decoder,
            cache=cache,
            arena=self.arena,
            partition=OneThread(),
            hook=FailClosed(NullHook()),
            log=self.log,
            clock_ns=Clock(),
            units=2,
            on_completed=lambda: None,
        )
        ours, theirs = socket.socketpair()
        self.front, self._engine_end = SocketChannel(theirs), SocketChannel(ours)
        self._prefill_tokens = options.get("prefill_tokens", 64)
        self.use(NullHook())

    def use(self, hook) -> None:
        self.parts = replace(self.parts, hook=FailClosed(hook))
        outbox = TokenBatcher(self._engine_end, interval=1)
        self.loop = DecodeLoop(
            self.parts, self._engine_end, outbox, prefill_tokens=self._prefill_tokens
        )

    @property
    def scheduler(self) -> Scheduler:
        return self.parts.scheduler

    def run_dry(self) -> dict[int, list[int]]:
        """Step until nothing is left; the tokens of each request, as the front got them."""
        for _ in range(5000):
            if self.scheduler.is_empty:
                break
            self.loop.step()
        assert self.scheduler.is_empty
        self.scheduler.check_integrity()
        self.arena.check()
        tokens: dict[int, list[int]] = {}
        for message in self.front.receive():
            assert isinstance(message, Output)
            for request_id, token in message.tokens:
                tokens.setdefault(request_id, []).append(token)
        return tokens

    def events(self) -> list:
        self.log.flush()
        return [event for _, event in read_events(self.log_dir)]

    def close(self) -> None:
        self.front.close()
        self._engine_end.close()
        del self.loop, self.parts
        self.decode.close()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_random_llama(folder)
    return folder


@pytest.fixture
def bench(model_dir, tmp_path) -> Iterator:
    made: list[Bench] = []

    def make(**options) -> Bench:
        made.append(Bench(model_dir, tmp_path / str(len(made)), **options))
        return made[-1]

    yield make
    # Each is closed, also where the one before cannot be: a failed test keeps its tensors, and what
    # it left open would fail another test, when it is collected.
    with ExitStack() as closing:
        for one in made:
            closing.callback(one.close)


def request(number: int, *, n_prompt: int = 20, max_tokens: int = 8, **fields) -> Submit:
    return Submit(
        **{
            "id": number,
            "name": f"r{number}",
            "prompt": tuple((number * 37 + i * 11) % 256 for i in range(n_prompt)),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "top_p": 1.0,
            "seed": 0,
            "stop_token_ids": frozenset(),
            "kv_arrives": False,
            "arrived_ns": 1,
        }
        | fields
    )


def test_a_retracted_request_ends_with_the_same_tokens_as_one_with_room(bench):
    requests = [request(i, n_prompt=60, max_tokens=70) for i in range(4)]
    roomy, tiny = bench(chunks=16), bench(chunks=4)
    for one in requests:
        roomy.scheduler.submit(one)
        tiny.scheduler.submit(one)
    wanted, got = roomy.run_dry(), tiny.run_dry()
    assert roomy.scheduler.retractions == 0
    assert tiny.scheduler.retractions > 0
    assert got == wanted
    assert all(len(tokens) == 70 for tokens in got.values())


def test_a_retracted_request_whose_kv_had_arrived_goes_on(bench):
    tiny = bench(chunks=3, reserve_tokens=1)
    for i in range(3):
        tiny.scheduler.submit(request(i, n_prompt=50, max_tokens=60, kv_arrives=True))
    tokens = tiny.run_dry()
    assert tiny.scheduler.retractions > 0
    assert {number: len(found) for number, found in tokens.items()} == {0: 60, 1: 60, 2: 60}


def test_admission_keeps_room_for_those_that_run_to_grow(bench):
    one = bench(chunks=2, reserve_tokens=60)
    for i in range(3):
        one.scheduler.submit(request(i, n_prompt=60, max_tokens=60))
    one.run_dry()
    assert one.scheduler.retractions == 0
    steps = [event for event in one.events() if isinstance(event, StepEvent)]
    assert {event.batch for event in steps} == {1}
    assert max(event.waiting for event in steps) == 2


def test_no_more_requests_run_than_allowed(bench):
    one = bench(max_running=2)
    for i in range(5):
        one.scheduler.submit(request(i, kv_arrives=True))
    one.run_dry()
    assert max(e.batch for e in one.events() if isinstance(e, StepEvent)) == 2


def test_a_step_starts_where_the_one_before_ended_while_a_request_goes_on(bench):
    one = bench()
    one.scheduler.submit(request(1, max_tokens=5, kv_arrives=True))
    one.run_dry()
    one.scheduler.submit(request(2, max_tokens=5, kv_arrives=True))
    one.run_dry()
    steps = [event for event in one.events() if isinstance(event, StepEvent)]
    gaps = [after.start_ns - before.end_ns for before, after in pairwise(steps)]
    assert [gap == 0 for gap in gaps] == [True] * 4 + [False] + [True] * 4
    assert all(event.hook_us > 0 for event in steps)
    assert [event.step for event in steps] == list(range(10))


def test_prompts_are_computed_in_pieces_between_decode_steps(bench):
    one = bench(prefill_tokens=32)
    one.scheduler.submit(request(1, n_prompt=10, max_tokens=30))
    for _ in range(3):
        one.loop.step()
    one.scheduler.submit(request(2, n_prompt=100, max_tokens=2))
    one.run_dry()
    prefilled = [e.prefill_tokens for e in one.events() if isinstance(e, StepEvent)]
    assert [n for n in prefilled if n] == [32, 32, 32, 3]


def test_the_log_tells_each_request_with_its_times(bench):
    one = bench()
    one.scheduler.submit(request(1, n_prompt=20, max_tokens=4))
    one.run_dry()
    steps = [event for event in one.events() if isinstance(event, StepEvent)]
    (told,) = [event for event in one.events() if isinstance(event, RequestEvent)]
    assert (told.prompt_tokens, told.completion_tokens, told.error) == (20, 4, "")
    assert (told.first_token_ns, told.end_ns) == (steps[0].end_ns, steps[-1].end_ns)


def test_a_stop_token_ends_a_request_and_a_seed_repeats_a_sampled_one(bench):
    one = bench()
    prompt = (1, 2, 3)
    for number, seed in ((1, 5), (2, 5), (3, 6)):
        one.scheduler.submit(
            request(number, prompt=prompt, seed=seed, temperature=1.5, max_tokens=12)
        )
    one.scheduler.submit(request(4, prompt=prompt, max_tokens=12))
    tokens = one.run_dry()
    assert tokens[1] == tokens[2] != tokens[3]

    stop = tokens[4][4]
    one.scheduler.submit(request(5, prompt=prompt, max_tokens=12, stop_token_ids=frozenset({stop})))
    assert one.run_dry()[5] == tokens[4][: tokens[4].index(stop) + 1]


@pytest.mark.parametrize("method", ["before_step", "after_step"])
def test_a_hook_that_raises_leaves_decode_going_on_all_units(bench, method, caplog):
    # A kept record would keep the traceback, its frames, and so the tensors over the arena.
    caplog.set_level(logging.CRITICAL, logger="windrow_sidecar.engines.hook")

    class Broken(NullHook):
        def before_step(self, facts: StepInput) -> Grant:
            if facts.step == 3 and method == "before_step":
                raise RuntimeError("broken on purpose")
            return Grant(decode_units=1, finetune_units=1)

        def after_step(self, end_ns: int, latency_us: int) -> None:
            if method == "after_step":
                raise RuntimeError("broken on purpose")

    one = bench()
    one.use(Broken())
    one.scheduler.submit(request(1, max_tokens=10))
    assert len(one.run_dry()[1]) == 10
    steps = [event for event in one.events() if isinstance(event, StepEvent)]
    assert (steps[0].decode_units, steps[0].finetune_units) == (1, 1)
    assert (steps[-1].decode_units, steps[-1].finetune_units) == (2, 0)


def test_a_hook_that_asks_for_an_unknown_level_is_switched_off_and_decode_goes_on(bench, caplog):
    caplog.set_level(logging.CRITICAL, logger="windrow_sidecar.engines.hook")

    class Greedy(NullHook):
        def before_step(self, facts: StepInput) -> Grant:
            return Grant(decode_units=3 if facts.step == 3 else 1, finetune_units=1)

    one = bench()
    one.use(Greedy())
    one.scheduler.submit(request(1, max_tokens=10))
    assert len(one.run_dry()[1]) == 10
    assert one.parts.hook.failed
    steps = [event for event in one.events() if isinstance(event, StepEvent)]
    assert (steps[0].decode_units, steps[0].finetune_units) == (1, 1)
    assert (steps[-1].decode_units, steps[-1].finetune_units) == (2, 0)


@pytest.mark.parametrize("refusals", [1, 3], ids=["one share", "every share for a while"])
def test_a_share_that_the_device_refuses_ends_harvesting_and_decode_goes_on(
    bench, caplog, refusals
):
    caplog.set_level(logging.CRITICAL, logger="windrow_sidecar.engines.hook")
    cpus = os.sched_getaffinity(0)
    if len(cpus) < 2:
        pytest.skip("a host device needs two cores; this process may use one")

    class Alternating(NullHook):
        def before_step(self, facts: StepInput) -> Grant:
            return Grant(decode_units=1 + facts.step % 2, finetune_units=1)

    faulty = FaultyDriver("host")
    partition = HostPartition(
        "decode", cpus, set_threads=lambda n: torch.set_num_threads(1), driver=faulty
    )
    one = bench()
    one.parts = replace(one.parts, partition=partition, units=len(cpus))
    one.use(Alternating())
    for n in range(2, 2 + refusals):
        faulty.fail("enter", n)
    one.scheduler.submit(request(1, max_tokens=10))
    try:
        assert len(one.run_dry()[1]) == 10
        assert faulty.fired == refusals
        assert one.parts.hook.failed
        assert os.sched_getaffinity(0) == cpus
    finally:
        partition.release()
    steps = [event for event in one.events() if isinstance(event, StepEvent)]
    assert (steps[0].decode_units, steps[0].finetune_units) == (1, 1)
    assert (steps[-1].decode_units, steps[-1].finetune_units) == (len(cpus), 0)


def test_a_hook_can_hold_admission_back_while_a_request_runs(bench):
    class Holding(NullHook):
        def before_step(self, facts: StepInput) -> Grant:
            until_ns = facts.start_ns + 10**9 if facts.step < 5 else 0
            return Grant(hold_admission_until_ns=until_ns)

    one = bench()
    one.use(Holding())
    one.scheduler.submit(request(1, max_tokens=12, kv_arrives=True))
    one.loop.step()
    one.scheduler.submit(request(2, max_tokens=2, kv_arrives=True))
    one.run_dry()
    batches = [event.batch for event in one.events() if isinstance(event, StepEvent)]
    assert batches[:6] == [1] * 6
    assert 2 in batches


def test_a_hook_can_have_a_step_begin_later_and_the_step_counts_the_gap(bench):
    class Gaps(NullHook):
        def before_step(self, facts: StepInput) -> Grant:
            self.until_ns = facts.start_ns + 30_000_000
            return Grant(gap_until_ns=self.until_ns if facts.step == 2 else 0)

    one = bench()
    one.parts = replace(one.parts, clock_ns=time.monotonic_ns)
    one.use(Gaps())
    one.scheduler.submit(request(1, max_tokens=4, kv_arrives=True))
    one.run_dry()
    steps = [event for event in one.events() if isinstance(event, StepEvent)]
    assert steps[2].end_ns - steps[2].start_ns >= 30_000_000
    assert steps[2].hook_us < 30_000, "the gap is not a cost of the decision"


def test_the_facts_tell_the_hook_what_the_step_is(bench):
    seen: list[StepInput] = []

    class Watching(NullHook):
        def before_step(self, facts: StepInput) -> Grant:
            seen.append(facts)
            return Grant()

    one = bench()
    one.use(Watching())
    one.scheduler.submit(request(1, n_prompt=21, max_tokens=2, kv_arrives=True))
    one.scheduler.submit(request(2, n_prompt=31, max_tokens=2, kv_arrives=True))
    one.run_dry()
    assert [(f.batch, f.context_tokens, f.admitted_tokens) for f in seen] == [
        (2, 20 + 30, 20 + 30),
        (2, 21 + 31, 0),
    ]


def test_the_facts_tell_the_least_slack_where_requests_are_held_to_an_objective(bench):
    slacks: list[int] = []

    class ByRequest(NullHook):
        request_objective_us = 1000  # the bench's clock makes steps of a few microseconds

        def before_step(self, facts: StepInput) -> Grant:
            slacks.append(facts.slack_us)
            return Grant()

    one = bench()
    one.use(ByRequest())
    one.scheduler.submit(request(1, max_tokens=6, kv_arrives=True))
    for _ in range(4):
        one.loop.step()
    assert slacks[:2] == [0, 0], "no token yet, then the first: nothing to judge"
    assert 900 < slacks[2] < 1000
    assert 1800 < slacks[3] < 2000
    one.scheduler.submit(request(2, max_tokens=3, kv_arrives=True))
    one.run_dry()
    assert slacks[5] < slacks[3], "the request that has saved the least counts"


def test_the_facts_tell_what_waits_for_a_first_token_where_a_policy_asks_for_it(bench):
    facts_seen: list[StepInput] = []
    passes: list[int] = []
    firsts: list[int] = []

    class ByFirstToken(NullHook):
        first_token_objective_us = 1000

        def before_step(self, facts: StepInput) -> Grant:
            facts_seen.append(facts)
            return Grant()

        def after_prompt(self, tokens: int, latency_us: int, grant: Grant) -> None:
            passes.append(tokens)
            assert latency_us > 0

        def after_first_token(self, after_us: int) -> None:
            firsts.append(after_us)

    one = bench(prefill_tokens=16)
    one.use(ByFirstToken())
    one.scheduler.submit(request(1, n_prompt=40, max_tokens=2))
    one.scheduler.submit(request(2, n_prompt=20, max_tokens=2))
    one.scheduler.submit(request(3, n_prompt=30, max_tokens=2, kv_arrives=True))
    one.run_dry()
    # The last token of a prompt is computed by the step that yields the first one.
    assert sum(passes) == 39 + 19
    assert [facts.prompts_left for facts in facts_seen][:3] == [60, 44, 28]
    assert facts_seen[0].first_token_waited_us > 0
    assert facts_seen[-1].prompts_left == facts_seen[-1].first_token_waited_us == 0
    assert len(firsts) == 2, "the prompt of the third was computed elsewhere"
    assert all(after_us > 0 for after_us in firsts)


def test_the_facts_tell_when_a_request_with_a_bound_of_its_own_is_due(bench):
    dues: list[int] = []

    class Deferring(NullHook):
        deferral_us = 400_000

        def before_step(self, facts: StepInput) -> Grant:
            dues.append(facts.due_ns)
            hold_ns = 10**15 if len(dues) < 4 else 0
            return Grant(hold_admission_until_ns=hold_ns)

    one = bench()
    one.use(Deferring())
    one.loop.step()
    one.scheduler.submit(request(1, max_tokens=2, kv_arrives=True, arrived_ns=7_000))
    one.loop.step()
    one.scheduler.submit(
        request(2, max_tokens=2, kv_arrives=True, arrived_ns=8_000, deferral_us=90)
    )
    one.loop.step()
    one.scheduler.submit(
        request(3, max_tokens=2, kv_arrives=True, arrived_ns=9_000, deferral_us=50)
    )
    one.loop.step()
    assert dues == [0, 0, 98_000, 59_000]
    one.loop._hold_until_ns = 0
    one.run_dry()
    assert dues[-1] == 0, "nobody waits"


def test_cancelled_requests_give_their_memory_back_in_every_state(bench):
    one = bench(chunks=2, reserve_tokens=1)
    for i in range(3):  # running, prefilling, waiting
        one.scheduler.submit(request(i, n_prompt=60, max_tokens=100, kv_arrives=i == 0))
    one.loop.step()
    for i in range(3):
        one.front.send(Cancel(i, "cancelled"))
    one.loop._take_messages()
    assert one.scheduler.is_empty
    one.scheduler.check_integrity()
    ended = [event for event in one.events() if isinstance(event, RequestEvent)]
    assert [event.error for event in ended] == ["cancelled"] * 3


def test_a_request_waits_while_its_memory_is_lent_and_runs_once_it_is_back(bench):
    one = bench(chunks=4)
    lent = one.arena.lend(4, owner=7)
    assert len(lent) == 4
    one.scheduler.submit(request(1, n_prompt=40, max_tokens=2, kv_arrives=True))
    assert one.loop.step() is None
    one.arena.reclaim(7)
    assert len(one.run_dry()[1]) == 2


def test_pages_that_do_not_add_up_end_harvesting_and_not_decode(bench, caplog):
    caplog.set_level(logging.CRITICAL, logger="windrow_sidecar.engines.hook")
    one = bench()
    one.scheduler.submit(request(1, max_tokens=3))
    one.run_dry()
    one.arena.take_kv()  # a chunk that nobody accounts for
    one.loop._tidy()
    assert one.parts.hook.failed
    one.scheduler.submit(request(2, max_tokens=3))
    while not one.scheduler.is_empty:
        one.loop.step()
    ended = [event.id for event in one.events() if isinstance(event, RequestEvent)]
    assert ended == ["r1", "r2"]


def test_a_profile_measures_every_point_and_leaves_nothing_behind(bench):
    one = bench()
    points = [Point(units, batch, 40) for units in (2, 1) for batch in (1, 4)]
    effort = Effort(rounds=2, steps=3, batches=(), contexts=(), soft_limit_s=60)
    samples = measure(one.parts, points, effort).samples
    assert [(s.units, s.batch) for s in samples] == [(2, 1), (2, 4), (1, 1), (1, 4)]
    assert [s.context_tokens // s.batch for s in samples] == [42] * 4
    assert all(s.step_us > 0 for s in samples)
    assert one.scheduler.is_empty
    assert one.events() == []


def test_a_profile_of_units_that_decode_cannot_have_is_not_taken(bench, caplog):
    caplog.set_level(logging.CRITICAL, logger="windrow_sidecar.engines.hook")
    one = bench()
    effort = Effort(rounds=1, steps=3, batches=(), contexts=(), soft_limit_s=60)
    with pytest.raises(InvariantBroken, match="does not run on 3 units"):
        measure(one.parts, [Point(2, 1, 40), Point(3, 1, 40)], effort)
    assert one.scheduler.is_empty


def test_the_loop_keeps_the_contract_of_the_step_seam(bench):
    one, hook = bench(), RecordingHook()
    one.use(hook)
    for n in range(5):
        prompt = {"n_prompt": 20 + 30 * n, "kv_arrives": bool(n % 2)}
        one.scheduler.submit(request(n, max_tokens=6 + n, **prompt))
    one.run_dry()
    assert check_calls(hook.calls) >= 10


class StepsTake:
    """A clock by which every step takes as long: what is measured has no noise."""

    def __init__(self, us: int) -> None:
        self.us, self.now_ns = us, 1_000_000

    def __call__(self) -> int:
        self.now_ns += 1000 * self.us
        return self.now_ns


SUBJECT = Subject("host:2-cores", "host", "builtin", "0.1.0", "f" * 64)


def profiler(one: Bench, root: Path, us: int = 100, **subject) -> Profiler:
    one.parts = replace(one.parts, clock_ns=StepsTake(us))
    store = ProfileStore(RunDir(root), root / "cache")
    kind = replace(SUBJECT, **subject)
    return Profiler(one.parts, host_splits(2), kind, Bounds(16, 300, 600), store)


def test_a_profile_is_read_back_by_the_next_engine_of_its_kind_and_by_no_other(
    bench, tmp_path, caplog
):
    caplog.set_level(logging.INFO)
    one = bench()
    taken = profiler(one, tmp_path).take("quick", one.decode.config)
    assert taken["noisePercent"] == 0
    RunDir(tmp_path).profile().write_text(json.dumps(taken))
    assert profiler(one, tmp_path).read_back() == taken
    assert profiler(one, tmp_path, engine_version="0.2.0").read_back() is None
    assert "of another engine version: '0.1.0', here it is '0.2.0'" in caplog.text
    # Twice as slow as the profile says: 100% off, where 8% would do.
    assert profiler(one, tmp_path, us=200).read_back() is None
    assert "steps take 100% other than it says; 8% would do" in caplog.text
    RunDir(tmp_path).profile().write_text(json.dumps(taken | {"noisePercent": 30.0}))
    assert profiler(one, tmp_path).read_back() is None
    assert "it is of a noisy machine" in caplog.text
    RunDir(tmp_path).profile().write_text("{")
    assert profiler(one, tmp_path).read_back() is None


def test_an_engine_starts_from_what_another_pod_of_its_kind_has_measured(bench, tmp_path):
    one, stored = bench(), tmp_path / "stored"
    taken = profiler(one, tmp_path).take("quick", one.decode.config)
    stored.mkdir()
    (stored / profile_file(taken["key"])).write_text(json.dumps(taken))
    new = profiler(one, tmp_path / "of-a-new-pod")
    assert new.read_back() is None
    store = replace(new.store, stored=stored)
    assert replace(new, store=store).read_back() == taken


@pytest.mark.parametrize("in_a_pod", [True, False])
def test_an_interrupted_profile_goes_on_where_it_was(bench, tmp_path, caplog, in_a_pod):
    caplog.set_level(logging.INFO)
    one = bench()
    whole = profiler(one, tmp_path)
    part = RunDir(tmp_path).profile().with_suffix(".part.jsonl")
    if not in_a_pod:  # `windrow profile`
        whole = replace(whole, store=replace(whole.store, run_dir=None))
        part = tmp_path / "cache" / profile_file(SUBJECT.key).replace(".json", ".part.jsonl")
    before = whole.store.unfinished(SUBJECT.key, "quick")
    before.keep(Point(2, 1, 256), MeasuredPoint(SoloSample(2, 1, 300, 4321.0), 40.0))
    other = whole.store.unfinished(SUBJECT.key, "full")
    assert not other.alone, "another effort's points are not its own"
    other.keep(Point(1, 1, 256), MeasuredPoint(SoloSample(1, 1, 300, 9999.0), None))
    with part.open("a") as file:
        file.write('{"key": "cut in the mid')
    taken = whole.take("quick", one.decode.config)
    assert "1 points are known from an interrupted one" in caplog.text
    known = [s["stepUs"] for s in taken["samples"] if s["stepUs"] in (4321.0, 9999.0)]
    assert known == [4321.0]
    assert {s["units"] for s in taken["samples"]} == {1, 2}
    assert not part.exists()


def test_points_beside_a_load_are_kept_as_well_and_none_for_longer_than_an_hour(tmp_path):
    store = ProfileStore(None, tmp_path)
    before = store.unfinished("key", "full")
    point = CoRunPoint(Point(1, 4, 512), 1)
    sample = CoRunSample(SoloSample(1, 4, 2048, 5000.0), 1, 900.0)
    before.keep_beside(point, sample)
    assert store.unfinished("key", "full").beside == {point: sample}
    old_s = time.time() - 3601
    os.utime(before.path, (old_s, old_s))
    assert not store.unfinished("key", "full").beside
    assert not before.path.exists()


def test_where_nothing_can_be_written_a_profile_is_taken_all_the_same(bench, tmp_path, caplog):
    (tmp_path / "cache").write_text("no directory")
    one = bench()
    taker = profiler(one, tmp_path)
    taker = replace(taker, store=replace(taker.store, run_dir=None))
    assert taker.take("quick", one.decode.config)["samples"]
    assert caplog.text.count("points are not kept") == 1


class GapBeforeEachStep(NullHook):
    """Grant the finetune side a long gap before each step; alone a step takes a millisecond."""

    def __init__(self, gap_ns: int) -> None:
        self.gap_ns = gap_ns

    def before_step(self, facts: StepInput) -> Grant:
        until_ns = facts.start_ns + self.gap_ns
        predicted_us = 1000 + self.gap_ns // 1000
        return Grant(finetune_units=2, gap_until_ns=until_ns, predicted_us=predicted_us)


@pytest.fixture
def sharing(bench):
    """Make a bench whose steps ride along with the turns of a finetune thread, and start that."""

    def make(finetune, *, gap_ns: int) -> tuple[Bench, threading.Thread]:
        one = bench()
        turns = Turns()
        turns.wants_ride = True
        rider = one.parts.decoder
        one.parts = replace(one.parts, turns=turns, rider=rider, clock_ns=time.monotonic_ns)
        one.use(GapBeforeEachStep(gap_ns))
        thread = threading.Thread(target=finetune, args=(turns,), daemon=True)
        thread.start()
        return one, thread

    return make


def tokens_alone(bench) -> dict[int, list[int]]:
    one = bench()
    for number in (1, 2):
        one.scheduler.submit(request(number, kv_arrives=True))
    return one.run_dry()


def joined_by(riding, n_rows: int) -> None:
    """Join the first products of a step with rows of a finetune forward."""
    hidden = riding.step._rows.shape[1]
    riding.step.join(0, Product.QKV, torch.ones(n_rows, hidden))


def test_a_finetune_thread_that_fails_in_the_middle_of_a_step_ends_its_turns_and_no_step(
    bench, sharing
):
    joined: list[int] = []

    def finetune(turns: Turns) -> None:
        try:
            while True:
                if turns.rest(20.0) and turns.ride is not None:
                    joined_by(turns.ride, 3)
                    joined.append(turns.ride.step.joined)
                    if len(joined) == 3:
                        return  # as an error would leave it: half a layer is done
        finally:
            turns.give_back()
            turns.end()

    one, thread = sharing(finetune, gap_ns=10_000_000_000)
    for number in (1, 2):
        one.scheduler.submit(request(number, kv_arrives=True))
    assert one.run_dry() == tokens_alone(bench)
    thread.join(20)
    assert joined == [1, 1, 1]
    assert not thread.is_alive()


def test_a_step_is_computed_again_where_the_finetune_thread_does_not_give_it_back(
    bench, sharing, monkeypatch
):
    monkeypatch.setattr(turns_module, "_GIVEN_BACK_WITHIN_S", 0.01)
    stuck, release = threading.Event(), threading.Event()

    def finetune(turns: Turns) -> None:
        while not (turns.rest(20.0) and turns.ride is not None):
            pass
        joined_by(turns.ride, 3)
        stuck.set()
        release.wait(20)  # between two points
        turns.give_back()

    one, thread = sharing(finetune, gap_ns=50_000_000)
    for number in (1, 2):
        one.scheduler.submit(request(number, kv_arrives=True))
    assert one.run_dry() == tokens_alone(bench)
    turns = one.parts.turns
    assert stuck.is_set()
    assert turns.overdue == 1
    assert not turns.offer()
    release.set()
    thread.join(20)
    assert turns.offer()


@pytest.fixture
def carrying(bench, monkeypatch):
    """Make a bench whose passes carry finetune batches within a bound, and start their thread."""
    # The thread is there: each turn waits until it has it, however busy the machine is.
    monkeypatch.setattr(turns_module, "_TAKEN_WITHIN_S", 20.0)

    def make(finetune, *, bound_us: int) -> tuple[Bench, threading.Thread]:
        one = bench()
        turns = Turns()
        one.parts = replace(
            one.parts,
            turns=turns,
            rider=one.parts.decoder,
            deferred=DeferredPasses(bound_us),
            clock_ns=time.monotonic_ns,
        )
        one.use(NullHook())
        thread = threading.Thread(target=finetune, args=(turns,), daemon=True)
        thread.start()
        while one.parts.deferred.iteration_us == 0 and not turns.wants_ride:
            time.sleep(0.001)
        return one, thread

    return make


def test_a_pass_that_carries_a_batch_gives_every_request_the_token_of_a_step_alone(bench, carrying):
    turns_taken: list[str] = []

    def finetune(turns: Turns) -> None:
        try:
            turns.wants_ride = True
            while len(turns_taken) < 6:
                if not turns.rest(20.0):
                    continue
                if turns.ride is None:
                    turns_taken.append("backward")
                    turns.wants_ride = True
                else:
                    joined_by(turns.ride, 3)
                    turns.ride.step.finish()  # the forward takes it through all layers
                    turns_taken.append("forward")
                    turns.wants_ride = False
                turns.give_back()
        finally:
            turns.end()

    one, thread = carrying(finetune, bound_us=60_000_000)
    for number in (1, 2):
        one.scheduler.submit(request(number, kv_arrives=True, arrived_ns=time.monotonic_ns()))
    assert one.run_dry() == tokens_alone(bench)
    thread.join(20)
    assert turns_taken[:5] == ["forward", "backward", "forward", "backward", "forward"]
    assert one.parts.deferred.iteration_us > 0


def test_an_iteration_that_does_not_end_is_taken_back_when_a_request_reaches_its_bound(
    bench, carrying
):
    rode: list[bool] = []
    taken_back_ns: list[int] = []

    def finetune(turns: Turns) -> None:
        turns.wants_ride = True
        while len(rode) < 1:
            if turns.rest(20.0) and turns.ride is not None:
                joined_by(turns.ride, 3)
                rode.append(turns.ride.step.joined == 1)
                while turns.held:
                    time.sleep(0.001)
                taken_back_ns.append(time.monotonic_ns())
                turns.give_back()
        turns.end()

    one, thread = carrying(finetune, bound_us=30_000)
    before_ns = time.monotonic_ns()
    for number in (1, 2):
        one.scheduler.submit(request(number, kv_arrives=True, arrived_ns=time.monotonic_ns()))
    assert one.run_dry() == tokens_alone(bench)
    thread.join(20)
    assert rode == [True]
    # The wait for the device ends a little before the clock is read, or a little after: what counts
    # is from the first arrival, which came before both.
    assert taken_back_ns[0] - before_ns >= 30_000_000
    assert one.parts.deferred.iteration_us > 0
