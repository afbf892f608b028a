"""`windrow inject` says what a pod would get, and why not where it gets nothing."""

from __future__ import annotations

import copy
import json

import pytest
import yaml
from decode_pods import DECODE_PODS, OTHER_ENGINES

import windrow_cli as cli

POLICY = {
    "apiVersion": "windrow.dev/v1alpha1",
    "kind": "HarvestPolicy",
    "metadata": {"name": "chat"},
    "spec": {"selector": {"matchLabels": {"app": "chat"}}, "objective": {"tpot": "40ms"}},
}


def asked(tmp_path, body, *arguments, policy=None):
    path = tmp_path / "pod.yaml"
    path.write_text(yaml.safe_dump(body))
    more = []
    if policy is not None:
        (tmp_path / "policy.yaml").write_text(yaml.safe_dump(policy))
        more = ["--policy", str(tmp_path / "policy.yaml")]
    return cli.run(["inject", "-f", str(path), *more, *arguments])


def test_it_prints_each_change_and_that_the_sidecar_comes_later(tmp_path, capsys):
    template = copy.deepcopy(DECODE_PODS["rbg"][0])
    container = template["spec"]["containers"][0]
    container["image"] = "lmsysorg/sglang:v0.5.23"
    container.setdefault("args", []).append("--page-size=64")
    body = {"kind": "StatefulSet", "spec": {"template": template}}
    assert asked(tmp_path, body) == 0
    said = capsys.readouterr().out
    assert "decodes by rule `rbg`, form attach" in said
    assert "/run/windrow" in said
    assert "attached later" in said


@pytest.mark.parametrize(
    ("body", "policy", "why"),
    [
        (OTHER_ENGINES["llm-d with vLLM"], None, "cannot drive"),
        (DECODE_PODS["rbg"][0], POLICY, "the policy does not select it"),
        ({"metadata": {}, "spec": {"containers": [{"name": "w"}]}}, None, "no rule"),
    ],
)
def test_it_says_why_a_pod_is_left_as_it_is(tmp_path, capsys, body, policy, why):
    assert asked(tmp_path, body, "--json", policy=policy) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["touched"] is False
    assert why in answer["why"]


def test_a_manifest_without_a_pod_ends_with_two(tmp_path, capsys):
    assert asked(tmp_path, {"kind": "Service", "spec": {}}) == cli.EXIT_USAGE
    assert "is a Service without a pod" in capsys.readouterr().err


def test_several_manifests_are_answered_pod_by_pod(tmp_path, capsys):
    path = tmp_path / "all.yaml"
    bodies = [{"kind": "Service", "spec": {}}, {"kind": "Pod", **DECODE_PODS["rbg"][0]}]
    bodies.append({"kind": "Deployment", "spec": {"template": OTHER_ENGINES["dynamo with vLLM"]}})
    path.write_text(yaml.safe_dump_all(bodies))
    # Its SGLang is older than the plugin was tested with.
    assert cli.run(["inject", "-f", str(path)]) == cli.EXIT_USAGE
    said = capsys.readouterr().out
    assert "not be harvested: SGLang" in said
    assert "=== Pod decode-\ndecodes by rule `rbg`" in said
    assert "container sglang, by" in said
    assert "=== Deployment\nleft as it is" in said


def test_a_server_that_the_plugin_would_refuse_ends_with_two_and_says_which_option(
    tmp_path, capsys
):
    command = ["python3", "-m", "sglang.launch_server", "--disaggregation-mode", "decode"]
    container = {
        "name": "decode",
        "image": "lmsysorg/sglang:v0.5.23",
        "command": command,
        "args": ["--page-size", "64", "--tp", "2"],
    }
    body = {"kind": "Pod", "metadata": {"name": "d"}, "spec": {"containers": [container]}}
    assert asked(tmp_path, body) == cli.EXIT_USAGE
    assert "not be harvested: --tp-size: 2 is not supported yet" in capsys.readouterr().out
    assert asked(tmp_path, body, "--json") == cli.EXIT_USAGE
    assert "--tp-size" in json.loads(capsys.readouterr().out)["refused"]


def test_arguments_that_the_built_in_engine_would_refuse_are_refused(tmp_path, capsys):
    container = {
        "name": "decode",
        "image": "registry.example.com/windrow/sidecar:1",
        "command": ["python", "-m", "windrow_sidecar.engines.builtin"],
        "args": ["--model-path", "$(MODEL)", "--disaggregation-mode", "decode"],
    }
    body = {"kind": "Pod", "metadata": {"name": "d"}, "spec": {"containers": [container]}}
    assert asked(tmp_path, body) == 0
    capsys.readouterr()
    container["args"] += ["--watchdog-timeout", "60"]
    assert asked(tmp_path, body) == cli.EXIT_USAGE
    assert "decode would not start: --watchdog-timeout: one rank" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "policy", "said"),
    [
        ({"kind": "LeaderWorkerSet", "spec": {"leaderWorkerTemplate": 3}}, None, "dry-run=server"),
        (
            DECODE_PODS["rbg"][0],
            {**POLICY, "spec": {**POLICY["spec"], "policy": "nosuch"}},
            "--policy: spec.policy: 'nosuch' is not supported. Write one of",
        ),
    ],
)
def test_what_cannot_be_looked_at_ends_with_two_and_says_what_to_do(
    tmp_path, capsys, body, policy, said
):
    assert asked(tmp_path, body, policy=policy) == cli.EXIT_USAGE
    assert said in capsys.readouterr().err


def test_a_policy_that_is_no_text_ends_with_two(tmp_path, capsys):
    (tmp_path / "policy.yaml").write_bytes(b"\x00\xff")
    assert asked(tmp_path, POLICY, "--policy", str(tmp_path / "policy.yaml")) == cli.EXIT_USAGE
    assert "policy.yaml cannot be read" in capsys.readouterr().err


def test_a_policy_without_a_name_is_previewed(tmp_path, capsys):
    nameless = {key: value for key, value in POLICY.items() if key != "metadata"}
    assert asked(tmp_path, DECODE_PODS["rbg"][0], policy=nameless) == 0
    assert "the policy does not select it" in capsys.readouterr().out
