"""The agent as a process, between an engine's hook, its workers, and an operator over TLS."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest
from agent_pod import attached_pod
from prometheus_client.parser import text_string_to_metric_families

from windrow.errors import UserError
from windrow.metrics import SIDECAR_METRICS
from windrow.proto import attach_pb2
from windrow_sidecar.agent.flags import parse_settings
from windrow_sidecar.testing.attached_operator import until

pytestmark = pytest.mark.paired

Event = attach_pb2.JobEvent
Ask = attach_pb2.JobCommand


@pytest.fixture
async def pod():
    async with attached_pod() as attached:
        yield attached


async def test_hello_names_pod_and_slot_and_the_token_is_shown(pod):
    operator, _, _ = pod
    hello = operator.hellos[-1]
    assert (hello.pod_name, hello.pod_uid, hello.protocol_version) == ("decode-0", "pod-uid-1", 1)
    slot = hello.slots[0]
    assert (slot.engine, slot.compute_units, list(slot.finetune_levels)) == ("stepping", 2, [1, 2])
    assert slot.arena_bytes == 32 << 20
    assert operator.tokens == ["Bearer secret-1"]
    profile = await until(
        lambda: next((m.profile for m in operator.heard if m.HasField("profile")), None)
    )
    assert (profile.key, profile.slot) == ("key-1", 0)


async def test_heartbeats_carry_load_and_memory_and_a_policy_reaches_the_engine(pod):
    operator, _, engine = pod
    operator.set_policy(
        name="chat", policy="windrow", mode="harvest", objective_seconds=0.012, percentile=99
    )
    terms = await until(lambda: engine.engine.hook.controller.terms)
    assert (terms.name, terms.objective_us, terms.max_compute_percent) == ("chat", 12_000, 100)
    # A heartbeat of a second without a judged step has no TPOT to tell.
    beat = await until(
        lambda: next(
            (
                b
                for b in operator.heartbeats
                if b.predicted_tokens_per_second and b.tpot_p50_seconds
            ),
            None,
        )
    )
    assert beat.engine_state == "serving"
    assert beat.steps > 0
    assert beat.tpot_p50_seconds == pytest.approx(0.005)
    total = beat.chunks_kv + beat.chunks_lent + beat.chunks_reserved + beat.chunks_free
    assert total + beat.chunks_draining == 32
    assert not beat.HasField("job")


async def test_an_unknown_policy_is_named_in_the_breaker_and_nothing_is_harvested(pod):
    operator, _, engine = pod
    operator.set_policy(name="chat", policy="winrow", mode="harvest", objective_seconds=0.012)
    beat = await until(lambda: next((b for b in operator.heartbeats if b.breaker), None))
    assert "there is no policy 'winrow'" in beat.breaker
    assert engine.engine.hook.controller.terms is None


async def test_a_job_runs_to_its_end_and_every_event_is_told_once(pod):
    operator, agent, _ = pod
    operator.assign({"behave": "succeed"})
    operator.assign({"behave": "succeed"})  # the same again is the same
    done = await until(lambda: operator.event(Event.SUCCEEDED))
    assert done.adapter_path == "/adapters/1"
    assert done.progress.step == 5
    assert operator.kinds() == ["STARTED", "SUCCEEDED"]
    await until(lambda: not operator.heartbeats[-1].HasField("job"))
    await until(lambda: not agent.worker_pids())
    await until(lambda: agent.sample("windrow_worker_exits_total", outcome="succeeded") == 1.0)
    # Of steps 2 to 5.
    assert agent.sample("windrow_harvested_tokens_total", job_namespace="team-a") == 400.0


async def test_a_running_job_is_in_the_heartbeats_and_the_worker_is_nice(pod):
    operator, agent, _ = pod
    operator.assign({"behave": "run"})
    # A rate takes reports over half a second.
    beat = await until(
        lambda: next((b for b in operator.heartbeats if b.job.progress.tokens_per_second), None)
    )
    assert (beat.job.job_uid, beat.job.epoch) == ("uid-1", 1)
    assert beat.job.progress.step > 5
    assert beat.job.progress.eta_seconds > 0
    (pid,) = agent.worker_pids()
    assert os.getpriority(os.PRIO_PROCESS, pid) == 19
    assert agent.oom_score_adj(pid) == 1000
    job = {"job_name": "support-tone", "job_namespace": "team-a"}
    assert agent.sample("windrow_job_step", **job) > 5
    assert agent.sample("windrow_worker_memory_bytes", part="fragmentation") == 2**20
    assert agent.sample("windrow_worker_memory_bytes", part="graphs") == 5 * 2**20


@pytest.mark.parametrize(
    ("behave", "reason", "user_error", "detail"),
    [
        ("fail", "DatasetInvalid", True, "rows.jsonl:3"),
        ("crash", "WorkerDied", False, "SIGABRT"),
    ],
)
async def test_a_failed_job_says_why_and_whether_a_retry_helps(
    pod, behave, reason, user_error, detail
):
    operator, agent, _ = pod
    operator.assign({"behave": behave})
    failed = await until(lambda: operator.event(Event.FAILED))
    assert (failed.reason, failed.user_error) == (reason, user_error)
    assert detail in failed.detail
    where = ("rows.jsonl:3", "Write chat rows.") if user_error else ("", "")
    assert (failed.field, failed.remedy) == where
    await until(lambda: not agent.worker_pids())
    assert operator.kinds().count("FAILED") == 1


async def test_a_worker_that_lives_and_says_nothing_is_killed_and_has_made_no_progress():
    async with attached_pod("--worker-silence-seconds=3") as (operator, agent, _):
        operator.assign({"behave": "silent"})
        failed = await until(lambda: operator.event(Event.FAILED))
        assert (failed.reason, failed.user_error) == ("NoProgress", False)
        assert "the worker said nothing for 3 s" in failed.detail
        assert failed.progress.step == 5
        await until(lambda: not agent.worker_pids())


async def test_a_killed_worker_is_a_failure_and_the_engine_hears_that_it_is_dead(pod):
    operator, agent, engine = pod
    operator.assign({"behave": "run"}, epoch=4)
    await until(lambda: operator.event(Event.STARTED, epoch=4))
    await until(lambda: engine.engine.hook.live_epoch == 4)
    os.kill(agent.worker_pids()[0], signal.SIGKILL)
    failed = await until(lambda: operator.event(Event.FAILED, epoch=4))
    assert (failed.reason, failed.user_error) == ("WorkerDied", False)
    assert "SIGKILL" in failed.detail
    await until(lambda: engine.engine.hook.live_epoch == 0)


async def test_stop_ends_with_a_checkpoint_and_abort_without(pod):
    operator, agent, _ = pod
    operator.assign({"behave": "run"})
    await until(lambda: operator.event(Event.STARTED))
    operator.command(Ask.STOP)
    stopped = await until(lambda: operator.event(Event.STOPPED), 30)
    assert "checkpoint of step" in stopped.detail
    assert stopped.progress.checkpoint_path
    operator.assign({"behave": "stubborn"}, epoch=2)
    await until(lambda: operator.event(Event.STARTED, epoch=2))
    operator.command(Ask.ABORT, epoch=2)
    aborted = await until(lambda: operator.event(Event.STOPPED, epoch=2))
    assert "SIGKILL" in aborted.detail
    await until(lambda: not agent.worker_pids())


async def test_a_worker_that_ignores_stop_is_killed_after_the_grace(pod):
    operator, agent, _ = pod
    operator.assign({"behave": "stubborn"})
    await until(lambda: operator.event(Event.STARTED))
    operator.command(Ask.STOP)
    assert await until(lambda: operator.event(Event.STOPPED), 30)
    await until(lambda: not agent.worker_pids())


async def test_a_slot_takes_newer_epochs_of_a_job_only(pod):
    operator, agent, _ = pod
    operator.assign({"behave": "run"}, epoch=3)
    await until(lambda: operator.event(Event.STARTED, epoch=3))
    operator.assign({"behave": "run"}, epoch=2)
    stale = await until(lambda: operator.event(Event.REJECTED, epoch=2))
    assert stale.reason == "StaleEpoch"
    (old,) = agent.worker_pids()
    operator.assign({"behave": "run"}, epoch=5)
    await until(lambda: operator.event(Event.STARTED, epoch=5))
    assert old not in agent.worker_pids()
    assert len(agent.worker_pids()) == 1


async def test_a_stop_for_a_run_that_is_not_here_is_answered(pod):
    operator, _, _ = pod
    operator.command(Ask.STOP, uid="uid-9", epoch=7)
    assert await until(lambda: operator.event(Event.STOPPED, epoch=7))


async def test_what_happened_while_the_operator_was_away_is_told_when_it_is_back(pod):
    operator, agent, _ = pod
    operator.assign({"behave": "run"})
    await until(lambda: operator.event(Event.STARTED))
    await operator.stop()
    operator.heard.clear()
    (agent.folder / "token").write_text("secret-2\n")
    os.kill(agent.worker_pids()[0], signal.SIGKILL)
    await until(lambda: not agent.worker_pids())
    await operator.start()
    await until(lambda: operator.event(Event.FAILED))
    # The run that ended is still in the hello, so that its end is not taken for a loss; all that
    # was reported before is reported again.
    assert [r.epoch for r in operator.hellos[0].running] == [1]
    assert operator.kinds() == ["STARTED", "FAILED"]
    assert operator.tokens[-1] == "Bearer secret-2"


async def test_the_worker_dies_with_a_killed_agent_and_decode_goes_on(pod):
    operator, agent, engine = pod
    operator.assign({"behave": "run"})
    await until(lambda: operator.event(Event.STARTED))
    await agent.end(signal.SIGKILL)
    await until(lambda: not agent.worker_pids())
    steps = engine.engine.hook.snapshot().steps
    await until(lambda: engine.engine.hook.snapshot().steps > steps + 20)
    operator.heard.clear()
    await agent.start()
    await until(lambda: any(h.slots for h in operator.hellos))
    assert not any(h.running for h in operator.hellos)
    await until(lambda: engine.engine.hook.live_epoch == 0)


async def test_a_new_agent_waits_for_a_worker_that_outlives_the_old_one(pod):
    operator, agent, engine = pod
    operator.assign({"behave": "lingering"})
    await until(lambda: operator.event(Event.STARTED))
    await agent.end(signal.SIGKILL)
    (pid,) = agent.worker_pids()
    await agent.start()
    await until(lambda: engine.engine.hook.live_epoch == 0)
    assert agent.is_gone(pid)


async def test_sigterm_stops_the_worker_with_a_checkpoint_and_leaves_no_file(pod):
    operator, agent, _ = pod
    operator.assign({"behave": "run"})
    await until(lambda: operator.event(Event.STARTED))
    assert await agent.end() == 0
    stopped = await until(lambda: operator.event(Event.STOPPED), 30)
    assert (stopped.reason, stopped.detail) == ("SlotLost", "the sidecar was asked to end")
    assert not (agent.folder / "agent.sock").exists()
    assert not (agent.folder / "metrics.port").exists()


async def test_an_agent_that_was_asked_to_end_says_so_and_takes_no_job(pod):
    operator, agent, _ = pod
    operator.assign({"behave": "stubborn"})
    await until(lambda: operator.event(Event.STARTED))
    ending = asyncio.create_task(agent.end())
    await until(lambda: operator.heartbeats[-1].engine_state == "leaving")
    # An operator that has not heard of it yet: the job would start and be lost a moment later.
    operator.assign({"behave": "run"}, epoch=2)
    rejected = await until(lambda: operator.event(Event.REJECTED, epoch=2))
    assert (rejected.reason, operator.event(Event.STARTED, epoch=2)) == ("SlotLost", None)
    assert await ending == 0


async def test_an_engine_that_goes_away_takes_its_job_with_it(pod):
    operator, agent, engine = pod
    operator.assign({"behave": "run"})
    await until(lambda: operator.event(Event.STARTED))
    engine.link.close()
    stopped = await until(lambda: operator.event(Event.STOPPED), 30)
    assert stopped.reason == "EngineNotServing"
    assert await until(lambda: operator.heartbeats[-1].engine_state == "gone")
    operator.assign({"behave": "run"}, epoch=2)
    rejected = await until(lambda: operator.event(Event.REJECTED, epoch=2))
    assert rejected.reason == "EngineNotServing"
    await until(lambda: not agent.worker_pids())


async def test_the_sidecar_serves_its_rows_of_the_table_and_no_other(pod):
    operator, agent, _ = pod
    operator.set_policy(name="chat", policy="static", mode="harvest", objective_seconds=0.012)
    operator.assign({"behave": "run"})
    await until(lambda: operator.event(Event.STARTED))
    ratio = "windrow_decode_tpot_objective_ratio"
    text = await until(lambda: f"{ratio}_count" in (text := agent.metrics()) and text)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    wanted = {metric.name.removesuffix("_total"): metric for metric in SIDECAR_METRICS}
    assert {name: family.type for name, family in families.items()} == {
        name: str(metric.type) for name, metric in wanted.items()
    }
    for name, family in families.items():
        labels = {frozenset(sample.labels) - {"le"} for sample in family.samples}
        assert labels <= {frozenset(wanted[name].labels)}, name
    arena = families["windrow_arena_bytes"].samples
    assert sum(sample.value for sample in arena) == 32 * 2**20
    # Every step takes 5 ms.
    steps = await until(lambda: agent.sample(f"{ratio}_count"))
    assert agent.sample(f"{ratio}_bucket", le="0.4") == 0
    assert agent.sample(f"{ratio}_bucket", le="0.5") >= steps
    assert agent.sample("windrow_decode_tpot_seconds_bucket", le="0.003") == 0
    info = next(sample for sample in families["windrow_slot_info"].samples)
    assert info.labels["policy"] == "chat"
    assert info.labels["mode"] == "harvest"
    assert info.labels["model"] == "tiny"
    (shared,) = families["windrow_slot_sharing_info"].samples
    assert (shared.labels["sharing"], shared.labels["reason"]) == ("spatial", "Cores")


async def test_settings_that_cannot_work_are_refused_at_once():
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "windrow_sidecar.agent",
        "--run-dir=/tmp/" + "x" * 100,
        stderr=asyncio.subprocess.PIPE,
    )
    _, err = await process.communicate()
    assert process.returncode == 2
    assert b"WINDROW_RUN_DIR" in err
    assert b"shorter run directory" in err


@pytest.mark.parametrize("jobs", ["0", "two"])
def test_a_number_of_jobs_that_is_none_is_refused(jobs):
    with pytest.raises(UserError, match="Give 1 for one job at a time") as caught:
        parse_settings(["--max-jobs", jobs], {})
    assert caught.value.field == "WINDROW_MAX_JOBS"
    assert parse_settings([], {"WINDROW_MAX_JOBS": "2"}).max_jobs == 2
