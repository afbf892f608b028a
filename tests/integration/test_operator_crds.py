"""Check what the API server itself refuses of our resources, and what it prints."""

import contextlib
import json

import pytest
from kubernetes import client
from kubernetes.client.exceptions import UnprocessableEntityException
from operator_process import install_crds
from waiting import wait_until

from windrow.crd import parse_job_spec
from windrow.errors import UserError

JOB = {
    "model": {"name": "/m"},
    "dataset": {"source": "/d/rows.jsonl"},
    "training": {"maxSteps": 100, "learningRate": "2e-4"},
    "output": {"destination": "/out"},
}
POLICY = {"selector": {}, "objective": {"tpot": "40ms"}}


def volume(name, mount_path, path="/srv"):
    return {"name": name, "mountPath": mount_path, "hostPath": {"path": path}}


class Api:
    """Our resources in one namespace; no operator is at work."""

    def __init__(self, kube, namespace):
        self.custom, self.namespace = client.CustomObjectsApi(kube), namespace

    def create(self, plural, kind, spec, name="x"):
        body = {
            "apiVersion": "windrow.dev/v1alpha1",
            "kind": kind,
            "metadata": {"name": name},
            "spec": spec,
        }
        return self.custom.create_namespaced_custom_object(
            "windrow.dev", "v1alpha1", self.namespace, plural, body, field_validation="Strict"
        )

    def patch(self, spec, **kwargs):
        return self.custom.patch_namespaced_custom_object(
            "windrow.dev", "v1alpha1", self.namespace, "finetunejobs", "x", {"spec": spec}
        )

    def place(self, **status):
        self.custom.patch_namespaced_custom_object_status(
            "windrow.dev",
            "v1alpha1",
            self.namespace,
            "finetunejobs",
            "x",
            {"status": {"epoch": 1, **status}},
        )


@pytest.fixture
def api(kube, namespace):
    install_crds(kube)
    api = Api(kube, namespace)
    # The server serves a new kind a moment after it has said so.
    wait_until(lambda: served(api), "the kinds are served")
    return api


def served(api):
    try:
        api.custom.list_namespaced_custom_object(
            "windrow.dev", "v1alpha1", api.namespace, "finetunejobs"
        )
    except client.ApiException:
        return False
    return True


def test_defaults_are_filled_in(api):
    asked = {**JOB, "adapter": {"lora": {}}}
    spec = api.create("finetunejobs", "FinetuneJob", asked)["spec"]
    assert spec["adapter"]["type"] == "lora"
    assert spec["adapter"]["lora"]["rank"] == 16
    assert spec["backoffLimit"] == 6
    assert spec["training"]["warmupRatio"] == 0.03


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("training", {"maxSteps": 0}, "should be greater than or equal to 1"),
        ("training", {"maxSteps": 1, "epochs": 1}, "exactly one of epochs and maxSteps"),
        ("training", {}, "exactly one of epochs and maxSteps"),
        ("training", {"maxSteps": 1, "learningRate": "0"}, "should match"),
        ("training", {"maxSteps": 1, "learningRate": "-1e-4"}, "should match"),
        ("training", {"maxSteps": 1, "learningRate": "NaN"}, "should match"),
        ("training", {"maxSteps": 1, "warmupRatio": "1.5"}, "should match"),
        ("adapter", {"lora": {"rank": 0}}, "should be greater than or equal to 1"),
        ("adapter", {"type": "dora"}, 'supported values: \\"lora\\"'),
        ("dataset", {"source": ""}, "should be at least 1 chars long"),
        ("training", {"maxSteps": 1, "microBatchSize": 17}, "may not be above batchSize"),
        ("output", {"destination": "/"}, "must name a directory below a volume"),
        ("output", {"destination": "file:///"}, "must name a directory below a volume"),
        ("output", {"destination": "/data/../etc"}, "must name a directory below a volume"),
        ("output", {"destination": "../data"}, "must name a directory below a volume"),
        ("output", {"destination": "/o", "deploy": {"enabled": "perhaps"}}, "boolean"),
        ("colour", "blue", "unknown field"),
    ],
)
def test_a_wrong_job_is_refused_by_the_server(api, part, value, words):
    with pytest.raises(client.ApiException) as refused:
        api.create("finetunejobs", "FinetuneJob", {**JOB, part: value})
    assert words in refused.value.body


