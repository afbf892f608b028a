"""Operator and sidecar of two releases: every message of a job's life, each way.

`data/release-0.1.0` holds the protocol of that release. What that release's side says is made with
its messages and read with today's, and the reverse: what crosses is bytes.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from grpc_tools import protoc

from windrow.proto import agent_pb2, attach_pb2
from windrow.rundir import DEFAULT_LEASE_S, RunDir
from windrow_operator import reports
from windrow_operator.cluster_state import ClusterState
from windrow_operator.job_steps import assignment
from windrow_operator.policies import config_of
from windrow_operator.reconcile import Timeouts, reconcile
from windrow_sidecar.agent.policy_lease import PolicyLease
from windrow_sidecar.agent.settings import AgentSettings
from windrow_sidecar.agent.worker_process import write_job

ROOT = Path(__file__).parents[2]
RELEASED = Path(__file__).parent / "data" / "release-0.1.0"
TODAY = {"attach": attach_pb2, "agent": agent_pb2}
NOW = datetime(2025, 1, 1, 12, 0, tzinfo=UTC)
KEY = "team/decode-0"


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """The files of the release's protocol, as descriptors, by name."""
    made = tmp_path_factory.mktemp("protocol") / "set"
    names = [f"{name}.proto" for name in TODAY]
    include = f"-I{resources.files('grpc_tools') / '_proto'}"
    options = ["protoc", f"-I{RELEASED}", include, f"--descriptor_set_out={made}", *names]
    assert protoc.main(options) == 0
    files = descriptor_pb2.FileDescriptorSet.FromString(made.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file) if hasattr(pool, "Add") else pool.AddSerializedFile(file.SerializeToString())
    return SimpleNamespace(pool=pool, files={file.name: file for file in files.file})


@pytest.fixture(scope="module")
def old(released):
    """The messages of the release, by name."""

    def of(name):
        found = released.pool.FindMessageTypeByName(f"windrow.v1.{name}")
        return message_factory.GetMessageClass(found)

    return of


def crossed(message, kind):
    """Return what the other side reads of a message."""
    return kind.FromString(message.SerializeToString())


def today(message):
    """A message of the release as today's side reads it."""
    return crossed(message, getattr(attach_pb2, message.DESCRIPTOR.name))


@pytest.mark.parametrize("name", sorted(TODAY))
def test_the_protocol_only_grows(released, name):
    ours = descriptor_pb2.FileDescriptorProto()
    TODAY[name].DESCRIPTOR.CopyToProto(ours)
    theirs = released.files[f"{name}.proto"]
    _holds(ours, theirs, theirs.name)
    for service in theirs.service:
        (same,) = (s for s in ours.service if s.name == service.name)
        assert {m.name: m for m in service.method}.items() <= {
            m.name: m for m in same.method
        }.items()


def _holds(ours, theirs, where):
    """Fields that `theirs` has, `ours` has with the same number, name and type."""
    messages = ours.message_type if hasattr(ours, "message_type") else ours.nested_type
    inner = theirs.message_type if hasattr(theirs, "message_type") else theirs.nested_type
    for message in inner:
        (same,) = (m for m in messages if m.name == message.name)
        fields = {f.number: (f.name, f.type, f.type_name, f.label) for f in same.field}
        for f in message.field:
            said = f"{where}: {message.name}.{f.name} = {f.number}"
            assert fields.get(f.number) == (f.name, f.type, f.type_name, f.label), said
        _holds(same, message, f"{where}: {message.name}")
    for enum in theirs.enum_type:
        (same,) = (e for e in ours.enum_type if e.name == enum.name)
        values = {v.number: v.name for v in same.value}
        assert {v.number: v.name for v in enum.value}.items() <= values.items()


