"""Check which pods get a sidecar attached, and when."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from windrow.crd import parse_job_spec, parse_policy_spec
from windrow_operator.agents import COMES_WITHIN, MOST_PER_POD, PodView, wanted
from windrow_operator.model import CheckedPolicy, EffectivePolicy, Job, Pod, SidecarState, Slot

NOW = datetime(2025, 1, 1, 12, 0, tzinfo=UTC)
READY = SidecarState(prepared=True, decode_ready=True)
ALIVE = replace(READY, attached=1, alive=True)


def terms(mode="harvest", form="attach", **spec):
    body = {
        "selector": {},
        "objective": {"tpot": "40ms"},
        "mode": "harvest",
        "sidecar": {"form": form},
        **spec,
    }
    return EffectivePolicy(CheckedPolicy("team", "p", "u", 1, "", parse_policy_spec(body)), mode)


def view(name="decode-0", state=READY, model="", under=None, **more):
    pod = Pod("team", name, f"uid-{name}", model=model, sidecar=state)
    return PodView(pod, terms() if under is None else under, **more)


def job(name="tone", model="/m"):
    spec = {
        "model": {"name": model},
        "dataset": {"source": "/d/rows.jsonl"},
        "training": {"maxSteps": 1, "learningRate": "2e-4"},
        "output": {"destination": f"/out/{name}"},
    }
    return Job("team", name, name, 1, NOW, parse_job_spec(spec))


def names(views, waiting=(), now=NOW):
    pods, _ = wanted(views, waiting, now)
    return [pod.name for pod in pods]


def test_an_observing_policy_gets_its_sidecars_as_soon_as_decode_is_ready():
    observing = terms("observe")
    ready = view(under=observing)
    starting = view("decode-1", replace(READY, decode_ready=False), under=observing)
    assert names([ready, starting]) == ["decode-0"]


def test_a_harvesting_policy_adds_nothing_before_a_job_waits():
    assert names([view()]) == []
    assert names([view()], [job()]) == ["decode-0"]


def test_each_waiting_job_gets_one_pod_and_those_that_serve_its_model_come_first():
    views = [view("decode-0"), view("decode-1", model="/m"), view("decode-2")]
    assert names(views, [job()]) == ["decode-1"]
    assert names(views, [job("a"), job("b")]) == ["decode-1", "decode-0"]


def test_a_job_waits_for_the_sidecar_that_is_on_its_way_and_no_longer_than_that():
    coming = view("decode-0", ALIVE, asked_at=NOW)
    assert names([coming, view("decode-1")], [job()]) == []
    late = NOW + COMES_WITHIN
    assert names([coming, view("decode-1")], [job()], late) == ["decode-1"]


def test_when_a_slot_refuses_the_job_the_next_pod_is_tried():
    attached = view("decode-0", ALIVE, slots=(Slot("team/decode-0"),), asked_at=NOW)
    assert names([attached, view("decode-1")], [job()]) == ["decode-1"]


@pytest.mark.parametrize(
    "excluded",
    [
        view(under=terms("off")),
        view(under=terms(form="sidecar")),
        PodView(Pod("team", "decode-0", "u", sidecar=READY), None),
        view(state=replace(READY, prepared=False)),
        view(state=replace(READY, native=True)),
        view(state=replace(READY, attached=MOST_PER_POD)),
        PodView(Pod("team", "decode-0", "u", ending=True, sidecar=READY), terms("observe")),
    ],
)
def test_pods_that_may_not_or_cannot_have_one_get_none(excluded):
    assert names([excluded], [job()]) == []


def test_a_pod_that_is_closed_to_the_jobs_namespace_is_not_touched():
    selector = {"namespaceSelector": {"matchLabels": {"tenant": "a"}}}
    assert names([view(under=terms(access=selector))], [job()]) == []


def test_a_sidecar_that_ended_under_a_job_is_replaced_at_once_and_later_ones_ever_later():
    first = replace(READY, attached=1, ended_at=NOW)
    assert names([view(state=first, held=True)]) == ["decode-0"]
    third = replace(READY, attached=3, ended_at=NOW)
    pods, look_again = wanted([view(state=third, held=True)], (), NOW)
    assert pods == []
    assert look_again == NOW + timedelta(seconds=10)
    assert names([view(state=third, held=True)], now=look_again) == ["decode-0"]
    many = replace(READY, attached=20, ended_at=NOW)
    assert wanted([view(state=many, held=True)], (), NOW)[1] == NOW + timedelta(minutes=5)


def test_after_a_refusal_a_pod_is_left_alone_for_a_while():
    refused = view(under=terms("observe"), retry_at=NOW + timedelta(minutes=1))
    assert names([refused]) == []
    assert names([refused], now=NOW + timedelta(minutes=1)) == ["decode-0"]
