"""Specs as users write them: what is taken, and what a wrong one is told."""

from __future__ import annotations

import copy
from datetime import UTC, datetime, timedelta

import pytest

from windrow.crd import (
    FinetuneJobSpec,
    HarvestHours,
    LabelSelector,
    SoloModel,
    format_duration,
    parse_duration,
    parse_job_spec,
    parse_policy_spec,
    parse_quantity,
)
from windrow.errors import UserError

JOB = {
    "model": {"name": "/models/tiny"},
    "dataset": {"source": "/data/rows.jsonl", "format": "chat", "evalFraction": 0.02},
    "adapter": {
        "type": "lora",
        "lora": {"rank": 8, "alpha": 16, "targetModules": "q_proj, v_proj"},
    },
    "training": {"maxSteps": 100, "learningRate": "2e-4", "warmupRatio": "0.03"},
    "output": {"destination": "/out/tone"},
}
POLICY = {
    "selector": {"matchLabels": {"app": "chat"}},
    "objective": {"tpot": "40ms", "percentile": 99, "scope": "perStep"},
    "limits": {"maxSmPercent": 60, "hours": ["20:00-08:00 Europe/Berlin"]},
}


def volume(name, path, **source):
    """A volume of a policy, on the node's disk unless `source` says otherwise."""
    return {"name": name, "mountPath": path, **(source or {"hostPath": {"path": "/srv"}})}


def changed(base: dict, path: str, value: object) -> dict:
    """A copy of `base` in which the field at the dotted `path` has `value` (None: is gone)."""
    result = copy.deepcopy(base)
    node = result
    *parents, leaf = path.split(".")
    for part in parents:
        node = node.setdefault(part, {})
    if value is None:
        node.pop(leaf, None)
    else:
        node[leaf] = value
    return result


def test_a_job_is_read_with_its_defaults():
    spec = parse_job_spec(JOB)
    assert spec.training.learning_rate == pytest.approx(2e-4)
    assert spec.training.batch_size == 16
    assert spec.backoff_limit == 6
    assert spec.adapter.settings.modules() == ["q_proj", "v_proj"]


def test_a_learning_rate_may_be_a_number():
    assert (
        parse_job_spec(changed(JOB, "training.learningRate", 1e-3)).training.learning_rate == 1e-3
    )


@pytest.mark.parametrize("field", ["targetModules", "excludeModules", "modulesToSave"])
def test_names_may_be_a_list_or_a_text_with_commas(field):
    told = [
        parse_job_spec(changed(JOB, f"adapter.lora.{field}", value)).adapter
        for value in (["q_proj", "v_proj"], "q_proj,v_proj", " q_proj , v_proj ")
    ]
    assert told[0] == told[1] == told[2]
    for wrong in ([], ["q_proj", ""], ["q_proj,v_proj"], ["q_proj", 1], 1, {"q": 1}):
        with pytest.raises(UserError) as caught:
            parse_job_spec(changed(JOB, f"adapter.lora.{field}", wrong))
        assert caught.value.field == f"spec.adapter.lora.{field}"


def test_alpha_may_be_a_fraction():
    lora = {"rank": 8, "alpha": 0.5, "alphaPattern": {"q_proj": 1.5}}
    settings = parse_job_spec(changed(JOB, "adapter.lora", lora)).adapter.settings
    assert (settings.alpha, settings.alpha_pattern) == (0.5, {"q_proj": 1.5})


@pytest.mark.parametrize(
    "text", ["1_0", " 1", "1 ", "+1", ".5", "inf", "0x1", "1e400", "", "1e100"]
)
def test_a_text_that_the_api_server_refuses_as_a_number_is_refused_here(text):
    with pytest.raises(UserError, match=r"learningRate: .* is not a number above zero"):
        parse_job_spec(changed(JOB, "training.learningRate", text))


def test_a_spec_that_was_read_can_be_written_and_read_again():
    spec = parse_job_spec(JOB)
    assert FinetuneJobSpec.model_validate(spec.model_dump(by_alias=True, exclude_none=True)) == spec


