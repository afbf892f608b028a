"""Each protection is off once, and the harm that it keeps away is there, over a real page.

The machine's steps take what `Machine` says, and its worker is a process that obeys the page. The
objective is one that decode can just hold alone: 12 ms, where its burst takes 10.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from windrow_sidecar.engines.harvest import HarvestSettings
from windrow_sidecar.engines.harvest.ablation import Protection
from windrow_sidecar.qos.terms import HarvestTerms
from windrow_sidecar.qos.view import Action, Grant, Offer
from windrow_sidecar.testing.stepping_engine import SteppingEngine

pytestmark = pytest.mark.alone

EPOCH, WANTED = 7, 8
OBJECTIVE_US = 12_000
TERMS = HarvestTerms("p", "windrow", "harvest", OBJECTIVE_US, max_memory_percent=100)
SMALL, BURST = 4, 16
STEPS = 200
# A minute: the worker is never taken for gone, however slow the machine is that runs this.
LONG_NS = 60_000_000_000


def until(condition: Callable[[], object], within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


@dataclass
class Machine:
    """Two cores: a step takes 2 ms and half a millisecond a request on both, twice that on one.

    A step on cores on which the worker still runs takes three times as long. `slower`: what the
    latency profile does not know of a step beside the worker.
    """

    decode: SteppingEngine
    slower: float = 1.0
    over: int = 0
    granted: int = 0
    beside_revoked: int = 0
    longest_over: int = 0
    _row: int = field(default=0)

    def step(self, batch: int) -> Grant:
        page = self.decode.arena.page
        latency: list[int] = []

        def takes(decision: Grant) -> int:
            offer = Offer._make(page.read_offer())
            # The worker has not said yet that it has seen the revocation: it may still run.
            revoked = decision.decode_units == 2 and offer.pause_epoch_seen < decision.pause_epoch
            self.beside_revoked += revoked
            solo_us = 2000 + (500 if decision.decode_units == 2 else 1000) * batch
            beside = decision.finetune_units > 0
            latency.append(round(solo_us * (3 if revoked else self.slower if beside else 1)))
            return latency[0]

        decision = self.decode.step(batch=batch, latency_us=takes)
        over = latency[0] > OBJECTIVE_US
        self.over += over
        self.granted += decision.finetune_units > 0
        self._row = self._row + 1 if over and decision.finetune_units > 0 else 0
        self.longest_over = max(self.longest_over, self._row)
        return decision


@contextlib.contextmanager
def machine(
    *without: Protection, slower: float = 1.0, steady_ns: int = 80_000_000
) -> Iterator[Machine]:
    """A machine whose worker is at work beside small batches; decisions stand for `steady_ns`."""
    settings = HarvestSettings(
        without=frozenset(without), steady_ns=steady_ns, worker_stale_ns=LONG_NS
    )
    with tempfile.TemporaryDirectory(prefix="wr-") as folder:
        decode = SteppingEngine(Path(folder), settings)
        decode.hook.set_terms(TERMS)
        argv = [sys.executable, "-m", "windrow_sidecar.testing.page_worker", decode.socket]
        worker = subprocess.Popen(
            [*argv, str(EPOCH), str(WANTED)], stdout=subprocess.PIPE, process_group=0
        )
        try:
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"attached\n"
            until(lambda: decode.step(SMALL).finetune_units == 1)
            until(
                lambda: (
                    decode.step(SMALL)
                    and Offer._make(decode.arena.page.read_offer()).tasklet_id > 2
                )
            )
            yield Machine(decode, slower)
        finally:
            worker.kill()
            worker.wait()
            worker.stdout.close()
            decode.close()


def wide(at: Machine) -> bool:
    """Return whether decode has its units back in a burst."""
    return at.step(BURST).decode_units == 2


def test_with_all_of_them_decode_holds_in_a_burst_what_it_holds_alone():
    with machine() as at:
        until(lambda: wide(at))
        # Until the worker was quiet, decode kept its narrow share: none ran on the worker's core.
        assert at.beside_revoked == 0
        assert at.granted == 0
        at.over = 0
        for _ in range(STEPS):
            at.step(BURST)
        assert (at.over, at.granted) == (0, 0)
        until(lambda: at.step(SMALL).finetune_units == 1)  # and nothing is wasted afterwards


def test_without_the_predictor_the_worker_runs_beside_steps_that_cannot_bear_it():
    for without in (["predictor"], ["predictor", "guard"]):
        with machine(*without) as at:
            for _ in range(STEPS):
                at.step(BURST)
            if "guard" in without:
                assert at.granted == at.over == STEPS
            else:  # until the guard pauses the worker; decode gets its units when that is quiet
                assert 2 <= at.granted <= at.over


def test_without_the_handover_decode_steps_onto_cores_that_the_worker_still_has():
    with machine("handover") as at:
        # The first step of the burst: the worker cannot have answered yet.
        first = at.step(BURST)
        assert (first.action, first.decode_units) == (Action.PAUSE, 2)
        assert at.beside_revoked == at.over == 1
    with machine() as at:
        assert at.step(BURST).decode_units == 1
        assert at.beside_revoked == 0


def test_without_the_guard_nothing_ends_what_nobody_has_predicted():
    # Beside the worker a step takes 15 ms where the profile predicts 6.
    longest: dict[tuple[Protection, ...], int] = {}
    for without in ((), ("predictor",), ("guard",), ("predictor", "guard")):
        with machine(*without, slower=2.5) as at:
            for _ in range(STEPS):
                at.step(SMALL)
            longest[without] = at.longest_over
    # Two in a row pause the worker. The predictor alone learns, but its decision holds.
    assert max(longest[()], longest["predictor",]) <= 2
    assert longest["guard",] > 2
    assert longest["predictor", "guard"] == STEPS


def test_without_the_reserve_a_prompt_that_arrives_finds_every_chunk_lent():
    taken: dict[bool, int] = {}
    for guarded in (True, False):
        with machine(*(() if guarded else ("reserve",)), steady_ns=0) as at:
            decode = at.decode
            held = []
            while decode.arena.counts()[0] > 2:  # decode uses all but two chunks
                held.append(decode.arena.take_kv())
            until(lambda: settled(at))
            n = 0
            while (chunk := decode.arena.take_kv()) >= 0:
                held.append(chunk)
                n += 1
            taken[guarded] = n
            for chunk in held:
                decode.arena.return_kv(chunk)
    assert taken[True] > 0
    assert taken[False] < taken[True]


def settled(at: Machine) -> bool:
    """Return whether two plans one after the other have lent the same."""
    before = at.decode.arena.counts()
    time.sleep(0.05)
    at.step(SMALL)
    return at.decode.arena.counts() == before
