"""What a HarvestSlot says of its device."""

from __future__ import annotations

from datetime import UTC, datetime

from windrow.cli.explain_job import _slot
from windrow.conditions import get_condition
from windrow.crd import HarvestSlotStatus
from windrow.proto import attach_pb2 as pb
from windrow.views import SlotView
from windrow_operator.cluster_state import LiveSlot
from windrow_operator.model import Slot
from windrow_operator.slots import slot_object, slot_status

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