@pytest.mark.parametrize(
    ("path", "value", "field", "words"),
    [
        ("training.learningRate", "NaN", "spec.training.learningRate", "NaN"),
        ("training.learningRate", float("nan"), "spec.training.learningRate", "nan"),
        ("training.learningRate", "-1e-4", "spec.training.learningRate", "'-1e-4' is not a"),
        ("training.learningRate", 0, "spec.training.learningRate", "0"),
        ("training.learningRate", True, "spec.training.learningRate", "True"),
        ("training.warmupRatio", "1.5", "spec.training.warmupRatio", "1.5"),
        ("training.maxSteps", 0, "spec.training.maxSteps", "0"),
        ("training.maxSteps", "ten", "spec.training.maxSteps", "ten"),
        ("training.epochs", 1, "spec.training", "exactly one of epochs and maxSteps"),
        ("training.maxSteps", None, "spec.training", "neither is set"),
        ("training.lerningRate", "1e-4", "spec.training.lerningRate", "Did you mean learningRate?"),
        # As Python and other trainers write it; the API server drops what it does not know.
        ("training.learning_rate", "1e-4", "spec.training.learning_rate", "mean learningRate?"),
        ("adapter.lora.rank", 0, "spec.adapter.lora.rank", "0"),
        ("adapter.lora.dropout", float("nan"), "spec.adapter.lora.dropout", "nan"),
        ("adapter.type", "dora", "spec.adapter.type", "useDora"),
        ("adapter.type", "bottleneck", "spec.adapter.type", "not in peft"),
        ("adapter.type", "adalora", "spec.adapter.type", "'lora'"),
        ("adapter.type", "ia3", "spec.adapter", "lora is set, but type is ia3"),
        ("adapter.lora.targetPattern", "(", "spec.adapter.lora.targetPattern", "expression"),
        ("adapter.lora.targetPattern", "q.*", "spec.adapter.lora", "both set"),
        ("adapter.lora.targetModules", "q_proj,,", "spec.adapter.lora.targetModules", "empty"),
        ("adapter.lora.rankPattern", {"(q": 2}, "spec.adapter.lora.rankPattern", "expression"),
        ("adapter.lora.alphaPattern", {"(q": 2}, "spec.adapter.lora.alphaPattern", "expression"),
        ("adapter.lora.rankPattern", {"q": 0}, "spec.adapter.lora.rankPattern.q", "0"),
        ("dataset.source", "", "spec.dataset.source", "is empty"),
        ("dataset.source", "  ", "spec.dataset.source", "is empty"),
        ("dataset.source", "/data/rows ", "spec.dataset.source", "ends with a blank"),
        ("dataset.source", "/data/ro\nws", "spec.dataset.source", "control character"),
        ("dataset.split", " train", "spec.dataset.split", "begins or ends with a blank"),
        ("dataset.source", "~/rows.jsonl", "spec.dataset.source", "a shell"),
        ("output.destination", "~/out", "spec.output.destination", "a shell"),
        ("dataset.source", "ftp://team/rows.jsonl", "spec.dataset.source", "ftp://"),
        ("dataset.secretRef", {"name": "s3"}, "spec.dataset", "takes no credentials"),
        ("model.revision", "../../../run/windrow/off", "spec.model.revision", "not a revision"),
        ("model.revision", "/run/windrow/off", "spec.model.revision", "not a revision"),
        ("model.secretRef", {"name": "hub"}, "spec.model", "is a path"),
        ("dataset.secretRef", {"name": "../../x/secrets/y"}, "spec.dataset.secretRef.name", "../"),
        ("dataset.secretRef", {"name": "x?y"}, "spec.dataset.secretRef.name", "x?y"),
        ("output.secretRef", {"name": "x/y"}, "spec.output.secretRef.name", "x/y"),
        ("output.secretRef", {"name": "%2e%2e"}, "spec.output.secretRef.name", "%2e"),
        ("dataset.badRows", "drop", "spec.dataset.badRows", "'fail' or 'skip'"),
        ("output.destination", "s3://team", "spec.output.destination", "no folder of a bucket"),
        ("output.destination", "s3:///out", "spec.output.destination", "no folder of a bucket"),
        ("output.destination", "s3://team/a/../b", "spec.output.destination", "climbs by .."),
        ("output.destination", "gs://team/out", "spec.output.destination", "gs://"),
        ("output.secretRef", {"name": "s3"}, "spec.output", "is a path"),
        ("output.destination", "/", "spec.output.destination", "names no directory"),
        ("output.destination", "file:///", "spec.output.destination", "names no directory"),
        ("output.destination", "//./", "spec.output.destination", "names no directory"),
        ("output.destination", ".", "spec.output.destination", "names no directory"),
        ("output.destination", "/out/../etc", "spec.output.destination", "climbs by .."),
        ("output.destination", "../out", "spec.output.destination", "climbs by .."),
        ("output.destination", "file:///o/%2e%2e/x", "spec.output.destination", "climbs by .."),
        ("output.destination", "file:/..", "spec.output.destination", "climbs by .."),
        ("output.destination", "file://nas/out", "spec.output.destination", "another machine, nas"),
        ("output.destination", "file:///out/..", "spec.output.destination", "climbs by .."),
        ("training.optimizer", {"beta1": "1"}, "spec.training.optimizer.beta1", "below 1"),
        ("training.earlyStop", {"patience": 2}, "spec.training", "evalEverySteps"),
        ("training.microBatchSize", 0, "spec.training.microBatchSize", "0"),
        ("training.microBatchSize", 17, "spec.training", "above batchSize 16"),
        ("dataset.source", None, "spec.dataset.source", "missing"),
        ("output.deploy", {"enabled": "perhaps"}, "spec.output.deploy.enabled", "perhaps"),
        ("workers", {"min": 2}, "spec.workers.min", "2"),
        ("colour", "blue", "spec.colour", "Known here: model, dataset"),
        ("model", "tiny", "spec.model", "tiny"),
    ],
)
def test_a_wrong_job_names_field_value_and_remedy(path, value, field, words):
    with pytest.raises(UserError) as caught:
        parse_job_spec(changed(JOB, path, value))
    assert caught.value.field == field
    assert words in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("objective.tpot", "40", "spec.objective.tpot"),
        ("objective.tpot", "-4ms", "spec.objective.tpot"),
        ("objective.tpot", "0ms", "spec.objective.tpot"),
        ("objective.tpot", "99us", "spec.objective.tpot"),
        ("objective.tpot", "2h", "spec.objective.tpot"),
        ("objective.tpot", "999999999999999h", "spec.objective.tpot"),
        ("objective.ttft", "11m", "spec.objective.ttft"),
        ("objective.ttft", "0s", "spec.objective.ttft"),
        ("objective.deferralBound", "2m", "spec.objective.deferralBound"),
        ("objective.deferralBound", "0s", "spec.objective.deferralBound"),
        ("objective.percentile", 100, "spec.objective.percentile"),
        ("objective.percentile", 0.001, "spec.objective.percentile"),
        ("selector", {"matchLabels": {"-app": "chat"}}, "spec.selector.matchLabels"),
        ("selector", {"matchLabels": {"a/b/c": "chat"}}, "spec.selector.matchLabels"),
        ("selector", {"matchLabels": {"app": "no spaces"}}, "spec.selector.matchLabels.app"),
        ("selector", {"matchLabels": {"app": "a" * 64}}, "spec.selector.matchLabels.app"),
        (
            "selector",
            {"matchExpressions": [{"key": "app", "operator": "In"}]},
            "spec.selector.matchExpressions[0]",
        ),
        (
            "selector",
            {"matchExpressions": [{"key": "app", "operator": "Exists", "values": ["a"]}]},
            "spec.selector.matchExpressions[0]",
        ),
        ("mode", "on", "spec.mode"),
        ("sharing", "space", "spec.sharing"),
        ("policy", "magic", "spec.policy"),
        ("limits.maxSmPercent", 101, "spec.limits.maxSmPercent"),
        ("limits.hostMemory", "much", "spec.limits.hostMemory"),
        ("limits.hostMemory", "64Gi", "spec.limits.hostMemory"),
        ("limits.hours", ["08:00-08:00"], "spec.limits.hours[0]"),
        ("limits.hours", ["08:00-09:00 Europe"], "spec.limits.hours[0]"),
        ("limits.hours", ["08:00-09:00 ../UTC"], "spec.limits.hours[0]"),
        ("limits.hours", ["Mo 20:00-08:00"], "spec.limits.hours[0]"),
        ("limits.hours", ["25:00-08:00"], "spec.limits.hours[0]"),
        ("limits.hours", ["20:00-08:00 Europe/Atlantis"], "spec.limits.hours[0]"),
        ("sidecar", {"gpuAccess": "wrap"}, "spec.sidecar.gpuAccess"),
        ("sidecar", {"gpuAccess": "dra"}, "spec.sidecar"),
        ("sidecar", {"adapterCache": {"volume": "a"}}, "spec.sidecar"),
        (
            "sidecar",
            {"volumes": [volume("a", "/a") | {"readOnly": True}], "adapterCache": {"volume": "a"}},
            "spec.sidecar",
        ),
        ("sidecar", {"volumes": [{"name": "a", "mountPath": "/a"}]}, "spec.sidecar.volumes[0]"),
        ("sidecar", {"volumes": [volume("a", "/a"), volume("b", "/a")]}, "spec.sidecar.volumes"),
        ("sidecar", {"volumes": [volume("a", "/a"), volume("a", "/b")]}, "spec.sidecar.volumes"),
        *(
            ("sidecar", {"volumes": [volume("a", path)]}, "spec.sidecar.volumes[0].mountPath")
            for path in (
                *("data", "", "/", "/data/", "/data//rows", "/data/../etc", "/data/.", "/a:b"),
                *("/run", "/run/windrow", "/run/windrow/x", "/var/run/secrets", "/var", "/proc/1"),
            )
        ),
        (
            "sidecar",
            {"volumes": [volume("a", "/a", hostPath={"path": "srv"})]},
            "spec.sidecar.volumes[0].hostPath.path",
        ),
        (
            "sidecar",
            {
                "volumes": [
                    {
                        "name": "a",
                        "mountPath": "/a",
                        "persistentVolumeClaim": {"claimName": "No_Claim"},
                    }
                ]
            },
            "spec.sidecar.volumes[0].persistentVolumeClaim.claimName",
        ),
    ],
)
def test_a_wrong_policy_names_the_field(path, value, field):
    with pytest.raises(UserError) as caught:
        parse_policy_spec(changed(POLICY, path, value))
    assert caught.value.field == field


