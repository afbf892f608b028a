"""Check which container of a pod decodes, with which engine and model, as real pods show it."""

from __future__ import annotations

import re

import pytest

from windrow.crd.harvestpolicy import SidecarSpec
from windrow_operator.command_line import option_of
from windrow_operator.decode_pods import (
    decoder_of,
    find_decoders,
    harvest_refusal,
    matching_rule,
    model_of,
    serving_container,
)
from windrow_operator.engine_evidence import engine_of
from windrow_operator.injection import PodNamespace, SidecarTemplate, inject
from windrow_operator.model import Refusal

TEMPLATE = SidecarTemplate("10.0.0.1:8443", "PEM")
DECODE = ["--disaggregation-mode", "decode"]
ROLE = {"rbg.workloads.x-k8s.io/role-name": "decode"}
DEFAULT = "kubectl.kubernetes.io/default-container"
GPU = {"limits": {"nvidia.com/gpu": "1"}}
SGLANG = ["python3", "-m", "sglang.launch_server"]


def container(name="main", image="registry.local/own:1", **more):
    return {"name": name, "image": image, **more}


def pod(*containers, labels=ROLE, **annotations):
    metadata = {"labels": labels, "annotations": annotations}
    return {"metadata": metadata, "spec": {"containers": list(containers)}}


def prepared(body):
    return inject(body, TEMPLATE, SidecarSpec(), PodNamespace({}))


# --- the engine -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "command", "image"),
    [
        ("vllm", ["python3", "-m", "dynamo.vllm"], "rt"),
        ("trtllm", ["python3", "-m", "dynamo.trtllm"], "tensorrtllm-runtime"),
        ("mocker", ["python3", "-m", "dynamo.mocker"], "sglang-runtime"),
        ("vllm", ["sh", "-c", "exec python3 -m vllm.entrypoints.openai.api_server"], "rt"),
        ("vllm", ["/usr/bin/tini", "--", "vllm", "serve", "chat"], "rt"),
        ("vllm", ["bash", "-ec", "export A=1\nvllm serve \\\n  --port 1"], "rt"),
        ("text-generation-inference", ["text-generation-launcher"], "rt"),
        ("vllm", ["bash", "/run.sh"], "vllm/vllm-openai:v0.9"),
        ("vllm", ["bash", "/run.sh"], "r.local:5000/vllm/server@sha256:00"),
    ],
)
def test_another_engine_is_left_alone_though_its_option_says_decode(engine, command, image):
    body = pod(container(image=image, command=command, args=DECODE), labels={})
    if "-c" in command or "-ec" in command:
        body["spec"]["containers"][0] |= {"command": [*command[:-1], f"{command[-1]} {DECODE[0]}"]}
        body["metadata"]["labels"] = ROLE
    with pytest.raises(Refusal, match=rf"with {re.escape(engine)}, which Windrow cannot drive"):
        prepared(body)


