"""Check what tenants who do not trust each other can do to each other: each attempt, refused."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from windrow.crd import parse_job_spec, parse_policy_spec
from windrow.errors import UserError
from windrow.proto import attach_pb2 as pb
from windrow.rundir import MOST_SLOTS, RunDir
from windrow_operator import claims, reports, status, tenancy
from windrow_operator.cluster_state import ClusterState
from windrow_operator.deploy import Deployments
from windrow_operator.job_steps import assignment
from windrow_operator.model import (
    Base,
    CheckedPolicy,
    EffectivePolicy,
    Holder,
    Job,
    Pod,
    Slot,
)
from windrow_operator.planning import NoPlacement, place, refusal
from windrow_operator.policies import policy_of
from windrow_operator.preemption import victims
from windrow_operator.reconcile import Command
from windrow_operator.server_calls import _reason_of
from windrow_operator.serving import Instance, instances, workers_of_dynamo
from windrow_sidecar.agent.settings import AgentSettings
from windrow_sidecar.agent.worker_process import access_document
from windrow_sidecar.finetune.data.source_access import SourceAccess

NOW = datetime(2025, 1, 1, 12, 0, tzinfo=UTC)
NAME = "kubernetes.io/metadata.name"
ALL = {"matchExpressions": [{"key": NAME, "operator": "Exists"}]}
BASE = Base("/m", "main", "auto")


def policy(namespace="prod", name="chat", *, volumes=(), offered=False, **access):
    spec = {
        "selector": {},
        "objective": {"tpot": "40ms"},
        "access": access,
        "sidecar": {"volumes": list(volumes)},
    }
    checked = CheckedPolicy(
        namespace, name, f"{namespace}-{name}", 1, "2025-01-01T00:00:00Z", parse_policy_spec(spec)
    )
    return replace(checked, offered=offered)


def volume(name, path, claim="c", **more):
    return {"name": name, "mountPath": path, "persistentVolumeClaim": {"claimName": claim}, **more}


def spec_of(*, source="/rows", destination="/out/tone", secrets=(None, None), **changes):
    rows, adapter = ({"secretRef": {"name": name}} if name else {} for name in secrets)
    return {
        "model": {"name": "/m"},
        "dataset": {"source": source, **rows},
        "training": {"maxSteps": 1},
        "output": {"destination": destination, **adapter},
        **changes,
    }


def job(namespace="evil", name="x", *, status_=None, **changes):
    body = spec_of(**changes)
    return Job(
        namespace,
        name,
        f"{namespace}-{name}",
        1,
        NOW,
        parse_job_spec(body),
        body={"spec": body},
        status=status_ or {},
        namespace_labels={NAME: namespace},
    )


def slot(of: CheckedPolicy, name="decode-0", **changes):
    values = {"predicted_tokens_per_second": 900.0, "outputs": ("/out",), "model": "/m"}
    terms = EffectivePolicy(of, "harvest")
    return Slot(f"{of.namespace}/{name}", **{**values, "terms": terms, **changes})


# --- two sides agree ------------------------------------------------------------------------------


@pytest.mark.parametrize(("said", "seconds"), [({}, None), ({"preparation": "90s"}, 90.0)])
def test_the_budget_of_a_jobs_rows_is_the_policys(tmp_path, said, seconds):
    told = tenancy.access_of(job("prod"), policy(**said))
    document = access_document(AgentSettings(RunDir(tmp_path)), told)
    assert SourceAccess.of(document, ()).preparation_s == seconds
    with pytest.raises(UserError, match="1s or more"):
        policy(preparation="10ms")


@pytest.mark.parametrize("promise", [900.0, 1e9])
def test_a_policy_of_another_namespace_attracts_no_job_that_does_not_name_it(promise):
    trap = slot(policy("evil", namespaceSelector=ALL), predicted_tokens_per_second=promise)
    for named in ([], ["chat"], ["other/chat"], ["evil/other"]):
        assert isinstance(place(job("bank", policies=named), [trap]), NoPlacement)
    own = slot(policy("bank"), predicted_tokens_per_second=1.0)
    assert place(job("bank"), [trap, own]).slot is own


def test_a_job_goes_to_a_policy_that_it_names_and_that_admits_it():
    named = job("bank", policies=["prod/chat"])
    assert place(named, [slot(policy(namespaceSelector=ALL))]).slot.key == "prod/decode-0"
    only_gold = policy(namespaceSelector={"matchLabels": {"tier": "gold"}})
    for closed in (policy(), only_gold):
        assert isinstance(place(named, [slot(closed)]), NoPlacement)


def test_an_administrator_can_mark_namespaces_whose_policies_are_offered_to_all():
    offered = policy(offered=True, namespaceSelector=ALL)
    assert place(job("bank"), [slot(offered)]).slot.key == "prod/decode-0"
    assert isinstance(place(job("bank"), [slot(policy(offered=True))]), NoPlacement)
    body = {"metadata": {"namespace": "prod", "name": "chat", "uid": "u"}, "spec": {}}
    for offering in ((), ("prod",)):
        cluster = ClusterState(NOW, offering)
        cluster.put_policy(body)
        assert cluster.policies["prod/chat"].offered is bool(offering)
    assert not policy_of(body).offered


def test_a_refusal_says_nothing_of_what_exists_elsewhere():
    nothing = place(job("bank"), []).message
    for named in ([], ["evil/chat"], ["evil/secret"]):
        for elsewhere in (policy("evil"), policy("evil", namespaceSelector=ALL)):
            hidden = [slot(elsewhere, f"secret-{n}") for n in range(20)]
            if named == ["evil/chat"] and elsewhere.spec.access.admits_others:
                continue  # both sides agree: it may know
            assert place(job("bank", policies=named), hidden).message == nothing


@pytest.mark.parametrize(
    ("access", "policies"),
    [({}, []), ({}, ["prod/chat"]), ({"namespaceSelector": ALL}, []), ({"adapters": False}, [])],
)
async def test_an_adapter_goes_into_no_server_that_both_sides_have_not_agreed_on(access, policies):
    cluster, pods = serving(policy_access={"adapters": True, **access})
    evil = job(policies=policies, output={"destination": "/o", "deploy": {"enabled": True}})
    assert await loaded_into(cluster, pods, evil) == []


async def test_an_adapter_goes_into_servers_of_the_own_namespace_and_of_a_named_policy():
    cluster, pods = serving(policy_access={"adapters": True})
    assert await loaded_into(cluster, pods, job("prod")) == ["prod/decode-0"]
    cluster, pods = serving(policy_access={"adapters": True, "namespaceSelector": ALL})
    named = job(policies=["prod/chat"])
    assert await loaded_into(cluster, pods, named) == ["prod/decode-0"]


async def test_a_decode_pod_under_another_policy_of_the_namespace_gets_no_adapter():
    cluster, pods = serving(policy_access={"adapters": True})
    other = serving_pod("decode-1", app="closed")
    closed = policy_body("closed", {"matchLabels": {"app": "closed"}}, {})
    cluster.put_policy(closed)
    cluster.put_pod(other)
    assert await loaded_into(cluster, [*pods, other], job("prod")) == ["prod/decode-0"]


def policy_body(name, selector, access):
    metadata = {"namespace": "prod", "name": name, "uid": name, "resourceVersion": "1"}
    spec = {"selector": selector, "objective": {"tpot": "40ms"}, "access": access}
    return {"metadata": metadata, "spec": spec}


def serving_pod(name, *, app="chat", **container):
    arguments = ["--model-path", "/m", "--disaggregation-mode", "decode"]
    return {
        "metadata": {
            "namespace": "prod",
            "name": name,
            "uid": name,
            "resourceVersion": "1",
            "labels": {"app": app},
        },
        "spec": {"containers": [{"name": "d", "args": arguments, **container}]},
        "status": {"podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]},
    }


def serving(policy_access):
    cluster, pod = ClusterState(NOW), serving_pod("decode-0")
    cluster.put_policy(policy_body("chat", {"matchLabels": {"app": "chat"}}, policy_access))
    cluster.put_pod(pod)
    return cluster, [pod]


async def loaded_into(cluster, pods, one):
    class Listed:
        async def list(self, path):
            return pods if "/prod/" in path else []

    deployments = Deployments(cluster, Listed(), None, lambda: NOW)
    return [each.key for each in instances(await deployments._pods(one), one)]


# --- what a sidecar says is a claim ---------------------------------------------------------------


def placed(namespace="bank", **status_):
    cluster = ClusterState(NOW)
    metadata = {
        "namespace": namespace,
        "name": "support",
        "uid": "u",
        "resourceVersion": "1",
        "generation": 1,
        "creationTimestamp": "2025-01-01T00:00:00Z",
    }
    body = {
        "metadata": metadata,
        "spec": spec_of(destination="/adapters/bank/support"),
        "status": {"epoch": 1, "slot": "evil/decode-0", **status_},
    }
    cluster.put_job(body)
    cluster.assign("u", 1, "evil/decode-0", NOW)
    return cluster


def told(cluster, **event):
    said = pb.JobEvent(job_uid="u", epoch=1, **event)
    reports.take_event(cluster, ["evil/decode-0"], said, NOW)
    return cluster.job_view("u"), cluster.runs["u"]


@pytest.mark.parametrize("path", ["attacker/lora", "/proc/1/root/x", "s3://evil/x", "", "/"])
def test_the_adapter_is_in_the_jobs_destination_whatever_its_sidecar_says(path):
    of_job, run = told(placed(), kind=pb.JobEvent.SUCCEEDED, adapter_path=path)
    after = status.succeeded(of_job, run, NOW)
    assert after["adapter"] == {"path": "/adapters/bank/support"}


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("/elsewhere/.windrow/other/checkpoints/step-00000007-00002", "step-00000007-00002"),
        ("/etc", "step-00000007-00000"),
        ("../../step-1", "step-00000007-00000"),
        ("/x/step-00000007-00000/..", "step-00000007-00000"),
        ("/x/step-00000007-00000\n", "step-00000007-00000"),
        ("", ""),
    ],
)
def test_a_checkpoint_is_in_the_jobs_own_folder_whatever_its_sidecar_says(said, name):
    progress = pb.Progress(step=7, total_steps=9, checkpoint_step=7, checkpoint_path=said)
    of_job, run = told(placed(), kind=pb.JobEvent.CHECKPOINTED, progress=progress)
    own = f"/adapters/bank/support/.windrow/u/checkpoints/{name}" if name else ""
    assert (status.running(of_job, run, NOW).get("checkpoint") or {}).get("path", "") == own
    # One that an earlier version stored is held to the same when the job is placed again.
    again = replace(of_job, status={"checkpoint": {"step": 7, "path": said}})
    told_next = assignment(again, Command("ASSIGN", "bank/a", 2), slot(policy("bank")), 0)
    assert told_next.checkpoint_path == own


def test_numbers_and_words_of_a_sidecar_fit_what_the_api_server_takes():
    huge = 2**64 - 1
    progress = pb.Progress(
        step=huge,
        total_steps=huge,
        loss=math.inf,
        tokens_per_second=math.nan,
        tokens=huge,
        eta_seconds=math.inf,
        skipped_rows=huge,
    )
    of_job, run = told(
        placed(),
        kind=pb.JobEvent.WARNED,
        reason="no reason! " * 1000,
        detail="x" * 10**6,
        progress=progress,
    )
    after = status.running(of_job, run, NOW)
    assert after["progress"]["step"] == after["progress"]["tokens"] == 2**53
    assert "loss" not in after["progress"]
    for condition in after["conditions"]:
        assert len(condition["message"]) <= 4096
        assert condition["reason"].isalnum()


def hello(*slots, running=()):
    return pb.SidecarHello(slots=slots, running=running)


def attached(cluster, name="decode-0", uid="uid", **message):
    pod = cluster.pods.setdefault(uid, Pod("evil", name, uid, node="n"))
    reports.take_hello(cluster, pod, hello(**message) if message else hello(), NOW, first=True)
    return pod


@pytest.mark.parametrize(
    "indices", [range(100_000), [7] * 1000, [MOST_SLOTS, 2**31], range(60, 200)]
)
def test_a_pod_has_no_more_slots_than_a_pod_can_have(indices):
    cluster, pod = ClusterState(NOW), Pod("evil", "p", "uid")
    cluster.pods["uid"] = pod
    said = pb.SidecarHello(slots=[pb.SlotFacts(index=n) for n in indices])
    reports.take_hello(cluster, pod, said, NOW, first=True)
    assert len(cluster.slots) <= MOST_SLOTS
    assert all(live.facts.index < MOST_SLOTS for live in cluster.slots.values())


@pytest.mark.parametrize(
    "facts",
    [
        {"model": "m" * 10_000},
        {"endpoint": "http://" + "x" * 10_000},
        {"output_trees": ["/x"] * 5000},
        {"finetune_levels": range(5000)},
        {"output_trees": ["/" + "x" * 10_000]},
        {"refused": "x" * 10_000},  # goes into a condition, whose message may be as long
        {"unseen_device": "x" * 10_000},
        {"arena_bytes": 2**64 - 1},  # the API server's numbers end at 2**63
        {"chunk_bytes": 2**60},
    ],
)
def test_a_slot_whose_words_are_longer_than_any_of_ours_is_none(facts):
    assert claims.slots_of(pb.SidecarHello(slots=[pb.SlotFacts(index=0, **facts)])) == []


def test_the_version_of_a_sidecar_fits_the_status_of_each_of_its_slots():
    cluster = ClusterState(NOW)
    pod = cluster.pods["uid"] = Pod("evil", "p", "uid")
    slots = [pb.SlotFacts(index=n) for n in range(MOST_SLOTS)]
    said = pb.SidecarHello(slots=slots, windrow_version="9" * 10**6)
    reports.take_hello(cluster, pod, said, NOW, first=True)
    assert {len(live.sidecar_version) for live in cluster.slots.values()} == {64}


def test_the_slots_of_a_living_pod_are_not_taken_by_one_of_a_like_name():
    cluster = ClusterState(NOW)
    owner = cluster.pods["a"] = Pod("team", "decode", "a")
    two = pb.SidecarHello(slots=[pb.SlotFacts(index=0), pb.SlotFacts(index=1)])
    reports.take_hello(cluster, owner, two, NOW, first=True)
    thief = cluster.pods["b"] = Pod("team", "decode.1", "b")
    one = pb.SidecarHello(slots=[pb.SlotFacts(index=0)])
    reports.take_hello(cluster, thief, one, NOW, first=True)
    assert cluster.slots["team/decode.1"].pod_uid == "a"
    cluster.pods["a"] = replace(owner, ending=True)
    reports.take_hello(cluster, thief, one, NOW, first=True)
    assert cluster.slots["team/decode.1"].pod_uid == "b"


@pytest.mark.parametrize(("driver", "device"), [("cuda", "NVIDIA H200"), ("host", "host:2-cores")])
@pytest.mark.parametrize("said", [1e9, 1e300, math.inf])
def test_a_rate_above_what_the_hardware_can_do_is_cut_and_told(driver, device, said):
    cluster = ClusterState(NOW)
    pod = cluster.pods["uid"] = Pod("evil", "decode-0", "uid")
    facts = pb.SlotFacts(index=0, driver=driver, device=device, compute_units=2**31)
    reports.take_hello(cluster, pod, pb.SidecarHello(slots=[facts]), NOW, first=True)
    live = cluster.slots["evil/decode-0"]
    beat = pb.SlotHeartbeat(slot=0, predicted_tokens_per_second=said)
    reports.take_heartbeat(cluster, live, beat, NOW)
    assert 0 < live.promise == claims.most_tokens_per_second(facts) < 1e9
    assert live.overstates


def test_words_and_numbers_of_a_heartbeat_fit_the_slots_status():
    cluster = ClusterState(NOW)
    attached(cluster)
    reports.take_hello(cluster, cluster.pods["uid"], hello(pb.SlotFacts()), NOW, first=True)
    live = cluster.slots["evil/decode-0"]
    beat = pb.SlotHeartbeat(
        engine_state="x" * 10**6,
        breaker="y" * 10**6,
        steps=2**64 - 1,
        tpot_p99_seconds=1e308,
        compute_utilization=-1e300,
        predicted_tokens_per_second=1e30,
    )
    reports.take_heartbeat(cluster, live, beat, NOW)
    assert len(live.beat.engine_state) == len(live.beat.breaker) == claims.MOST_TEXT
    assert live.beat.steps == 2**53
    assert math.isnan(live.beat.tpot_p99_seconds)
    assert math.isnan(live.beat.compute_utilization)
    assert live.beat.predicted_tokens_per_second < 1e9


def test_a_hello_names_so_many_jobs_at_most():
    cluster = ClusterState(NOW)
    pod = cluster.pods["uid"] = Pod("evil", "decode-0", "uid")
    running = [pb.RunningJob(job_uid=f"u{n}", epoch=1) for n in range(10_000)]
    stale = reports.take_hello(cluster, pod, pb.SidecarHello(running=running), NOW, first=True)
    assert len(stale) == claims.MOST_RUNNING


# --- what a job names -----------------------------------------------------------------------------


def guest(**changes):
    return job(policies=["prod/chat"], **changes)


def test_a_bucket_needs_no_volume():
    own = slot(policy(), outputs=())
    assert refusal(job("prod", destination="s3://b/out"), own) == ""
    assert "nowhere" in refusal(job("prod"), own)


@pytest.mark.parametrize("destination", ["/out/bank/x", "/out", "/out/evilish/x", "/out/../out/x"])
def test_each_namespace_writes_below_its_own_folder_where_others_are_admitted(destination):
    shared = policy(namespaceSelector=ALL, volumes=[volume("out", "/out")])
    trees = (tenancy.tree_of(shared, shared.spec.sidecar.volumes[0]),)
    assert trees == ("/out/{namespace}",)
    if ".." not in destination:
        assert "only below /out/evil" in refusal(
            guest(destination=destination), slot(shared, outputs=trees)
        )
    assert refusal(guest(destination="/out/evil/x"), slot(shared, outputs=trees)) == ""
    told_ = assignment(guest(), Command("ASSIGN", "prod/a", 1), slot(shared, outputs=trees), 0)
    assert list(told_.outputs.trees) == ["/out/evil"]
    assert list(told_.outputs.mounts) == ["/out"]
    assert list(told_.access.readable_trees) == ["/out/evil", "/m"]  # and what decode serves


@pytest.mark.parametrize("field", ["dataset", "model"])
def test_what_others_wrote_on_a_shared_volume_is_not_read(field):
    volumes = [volume("out", "/out"), volume("read", "/read", readOnly=True)]
    shared = policy(namespaceSelector=ALL, volumes=volumes)
    here = slot(shared, outputs=("/out/{namespace}",), model="")
    for path in ("/out/bank/private", "/read/bank/private"):  # one claim, mounted twice
        named = {"source": path} if field == "dataset" else {"model": {"name": path}}
        refused = refusal(guest(destination="/out/evil/x", **named), here)
        assert f"cannot read spec.{field}" in refused
        assert "folder of namespace evil" in refused
    own = guest(destination="/out/evil/x", source="/read/evil/rows")
    assert refusal(own, here) == ""


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("/out/bank/.windrow/u", "folder of namespace evil"),
        ("/elsewhere/.windrow/u", "on no volume of policy chat"),
        ("/out/evil/.windrow/u", ""),
    ],
)
def test_a_job_goes_on_from_no_checkpoint_outside_of_its_own_folder(named, said):
    shared = policy(namespaceSelector=ALL, volumes=[volume("out", "/out")])
    here = slot(shared, outputs=("/out/{namespace}",))
    begins = {"checkpoint": {"resumeFrom": named}, "destination": "/out/evil/x"}
    refused = refusal(guest(source="/out/evil/rows", **begins), here)
    assert refused.startswith("cannot read spec.checkpoint.resumeFrom") if said else refused == ""
    assert said in refused
    # What it has of its own is taken instead.
    own = replace(guest(source="/out/evil/rows", **begins), status={"checkpoint": {"step": 1}})
    assert refusal(own, here) == ""


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("../up", "climbs by .."),
        ("here/there", "is not an absolute path"),
        ("s3://b/x/.windrow/u", "by the credentials of the output"),
        ("https://h/x", "nothing here can write https://"),
    ],
)
def test_a_checkpoint_to_go_on_from_is_checked_when_the_job_is_read(named, said):
    with pytest.raises(UserError, match=said) as refused:
        parse_job_spec(spec_of(checkpoint={"resumeFrom": named}))
    assert "checkpoint" in str(refused.value)


def test_a_read_only_volume_of_its_own_is_everybodys():
    volumes = [volume("out", "/out"), volume("models", "/models", "other", readOnly=True)]
    shared = policy(namespaceSelector=ALL, volumes=volumes)
    here = slot(shared, outputs=("/out/{namespace}",))
    assert refusal(guest(destination="/out/evil/x", source="/models/rows"), here) == ""


@pytest.mark.parametrize("place_", ["source", "destination"])
def test_a_bucket_without_a_secret_needs_the_policys_word(place_):
    other = {"source": "/rows", "destination": "/out/x"} | {place_: "s3://b/x"}
    for said, whom in ((None, "its own namespace only"), (False, "nobody")):
        refused = refusal(guest(**other), slot(policy(namespaceSelector=ALL, podCredentials=said)))
        assert whom in refused
        assert "access.podCredentials" in refused
    assert refusal(guest(**other), slot(policy(namespaceSelector=ALL, podCredentials=True))) == ""
    assert refusal(job("prod", **other), slot(policy())) == ""
    assert refusal(job("prod", **other), slot(policy(podCredentials=False)))


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data/token?x=.jsonl",
        "http://[fd00:ec2::254]/rows.jsonl",
        "http://10.0.0.7:10255/pods.jsonl",
        "http://127.0.0.1:30000/rows.jsonl",
        "http://[::1]:30000/rows.jsonl",
        "https://a:b/rows.jsonl",
    ],
)
def test_rows_come_from_no_address_inside(url):
    assert "cannot read spec.dataset.source" in refusal(
        guest(source=url), slot(policy(namespaceSelector=ALL))
    )


def test_a_list_of_sources_holds_for_everybody():
    listed = slot(policy(sources=["rows.example.com"]))
    assert refusal(job("prod", source="https://rows.example.com/a.jsonl"), listed) == ""
    refused = refusal(job("prod", source="https://elsewhere.org/a.jsonl"), listed)
    assert "which lists rows.example.com" in refused
    assert "spec.access.sources" in refused


@pytest.mark.parametrize("key", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_an_endpoint_in_a_secret_needs_the_policys_word(key):
    for url in ("http://169.254.169.254/", "http://10.0.0.7", "https://s3.evil.org", "http://a:b"):
        assert tenancy.endpoint_refusal(guest(), policy(namespaceSelector=ALL), {key: url})
    listed = policy(namespaceSelector=ALL, sources=["minio.prod.svc:9000"])
    own = {key: "http://minio.prod.svc:9000"}
    assert tenancy.endpoint_refusal(guest(), listed, own) == ""
    assert tenancy.endpoint_refusal(job("prod"), policy(), own) == ""
    assert tenancy.endpoint_refusal(job("prod"), policy(), {key: "http://169.254.169.254"})


# --- whose destination ----------------------------------------------------------------------------


def put(cluster, namespace, name, destination, **status_):
    conditions = [{"type": "Succeeded", "status": "True", "reason": "Completed", "message": ""}]
    finished = {"conditions": conditions} if status_.pop("finished", False) else {}
    metadata = {
        "namespace": namespace,
        "name": name,
        "uid": f"{namespace}-{name}",
        "generation": 1,
        "resourceVersion": "1",
        "creationTimestamp": "2025-01-01T00:00:00Z",
    }
    spec = spec_of(destination=destination, policies=["prod/chat"])
    cluster.put_namespace({"metadata": {"name": namespace, "labels": {NAME: namespace}}})
    cluster.put_job({"metadata": metadata, "spec": spec, "status": {**finished, **status_}})


def test_a_destination_that_holds_a_finished_job_of_another_namespace_is_refused():
    cluster = ClusterState(NOW)
    volumes = [volume("v", "/out", folder="")]
    body = policy_body("chat", {}, {"namespaceSelector": ALL})
    cluster.put_policy({**body, "spec": {**body["spec"], "sidecar": {"volumes": volumes}}})
    put(cluster, "bank", "support", "/out/support", finished=True)
    for place_ in ("/out/support", "/out/./support/", "file:///out/support"):
        put(cluster, "evil", "x", place_)
        assert cluster.job_view("evil-x").destination_owner == "a job of another namespace"
        cluster.drop_job("evil-x")
    put(cluster, "bank", "again", "/out/support")
    assert cluster.job_view("bank-again").destination_owner == ""


def test_one_path_in_the_claims_of_two_namespaces_is_two_places():
    cluster = ClusterState(NOW)
    for namespace in ("bank", "evil"):
        spec = policy_body("chat", {}, {})["spec"] | {"sidecar": {"volumes": [volume("v", "/out")]}}
        metadata = {"namespace": namespace, "name": "chat", "uid": namespace}
        cluster.put_policy({"metadata": metadata, "spec": spec})
    put(cluster, "evil", "x", "/out/support", finished=True)
    put(cluster, "evil", "y", "/out/support")
    body = dict(cluster.jobs["evil-y"])
    for uid in ("evil-x", "evil-y"):
        body = dict(cluster.jobs[uid])
        cluster.put_job({**body, "spec": {**body["spec"], "policies": []}}, put_back=True)
    metadata = {**body["metadata"], "namespace": "bank", "uid": "bank-z", "name": "z"}
    metadata["creationTimestamp"] = "2025-01-02T00:00:00Z"
    own = {**body["spec"], "policies": []}
    cluster.put_job({"metadata": metadata, "spec": own, "status": {}})
    assert cluster.job_view("bank-z").destination_owner == ""


# --- inside a pod, priority -----------------------------------------------------------------------


@pytest.mark.parametrize("shares", [False, True])
def test_jobs_of_two_namespaces_share_a_worker_only_where_the_policy_says_so(shares):
    theirs = Holder("b", "bank/support", BASE)
    both = policy(namespaceSelector=ALL, shareWorkers=shares)
    one = slot(both, holders=(theirs,), max_jobs=4)
    refused = refusal(guest(), one)
    assert (refused == "") is shares
    assert "bank" not in refused
    own = slot(both, holders=(Holder("y", "evil/y", BASE),), max_jobs=4)
    assert refusal(guest(), own) == ""


def test_a_slot_that_another_namespaces_job_is_on_hides_no_slot_that_is_open():
    both = EffectivePolicy(policy(namespaceSelector=ALL), "harvest")
    theirs = slot(both.policy, "a", terms=both, holders=(Holder("b", "bank/b", BASE),), max_jobs=4)
    own = slot(
        both.policy,
        "b",
        terms=both,
        holders=(Holder("y", "evil/y", BASE),),
        max_jobs=4,
        predicted_tokens_per_second=1.0,
    )
    assert place(guest(), [theirs, own]).slot.key == "prod/b"


@pytest.mark.parametrize("reaches", [False, True])
def test_priority_takes_no_slot_of_another_namespace_unless_the_policy_says_so(reaches):
    both = policy(namespaceSelector=ALL, preemptAcrossNamespaces=reaches)
    victim = replace(
        job("bank", "support", policies=["prod/chat"]), status={"slot": "prod/decode-0"}
    )
    held = slot(both, holders=(Holder(victim.uid, victim.key, BASE),))
    urgent = replace(guest(), priority=10**6, may_preempt=True)
    chosen = victims([victim], {held.key: held}, {}, [urgent])
    assert bool(chosen) is reaches


def test_a_policy_lists_the_priority_classes_that_it_takes():
    only_low = slot(policy(priorityClasses=["low"]))
    refused = refusal(job("prod", priorityClassName="high"), only_low)
    assert "policy chat lists low in access.priorityClasses" in refused
    for own in ({}, {"priorityClassName": "low"}):
        assert refusal(job("prod", **own), only_low) == ""


@pytest.mark.parametrize("name", ["system-cluster-critical", "system-node-critical", "system-x"])
def test_a_class_of_the_clusters_own_pods_is_no_jobs(name):
    with pytest.raises(UserError, match="priorityClassName"):
        parse_job_spec(spec_of(priorityClassName=name))


# --- the operator as a client ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("port", "address", "url"),
    [
        ("30000", "10.0.0.1", "http://10.0.0.1:30000"),
        ("30000", "fd00::1", "http://[fd00::1]:30000"),
        ("80@169.254.169.254", "10.0.0.1", None),
        ("80/../..", "10.0.0.1", None),
        ("0", "10.0.0.1", None),
        ("99999", "10.0.0.1", None),
        ("30000", "evil.example.com", None),
        ("30000", "10.0.0.1:80/x?", None),
    ],
)
def test_a_pods_command_line_leads_the_operator_nowhere_else(port, address, url):
    arguments = ["--model-path", "/m", "--disaggregation-mode", "decode", "--port", port]
    pod = serving_pod("decode-0", args=arguments)
    pod["status"]["podIP"] = address
    found = instances([pod], job("prod"))
    assert found == ([Instance("prod/decode-0", "decode-0", "decode", url)] if url else [])


def test_a_worker_of_dynamo_is_asked_for_nothing_and_named():
    arguments = ["--model-path", "/m", "--disaggregation-mode", "decode"]
    of_dynamo = serving_pod("decode-0", args=arguments)
    of_dynamo["spec"]["containers"][0]["command"] = ["python3", "-m", "dynamo.sglang"]
    other = serving_pod("decode-1", args=[*arguments[:1], "/other", *arguments[2:]])
    assert instances([of_dynamo], job("prod")) == []
    assert workers_of_dynamo([of_dynamo, other], job("prod")) == ["prod/decode-0"]


def test_of_an_answer_a_short_error_message_is_repeated_and_nothing_else():
    assert _reason_of({"SecretAccessKey": "k", "message": "k"}) == " and says no error_message"
    assert _reason_of({"error_message": {"key": "k"}}) == " and says no error_message"
    said = _reason_of({"error_message": "no\x1b[2J room\n" + "x" * 10_000})
    assert said.startswith(": no [2J room xxx")
    assert len(said) < 300
