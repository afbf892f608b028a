"""The hook over a real arena and page, with a worker in another process."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from windrow.decisions import read_decisions
from windrow.errors import UserError
from windrow.eventlog import MarkEvent, read_events
from windrow.rundir import RunDir
from windrow_sidecar.engines.harvest import HarvestHook, HarvestSettings
from windrow_sidecar.engines.hook import StepInput
from windrow_sidecar.qos.levels import host_levels
from windrow_sidecar.qos.terms import HarvestTerms, make_terms
from windrow_sidecar.qos.view import Action, Grant, Offer
from windrow_sidecar.testing.stepping_engine import PROFILE, UNITS, SteppingEngine

pytestmark = pytest.mark.paired

EPOCH = 7
TERMS = HarvestTerms("p", "windrow", "harvest", objective_us=12_000)


def until(condition, within_s: float = 10.0):
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)
    return value


@contextlib.contextmanager
def worker_of(decode: SteppingEngine, wanted: int = 8):
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "windrow_sidecar.testing.page_worker",
            decode.socket,
            str(EPOCH),
            str(wanted),
        ],
        stdout=subprocess.PIPE,
        process_group=0,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"attached\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def offer_to(decode: SteppingEngine) -> Offer:
    return Offer._make(decode.arena.page.read_offer())


def marks(decode: SteppingEngine) -> list[str]:
    decode.log.flush()
    folder = Path(decode.socket).parent
    return [e.what for _, e in read_events(folder) if isinstance(e, MarkEvent)]


@pytest.fixture
def decode():
    with tempfile.TemporaryDirectory(prefix="wr-") as folder:
        running = SteppingEngine(Path(folder), HarvestSettings(worker_stale_ns=300_000_000))
        yield running
        running.close()


def test_without_a_policy_nothing_is_granted_and_nothing_lent(decode):
    with worker_of(decode):
        until(lambda: offer_to(decode).job_epoch == EPOCH)
        decisions = [decode.step() for _ in range(50)]
    assert {d.action for d in decisions} == {Action.PAUSE}
    assert {d.decode_units for d in decisions} == {2}
    assert decode.arena.counts()[2] == 0


def test_a_worker_gets_chunks_and_a_core_while_decode_has_headroom(decode):
    decode.hook.set_terms(TERMS)
    with worker_of(decode, wanted=8):
        until(lambda: (decode.step().finetune_units, decode.arena.counts()[2]) == (1, 8))
        decision = decode.step()
        assert (decision.action, decision.decode_units, decision.chunks) == (Action.GO, 1, 8)
        assert 6000 <= decision.predicted_us <= 6600
        until(lambda: offer_to(decode).tasklet_id > 5)  # tasklets really run
        seen = marks(decode)
        assert seen.count("worker-attached") == 1
        assert {"policy", "lend"} <= set(seen)


def test_a_grant_that_one_step_uses_up_is_published_before_each(decode):
    decode.hook.set_terms(HarvestTerms("p", "llmstation", "harvest", objective_us=12_000))
    page = decode.arena.page
    with worker_of(decode):
        until(lambda: decode.step().n_tasklets)
        for _ in range(5):
            before = page.grant_seq
            # A step of 6.3 ms beside the worker, tasklets of 2 ms: three of them.
            assert decode.step().n_tasklets == 3
            assert page.grant_seq > before
            assert Grant._make(page.read_grant()).n_tasklets == 3


def test_requests_that_are_held_back_are_no_work_of_decode(decode):
    decode.hook.set_terms(HarvestTerms("p", "fineinfer", "harvest", objective_us=12_000))
    with worker_of(decode):
        until(lambda: decode.hook.idle(time.monotonic_ns()).hold_admission_until_ns)
        waits = StepInput(1, time.monotonic_ns(), 0, 0, 1, 0, 0)
        held = decode.hook.before_step(waits)
        assert (held.action, held.finetune_units) == (Action.GO, 2)
        assert held.hold_admission_until_ns > waits.start_ns
        # Waiting since then, it is due after 400 ms; the worker's units are decode's again.
        due = decode.hook.before_step(waits._replace(start_ns=waits.start_ns + 400_000_000))
        assert (due.action, due.hold_admission_until_ns) == (Action.PAUSE, 0)


def test_what_was_decided_can_be_read_while_decode_serves(decode):
    run_dir = RunDir(Path(decode.socket).parent)
    settings = HarvestSettings(run_dir=run_dir, steady_ns=0)
    hook = HarvestHook(decode.arena, host_levels(UNITS), PROFILE, settings)
    hook.set_terms(TERMS)
    for step in range(3):
        hook.before_step(StepInput(step, time.monotonic_ns(), 4, 2000, 0, 0, 0))
        hook.after_step(time.monotonic_ns(), 5000)
    hook.snapshot()
    kept = read_decisions(run_dir.decision_log())
    assert [(d.step, d.batch, d.why_paused) for d in kept] == [
        (n, 4, "no worker") for n in range(3)
    ]
    assert [d.longest_us for d in kept] == [5000, 5000, 0]


def test_memory_limit_bounds_what_is_lent(decode):
    decode.hook.set_terms(HarvestTerms("p", "windrow", "harvest", 12_000, max_memory_percent=10))
    with worker_of(decode, wanted=20):
        until(lambda: decode.step().chunks == 3)
        for _ in range(20):
            decode.step()
        assert decode.arena.counts()[2] == 3


def test_a_policy_that_lends_no_memory_lends_none(decode):
    asked = {
        "name": "p",
        "policy": "windrow",
        "mode": "harvest",
        "objective_seconds": 0.012,
        "percentile": 99.0,
        "scope": "perStep",
        "max_compute_percent": 100,
    }
    decode.hook.set_terms(make_terms(**asked, max_memory_percent=0))
    with worker_of(decode, wanted=20):
        until(lambda: decode.step() and "worker-attached" in marks(decode))
        for _ in range(20):
            assert decode.step().chunks == 0
        assert decode.arena.counts()[2] == 0
        # It was the policy that held it back.
        decode.hook.set_terms(make_terms(**asked, max_memory_percent=10))
        until(lambda: decode.step().chunks == 3)


def test_a_burst_pauses_the_worker_and_decode_widens_only_when_it_is_quiet(decode):
    decode.hook.set_terms(TERMS)
    with worker_of(decode):
        until(lambda: decode.step().finetune_units == 1 and offer_to(decode).tasklet_id > 2)
        # The moment of the burst: the worker cannot have answered yet.
        first = decode.step(batch=16, latency_us=10_000)
        assert (first.action, first.finetune_units) == (Action.PAUSE, 0)
        wide = until(
            lambda: (d := decode.step(batch=16, latency_us=10_000)).decode_units == 2 and d
        )
        offer = offer_to(decode)
        assert wide.action == Action.PAUSE
        assert offer.in_flight_us == 0
        assert offer.pause_epoch_seen == wide.pause_epoch
        # And it comes back when the burst is over.
        until(lambda: decode.step().finetune_units == 1)
        assert {"pause", "resume"} <= set(marks(decode))


def test_an_idle_engine_gives_the_worker_every_core(decode):
    decode.hook.set_terms(TERMS)
    with worker_of(decode):
        until(lambda: decode.step().finetune_units == 1)
        idle = decode.hook.idle(time.monotonic_ns())
        assert (idle.finetune_units, idle.decode_units) == (2, 1)
        back = decode.step()
        assert (back.finetune_units, back.decode_units) == (1, 1)
        assert back.pause_epoch == idle.pause_epoch + 1


def test_memory_pressure_takes_chunks_back(decode):
    decode.hook.set_terms(TERMS)
    with worker_of(decode, wanted=16):
        until(lambda: decode.step() and decode.arena.counts()[2] == 16)
        taken = [decode.arena.take_kv() for _ in range(14)]
        until(lambda: decode.step(waiting=3) and decode.arena.counts()[2] <= 12)
        until(lambda: decode.arena.counts()[0] + decode.arena.counts()[3] >= 2)
        for chunk in taken:
            decode.arena.return_kv(chunk)
    assert "revoke" in marks(decode)


def test_chunks_of_a_killed_worker_return_when_the_agent_says_that_it_is_dead(decode):
    decode.hook.set_terms(TERMS)
    decode.hook.worker_lives(EPOCH)
    with worker_of(decode) as process:
        until(lambda: decode.step() and decode.arena.counts()[2] == 8)
        process.kill()
        process.wait()
        decode.hook.worker_lives(0)
        decision = decode.step()
    assert (decision.action, decision.decode_units) == (Action.PAUSE, 2)
    assert decode.arena.counts()[2] == 0
    assert {"worker-gone", "reclaim"} <= set(marks(decode))


def test_chunks_return_without_an_agent_when_nobody_is_attached_any_more(decode):
    decode.hook.set_terms(TERMS)
    with worker_of(decode) as process:
        until(lambda: decode.step() and decode.arena.counts()[2] == 8)
        process.kill()
        process.wait()
        until(lambda: decode.step().decode_units == 2 and decode.arena.counts()[2] == 0)


def test_a_silent_worker_keeps_its_chunks_and_loses_its_core(decode):
    decode.hook.set_terms(TERMS)
    decode.hook.worker_lives(EPOCH)
    with worker_of(decode) as process:
        until(lambda: decode.step() and decode.arena.counts()[2] == 8)
        process.send_signal(19)  # SIGSTOP
        until(lambda: decode.step().decode_units == 2)
        assert decode.arena.counts()[2] + decode.arena.counts()[4] == 8
        process.send_signal(18)
        until(lambda: decode.step().finetune_units == 1)


def test_observe_grants_nothing_and_tells_what_it_would_give(decode):
    decode.hook.set_terms(HarvestTerms("p", "windrow", "observe", 12_000))
    with worker_of(decode):
        until(lambda: offer_to(decode).job_epoch == EPOCH)
        for _ in range(20):
            assert decode.step().action == Action.PAUSE
    assert decode.hook.controller.would_units == 1
    assert decode.arena.counts()[2] == 0
    decode.hook.idle(time.monotonic_ns())  # judges the last steps
    snapshot = decode.hook.snapshot()
    assert snapshot.steps == 20
    assert snapshot.tpot_p50_s == 0.005
    # The first call starts the smoothing from nothing; more follow a second apart.
    assert decode.hook.predicted_tokens_per_second(snapshot) > 0


def test_closing_revokes_and_pauses(decode):
    decode.hook.set_terms(TERMS)
    with worker_of(decode):
        granted = until(lambda: (d := decode.step()).chunks == 8 and d)
        decode.hook.close()
        grant = Grant._make(decode.arena.page.read_grant())
        assert (grant.action, grant.chunks) == (Action.PAUSE, 0)
        assert grant.pause_epoch > granted.pause_epoch
        until(lambda: decode.arena.counts()[2] + decode.arena.counts()[4] == 0)


def test_without_a_policy_and_with_nothing_lent_the_hook_sleeps(decode):
    assert not decode.hook.is_awake
    decode.hook.set_terms(TERMS)
    assert decode.hook.is_awake
    with worker_of(decode):
        until(lambda: (decode.step(), decode.arena.counts()[2])[1])
        decode.hook.set_terms(None)
        decode.step()
        assert decode.hook.is_awake  # chunks are out
        until(lambda: (decode.step(), not decode.arena.counts()[2])[1])
        until(lambda: (decode.step(), not decode.hook.is_awake)[1])


def test_an_engine_that_keeps_its_chunks_hears_how_many_are_lacking(decode):
    held = [decode.arena.take_kv() for _ in range(30)]  # two are left, for the reserve
    decode.hook.set_terms(TERMS)
    decode.step()
    assert decode.hook.chunks_lacking == 0  # nobody wants any
    with worker_of(decode, wanted=8):
        lacking = until(lambda: (decode.step(), decode.hook.chunks_lacking)[1])
        for chunk in held[-lacking:]:
            decode.arena.return_kv(chunk)
        until(lambda: (decode.step(), decode.arena.counts()[2] == 8)[1])
        until(lambda: (decode.step(), decode.hook.chunks_lacking == 0)[1])


def test_a_profile_that_comes_later_is_decided_by_from_then_on(decode):
    hook = HarvestHook(decode.arena, host_levels(UNITS), None)
    hook.set_terms(TERMS)
    hook.idle(time.monotonic_ns())
    assert hook.controller.why_paused == "no latency profile"
    hook.set_profile(PROFILE)
    with worker_of(decode):
        until(lambda: hook.idle(time.monotonic_ns()).action == Action.GO)
    with pytest.raises(UserError, match=r"no solo model for \[1\] units"):
        hook.set_profile({"solo": PROFILE["solo"][1:]})


def test_steps_of_several_tokens_are_judged_and_counted_by_token(decode):
    hook = HarvestHook(decode.arena, host_levels(UNITS), PROFILE, HarvestSettings(steady_ns=0))
    hook.set_terms(replace(TERMS, objective_us=4000))

    def step(number: int, tokens: float, latency_us: int) -> None:
        now_ns = time.monotonic_ns()
        hook.before_step(StepInput(number, now_ns, 4, 2000, 0, 0, 0, tokens=tokens))
        hook.after_step(now_ns + latency_us * 1000, latency_us)

    step(1, 1.0, 5000)
    assert hook.snapshot().steps_over_objective == 1
    step(2, 2.5, 9000)
    step(3, 2.51, 11_000)  # no change worth another objective
    hook.idle(time.monotonic_ns())
    found = hook.snapshot()
    assert found.steps_over_objective == 2
    assert (found.objective_us, hook.controller.step_objective_us) == (4000, 10_000)
    assert (found.tpot_p50_s, found.tpot.sum) == (0.0044, pytest.approx(0.005 + 0.0036 + 0.0044))
    assert found.busy_s == pytest.approx(0.025)
    assert hook.request_objective_us == 0
    hook.set_terms(replace(TERMS, objective_us=4000, per_request=True))
    hook.idle(time.monotonic_ns())
    assert hook.request_objective_us == 4000  # of a token, as slack is counted


def test_a_prompt_takes_the_workers_units_where_its_first_token_would_be_late(decode):
    hook = decode.hook
    hook.set_terms(replace(TERMS, first_token_us=500_000))
    with worker_of(decode):
        until(lambda: decode.step().finetune_units == 1)
        assert hook.first_token_objective_us == 500_000

        def decide(waited_us: int) -> Grant:
            now_ns = time.monotonic_ns()
            return hook.before_step(StepInput(10**6, now_ns, 0, 0, 0, 100, 0, 100, 100, waited_us))

        assert decide(0).action == Action.PAUSE  # nobody knows how long a prompt takes
        assert hook.controller.why_paused == "prompts"
        hook.after_prompt(100, 10_000, Grant(decode_units=UNITS))
        until(lambda: decide(0).finetune_units == 1)
        assert decide(490_000).action == Action.PAUSE
        hook.after_first_token(600_000)
        hook.after_first_token(400_000)
    found = hook.snapshot()
    assert (found.first_tokens, found.first_tokens_over_objective) == (2, 1)


def test_a_pass_over_prompts_is_decided_for_the_batch_that_runs_on_behind_it(decode):
    hook = HarvestHook(decode.arena, host_levels(UNITS), PROFILE, HarvestSettings(steady_ns=0))
    hook.set_terms(TERMS)

    def batch_of(number: int, batch: int, prefill: int = 0) -> tuple[int, int]:
        now_ns = time.monotonic_ns()
        context = 500 * batch
        hook.before_step(
            StepInput(number, now_ns, batch, context, 0, prefill, 0, prefill_tokens=prefill)
        )
        view = hook.snapshot().view
        return view.batch, view.context_tokens

    assert batch_of(1, 0, prefill=100) == (1, 0)
    assert batch_of(2, 4) == (4, 2000)
    assert batch_of(3, 0, prefill=100) == (4, 2000)
    hook.idle(time.monotonic_ns())
    assert batch_of(4, 0, prefill=100) == (1, 0)