VLLM_ENV = [{"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "value": "1"}]


@pytest.mark.parametrize(
    ("engine", "shown"),
    [
        ("vllm", {"env": VLLM_ENV}),
        ("vllm", {"image": "ghcr.io/llm-d/llm-d-xpu:latest", "args": ["--port", "8000"]}),
        ("vllm", {"name": "vllm", "args": ["--model", "random"]}),
        ("trtllm", {"env": [{"name": "TRTLLM_ENABLE_PDL", "value": "1"}]}),
    ],
)
def test_an_engine_is_known_by_what_its_container_is_set_up_for(engine, shown):
    """A controller writes the command later, or the image has it."""
    named = container(**{"resources": GPU, **shown})
    with pytest.raises(Refusal, match=f"with {engine}, which Windrow cannot drive"):
        prepared(pod(named))
    assert engine_of({**named, "command": SGLANG, "image": "rt"}).name == "sglang"
    assert engine_of({**named, "image": "lmsysorg/sglang:v0.5.23"}).name == "sglang"


def test_variables_of_both_engines_are_those_of_sglang():
    both = container(env=[*VLLM_ENV, {"name": "SGLANG_GRPC_PORT", "value": "1"}])
    assert engine_of(both).name == "sglang"


def test_a_placeholder_decodes_nothing():
    for image, resources in (("registry.k8s.io/pause:3.9", {}), ("mirror/nginx:1.14.1", GPU)):
        with pytest.raises(Refusal, match="main decode nothing"):
            prepared(pod(container(image=image, resources=resources)))


@pytest.mark.parametrize("resource", ["gpu.intel.com/xe", "amd.com/gpu", "huawei.com/Ascend910"])
def test_a_gpu_of_another_maker_is_said(resource):
    other = container(command=SGLANG, args=[*DECODE, "--page-size", "64"])
    other["resources"] = {"limits": {resource: "1"}}
    assert f"container main has {resource}" in prepared(pod(other)).gpu.why
    assert resource in harvest_refusal(other)


@pytest.mark.parametrize(
    "command",
    [
        SGLANG,
        ["sglang", "serve"],
        ["python3", "-m", "dynamo.sglang"],
        ["python3", "/sgl-workspace/sglang/python/sglang/launch_server.py"],
        ["bash", "-c", "pip install vllm && exec python3 -m sglang.launch_server"],
        ["bash", "-c", "echo starting vllm\npython3 -m sglang.launch_server # not vllm"],
        ["python3", "-m", "sglang.launch_server", "--tokenizer", "vllm"],
        ["sh", "-c", 'eval "python3 -m sglang.launch_server ${MORE}"'],
    ],
)
def test_sglang_is_known_by_what_is_started(command):
    found = engine_of(container(command=command))
    assert (found.name, found.why, found.doubt) == ("sglang", "its command", "")


def test_evidence_against_evidence_is_refused_with_what_to_do():
    both = container(command=["sh", "-c", "python3 -m sglang.launch_server & vllm serve x"])
    with pytest.raises(Refusal, match=r"starts sglang and vllm"):
        prepared(pod(both))
    odd = container(image="vllm/vllm-openai:v1", command=[*SGLANG, *DECODE])
    with pytest.raises(Refusal, match=r"windrow.dev/inject: enabled") as caught:
        prepared(pod(odd))
    assert caught.value.reason == "EngineInDoubt"
    assert prepared(pod(odd, labels={"windrow.dev/inject": "enabled"})).decoders == ("main",)


def test_labels_that_say_decode_and_arguments_that_say_prefill_are_refused():
    body = pod(container(command=SGLANG, args=["--disaggregation-mode", "prefill"]))
    with pytest.raises(Refusal, match="container main says --disaggregation-mode prefill"):
        prepared(body)


# --- the container --------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(
    "first",
    [
        container("istio-proxy", "registry.local/proxyv2", args=["proxy", "sidecar"]),
        container("linkerd-proxy", "cr.l5d.io/linkerd/proxy"),
        container("routing-proxy", "ghcr.io/llm-d/llm-d-routing-sidecar:v0.4"),
        container("main", "own/sglang-runtime:1", command=["dynamo-sglang-smg-sidecar"]),
        container("scheduler", "lmsysorg/sglang-router:v0.2", command=["sh", "-c", "x --decode y"]),
    ],
)
def test_what_stands_first_before_the_engine_is_not_prepared(first, named):
    said = {DEFAULT: "engine"} if named else {}
    second = container("engine", "registry.local/sglang", command=["bash", "/scripts/decode.sh"])
    assert prepared(pod(first, second, **said)).decoders == ("engine",)


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        (container("b", command=SGLANG), "its command starts sglang"),
        (container("b", args=DECODE), "--disaggregation-mode decode"),
        (container("b", resources=GPU), "its GPU"),
        (container("b", "own/sglang"), "its image"),
        (container("b", resources={"claims": [{"name": "gpu"}]}), "its GPU"),
    ],
)
def test_one_of_two_unknown_containers_is_chosen_by_what_it_shows(engine, why):
    found = find_decoders(pod(container("a"), engine))
    assert ([each["name"] for each in found.containers], found.why) == (["b"], why)
    assert not found.doubt


def test_a_router_beside_decode_and_a_prefill_engine_beside_it_are_not_the_decoder():
    router = container("r", command=["python3", "-m", "sglang_router.launch_router", "--decode"])
    prefill = container("p", command=SGLANG, args=["--disaggregation-mode=prefill"])
    body = pod(router, prefill, container("d", command=SGLANG, args=DECODE))
    assert prepared(body).decoders == ("d",)


def test_containers_that_show_nothing_are_refused_until_one_is_named():
    both = container("a"), container("b")
    with pytest.raises(Refusal, match=r"which of containers a, b decodes.*default-container"):
        prepared(pod(*both))
    assert prepared(pod(*both, **{DEFAULT: "b"})).decoders == ("b",)


def test_a_proxy_alone_under_a_label_is_no_decoder_unless_it_is_named():
    proxy = container("web", "nginx:1.27")
    with pytest.raises(Refusal, match="web decode nothing"):
        prepared(pod(proxy))
    assert prepared(pod(proxy, **{DEFAULT: "web"})).decoders == ("web",)


def test_a_default_container_that_the_image_contradicts_is_refused():
    both = container("a"), container("b", "lmsysorg/sglang:v1", resources=GPU)
    with pytest.raises(Refusal, match=r"names container a .* shows container b"):
        prepared(pod(*both, **{DEFAULT: "a"}))


def test_the_evidence_is_said():
    body = pod(container("istio-proxy"), container("engine", "x/sglang:1"))
    assert prepared(body).evidence == (
        "the only container that can; engine sglang, by its image x/sglang:1"
    )


