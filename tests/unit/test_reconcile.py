"""The next step of a job in every state that it can be found in."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from windrow.conditions import LIFECYCLE, get_condition
from windrow.crd import parse_job_spec, parse_policy_spec
from windrow_operator.model import (
    STALE_AFTER,
    Base,
    CheckedPolicy,
    EffectivePolicy,
    Holder,
    Job,
    JobPlacement,
    RunState,
    Slot,
    WorkerProgress,
)
from windrow_operator.reconcile import NOTHING, Command, Timeouts, reconcile

NOW = datetime(2025, 1, 1, 12, 0, tzinfo=UTC)
PATIENCE = Timeouts()
KEY = "team/decode-0"


def later(**delta):
    return NOW + timedelta(**delta)


def spec(**changes):
    return parse_job_spec(
        {
            "model": {"name": "/m"},
            "dataset": {"source": "/d"},
            "training": {"maxSteps": 100},
            "output": {"destination": "/o"},
            **changes,
        }
    )


def slot(key=KEY, **changes):
    policy = CheckedPolicy(
        "team",
        "chat",
        "p",
        1,
        "",
        parse_policy_spec({"selector": {}, "objective": {"tpot": "1s"}, "mode": "harvest"}),
    )
    values = {
        "terms": EffectivePolicy(policy, "harvest"),
        "predicted_tokens_per_second": 9600.0,
        "outputs": ("/o",),
    }
    return Slot(key, **{**values, **changes})


def run(state=RunState.RUNNING, **changes):
    return JobPlacement(
        **{"uid": "u", "epoch": 1, "slot": KEY, "state": state, "since": NOW, **changes}
    )


class Life:
    """A job that the decisions of `reconcile` are applied to, as the driver does."""

    def __init__(self, spec_=None, *, slots=None, timeouts=PATIENCE, **changes):
        values = {"namespace": "team", "name": "tone", "uid": "u", "generation": 1}
        chosen = spec() if spec_ is None else spec_
        self.job = Job(**{**values, "created": NOW, "spec": chosen, **changes})
        self.slots = {KEY: slot()} if slots is None else slots
        self.timeouts = timeouts

    def step(self, run_=None, now=NOW):
        actions = reconcile(self.job, run_, self.slots, now, self.timeouts)
        if actions.status is not None:
            self.job = replace(self.job, status=actions.status)
        if actions.finalizer is not None:
            self.job = replace(self.job, has_finalizer=actions.finalizer)
        return actions

    def placed(self):
        self.step()
        assert self.job.slot == KEY
        return self

    def running(self):
        self.placed().step(run())
        assert self.state == "Running"
        return self

    @property
    def state(self):
        return self.job.status["state"]

    def condition(self, type_):
        return get_condition(self.job.status["conditions"], type_)


# --- placing --------------------------------------------------------------------------------------


def test_a_new_job_is_placed_and_fenced_before_anybody_is_told():
    life = Life()
    actions = life.step()
    assert actions.finalizer is True
    assert actions.status["epoch"] == 1
    assert actions.commands == (Command("ASSIGN", KEY, 1),)
    assert life.state == "Placed"


def test_a_job_joins_one_that_shares_its_base_and_each_has_its_own_life():
    free = Life().running()
    holder = Holder("u", "team/tone", Base.of(spec()))
    taken = {KEY: slot(holders=(holder,), max_jobs=4)}
    second = Life(slots=taken, name="code", uid="v").placed()
    assert second.condition("Placed")["message"].endswith("in one worker with team/tone")
    assert second.job.epoch == 1
    second.step(run(RunState.FAILED, uid="v", user_error=True, reason="DatasetInvalid"))
    assert second.state == "Failed"
    assert free.step(run()).commands == ()
    assert free.state == "Running"


def test_a_job_without_a_slot_says_why_once():
    life = Life(slots={KEY: slot(attached=False)})
    first = life.step()
    assert [event.reason for event in first.events] == ["NoSlot"]
    assert life.condition("Placed")["message"] == "decode-0 has no sidecar attached"
    assert life.step() == NOTHING


def test_why_a_job_waits_is_of_now_in_its_condition_and_an_event_when_it_is_another_reason():
    life = Life(slots={KEY: slot(attached=False)})
    life.step()
    # The obstacle changes with every job that comes or ends: no event for each.
    life.slots = {KEY: slot(engine_state="starting")}
    other = life.step(now=later(seconds=5))
    assert (life.condition("Placed")["message"], other.events) == (
        "decode-0 has an engine that is starting",
        (),
    )
    life.job = replace(life.job, priority_class_missing="batch")
    assert [e.reason for e in life.step(now=later(seconds=9)).events] == ["PriorityClassNotFound"]


def test_an_invalid_job_is_not_placed_and_names_the_field():
    life = Life()
    life.job = replace(life.job, spec=None, error="spec.adapter.lora.rank: 0 is wrong")
    life.step()
    assert life.state == "Invalid"
    assert "rank" in life.condition("Accepted")["message"]


def test_the_status_of_an_invalid_job_names_field_and_remedy_until_it_is_corrected():
    life = Life()
    valid = life.job
    where = {"error_field": "spec.adapter.lora.rank", "error_remedy": "Write 1 or more."}
    life.job = replace(valid, spec=None, error="0 is wrong", **where)
    life.step()
    assert life.job.status["userError"] == {
        "field": "spec.adapter.lora.rank",
        "remedy": "Write 1 or more.",
    }
    life.job = replace(valid, status=life.job.status, generation=2)
    life.step()
    assert life.state == "Placed"
    assert "userError" not in life.job.status


def test_a_job_of_a_priority_class_that_does_not_exist_waits_until_it_does():
    life = Life(priority_class_missing="batch")
    life.step()
    assert life.state == "Invalid"
    accepted = life.condition("Accepted")
    assert accepted["reason"] == "PriorityClassNotFound"
    assert "no PriorityClass 'batch'" in accepted["message"]
    life.job = replace(life.job, priority_class_missing="")
    life.placed()


def test_a_job_whose_destination_belongs_to_another_is_refused_until_that_one_ends():
    life = Life(destination_owner="job team/first")
    life.step()
    assert life.condition("Accepted")["reason"] == "DestinationInUse"
    life.job = replace(life.job, destination_owner="")
    life.step()
    assert life.state == "Placed"


# --- running --------------------------------------------------------------------------------------


def test_progress_goes_into_the_status_and_nothing_else_is_written():
    life = Life().running()
    progress = WorkerProgress(40, 100, 2.25, 9840.0, 4000, 72.0, 25, "/c25")
    actions = life.step(run(progress=progress))
    assert (actions.commands, actions.events) == ((), ())
    assert life.job.status["step"] == "40/100"
    assert life.job.status["checkpoint"] == {
        "step": 25,
        "path": "/o/.windrow/u/checkpoints/step-00000025-00000",
    }
    assert life.step(run(progress=progress)).status is None


def test_a_short_pause_is_not_told_and_a_long_one_is():
    life = Life().running()
    paused = run(RunState.PAUSED, detail="burst")
    life.step(paused, later(seconds=1))
    assert life.condition("Running")["reason"] == "Started"
    life.step(paused, later(seconds=11))
    assert life.condition("Running")["reason"] == "Paused"


def test_success_gives_the_slot_back_and_the_finalizer_goes_next():
    life = Life().running()
    life.step(run(RunState.SUCCEEDED, base_loss=3.0, tuned_loss=2.0))
    assert life.state == "Succeeded"
    assert life.job.slot == ""
    assert life.job.status["evaluation"] == {"baseLoss": 3.0, "tunedLoss": 2.0}
    assert life.step().finalizer is False
    assert life.step() == NOTHING


def test_a_worker_that_gives_no_sign_counts_as_failed():
    life = Life().placed()
    assert life.step(run(RunState.ASSIGNED)).wake_at == NOW + PATIENCE.start_timeout
    actions = life.step(run(RunState.ASSIGNED), NOW + PATIENCE.start_timeout)
    assert [command.action for command in actions.commands] == ["ABORT"]
    assert life.job.status["attempts"] == 1


# --- failing --------------------------------------------------------------------------------------


def test_a_failure_waits_longer_each_time():
    life = Life()
    waits = []
    for epoch in (1, 2, 3):
        life.step(now=later(hours=epoch))
        failed = run(RunState.FAILED, epoch=epoch, reason="WorkerDied", detail="signal 9")
        waits.append(life.step(failed, later(hours=epoch)).wake_at - later(hours=epoch))
    assert waits == [timedelta(seconds=2), timedelta(seconds=4), timedelta(seconds=8)]
    assert life.step(now=later(hours=3, seconds=1)).wake_at == later(hours=3, seconds=8)
    assert life.step(now=later(hours=3, seconds=8)).status["epoch"] == 4


def test_the_last_failure_within_the_limit_is_final():
    life = Life(spec(backoffLimit=0)).placed()
    life.step(run(RunState.FAILED, reason="WorkerDied", detail="signal 9"))
    assert life.state == "Failed"
    assert life.condition("Failed")["reason"] == "BackoffLimitExceeded"


def test_an_error_of_the_user_is_final_at_once():
    life = Life().placed()
    life.step(run(RunState.FAILED, reason="DatasetInvalid", detail="row 17", user_error=True))
    assert life.condition("Failed")["reason"] == "DatasetInvalid"
    told = "row 17. Fix it in a new job: one that has failed does not run again."
    assert life.condition("Failed")["message"] == told
    assert "userError" not in life.job.status


def test_the_status_of_a_job_that_failed_for_its_rows_names_field_and_remedy():
    life = Life().placed()
    where = {"field": "rows.jsonl:17", "remedy": "Write chat rows."}
    life.step(run(RunState.FAILED, reason="DatasetInvalid", user_error=True, **where))
    assert life.job.status["userError"] == where


def test_a_job_whose_model_is_not_found_is_shown_what_slots_serve():
    slots = {KEY: slot(model="/models/chat"), "team/decode-1": slot("team/decode-1", model="/m/b")}
    life = Life(slots=slots).placed()
    failed = {"user_error": True, "reason": "ModelNotFound", "detail": "the Hub gave: no network"}
    life.step(run(RunState.FAILED, remedy="Name a model.", **failed))
    said = "Slots serve /m/b, /models/chat: a job that names one of them shares its weights."
    assert life.condition("Failed")["message"].startswith(f"the Hub gave: no network. {said}")
    assert life.job.status["userError"]["remedy"] == f"Name a model. {said}"


def test_a_job_is_told_of_the_claim_that_its_policy_leaves_out():
    life = Life(slots={KEY: slot(outputs=())})
    life.step()
    said = life.condition("Placed")["message"]
    assert "may write nowhere" in said
    assert "persistentVolumeClaim that is not readOnly" in said


def test_a_rejection_is_no_failure():
    life = Life().placed()
    life.step(run(RunState.REJECTED, reason="Busy", detail="another job"))
    assert "attempts" not in life.job.status
    assert life.condition("Placed")["reason"] == "Rejected"
    assert life.step(now=later(seconds=2)).status["epoch"] == 2


def test_a_slot_that_a_neighbour_has_cost_is_no_failed_attempt():
    life = Life(spec(backoffLimit=0)).running()
    words = "its worker has ended with job other"
    life.step(run(RunState.STOPPED, reason="SlotLost", detail=words))
    assert "attempts" not in life.job.status
    assert life.condition("Placed")["reason"] == "SlotLost"
    assert words in life.condition("Placed")["message"]
    assert life.step(now=NOW).status["epoch"] == 2


# --- losing a slot --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pod_gone", "grace"), [(True, PATIENCE.gone_grace), (False, PATIENCE.lost_grace)]
)
def test_a_silent_sidecar_is_waited_for_and_then_the_job_moves(pod_gone, grace):
    life = Life().running()
    life.slots[KEY] = slot(attached=False, lost_at=NOW, pod_gone=pod_gone)
    life.slots["team/decode-1"] = slot("team/decode-1")
    life.step(run(), NOW + STALE_AFTER)
    before = life.step(run(), NOW + grace - timedelta(seconds=1))
    assert (before.status, before.wake_at) == (None, NOW + grace)
    life.step(run(), NOW + grace)
    assert life.condition("Placed")["reason"] == "SlotLost"
    moved = life.step(None, NOW + grace)
    assert moved.commands == (Command("ASSIGN", "team/decode-1", 2),)


AT_40 = WorkerProgress(40, 100, 2.0, tokens_per_second=9840, eta_seconds=72)


@pytest.mark.parametrize("gone", [{"attached": False, "lost_at": NOW}, {"silent": True}])
def test_what_a_worker_said_is_dropped_when_nothing_is_heard_of_it_for_ten_seconds(gone):
    life = Life().running()
    heard = run(seen_at=NOW, progress=AT_40)
    life.step(heard)
    assert {"step", "tokensPerSecond", "eta"} <= life.job.status.keys()
    life.slots[KEY] = slot(**gone)

    assert life.step(heard, later(seconds=9)).status is None
    life.step(heard, later(seconds=10))
    assert life.state == "Silent"
    assert not {"step", "tokensPerSecond", "eta"} & life.job.status.keys()
    assert not {"tokensPerSecond", "etaSeconds"} & life.job.status["progress"].keys()
    running = life.condition("Running")
    assert (running["status"], running["reason"]) == ("Unknown", "Silent")
    assert "since 2025-01-01T12:00:00Z, when it was at step 40/100" in running["message"]
    assert life.step(heard, later(seconds=11)).status is None

    life.slots[KEY] = slot()
    back = life.step(replace(heard, seen_at=later(seconds=12)), later(seconds=12))
    assert (life.state, life.job.status["step"]) == ("Running", "40/100")
    assert back.events == ()  # it never stopped


def test_a_job_that_lost_its_slot_stands_at_its_checkpoint():
    life = Life().running()
    saved = replace(AT_40, checkpoint_step=25, checkpoint_path="/c25")
    life.step(run(progress=saved))
    life.step(run(RunState.LOST, progress=saved))
    assert life.job.status["step"] == "25/100"
    assert not {"tokensPerSecond", "etaSeconds"} & life.job.status["progress"].keys()


def test_an_attached_sidecar_that_knows_nothing_of_the_job_has_lost_it():
    life = Life().running()
    life.step(None)
    assert life.condition("Placed")["reason"] == "SlotLost"
    assert life.step().commands == (Command("ASSIGN", KEY, 2),)


def test_a_restarted_operator_waits_for_the_sidecar_before_it_decides():
    life = Life().running()
    life.slots[KEY] = slot(attached=False, lost_at=NOW, awaited=True)
    life.step(None, later(seconds=30))
    assert life.state == "Silent"
    assert life.step(None, later(seconds=31)).status is None
    life.slots[KEY] = slot()
    life.step(run(), later(seconds=31))
    assert (life.state, life.job.epoch) == ("Running", 1)


# --- stopping -------------------------------------------------------------------------------------


def test_a_suspended_job_is_asked_to_stop_now_and_then_until_it_has():
    life = Life().running()
    life.job = replace(life.job, spec=spec(suspend=True))
    assert life.step(run()).commands == (Command("STOP", KEY, 1, "Suspended"),)
    assert life.state == "Stopping"
    asked = run(stop_asked_at=NOW, stop_sent_at=NOW)
    assert life.step(asked, later(seconds=5)).commands == ()
    assert life.step(asked, later(seconds=10)).commands[0].action == "STOP"
    at = WorkerProgress(7, 100, checkpoint_step=6, checkpoint_path="/c6")
    stopped = life.step(run(RunState.STOPPED, progress=at), later())
    assert life.state == "Suspended"
    assert life.job.slot == ""
    # What it goes on from, which is not always the last step that ran.
    assert [event.message for event in stopped.events] == ["Stopped at step 6, in /c6"]
    assert life.job.status["step"] == "6/100"
    assert life.job.status["progress"]["step"] == 6


def test_a_job_that_resumes_says_after_which_step():
    life = Life()
    (said,) = (event for event in life.placed().step(run()).events)
    assert (said.reason, said.message) == ("Started", "Started on decode-0")
    life.job = replace(life.job, spec=spec(suspend=True))
    at = WorkerProgress(8, 100, checkpoint_step=6, checkpoint_path="/c6")
    life.step(run(RunState.STOPPED, progress=at))
    life.job = replace(life.job, spec=spec())
    life.placed()
    (said,) = life.step(run(epoch=2, resumed=True)).events
    assert (said.reason, said.message) == ("Resumed", "Resumed on decode-0, after step 6")


def test_a_job_that_is_stopped_before_its_first_checkpoint_says_so_and_is_at_step_0():
    life = Life().running()
    life.job = replace(life.job, spec=spec(suspend=True))
    stopped = life.step(run(RunState.STOPPED, progress=WorkerProgress(3, 100)))
    assert [event.message for event in stopped.events] == ["Stopped before the first checkpoint"]
    assert life.job.status["step"] == "0/100"


def test_a_worker_that_does_not_stop_is_aborted():
    life = Life().running()
    life.job = replace(life.job, spec=spec(suspend=True))
    asked = run(stop_asked_at=NOW, stop_sent_at=NOW)
    actions = life.step(asked, NOW + PATIENCE.stop_timeout)
    assert actions.commands == (Command("ABORT", KEY, 1, "Suspended"),)
    assert life.state == "Suspended"


def test_a_job_that_was_never_placed_is_suspended_at_once_and_resumes():
    life = Life(spec(suspend=True))
    life.step()
    assert life.state == "Suspended"
    assert life.step() == NOTHING
    life.job = replace(life.job, spec=spec())
    life.step()
    assert life.state == "Placed"


@pytest.mark.parametrize(
    ("mode", "why"), [("off", "hours"), ("observe", "policy chat is in mode observe")]
)
def test_a_policy_that_closes_stops_the_job_and_it_waits_and_says_why_all_the_while(mode, why):
    life = Life().running()
    open_ = life.slots[KEY]
    life.slots[KEY] = slot(terms=replace(open_.terms, mode=mode, why=why))
    (stop,) = life.step(run()).commands
    said = f"decode-0 may not be harvested now ({why})"
    assert (stop.action, stop.reason) == ("STOP", said)
    stopping = life.condition("Running")
    assert stopping["reason"] == "Stopping"
    assert stopping["message"] == f"The worker writes a checkpoint and stops: {said}"
    ended = run(
        RunState.STOPPED, stop_asked_at=NOW, stop_reason=stop.reason, detail="step 5 is kept"
    )
    (event,) = life.step(ended).events
    assert (event.reason, event.message) == ("PolicyChanged", f"{said}; step 5 is kept")
    life.step()
    assert (life.state, life.condition("Placed")["reason"]) == ("Pending", "NoSlot")
    assert life.condition("Placed")["message"] == said
    assert life.condition("Evicted")["message"] == f"{said}; step 5 is kept"
    life.slots[KEY] = open_
    assert life.step().commands[0].action == "ASSIGN"


def test_a_job_whose_destination_comes_to_be_anothers_goes_on_and_is_told_once():
    life = Life().running()
    life.job = replace(life.job, destination_owner="job team/first, which reaches it by '/b/o'")
    (event,) = life.step(run()).events
    assert (event.reason, event.warning) == ("DestinationInUse", True)
    assert "team/first, which reaches it by '/b/o'" in event.message
    assert (life.state, life.condition("Placed")["reason"]) == ("Running", "DestinationInUse")
    assert life.step(run()) == NOTHING
    life.step(run(RunState.LOST, checkpoint_before=0))
    life.step(now=later(hours=1))
    assert (life.state, life.condition("Accepted")["reason"]) == ("Invalid", "DestinationInUse")
    life.job = replace(life.job, destination_owner="")
    life.step(now=later(hours=1))
    assert (life.state, life.condition("Placed")["reason"]) == ("Placed", "Placed")


def test_a_running_job_gets_back_the_finalizer_that_somebody_took_and_says_so():
    life = Life().running()
    life.job = replace(life.job, has_finalizer=False)
    actions = life.step(run())
    assert actions.finalizer is True
    assert [(e.reason, e.warning) for e in actions.events] == [("FinalizerRestored", True)]
    assert "windrow.dev/cleanup" in actions.events[0].message
    assert life.step(run()) == NOTHING
    life.step(run(RunState.SUCCEEDED))
    life.job = replace(life.job, has_finalizer=False)  # nobody waits for a finished job
    assert life.step() == NOTHING


# --- the ends of a job ----------------------------------------------------------------------------


def test_a_running_job_that_is_deleted_stops_first():
    life = Life().running()
    life.job = replace(life.job, deleted_at=NOW)
    asked = life.step(run())
    assert (asked.finalizer, asked.commands[0].action) == (None, "STOP")
    assert life.step(run(RunState.STOPPED)).finalizer is False


def test_a_job_that_is_deleted_while_it_stops_is_told_at_once_and_once():
    life = Life().running()
    life.job = replace(life.job, deleted_at=NOW)
    asked = run(stop_asked_at=NOW, stop_sent_at=NOW, stop_reason="Suspended")
    assert life.step(asked, later(seconds=1)).commands == (Command("STOP", KEY, 1, "Deleted"),)
    told = replace(asked, stop_reason="Deleted")
    assert life.step(told, later(seconds=1)).commands == ()


def test_a_deleted_job_goes_when_its_bound_is_over():
    life = Life().running()
    life.job = replace(life.job, deleted_at=NOW)
    actions = life.step(run(), NOW + PATIENCE.stop_timeout)
    assert (actions.finalizer, actions.commands[0].action) == (False, "ABORT")


def test_a_deleted_job_whose_pod_is_gone_goes_at_once():
    life = Life().running()
    life.job = replace(life.job, deleted_at=NOW)
    life.slots[KEY] = slot(attached=False, lost_at=NOW, pod_gone=True)
    assert life.step(run()).finalizer is False


def test_a_deleted_job_after_a_restart_waits_for_the_sidecar():
    life = Life().running()
    life.job = replace(life.job, deleted_at=NOW)
    life.slots[KEY] = slot(attached=False, lost_at=NOW)
    actions = life.step(None)
    assert (actions.finalizer, actions.wake_at) == (None, NOW + PATIENCE.stop_timeout)


def test_the_deadline_fails_the_job_wherever_it_is():
    life = Life(spec(activeDeadlineSeconds=60)).running()
    actions = life.step(run(), later(seconds=60))
    assert actions.commands == (Command("ABORT", KEY, 1, "DeadlineExceeded"),)
    assert life.condition("Failed")["reason"] == "DeadlineExceeded"


def test_a_finished_job_is_deleted_when_its_time_has_come():
    life = Life(spec(ttlSecondsAfterFinished=60)).running()
    life.step(run(RunState.SUCCEEDED))
    assert life.step(now=later(seconds=59)).wake_at == later(seconds=60)
    assert life.step(now=later(seconds=60)).delete


def test_checkpoints_that_cannot_be_written_are_a_condition_and_one_event_until_one_can():
    life = Life().running()
    full = run(trouble=("DiskFull", "/o cannot be written"))
    step = life.step(full)
    said = life.condition("Checkpointed")
    assert (said["status"], said["reason"]) == ("False", "DiskFull")
    assert said["message"] == "/o cannot be written"
    assert [(e.reason, e.warning) for e in step.events] == [("DiskFull", True)]
    assert life.step(full).events == ()
    assert life.state == "Running"
    step = life.step(run(trouble=("", "/c5")))
    assert life.condition("Checkpointed")["status"] == "True"
    assert [(e.reason, e.warning) for e in step.events] == [("CheckpointWritten", False)]


def test_a_warning_that_comes_with_the_end_is_told_with_it():
    life = Life().running()
    ended = run(RunState.FAILED, reason="DiskFull", detail="full", trouble=("DiskFull", "at 5"))
    step = life.step(ended)
    assert [e.message for e in step.events] == ["at 5", "full"]
    assert life.condition("Checkpointed")["reason"] == "DiskFull"
    assert life.condition("Placed")["reason"] == "BackOff"


def test_every_reason_that_a_life_writes_stands_in_the_table():
    known = {(row.type, row.status, row.reason) for row in LIFECYCLE}
    lives = [Life().running(), Life(spec(suspend=True)), Life(slots={})]
    lives[0].step(run(RunState.SUCCEEDED))
    for life in lives[1:]:
        life.step()
    written = {
        (c["type"], c["status"], c["reason"])
        for life in lives
        for c in life.job.status["conditions"]
    }
    assert written <= known


# --- whose doing it is ----------------------------------------------------------------------------


def lost(**changes):
    return run(RunState.LOST, checkpoint_before=0, **changes)


def test_a_job_that_takes_its_sidecars_down_backs_off_and_does_not_walk_the_cluster():
    life, now, sidecars = Life(), NOW, 0
    for _ in range(20):
        actions = life.step(now=now)
        if any(command.action == "ASSIGN" for command in actions.commands):
            sidecars += 1
            actions = life.step(replace(lost(), epoch=life.job.epoch), now)
            assert actions.slot_failed is True
        if life.state == "Failed":
            break
        now = actions.wake_at
    assert sidecars == PATIENCE.most_losses
    assert life.condition("Failed")["reason"] == "BackoffLimitExceeded"
    assert now - NOW >= PATIENCE.backoff_base * 3  # 2 s, then 4 s


def test_a_job_that_got_further_or_whose_pod_is_gone_is_placed_again_at_once():
    further = lost(progress=WorkerProgress(step=30, checkpoint_step=25, checkpoint_path="/c"))
    life = Life().running()
    actions = life.step(further)
    assert (actions.slot_failed, life.job.status.get("losses")) == (None, None)
    assert "retryAt" not in life.job.status

    life = Life().running()
    life.slots[KEY] = slot(attached=False, lost_at=NOW, pod_gone=True)
    life.step(run(checkpoint_before=0), later(seconds=18))
    assert (life.state, life.job.status.get("losses")) == ("Pending", None)


def test_a_slot_that_rejects_is_asked_ever_more_seldom_until_it_takes_the_job():
    life, now, pauses = Life(), NOW, []
    for _ in range(3):
        life.step(now=now)
        due = life.step(run(RunState.REJECTED, epoch=life.job.epoch), now).wake_at
        pauses.append((due - now).total_seconds())
        now = due
    assert pauses == [2, 4, 8]
    life.step(now=now)
    life.step(run(epoch=life.job.epoch), now)
    assert "rejections" not in life.job.status


def test_the_worker_of_a_pod_that_is_ending_is_asked_for_a_checkpoint():
    life = Life().running()
    life.slots[KEY] = slot(pod_gone=True)
    (stop,) = life.step(run()).commands
    assert (stop.action, stop.reason) == ("STOP", "the pod is ending")
    life.step(run(RunState.STOPPED, stop_asked_at=NOW))
    assert life.condition("Placed")["reason"] == "SlotLost"


def test_a_dead_sidecar_is_lost_within_thirty_seconds_of_its_last_word():
    found_after = timedelta(seconds=10)  # gRPC's keepalive: six seconds and four
    assert found_after + max(PATIENCE.lost_grace, PATIENCE.gone_grace) < timedelta(seconds=30)


def test_a_job_gives_its_slot_to_one_of_higher_priority_with_a_checkpoint():
    life = Life().running()
    life.job = replace(life.job, preempted_by="team/urgent")
    (stop,) = life.step(run()).commands
    assert (stop.action, stop.reason) == (
        "STOP",
        "job team/urgent of higher priority takes the slot",
    )
    life.step(run(RunState.STOPPED, stop_asked_at=NOW))
    for type_ in ("Placed", "Evicted"):
        assert life.condition(type_)["reason"] == "Preempted"
    assert life.job.status["evictions"] == [{"reason": "Preempted", "count": 1}]
    life.job = replace(life.job, preempted_by="")
    life.step()
    assert life.condition("Evicted")["status"] == "False"
    life.step(run(RunState.LOST, epoch=2))
    life.step()
    life.step(run(RunState.LOST, epoch=3))
    counts = {entry["reason"]: entry["count"] for entry in life.job.status["evictions"]}
    assert counts == {"Preempted": 1, "SlotLost": 2}


def test_a_job_that_waits_suspended_is_not_evicted_again_and_again():
    life = Life(spec(suspend=True))
    for _ in range(3):
        life.step()
    assert "evictions" not in life.job.status
    assert life.condition("Evicted") is None


def test_a_job_that_another_controller_manages_is_left_alone():
    life = Life(spec(managedBy="kueue.x-k8s.io/multikueue"))
    assert life.step() == NOTHING
    life = Life(spec(managedBy="windrow.dev/operator"))
    assert life.step().commands


def test_a_job_that_moves_keeps_its_steps_and_is_requeued_with_reason_and_count():
    life = Life().running()
    life.job = replace(life.job, moves="decode leaves 100 tok/s on decode-0")
    asked = life.step(run())
    assert [(c.action, c.reason) for c in asked.commands] == [("STOP", life.job.moves)]
    life.step(run(RunState.STOPPED, stop_asked_at=NOW, stop_reason=life.job.moves))
    life.job = replace(life.job, moves="")
    requeued = life.condition("Requeued")
    assert (requeued["status"], requeued["reason"]) == ("True", "DecodeBusy")
    assert requeued["message"] == "Evicted 1 time: DecodeBusy 1"
    life.step()
    assert life.condition("Requeued")["status"] == "False"
    life.step(replace(lost(), epoch=2), now=NOW)
    life.slots.clear()
    known = {(row.type, row.status, row.reason) for row in LIFECYCLE}
    assert {(c["type"], c["status"], c["reason"]) for c in life.job.status["conditions"]} <= known
    assert life.condition("Requeued")["message"] == "Evicted 2 times: DecodeBusy 1, SlotLost 1"