def test_what_came_to_a_job_since_the_release_is_in_no_spec_that_does_not_ask_for_it():
    """A sidecar of the release refuses fields that it does not know; a default would write them."""
    known = set(RELEASED.joinpath("finetunejob-fields.txt").read_text().split())
    body = yaml.safe_load((ROOT / "crds" / "finetunejobs.yaml").read_text())
    schema = body["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    fields = dict(_fields(schema))
    assert known <= fields.keys(), "fields are gone that jobs of the release have"
    assert not {name for name in fields.keys() - known if "default" in fields[name]}


def _fields(schema, above=""):
    for name, field in (schema.get("properties") or {}).items():
        yield f"{above}.{name}", field
        yield from _fields(field, f"{above}.{name}")
        yield from _fields(field.get("items") or {}, f"{above}.{name}[]")


SPEC = {
    "model": {"name": "/m", "revision": "main", "quantization": "none"},
    "dataset": {"source": "/rows", "format": "chat"},
    "training": {"maxSteps": 4},
    "output": {"destination": "/out/tone"},
}
POLICY = {
    "metadata": {"namespace": "team", "name": "chat", "uid": "p", "resourceVersion": "1"},
    "spec": {
        "selector": {},
        "objective": {"tpot": "40ms"},
        "mode": "harvest",
        "sidecar": {
            "volumes": [
                {
                    "name": "out",
                    "mountPath": "/out",
                    "persistentVolumeClaim": {"claimName": "c"},
                }
            ]
        },
    },
}
POD = {
    "metadata": {
        "namespace": "team",
        "name": "decode-0",
        "uid": "pod-1",
        "resourceVersion": "1",
        "labels": {"windrow.dev/decode": "true"},
    },
    "spec": {
        "nodeName": "n",
        "volumes": [
            {"name": "windrow-run", "emptyDir": {}},
            {"name": "windrow-out", "persistentVolumeClaim": {"claimName": "c"}},
        ],
        "containers": [{"name": "engine", "args": ["--model-path", "/m"]}],
        "initContainers": [
            {"name": "windrow", "volumeMounts": [{"name": "windrow-out", "mountPath": "/out"}]}
        ],
    },
}


class Operator:
    """Today's decisions about one job, over what a sidecar says."""

    def __init__(self):
        self.cluster, self.now, self.version = ClusterState(NOW), NOW, 1
        metadata = {"namespace": "team", "name": "tone", "uid": "u", "generation": 1}
        self.body = {
            "metadata": {**metadata, "creationTimestamp": "2025-01-01T00:00:00Z"},
            "spec": SPEC,
            "status": {},
        }
        self.cluster.put_namespace({"metadata": {"name": "team", "labels": {}}})
        self.cluster.put_policy(POLICY)
        self.pod = self.cluster.put_pod(POD)
        self._put({})

    def _put(self, status, **spec):
        self.version += 1
        metadata = {
            **self.body["metadata"],
            "resourceVersion": str(self.version),
            "generation": self.version,
        }
        self.body = {
            **self.body,
            "metadata": metadata,
            "status": status,
            "spec": {**self.body["spec"], **spec},
        }
        self.cluster.put_job(self.body)

    def suspend(self, suspend):
        self._put(self.body["status"], suspend=suspend)

    def step(self):
        """Take the step that is due; returns what a sidecar is told."""
        self.now += timedelta(seconds=3)
        job = self.cluster.job_view("u")
        slots = self.cluster.slot_views(self.now)
        actions = reconcile(job, self.cluster.run_of(job), slots, self.now, Timeouts())
        if actions.status is not None:
            self._put(dict(actions.status))
        told = []
        for command in actions.commands:
            if command.action == "ASSIGN":
                self.cluster.assign("u", command.epoch, command.slot, self.now)
                told.append(assignment(self.cluster.job_view("u"), command, slots[KEY], 0))
            else:
                self.cluster.stop_sent("u", command.reason, self.now)
                told.append(
                    attach_pb2.JobCommand(
                        job_uid="u",
                        epoch=command.epoch,
                        action=command.action,
                        reason=command.reason,
                    )
                )
        return told

    def hello(self, hello):
        return reports.take_hello(self.cluster, self.pod, today(hello), self.now, first=True)

    def beat(self, beat):
        live = self.cluster.slots[KEY]
        return reports.take_heartbeat(self.cluster, live, today(beat), self.now)

    def event(self, event):
        reports.take_event(self.cluster, [KEY], today(event), self.now)

    @property
    def state(self):
        return self.body["status"].get("state")


def test_an_operator_leads_a_job_of_an_older_sidecar_through_its_whole_life(old):
    operator = Operator()

    def running(epoch, **progress):
        progress = old("Progress")(total_steps=4, **progress)
        return old("RunningJob")(slot=0, job_uid="u", epoch=epoch, progress=progress)

    def event(kind, epoch, **fields):
        number = attach_pb2.JobEvent.Kind.Value(kind)
        operator.event(old("JobEvent")(kind=number, job_uid="u", epoch=epoch, **fields))

    def beat(*jobs):
        said = {"engine_state": "serving", "predicted_tokens_per_second": 500.0, "chunks_free": 4}
        operator.beat(old("SlotHeartbeat")(slot=0, jobs=jobs, **said))

    facts = old("SlotFacts")(index=0, engine="sglang", driver="host", model="/m", chunks=8)
    hello = {"protocol_version": 1, "windrow_version": "0.1.0", "pod_uid": "pod-1"}
    assert operator.hello(old("SidecarHello")(slots=[facts], **hello)) == []
    assert operator.cluster.slots[KEY].sidecar_version == "0.1.0"
    terms = operator.cluster.terms(operator.pod, NOW)
    policy = crossed(config_of(terms), old("PolicyConfig"))
    assert (policy.name, policy.mode, policy.objective_seconds) == ("chat", "harvest", 0.04)
    beat()

    (assign,) = operator.step()
    read = crossed(assign, old("Assign"))
    assert (read.job_uid, read.epoch, read.slot) == ("u", 1, 0)
    assert json.loads(read.spec_json) == SPEC
    assert list(read.outputs.trees) == ["/out"]
    assert operator.state == "Placed"
    event("STARTED", 1, reason="Started", detail="from the beginning")
    beat(running(1, step=1, loss=2.0, tokens_per_second=100.0))
    operator.step()
    assert operator.state == "Running"
    assert operator.body["status"]["progress"]["step"] == 1

    saved = {
        "checkpoint_step": 2,
        "checkpoint_path": "/out/tone/.windrow/u/checkpoints/step-00000002-00000",
    }
    event("CHECKPOINTED", 1, progress=old("Progress")(step=2, total_steps=4, **saved))
    operator.step()
    assert operator.body["status"]["checkpoint"]["step"] == 2
    operator.suspend(True)
    (stop,) = operator.step()
    assert crossed(stop, old("JobCommand")).action == attach_pb2.JobCommand.STOP
    event("STOPPED", 1, progress=old("Progress")(step=2, total_steps=4, **saved))
    operator.step()
    assert operator.state == "Suspended"

    operator.suspend(False)
    beat()
    (assign,) = operator.step()
    read = crossed(assign, old("Assign"))
    assert (read.epoch, read.checkpoint_path) == (2, saved["checkpoint_path"])
    # The stream breaks and comes back: what runs is adopted, and no word of an older epoch counts.
    resumed = {"reason": "Resumed", "detail": "from step 2"}
    event("STARTED", 2, **resumed)
    assert operator.hello(old("SidecarHello")(slots=[facts], running=[running(2)], **hello)) == []
    event("FAILED", 1, reason="WorkerFailed", detail="late")
    beat(running(2, step=3))
    operator.step()
    assert operator.state == "Running"
    event("EVALUATED", 2, base_eval_loss=3.0, tuned_eval_loss=1.0)
    event("SUCCEEDED", 2, adapter_path="/out/tone", progress=old("Progress")(step=4, total_steps=4))
    operator.step()
    assert operator.state == "Succeeded"
    assert operator.body["status"]["adapter"]["path"] == "/out/tone"


def test_a_sidecar_works_for_an_older_operator(old, tmp_path):
    """What it does not say has a meaning: the open stream renews, and the slot's trees are read."""
    hello = today(old("OperatorHello")(protocol_version=1, heartbeat_seconds=2.0))
    policy = today(old("PolicyConfig")(name="chat", policy="windrow", mode="harvest"))
    assert (hello.renews, policy.lease_seconds) == (False, 0.0)
    lease = PolicyLease()
    lease.hello(0.0, renews=hello.renews)
    lease.told(policy.lease_seconds)
    assert lease.ended(10 * DEFAULT_LEASE_S, attached=True) == ""
    assert lease.ended(10 * DEFAULT_LEASE_S + 1, attached=False) == ""
    assert lease.ended(12 * DEFAULT_LEASE_S, attached=False) != ""
    assign = old("Assign")(
        slot=0, job_uid="u", job_name="tone", epoch=1, spec_json=json.dumps(SPEC)
    )
    assert not today(assign).model_secret  # so the worker asks the Hub as it did before
    folder = write_job(AgentSettings(RunDir(tmp_path)), today(assign))
    job = json.loads((folder / "job.json").read_text())
    assert (job["epoch"], job["spec"], job["access"], job["outputs"]) == (1, SPEC, None, None)


@pytest.mark.parametrize(
    "message",
    [
        attach_pb2.SidecarHello(
            protocol_version=1,
            windrow_version="9",
            slots=[attach_pb2.SlotFacts(index=1, refused="x", sharing_code="y", max_jobs=2)],
            rests=True,
        ),
        attach_pb2.SlotHeartbeat(slot=1, off="turned off", batch=3, chunks_free=2),
        attach_pb2.JobEvent(kind="FAILED", reason="X", field="spec.x", remedy="y", epoch=2),
        attach_pb2.ProfileReport(slot=1, key="k", profile_json="{}"),
        attach_pb2.Assign(job_uid="u", epoch=2, access=attach_pb2.Access(pod_credentials=True)),
        attach_pb2.Assign(job_uid="u", epoch=2, model_secret={"HF_TOKEN": "t"}),
        attach_pb2.PolicyConfig(name="p", mode="off", lease_seconds=2),
        attach_pb2.OperatorHello(protocol_version=1, leader_term=3, renews=True),
        attach_pb2.JobCommand(job_uid="u", action="STOP", epoch=2),
    ],
    ids=lambda message: message.DESCRIPTOR.name,
)
def test_an_older_side_reads_what_it_knows_and_passes_over_the_rest(old, message):
    read = crossed(message, old(message.DESCRIPTOR.name))
    said = json_format.MessageToDict(read)
    assert said
    assert said.items() <= json_format.MessageToDict(message).items() or "slots" in said