TRAINING = {"maxSteps": 1}
DPO = {"maxSteps": 1, "method": "dpo"}
NO_NAMES = (3, {"a": 1}, True, [], "", " ,a")
VALUES = [
    *({"training": {**TRAINING, "learningRate": n}} for n in (2e-4, "2e-4", 5e-5, 1, "0.10e2")),
    *({"training": {**TRAINING, "learningRate": n}} for n in (0, -1, "0.0", "1e100", [], True)),
    *({"training": {**TRAINING, "warmupRatio": n}} for n in (0, 1, 0.5, "1.0", "9.9e-01", "0")),
    *({"training": {**TRAINING, "warmupRatio": n}} for n in (1.1, "1.1", "10e-1", "1e0", {"a": 1})),
    *(
        {"training": {**TRAINING, "optimizer": {"beta1": n}}}
        for n in (0, 0.9, "0.9", "9e-1", 1, "1", "1e-0", "0.5e1")
    ),
    *(
        {"training": {**TRAINING, "optimizer": {"maxGradientNorm": n}}}
        for n in (0.5, "1e2", 0, "0")
    ),
    *({"training": {"maxSteps": n}} for n in (1000, 1.5, "1")),
    *(
        {"dataset": {"source": "/d", "format": form}, "training": {**TRAINING, **method}, **more}
        for form in ("preference", "chat")
        for method in ({"method": "dpo"}, {}, {"dpo": {}})
        for more in ({}, {"adapter": {"lora": {"bias": "all"}}})
    ),
    *(
        {"dataset": {"source": "/d", "format": "preference"}, "training": {**DPO, **wrong}}
        for wrong in ({"loss": "all"}, {"dpo": {"beta": 0}}, {"dpo": {"labelSmoothing": 0.6}})
    ),
    *(
        {"dataset": {"source": "/d", "secretRef": {"name": "s"}, "mixture": [{"source": place}]}}
        for place in ("/m", "s3://b/m", "owner/name", "https://host/m")
    ),
    *(
        {"model": {"name": name, "secretRef": {"name": "s"}}}
        for name in ("/models/chat", "./chat", "owner/name", "name")
    ),
    *({"dataset": {"source": "/d", "weight": n}} for n in (0.5, 100, 101, 0, "1")),
    *(
        {"output": {"destination": "/o", **hub, **secret}}
        for hub in ({}, *({"hub": {"repository": name}} for name in ("a/b", "a", "a/b/c")))
        for secret in ({}, {"secretRef": {"name": "s"}})
    ),
    *(
        {"tracking": {**servers, **secret}}
        for servers in (
            *({}, {"mlflow": {}}, {"wandb": {"mode": "offline"}}, {"wandb": {"project": "a/b"}}),
            *({"mlflow": {"uri": u}} for u in ("https://h:1/a", "h", "https://u:p@h", "file:///a")),
        )
        for secret in ({}, {"secretRef": {"name": "s"}})
    ),
    *({"dataset": {"source": "/d", "evalFraction": n}} for n in (5e-05, 0, 0.5, 0.6, "0.1")),
    *({"adapter": {"lora": {"alpha": n}}} for n in (0.5, 16, 0, "16")),
    *({"adapter": {"lora": {"alphaPattern": {"q": n}}}} for n in (0.5, 0)),
    *(
        {"adapter": {"lora": {field: n}}}
        for field in ("targetModules", "modulesToSave")
        for n in ("q_proj", "q_proj, v_proj", ["q_proj", "v_proj"], *NO_NAMES)
    ),
]


def test_the_server_and_the_command_line_take_the_same_values(api):
    taken_by_one = []
    for number, value in enumerate(VALUES):
        ours, theirs = parsed({**JOB, **value}), None
        with contextlib.suppress(UnprocessableEntityException):
            theirs = parsed(
                api.create("finetunejobs", "FinetuneJob", {**JOB, **value}, f"x{number}")["spec"]
            )
        if ours != theirs:
            taken_by_one.append(value)
    assert taken_by_one == []