def test_a_policy_is_read_in_units():
    spec = parse_policy_spec(POLICY)
    assert spec.objective.tpot == timedelta(milliseconds=40)


def test_a_policy_is_open_only_in_its_hours():
    spec = parse_policy_spec(POLICY)
    assert spec.open_at(datetime(2025, 1, 1, 22, 0, tzinfo=UTC))
    assert not spec.open_at(datetime(2025, 1, 1, 12, 0, tzinfo=UTC))


@pytest.mark.parametrize(
    ("hours", "day", "clock", "is_open"),  # January 2025: the 6th is a Monday
    [
        ("Mon-Fri 20:00-08:00", 6, 21, True),
        ("Mon-Fri 20:00-08:00", 6, 7, False),  # of Sunday's night, which has none
        ("Mon-Fri 20:00-08:00", 11, 7, True),  # Saturday morning is of Friday's night
        ("Mon-Fri 20:00-08:00", 11, 21, False),
        ("Sat,Sun 00:00-24:00", 11, 0, True),
        ("Sat,Sun 00:00-24:00", 12, 23, True),
        ("Sat,Sun 00:00-24:00", 13, 0, False),
        ("Sat-Mon 10:00-12:00", 13, 11, True),
        ("Sat-Mon 10:00-12:00", 14, 11, False),
        ("Mon,Wed-Fri 10:00-12:00", 7, 11, False),
        ("Mon,Wed-Fri 10:00-12:00", 9, 11, True),
        ("Mon 00:00-06:00 Asia/Tokyo", 5, 16, True),  # Monday, 1 o'clock, in Tokyo
        ("Mon 00:00-06:00 Asia/Tokyo", 6, 16, False),
    ],
)
def test_hours_of_some_days_belong_to_the_day_on_which_they_begin(hours, day, clock, is_open):
    moment = datetime(2025, 1, day, clock, 0, tzinfo=UTC)
    assert HarvestHours(hours).contains(moment) is is_open