# --- values as the kubelet and the shell make them ------------------------------------------------


@pytest.mark.parametrize(
    ("words", "model"),
    [
        (["--model-path", "$(MODEL_PATH)"], "/mnt/models/chat"),
        (["--model-path=$(MODEL_PATH)"], "/mnt/models/chat"),
        (["sh", "-c", "x --model-path ${MODEL_PATH} --port 1"], "/mnt/models/chat"),
        (["sh", "-c", 'x --model-path "$MODEL_PATH"'], "/mnt/models/chat"),
        (["bash", "-lc", "MODEL=${ROOT}/chat\nx \\\n --model-path $MODEL"], "/mnt/models/chat"),
        (["bash", "-c", "x --model-path ${OTHER:-/mnt/models/chat}"], "/mnt/models/chat"),
        (["--model-path", "$(ROOT)/chat"], "/mnt/models/chat"),
        (["--model-path", "/a", "--model-path", "/b"], "/b"),
        (["--model-path", "$(SECRET)"], ""),
        (["sh", "-c", "x --model-path $(cat /model)"], ""),
        (["--model-path", "$$(MODEL_PATH)"], ""),
        (["--model-path", "/with space/chat"], "/with space/chat"),
        (["bash", "-c", 'A=(--port 1\n --model-path $ROOT/chat)\nx "${A[@]}"'], "/mnt/models/chat"),
        (["bash", "-c", "A=(-x)\nA+=(--model-path /b)\nx ${A[@]} -y"], "/b"),
        (["sh", "-c", 'A="--port 1 --model-path /b"\nx $A'], "/b"),
        (["sh", "-c", "x $ALL"], "/b"),
        (["sh", "-c", "sglang serve --model /b & vllm bench serve --model hub/name"], "/b"),
        (["sh", "-c", f"{' '.join(SGLANG)} --model /b & python -m sglang.bench --model c"], "/b"),
        (["sh", "-c", f"cd /mnt/models; {' '.join(SGLANG)} --model ./chat"], "/mnt/models/chat"),
        (["sh", "-c", f"cd $(pwd); {' '.join(SGLANG)} --model ./chat"], "./chat"),
        (["x", "--model-path", "./chat"], "/work/chat"),
        (["sh", "-c", 'eval "x --model-path ${MODEL_PATH} ${MORE}"'], "/mnt/models/chat"),
        (["sh", "-c", "A=/b; timeout 9 bash -c 'x --model-path $A'"], "/b"),
    ],
)
def test_a_models_path_is_that_of_its_variable(words, model):
    env = [
        {"name": "ROOT", "value": "/mnt/models"},
        {"name": "MODEL_PATH", "value": "$(ROOT)/chat"},
        {"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
        {"name": "ALL", "value": "--model-path /b --port 1"},
    ]
    assert model_of(container(command=words, env=env, workingDir="/work")) == model


@pytest.mark.parametrize(
    ("words", "model"),
    [
        (["sglang", "serve", "/models/m", "--port", "1"], "/models/m"),
        (["bash", "-c", "exec /usr/bin/sglang serve Qwen/Qwen3-0.6B --port 1"], "Qwen/Qwen3-0.6B"),
        (["sglang", "serve", "--model-path", "/m"], "/m"),
        (["sglang", "serve", "--port", "1"], ""),
    ],
)
def test_sglang_serve_names_its_model_by_place(words, model):
    assert model_of(container(command=words)) == model


def test_a_model_by_place_is_not_noted_as_missing():
    by_place = pod(container(command=["sglang", "serve", "/models/m", *DECODE]))
    without = pod(container(command=["sglang", "serve", *DECODE]))
    missing = "the command line names no model"
    assert not any(missing in note for note in prepared(by_place).notes)
    assert any(missing in note for note in prepared(without).notes)


def test_a_model_whose_value_the_spec_does_not_hold_is_told():
    body = pod(container(command=[*SGLANG, *DECODE, "--model-path", "$(MODEL_PATH)"]))
    (note,) = prepared(body).notes
    assert "the model is $(MODEL_PATH)" in note


@pytest.mark.parametrize(
    ("words", "env", "told"),
    [
        (["--config", "/c.yaml"], {}, ["options are in /c.yaml"]),
        (["--model-path", "~/chat"], {}, ["Write the path from the root"]),
        (["--model-path", "./chat"], {}, ["Write the path from the root"]),
        (["--model-path", "s3://bucket/chat"], {}, ["from a place that is not the Hub"]),
        (
            ["--model-path", "owner/chat"],
            {"SGLANG_USE_MODELSCOPE": "true"},
            ["from a place that is not the Hub"],
        ),
        (["--model-path", "/m", "--chat-template", "/t.jinja"], {}, ["--chat-template /t.jinja"]),
        (["--model-path", "/m", "--chat-template", "/m/chat_template.jinja"], {}, []),
        (["--model-path", "/check-points/m"], {}, ["since the path holds 'points'"]),
        (["--model-path", "/m", "--tool-call-parser", "deepseekv4"], {}, ["code of its own under"]),
        (["--model-path", "/m", "--tool-call-parser", "qwen25"], {}, []),
        (["--model-path", "/m", "--hf-chat-template-name", "rag"], {}, ["of the name rag"]),
        (
            ["--model-path", "/m", '--default-chat-template-kwargs={"enable_thinking": false}'],
            {},
            ['kwargs {"enable_thinking": false}'],
        ),
    ],
)
def test_what_the_sidecar_does_not_see_of_the_served_model_is_told(words, env, told):
    variables = [{"name": name, "value": value} for name, value in env.items()]
    notes = prepared(pod(container(command=[*SGLANG, *words], env=variables))).notes
    assert len(notes) == len(told)
    for note, part in zip(notes, told, strict=True):
        assert part in note


def test_what_a_file_of_options_may_say_is_not_refused():
    asked = container(command=[*SGLANG, "--config", "/c.yaml"])
    assert harvest_refusal(asked) == ""
    assert "--tp-size" in harvest_refusal(container(command=[*asked["command"], "--tp", "2"]))
    assert "--page-size" in harvest_refusal(container(command=SGLANG))


def test_an_engine_in_an_init_container_that_stays_is_refused_by_its_name():
    # So does Dynamo's sidecar for SGLang have it: the container itself decodes nothing.
    body = pod(container(command=["/usr/bin/worker"]))
    engine = container("engine", command=[*SGLANG, *DECODE], restartPolicy="Always")
    body["spec"]["initContainers"] = [engine]
    with pytest.raises(Refusal, match="runs in the init container engine"):
        prepared(body)
    body["spec"]["containers"].append(container("second", command=[*SGLANG, *DECODE]))
    assert prepared(body).decoders == ("second",)


def test_a_server_is_what_is_started_and_not_what_it_serves_or_balances():
    assert engine_of(container(command=["vllm", "serve", "/models/sglang"])).name == "vllm"
    assert not engine_of(container(command=["vllm", "serve", "/models/sglang"])).doubt
    balancer = container("lb", command=["python3", "-m", "sglang.srt.disaggregation.mini_lb"])
    body = pod(container(command=[*SGLANG, "--config", "/c.yaml"]), balancer)
    assert [each["name"] for each in find_decoders(body).containers] == ["main"]


def test_a_script_that_a_script_runs_is_read():
    line = f"{' '.join(SGLANG)} {' '.join(DECODE)}"
    asked = container(command=["/bin/bash", "-c"], args=[f'set -e\neval "{line} $MORE"'])
    assert matching_rule(pod(asked, labels={})) == "arguments"


def test_options_in_a_variable_are_those_of_the_command():
    line, options = "exec python3 -m sglang.launch_server $ARGS", " ".join(DECODE)
    asked = container(command=["sh", "-c", line], env=[{"name": "ARGS", "value": options}])
    assert matching_rule(pod(asked, labels={})) == "arguments"


def test_the_part_may_come_by_a_variable_and_a_script_of_both_parts_says_none():
    env = [{"name": "PART", "value": "decode"}]
    line = "python3 -m sglang.launch_server --disaggregation-mode ${PART}"
    by_variable = container(command=["sh", "-c", line], env=env)
    assert matching_rule(pod(by_variable, labels={})) == "arguments"
    script = f"if x; then {line.replace('${PART}', 'prefill')}; else {line}; fi"
    both = container(command=["sh", "-c", script], env=env)
    assert matching_rule(pod(both, labels={})) == ""


def test_the_container_of_a_prefill_pod_is_the_one_that_says_so():
    prefill = container("p", command=SGLANG, args=["--disaggregation-mode", "prefill"])
    body = pod(container("istio-proxy"), prefill, labels={})
    assert serving_container(body)["name"] == "p"
    assert option_of(serving_container(body), "--disaggregation-mode") == "prefill"


def test_null_is_a_field_that_was_left_out():
    engine = container(command=SGLANG, args=[*DECODE, "--model-path", "/m"])
    engine |= {"env": None, "volumeMounts": None, "resources": None, "envFrom": None}
    body = pod(engine) | {"metadata": {"labels": ROLE, "annotations": None}}
    body["spec"] |= {"volumes": None, "initContainers": None, "securityContext": None}
    done = prepared(body)
    assert {step["path"] for step in done.patch} == {
        "/metadata/labels",
        "/metadata/annotations",
        "/spec/volumes",
        "/spec/containers",
    }
    assert decoder_of(body)["name"] == "main"