def parsed(spec):
    with contextlib.suppress(UserError):
        return parse_job_spec(spec)


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("objective", {"tpot": "40"}, "should match"),
        ("mode", "on", "supported values"),
        ("limits", {"hours": ["late"]}, "should match"),
        ("limits", {"hours": ["08:00-08:00"]}, "hours begin when they end"),
        ("limits", {"hours": ["Mon-Fri 08:00-08:00 Asia/Tokyo"]}, "hours begin when they end"),
        ("limits", {"hours": ["Monday 08:00-09:00"]}, "should match"),
        ("limits", {"hostMemory": "64Gi"}, "hostMemory is not supported yet"),
        ("objective", {"tpot": "2h"}, "tpot must be between 100us and 1m"),
        ("objective", {"tpot": "10us"}, "tpot must be between 100us and 1m"),
        ("objective", {"tpot": "999999999999999h"}, "tpot must be between 100us and 1m"),
        ("objective", {"tpot": "40ms", "percentile": 0.001}, "greater than or equal to 50"),
        ("objective", {"tpot": "40ms", "ttft": "11m"}, "ttft must be between 1ms and 10m"),
        ("objective", {"tpot": "40ms", "deferralBound": "2m"}, "deferralBound must be between"),
        ("selector", {"matchLabels": {"-app": "chat"}}, "not a label key"),
        ("selector", {"matchLabels": {"app": "no spaces"}}, "should match"),
        (
            "selector",
            {"matchExpressions": [{"key": "app", "operator": "In"}]},
            "In and NotIn need values",
        ),
        (
            "selector",
            {"matchExpressions": [{"key": "app", "operator": "Exists", "values": ["a"]}]},
            "Exists and DoesNotExist take none",
        ),
        ("access", {"namespaceSelector": {"matchLabels": {"a b": "c"}}}, "not a label key"),
        ("sidecar", {"volumes": [volume("a", "/a"), volume("b", "/a")]}, "one mountPath"),
        ("sidecar", {"volumes": [volume("a", "/a"), volume("a", "/b")]}, "Duplicate value"),
        (
            "sidecar",
            {"volumes": [volume("a", "/a")], "adapterCache": {"volume": "b"}},
            "adapterCache.volume is none of the volumes",
        ),
        ("sidecar", {"volumes": [volume("a", "data")]}, "should match"),
        ("sidecar", {"volumes": [volume("a", "/a/../b")]}, "may not hold . or .."),
        ("sidecar", {"volumes": [volume("a", "/run/windrow")]}, "may not be /, /var"),
        ("sidecar", {"volumes": [volume("a", "/var/run/secrets/x")]}, "may not be /, /var"),
        ("sidecar", {"volumes": [volume("a", "/a", "srv")]}, "should match"),
        (
            "sidecar",
            {"volumes": [{"name": "a", "mountPath": "/a"}]},
            "exactly one of persistentVolumeClaim and hostPath",
        ),
    ],
)
def test_a_wrong_policy_is_refused_by_the_server(api, part, value, words):
    with pytest.raises(client.ApiException) as refused:
        api.create("harvestpolicies", "HarvestPolicy", {**POLICY, part: value})
    assert words in refused.value.body


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"name": "/other"}},
        {"dataset": {"source": "/other"}},
        {"adapter": {"lora": {"rank": 8}}},
        {"output": {"destination": "/other"}},
        {"training": {"batchSize": 8}},
        {"training": {"learningRate": "1e-4"}},
    ],
)
def test_what_a_checkpoint_depends_on_is_fixed_once_the_job_was_placed(api, change):
    api.create("finetunejobs", "FinetuneJob", JOB)
    api.place()
    with pytest.raises(client.ApiException) as refused:
        api.patch(change)
    assert "cannot change once the job has been placed" in refused.value.body
    api.patch({"suspend": True})