@pytest.mark.parametrize(
    "text",
    [
        "mon 10:00-12:00",
        "Mon-Wed-Fri 10:00-12:00",
        "Mon, 10:00-11:00",
        "Mon10:00-12:00",
        "24:00-08:00",
        "Mon 08:00-08:00",
    ],
)
def test_hours_that_are_not_understood_are_refused(text):
    with pytest.raises(ValueError, match="interval"):
        HarvestHours(text)


def test_hours_count_their_begin_and_not_their_end():
    hours = HarvestHours("08:00-20:00")
    assert hours.contains(datetime(2025, 1, 1, 8, 0, tzinfo=UTC))
    assert not hours.contains(datetime(2025, 1, 1, 20, 0, tzinfo=UTC))


@pytest.mark.parametrize(
    ("text", "seconds"), [("40ms", 0.04), ("1.5s", 1.5), ("1h30m", 5400), ("250us", 250e-6)]
)
def test_durations_are_read_as_kubernetes_writes_them(text, seconds):
    assert parse_duration(text).total_seconds() == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["40ms", "1.5s", "250us", "18.25ms"])
def test_a_duration_is_written_as_it_was_read(text):
    assert format_duration(parse_duration(text)) == text


@pytest.mark.parametrize(("text", "n_bytes"), [("512Mi", 2**29), ("1k", 1000), ("7", 7)])
def test_quantities_are_bytes(text, n_bytes):
    assert parse_quantity(text) == n_bytes


