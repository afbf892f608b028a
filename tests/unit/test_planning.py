"""Check where a job goes, and what it is told when it cannot go anywhere."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from windrow.crd import parse_job_spec, parse_policy_spec
from windrow_operator.model import (
    Base,
    CheckedPolicy,
    EffectivePolicy,
    Holder,
    Job,
    Pod,
    Slot,
    Usage,
)
from windrow_operator.planning import NoPlacement, Placement, place, rate, refusal
from windrow_operator.policies import places_of, select, terms_of
from windrow_operator.slot_table import SlotTable

NOW = datetime(2025, 1, 1, 12, 0, tzinfo=UTC)
BASE = Base("/m", "main", "auto")


def job(model="/m", **changes):
    spec = parse_job_spec(
        {
            "model": {"name": model},
            "dataset": {"source": "/d"},
            "training": {"maxSteps": 1},
            "output": {"destination": "/o"},
        }
    )
    values = {"namespace": "team", "name": "tone", "uid": "u", "generation": 1, "created": NOW}
    return Job(**{**values, "spec": spec, **changes})


def policy(name="chat", created="2025-01-01T00:00:00Z", **changes):
    spec = {
        "selector": {"matchLabels": {"app": "chat"}},
        "objective": {"tpot": "40ms"},
        "mode": "harvest",
        **changes,
    }
    return CheckedPolicy("team", name, f"uid-{name}", 1, created, parse_policy_spec(spec))


def mounted(name, path, *, read_only=False, claim=None, node=None):
    source = (
        {"persistentVolumeClaim": {"claimName": claim}} if claim else {"hostPath": {"path": node}}
    )
    return {"name": name, "mountPath": path, "readOnly": read_only, **source}


def under(name, *volumes):
    return policy(name, sidecar={"volumes": list(volumes)})


@pytest.mark.parametrize(
    ("one", "other", "meet"),
    [
        ("/x/out", "/x/./out/", True),
        ("/x/out", "/y/out", True),  # one claim, two paths
        ("/x/out", "/y/other", False),
        ("/x/out", "/y/out/deeper", False),
        ("/x", "/y", True),
        ("/x/in/out", "/z/out", True),  # the inner volume hides what the outer one has there
        ("/x/in/out", "/y/in/out", False),
        ("/n/sub/out", "/m/out", True),  # a directory of the node, and one in it
        ("/r/out", "/x/out", False),  # nobody writes to what is read-only
        ("out", "/x/out", False),
        ("claim:team/shared/out", "/x/out", False),
    ],
)
def test_two_destinations_meet_where_volumes_make_them_one_directory(one, other, meet):
    known = [
        under("a", mounted("v", "/x", claim="shared"), mounted("w", "/x/in", claim="inner")),
        under("b", mounted("v", "/y", claim="shared"), mounted("w", "/z", claim="inner")),
        under("c", mounted("v", "/n", node="/srv"), mounted("w", "/m", node="/srv/sub")),
        under("d", mounted("v", "/r", claim="shared", read_only=True)),
        CheckedPolicy("team", "wrong", "u", 1, "", None, "a field is wrong"),
    ]
    places = [places_of(destination, known) for destination in (one, other)]
    assert bool(places[0] & places[1]) is meet


def slot(name="decode-0", tokens=1000.0, **changes):
    values = {
        "terms": EffectivePolicy(policy(), "harvest"),
        "predicted_tokens_per_second": tokens,
        "outputs": ("/o",),
    }
    return Slot(f"team/{name}", **{**values, **changes})


def test_the_most_headroom_wins():
    choice = place(job(), [slot("a", 900), slot("b", 9600), slot("c", 950)])
    assert isinstance(choice, Placement)
    assert choice.message == "b predicts 9.6k tok/s"


@pytest.mark.parametrize(
    ("basis", "added"),
    [
        ("measured", ""),
        ("profiled", " (no worker has run there yet)"),
        ("derived", " (no worker has run there yet)"),
        ("a word of a sidecar's own", ""),
    ],
)
def test_a_choice_says_how_sure_the_predicted_rate_is(basis, added):
    choice = place(job(), [slot("b", 9600, predicted_from=basis)])
    assert choice.message == f"b predicts 9.6k tok/s{added}"


def test_weights_that_are_there_count_as_a_quarter_more_headroom():
    served = slot("b", 8000, model="/m/")
    choice = place(job(), [slot("a", 9600, model="/other"), served])
    assert choice.message == "b predicts 8.0k tok/s, shares the served model's weights"
    assert place(job(), [slot("a", 10100, model="/other"), served]).slot.key == "team/a"


def test_jobs_are_spread_over_nodes_while_the_headroom_is_alike():
    busy = slot("a", 5000, node="n1", holders=(Holder("x", "team/x", BASE),))
    table = SlotTable([busy, slot("b", 9600, node="n1"), slot("c", 9000, node="n2")])
    assert place(job(), table).slot.key == "team/c"
    # Its neighbour has ended: the count follows, whatever order the news comes in.
    table.put(replace(busy, holders=()))
    assert place(job(), table).slot.key == "team/b"
    table.put(busy)
    table.put(slot("c", 5000, node="n2"))
    choice = place(job(), table)
    assert choice.message == "b predicts 9.6k tok/s, beside 1 job on other devices of its node"


def test_a_reserved_place_is_nobody_elses_until_it_is_released():
    one = slot("a")
    table = SlotTable([one])
    table.reserve(one.key, Holder("v", "team/v", BASE))
    table.put(replace(one, predicted_tokens_per_second=5.0))  # news that knows nothing of it yet
    assert isinstance(place(job(), table), NoPlacement)
    assert table.release("v") == one.key
    table.put(replace(one, predicted_tokens_per_second=6.0))
    assert place(job(), table).slot.key == one.key


@pytest.mark.parametrize("seed", range(20))
def test_a_table_that_is_kept_chooses_as_one_that_is_made_anew(seed):
    dice = random.Random(seed)
    shared = EffectivePolicy(policy(), "harvest")
    table, truth = SlotTable(), {}
    for _ in range(300):
        key = f"s{dice.randrange(12):02}"
        if dice.random() < 0.1:
            table.remove(f"team/{key}")
            truth.pop(f"team/{key}", None)
            continue
        held = [Holder(f"u{n}", f"team/u{n}", BASE) for n in range(dice.choice((0, 0, 0, 1, 2)))]
        one = slot(
            key,
            dice.randrange(1, 20) * 100,
            terms=shared,
            node=dice.choice(("", "n1", "n2", "n3")),
            model=dice.choice(("/m", "/other")),
            holders=tuple(held),
            max_jobs=dice.choice((1, 3)),
            attached=dice.random() < 0.9,
            failed_jobs=frozenset(dice.choice(((), ("u",)))),
        )
        table.put(one)
        truth[one.key] = one
        fresh = SlotTable(truth.values())
        assert len(table) == len(fresh)
        kept, made = place(job(), table), place(job(), fresh)
        assert (type(kept), getattr(kept, "slot", None)) == (
            type(made),
            getattr(made, "slot", None),
        )


def test_news_that_make_no_room_wake_nobody_who_waits():
    taken = slot("a", holders=(Holder("x", "team/x", BASE),))
    table = SlotTable([taken])
    room = table.room
    table.put(replace(taken, predicted_tokens_per_second=5.0))
    assert table.room == room
    table.put(replace(taken, holders=()))
    assert table.room > room


def test_what_other_tenants_call_their_jobs_and_slots_is_not_said():
    rivals = EffectivePolicy(replace(policy(), namespace="rival"), "harvest")
    closed = Slot("rival/secret-pod", terms=rivals)
    shared = EffectivePolicy(replace(every_namespace(), namespace="open", offered=True), "harvest")
    taken = Slot(
        "open/pod", terms=shared, outputs=("/o",), holders=(Holder("x", "rival/secret-job", BASE),)
    )
    guest = job(namespace_labels={"kubernetes.io/metadata.name": "team"})
    message = place(guest, [closed, taken]).message
    assert "secret" not in message
    assert message == "open/pod runs a job of another namespace"


def test_a_tie_goes_by_name():
    assert place(job(), [slot("b"), slot("a")]).slot.key == "team/a"


def every_namespace():
    named = {"key": "kubernetes.io/metadata.name", "operator": "Exists"}
    return policy(access={"namespaceSelector": {"matchExpressions": [named]}})


def test_a_slot_of_another_namespace_is_named_in_full():
    guest = job(namespace="other", namespace_labels={"kubernetes.io/metadata.name": "other"})
    open_to_all = EffectivePolicy(replace(every_namespace(), offered=True), "harvest")
    assert place(guest, [slot("a", terms=open_to_all)]).message.startswith("team/a predicts")


def test_a_policy_that_says_nothing_of_namespaces_is_its_own_namespaces():
    refused = place(job(namespace="other"), [slot("a")])
    assert "No slot is open to namespace other" in refused.message
    assert "spec.policies" in refused.message
    assert refused.message == place(job(namespace="other"), []).message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attached": False}, "no sidecar attached"),
        ({"silent": True}, "a sidecar that does not report"),
        ({"outputs": ()}, "cannot write /o: by its policy's volumes its pod may write nowhere"),
        ({"outputs": ("/other", "/on")}, "its pod may write only below /other and /on"),
        ({"pod_gone": True}, "a pod that is ending"),
        ({"terms": None}, "no valid HarvestPolicy"),
        ({"terms": EffectivePolicy(policy(mode="observe"), "observe")}, "mode observe"),
        ({"tensor_parallel": 2}, "2 tensor-parallel ranks, and a worker on one"),
        ({"engine_state": "starting"}, "an engine that is starting"),
        ({"breaker": "too many slow steps"}, "gave up harvesting (too many slow steps)"),
        ({"memory_full": True}, "no memory to lend"),
        ({"holders": (Holder("x", "team/a", BASE),)}, "runs job team/a"),
        (
            {"holders": (Holder("x", "team/a", BASE), Holder("y", "team/b", BASE)), "max_jobs": 2},
            "runs jobs team/a and team/b, as many as it takes",
        ),
        (
            {"holders": (Holder("x", "team/a", Base("/other", "main", "auto")),), "max_jobs": 2},
            "runs job team/a, over another base",
        ),
        ({"holders": (Holder("x"),), "max_jobs": 2}, "that is unknown, over another base"),
    ],
)
def test_a_slot_that_cannot_take_the_job_says_why(changes, words):
    choice = place(job(), [slot(**changes)])
    assert isinstance(choice, NoPlacement)
    assert words in choice.message


def test_a_slot_that_the_job_already_holds_does_not_refuse_it():
    assert refusal(job(uid="u"), slot(holders=(Holder("u", "team/tone", BASE),))) == ""


def test_without_a_free_slot_a_job_shares_one_whose_jobs_have_its_base():
    taken = slot("a", 9600, holders=(Holder("x", "team/a", BASE),), max_jobs=4)
    choice = place(job(), [taken, slot("b", 100)])
    assert choice.slot.key == "team/b", "a free slot goes before a shared one"
    choice = place(job(model="/m/"), [taken])
    assert choice.message == "a predicts 9.6k tok/s, in one worker with team/a"
    two = (Holder("x", "team/a", BASE), Holder("y", "team/b", BASE))
    choice = place(
        job(), [slot("a", holders=two, max_jobs=4), slot("b", 1, holders=two[:1], max_jobs=4)]
    )
    assert choice.slot.key == "team/b", "with whom fewer share"


def test_a_quantised_base_is_not_shared():
    spec = job().spec
    nf4 = spec.model_copy(update={"model": spec.model.model_copy(update={"quantization": "nf4"})})
    assert Base.of(nf4) is None
    taken = slot(holders=(Holder("x", "team/a", BASE),), max_jobs=4)
    assert "a quantised base is not shared" in refusal(job(spec=nf4), taken)


def test_a_policy_closes_its_slots_to_other_namespaces():
    closed = policy(access={"namespaceSelector": {"matchLabels": {"tenant": "yes"}}})
    terms = EffectivePolicy(closed, "harvest")
    assert refusal(job(namespace_labels={"tenant": "yes"}), slot(terms=terms)) == ""
    assert "closed to namespace team by policy chat" in refusal(job(), slot(terms=terms))


def test_of_very_many_refusals_some_are_listed():
    choice = place(job(), [slot(f"s{n}", attached=False) for n in range(100)])
    assert choice.message.endswith("and 92 more slots refuse")


def test_without_any_slot_the_message_says_so():
    assert "a policy has to select a decode pod" in place(job(), []).message


@pytest.mark.parametrize(("tokens", "text"), [(940.4, "940"), (9600, "9.6k"), (0, "0")])
def test_rates_are_short(tokens, text):
    assert rate(tokens) == text


def test_of_several_policies_the_oldest_has_the_pod():
    pod = Pod("team", "decode-0", "p", labels={"app": "chat"})
    old, new = policy("z", "2025-01-01T00:00:00Z"), policy("a", "2025-02-01T00:00:00Z")
    assert select(pod, [new, old]) == old


def test_the_annotation_names_the_policy_over_any_selector():
    pod = Pod("team", "d", "p", labels={"app": "chat"}, annotations={"windrow.dev/policy": "b"})
    other = policy("b", selector={"matchLabels": {"app": "none"}})
    assert select(pod, [policy("a"), other]) == other


def test_a_policy_of_another_namespace_has_no_pod_here():
    assert select(Pod("prod", "d", "p", labels={"app": "chat"}), [policy()]) is None


def test_hours_and_the_daily_quota_turn_harvesting_off():
    night = policy(limits={"hours": ["20:00-08:00"]})
    assert terms_of(night, NOW).mode == "off"
    assert terms_of(night, NOW.replace(hour=21)).mode == "harvest"
    capped = policy(access={"gpuSecondsPerDay": 60})
    assert terms_of(capped, NOW, Usage("", 59)).mode == "harvest"
    assert "has used its 60 seconds" in terms_of(capped, NOW, Usage("", 60)).why


def test_a_table_of_slots_answers_as_the_list_does_and_knows_what_was_placed():
    shared = EffectivePolicy(policy(), "harvest")
    table = SlotTable(slot(f"s{i:02}", tokens=i % 7, terms=shared) for i in range(50))
    seen = []
    for number in range(50):
        choice = place(job(uid=f"u{number}"), table)
        assert choice.slot == place(job(uid=f"u{number}"), list(table.values())).slot
        seen.append(choice.slot.key)
        table.put(replace(choice.slot, holders=(Holder(f"u{number}", "team/x"),)))
    assert len(set(seen)) == 50
    refused = place(job(uid="one-more"), table)
    assert isinstance(refused, NoPlacement)
    assert "and 42 more slots refuse" in refused.message


def test_a_job_that_is_on_a_full_slot_may_stay_there():
    own = slot("a", holders=(Holder("u", "team/tone"),))
    assert place(job(uid="u"), [own, slot("b", 10, breaker="x")]).slot.key == "team/a"
    assert isinstance(place(job(uid="v"), [own]), NoPlacement)


def test_a_namespace_that_has_had_its_share_of_today_waits_and_others_do_not():
    shares = policy(
        access={
            "gpuSecondsPerDayAndNamespace": 60,
            "namespaceSelector": every_namespace().spec.access.namespace_selector.model_dump(
                by_alias=True
            ),
        }
    )
    used = Usage("2025-01-01", 65, {"team": 60, "other": 5})
    given = [slot("a", terms=terms_of(shares, NOW, used))]
    team = job(namespace_labels={"kubernetes.io/metadata.name": "team"})
    assert place(team, given).message == "a gives namespace team no more today by policy chat"
    labels = {"kubernetes.io/metadata.name": "other"}
    offered = replace(shares, offered=True)
    given = [slot("a", terms=terms_of(offered, NOW, used))]
    assert isinstance(place(job(namespace="other", namespace_labels=labels), given), Placement)