def test_how_often_a_checkpoint_is_written_can_change_only_between_two_workers(api):
    api.create("finetunejobs", "FinetuneJob", JOB)
    api.place(slot="ns/decode-0")
    with pytest.raises(client.ApiException) as refused:
        api.patch({"checkpoint": {"everySteps": 5}})
    assert "set suspend to true first" in refused.value.body
    api.patch({"suspend": True})
    api.place(slot=None)
    assert api.patch({"checkpoint": {"everySteps": 5}})["spec"]["checkpoint"]["everySteps"] == 5


def test_what_orders_and_bounds_a_job_can_change_while_it_runs(api):
    api.create("finetunejobs", "FinetuneJob", JOB)
    api.place(slot="ns/decode-0")
    free = {
        "priorityClassName": "batch",
        "backoffLimit": 1,
        "activeDeadlineSeconds": 9,
        "ttlSecondsAfterFinished": 9,
        "suspend": True,
    }
    assert free.items() <= api.patch(free)["spec"].items()


def test_a_job_that_was_never_placed_can_be_changed(api):
    api.create("finetunejobs", "FinetuneJob", JOB)
    assert api.patch({"adapter": {"lora": {"rank": 8}}})["spec"]["adapter"]["lora"]["rank"] == 8


def test_kubectl_prints_the_columns_that_people_look_for(api, kube):
    api.create("finetunejobs", "FinetuneJob", JOB)
    wanted = {
        "finetunejobs": "Name Model State Step Loss Tokens/s ETA Slot Queue Age",
        "harvestslots": "Name Ready Node Model Objective TPOT-P99 Decode Finetune Lent Sharing "
        "Harvestable Job Age",
    }
    for plural, columns in wanted.items():
        table = kube.call_api(
            *kube.param_serialize(
                "GET",
                f"/apis/windrow.dev/v1alpha1/namespaces/{api.namespace}/{plural}",
                header_params={"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"},
                auth_settings=["BearerToken"],
            )
        )
        table.read()
        names = [column["name"] for column in json.loads(table.data)["columnDefinitions"]]
        assert " ".join(names) == columns


def test_short_names_and_the_category_work(api, kube):
    discovered = client.CustomObjectsApi(kube).get_api_resources("windrow.dev", "v1alpha1")
    kinds = {item.name: item for item in discovered.resources if "/" not in item.name}
    assert {name: item.short_names for name, item in kinds.items()} == {
        "finetunejobs": ["ftj"],
        "harvestpolicies": ["hp"],
        "harvestslots": ["hs"],
        "latencyprofiles": ["lp"],
    }
    assert all(item.categories == ["windrow"] for item in kinds.values())


def test_a_policy_that_names_no_mode_observes_and_one_from_before_goes_on_harvesting(kube, api):
    crds = client.ApiextensionsV1Api(kube)
    name = "harvestpolicies.windrow.dev"

    def default_to(mode):
        body = crds.read_custom_resource_definition(name).to_dict()
        schema = body["spec"]["versions"][0]["schema"]["open_apiv3_schema"]
        before = schema["properties"]["spec"]["properties"]["mode"]["default"]
        path = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/mode/default"
        patch = [{"op": "replace", "path": path, "value": mode}]
        crds.patch_custom_resource_definition(name, patch)
        return before

    def made_with(mode):
        name = f"probe-{mode}"
        made = api.create("harvestpolicies", "HarvestPolicy", POLICY, name=name)
        if made["spec"]["mode"] != mode:
            api.custom.delete_namespaced_custom_object(
                "windrow.dev", "v1alpha1", api.namespace, "harvestpolicies", name
            )
        return made["spec"]["mode"] == mode

    assert default_to("harvest") == "observe"
    try:
        wait_until(lambda: made_with("harvest"), "the definition of before is served")
    finally:
        default_to("observe")
    wait_until(lambda: made_with("observe"), "the definition of now is served")
    held = api.custom.get_namespaced_custom_object(
        "windrow.dev", "v1alpha1", api.namespace, "harvestpolicies", "probe-harvest"
    )
    assert held["spec"]["mode"] == "harvest"
