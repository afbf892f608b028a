"""Decode pods of each stack, in the shape in which its own controllers make them."""

from __future__ import annotations

SGLANG = {
    "name": "sglang",
    "image": "lmsysorg/sglang:v0.5.17",
    "command": ["python3", "-m", "sglang.launch_server"],
    "args": ["--model-path", "/models/chat", "--disaggregation-mode", "decode", "--port", "30000"],
    "resources": {"limits": {"nvidia.com/gpu": "1"}},
    "volumeMounts": [
        {"name": "models", "mountPath": "/models", "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ],
}
VOLUMES = [
    {"name": "models", "persistentVolumeClaim": {"claimName": "models"}},
    {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}},
]


def _pod(labels, *containers, inits=()):
    spec = {"containers": list(containers), "volumes": VOLUMES}
    if inits:
        spec["initContainers"] = list(inits)
    return {"metadata": {"generateName": "decode-", "labels": labels}, "spec": spec}


def _shell(command, **more):
    return {**SGLANG, "command": ["sh", "-c", command], "args": None, **more}


# stack -> (the pod, the rule that finds it)
DECODE_PODS = {
    "rbg": (
        _pod(
            {
                "rolebasedgroup.workloads.x-k8s.io/name": "chat",
                "rbg.workloads.x-k8s.io/group-name": "chat",
                "rbg.workloads.x-k8s.io/role-name": "decode",
                "app.kubernetes.io/managed-by": "RoleBasedGroup",
            },
            SGLANG,
        ),
        "rbg",
    ),
    "lws": (
        _pod(
            {
                "leaderworkerset.sigs.k8s.io/name": "chat-decode",
                "leaderworkerset.sigs.k8s.io/worker-index": "0",
                "disaggregatedset.x-k8s.io/role": "decode",
            },
            {**SGLANG, "env": [{"name": "LWS_LEADER_ADDRESS", "value": "chat-0"}]},
        ),
        "lws-disaggregatedset",
    ),
    "ome": (
        _pod(
            {"component": "decoder", "ome.io/inferenceservice": "chat"},
            {**SGLANG, "name": "ome-container"},
            inits=[{"name": "model-check", "image": "ome-agent"}],
        ),
        "ome",
    ),
    "dynamo": (
        _pod(
            {
                "nvidia.com/dynamo-component-type": "worker",
                "nvidia.com/dynamo-sub-component-type": "decode",
                "nvidia.com/dynamo-graph-deployment-name": "chat",
            },
            {
                **SGLANG,
                "name": "main",
                "image": "nvcr.io/nvidia/ai-dynamo/sglang-runtime:0.9",
                "command": ["python3", "-m", "dynamo.sglang"],
            },
        ),
        "dynamo-sub-component",
    ),
    "llm-d": (
        _pod(
            {"llm-d.ai/role": "decode", "llm-d.ai/inferenceServing": "true"},
            {**SGLANG, "name": "modelserver"},
            inits=[{"name": "routing-proxy", "image": "sidecar", "restartPolicy": "Always"}],
        ),
        "llm-d",
    ),
    "kserve": (
        _pod(
            {
                "app.kubernetes.io/part-of": "llminferenceservice",
                "kserve.io/component": "workload",
                "llm-d.ai/role": "decode",
            },
            _shell(
                "exec python3 -m sglang.launch_server --disaggregation-mode=decode", name="main"
            ),
        ),
        "llm-d",
    ),
    "plain": (
        _pod({"app": "chat"}, {"name": "proxy", "image": "envoy"}, SGLANG),
        "arguments",
    ),
    "plain shell": (
        _pod({"app": "chat"}, _shell("sglang serve --disaggregation-mode decode --tp 1")),
        "arguments",
    ),
}

# Pods that their stack calls decoders, with an engine that Windrow cannot drive.
OTHER_ENGINES = {
    "llm-d with vLLM": _pod(
        {"llm-d.ai/role": "decode"},
        {"name": "vllm", "image": "ghcr.io/llm-d/llm-d-cuda:v0.4", "command": ["vllm", "serve"]},
    ),
    "dynamo with vLLM": _pod(
        {"nvidia.com/dynamo-sub-component-type": "decode"},
        {"name": "main", "image": "runtime:1", "command": ["python3", "-m", "dynamo.vllm"]},
    ),
    "dynamo with TensorRT-LLM": _pod(
        {"nvidia.com/dynamo-sub-component-type": "decode"},
        {"name": "main", "image": "nvcr.io/nvidia/ai-dynamo/tensorrtllm-runtime:0.9", "args": []},
    ),
    "an image's own entry point": _pod(
        {"rbg.workloads.x-k8s.io/role-name": "decode"},
        {"name": "main", "image": "vllm/vllm-openai:latest", "args": ["--model", "chat"]},
    ),
}