def test_a_selector_wants_all_its_labels_and_expressions():
    selector = LabelSelector.model_validate(
        {
            "matchLabels": {"app": "chat"},
            "matchExpressions": [
                {"key": "tier", "operator": "In", "values": ["a", "b"]},
                {"key": "canary", "operator": "DoesNotExist"},
            ],
        }
    )
    assert selector.matches({"app": "chat", "tier": "a"})
    assert not selector.matches({"app": "chat", "tier": "c"})
    assert not selector.matches({"app": "chat", "tier": "a", "canary": ""})
    assert LabelSelector().matches({})


def test_a_solo_model_counts_a_small_batch_as_four():
    model = SoloModel.model_validate({"units": 2, "c0Us": 100, "b0Us": 10, "k0NsPerToken": 500})
    assert model.predict_us(1, 2000) == model.predict_us(4, 2000) == 100 + 40 + 1000


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ({}, "auto"),
        ({"sidecar": {"mps": True}}, "auto"),
        ({"sidecar": {"mps": False}}, "temporal"),
        ({"sharing": "spatial"}, "spatial"),
        ({"sharing": "spatial", "sidecar": {"mps": True}}, "spatial"),
        ({"sharing": "temporal", "sidecar": {"mps": True}}, "temporal"),
        ({"sharing": "temporal", "sidecar": {"mps": False}}, "temporal"),
    ],
)
def test_sharing_takes_the_place_of_the_sidecars_mps(written, wanted):
    assert parse_policy_spec({**POLICY, **written}).wanted_sharing == wanted


@pytest.mark.parametrize("sharing", ["auto", "spatial"])
def test_a_policy_that_says_two_things_of_sharing_is_refused(sharing):
    with pytest.raises(UserError, match=r"sidecar.mps: false means sharing: temporal"):
        parse_policy_spec({**POLICY, "sharing": sharing, "sidecar": {"mps": False}})
