"""Check what a HarvestSlot says of its device."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from windrow.conditions import IN_TIME, SLOT, Reason, get_condition
from windrow.crd import ANNOTATION_GPU_ACCESS, HarvestSlotStatus, parse_policy_spec
from windrow.proto import attach_pb2 as pb
from windrow.views import SlotView
from windrow_cli import top
from windrow_cli.explain_job import _slot
from windrow_cli.explain_slot import explain_slot
from windrow_operator.cluster_state import ClusterState, LiveSlot
from windrow_operator.model import CheckedPolicy, EffectivePolicy, Pod, Slot
from windrow_operator.slot_table import capacity_refusal
from windrow_operator.slots import readiness, slot_object, slot_status

NOW = datetime(2025, 1, 1, 12, 0, tzinfo=UTC)


def written(**facts):
    live = LiveSlot("team/decode-0", "team", "decode-0", "decode-0", "pod-0", attached=True)
    live.facts = pb.SlotFacts(compute_units=132, **facts)
    live.beat, live.beat_at = pb.SlotHeartbeat(engine_state="serving", steps=1), NOW
    status = slot_status(live, Slot(live.key), [], [], NOW)
    HarvestSlotStatus.model_validate(status)
    return slot_object(live) | {"status": status}


def test_a_slot_says_how_its_gpu_is_shared_and_why():
    why = "the worker shares it so: MPS is not enabled in its context"
    found = written(sharing="temporal", sharing_reason=why)
    assert found["status"]["sharing"] == "temporal"
    assert found["status"]["sharingReason"] == why
    assert f"its GPU is shared in temporal mode: {why}" in _slot(SlotView.of(found))


@pytest.mark.parametrize(
    ("said", "shown", "rate", "words"),
    [
        ("measured", "measured", "1,200 tok/s", "1,200 tokens/s to gather (measured here)"),
        ("profiled", "profiled", "~1,200 tok/s", "no worker has run here yet"),
        ("derived", "derived", "~1,200 tok/s", "derived from decode's own steps"),
        ("", None, "1,200 tok/s", "1,200 tokens/s to gather"),
        ("<script>", None, "1,200 tok/s", "1,200 tokens/s to gather"),
    ],
)
def test_a_predicted_rate_says_what_it_rests_on(said, shown, rate, words):
    live = LiveSlot("team/decode-0", "team", "decode-0", "decode-0", "pod-0", attached=True)
    live.facts, live.beat_at = pb.SlotFacts(compute_units=132), NOW
    live.beat = pb.SlotHeartbeat(
        engine_state="serving", predicted_tokens_per_second=1200, predicted_from=said
    )
    status = slot_status(live, Slot(live.key), [], [], NOW)
    assert HarvestSlotStatus.model_validate(status).predicted_from == shown
    view = SlotView.of(slot_object(live) | {"status": status})
    assert rate in top.row_of(view)
    assert words in explain_slot(view, [], NOW).shared


def test_a_slot_shows_how_its_ranks_differ_where_they_do():
    said = "rank 1 computes 2.0 times as long as rank 0"
    live = LiveSlot("team/decode-0", "team", "decode-0", "decode-0", "pod-0", attached=True)
    live.facts, live.beat_at = pb.SlotFacts(compute_units=8, ranks=2), NOW
    for differ in (said, ""):
        live.beat = pb.SlotHeartbeat(engine_state="serving", ranks_differ=differ)
        status = slot_status(live, Slot(live.key), [], [], NOW)
        assert HarvestSlotStatus.model_validate(status).ranks_differ == (differ or None)
        view = SlotView.of(slot_object(live) | {"status": status})
        assert (said in top.row_of(view)[-1]) == bool(differ)
        uneven = f" ({said})" if differ else ""
        assert f"decode and worker on 2 ranks{uneven}" in explain_slot(view, [], NOW).shared


def ready(**of_view):
    live = LiveSlot("team/decode-0", "team", "decode-0", "decode-0", "pod-0", attached=True)
    policy = CheckedPolicy("team", "chat", "u", 1, "", None)
    view = Slot(live.key, terms=EffectivePolicy(policy, "harvest"), **of_view)
    return get_condition(slot_status(live, view, [], [], NOW)["conditions"], "Ready"), view


def test_a_slot_whose_sidecar_sees_no_gpu_says_who_gives_it_one_and_takes_no_job():
    facts = pb.SlotFacts(driver="cuda", unseen_device="the sidecar's container sees no GPU (why)")
    live = LiveSlot("team/decode-0", "team", "decode-0", "decode-0", "pod-0", facts=facts)
    access = {ANNOTATION_GPU_ACCESS: "none: a device plugin gives nvidia.com/gpu to decode alone"}
    state = ClusterState(NOW)
    state.pods["pod-0"] = Pod("team", "decode-0", "pod-0", annotations=access)
    state.put_slot(live)
    unseen = state.slot_view(live, NOW).unseen_device
    assert unseen == f"{facts.unseen_device}; GPU access {access[ANNOTATION_GPU_ACCESS]}"
    condition, view = ready(unseen_device=unseen)
    assert (condition["status"], condition["reason"]) == ("False", "DeviceNotSeen")
    said = f"No worker can use the GPU: {unseen}. In the HarvestPolicy set"
    assert condition["message"].startswith(said)
    assert "sidecar.gpuAccess: env" in condition["message"]
    assert "sees no GPU" in capacity_refusal(view)


def test_a_slot_of_several_ranks_says_what_to_run_instead():
    condition, view = ready(tensor_parallel=2)
    assert (condition["status"], condition["reason"]) == ("False", "TensorParallel")
    assert condition["message"].startswith("Decode runs on 2 ranks")
    assert "--tp-size 1" in condition["message"]
    assert capacity_refusal(view)


def test_a_slot_of_several_ranks_takes_a_job_where_its_sidecar_starts_as_many():
    condition, view = ready(tensor_parallel=2, ranks=2)
    assert condition["status"] == "True"
    assert condition["message"].endswith("it runs on decode's 2 ranks")
    assert not capacity_refusal(view)
    found = written(tensor_parallel=2, ranks=2)
    assert found["status"]["ranks"] == 2
    assert top.row_of(SlotView.of(found))[0].endswith(" x2")
    told = explain_slot(SlotView.of(found), [], NOW).shared
    assert "on 2 ranks" in told
    assert "ranks" not in written()["status"]


def test_a_slot_of_a_host_says_nothing_of_a_gpu():
    assert not {"sharing", "sharingReason"} & written()["status"].keys()


def test_a_slot_without_its_sidecar_promises_no_call_of_one_that_has_ended():
    # Killed while nothing ran on it, it is not brought back before a job needs the slot.
    live = LiveSlot("team/decode-0", "team", "decode-0", "decode-0", "pod-0")
    status = slot_status(live, Slot(live.key, attached=False), [], [], NOW)
    assert get_condition(status["conditions"], "Attached")["message"] == (
        "The sidecar is not connected. One that runs dials again; one that has ended comes back "
        "once a job needs its slot"
    )


def shared(**facts):
    live = LiveSlot("team/decode-0", "team", "decode-0", "decode-0", "pod-0", attached=True)
    state = ClusterState(NOW)
    live.facts = pb.SlotFacts(driver="cuda", **facts)
    state.put_slot(live)
    return state.slot_view(live, NOW)


def condition_of(view, held=()):
    live = LiveSlot("team/decode-0", "team", "decode-0", "decode-0", "pod-0", attached=True)
    conditions = slot_status(live, view, [], list(held), NOW)["conditions"]
    return get_condition(conditions, "SharedInSpace"), conditions


@pytest.mark.parametrize("reason", IN_TIME)
def test_a_slot_that_is_shared_in_time_says_why_and_what_gets_the_better_form(reason):
    view = shared(sharing="temporal", sharing_code=str(reason), sharing_reason="It is so")
    found, _ = condition_of(view)
    assert (found["status"], found["reason"]) == ("False", reason)
    assert found["message"] == f"It is so. {IN_TIME[reason]}"


def test_a_slot_that_is_shared_in_space_says_so_and_a_host_says_nothing():
    found, held = condition_of(shared(sharing="spatial", sharing_reason="the worker is capped"))
    assert (found["status"], found["reason"]) == ("True", Reason.MPS_CLIENTS)
    assert condition_of(shared(), held)[0] is None
    older, _ = condition_of(shared(sharing="temporal", sharing_reason="so", sharing_code="Odd"))
    assert older["reason"] == Reason.REASON_NOT_SAID


def test_every_reason_for_sharing_in_time_is_in_the_table():
    told = {row.reason for row in SLOT if row.type == "SharedInSpace" and row.status == "False"}
    assert told == set(IN_TIME)


@pytest.mark.parametrize(
    ("wanted", "found", "lacks"),
    [
        ("spatial", "temporal", True),
        ("spatial", "spatial", False),
        ("spatial", "", False),
        ("auto", "temporal", False),
        (None, "temporal", False),
    ],
)
def test_a_policy_that_insists_on_space_lets_no_job_onto_a_slot_without(wanted, found, lacks):
    spec = {"selector": {}, "objective": {"tpot": "40ms"}}
    spec |= {"sharing": wanted} if wanted else {}
    policy = CheckedPolicy("team", "chat", "u", 1, "", parse_policy_spec(spec))
    view = Slot("team/decode-0", terms=EffectivePolicy(policy, "harvest"), sharing=found)
    assert bool(capacity_refusal(view)) is lacks
    assert (readiness(view)[1] == Reason.NOT_SHARED_IN_SPACE) is lacks


def test_jobs_whose_rows_pass_together_are_shown_as_such():
    live = LiveSlot("team/decode-0", "team", "decode-0", "decode-0", "pod-0", attached=True)
    live.facts, live.beat_at = pb.SlotFacts(compute_units=132), NOW
    live.beat = pb.SlotHeartbeat(engine_state="serving", steps=1)
    one = {"namespace": "team", "uid": "u", "epoch": 1}
    jobs = [one | {"name": "a", "joinedWith": 1}, one | {"name": "b", "joinedWith": 1}]
    jobs.append(one | {"name": "c"})
    status = slot_status(live, Slot(live.key), jobs, [], NOW)
    parsed = HarvestSlotStatus.model_validate(status).jobs
    assert [job.joined_with for job in parsed] == [1, 1, None]
    view = SlotView.of(slot_object(live) | {"status": status})
    assert "team/a, team/b, team/c (2 joined)" in str(top.row_of(view))
    assert "the rows of 2 pass in the same tasklets" in explain_slot(view, [], NOW).job
