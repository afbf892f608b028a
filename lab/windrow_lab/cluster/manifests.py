"""Objects that the demo applies: decode pods, a policy, a job. Plain, and built purely."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from windrow.crd import (
    API_VERSION,
    FINETUNE_JOB,
    HARVEST_POLICY,
    LABEL_INJECT,
    format_duration,
)
from windrow_lab.machine import sglang
from windrow_lab.machine.devices import Device
from windrow_lab.node.launch import ANNOTATION_CPUSET, ANNOTATION_NICE

Json = dict[str, Any]

NAMESPACE = "default"
APP = "chat"
DECODE_CONTAINER = "decode"
# Tokens of one piece of a stream. Writing each token out alone costs the front process, which
# shares the device's cores, as much as a decode step; TPOT needs the first and the last moment.
STREAM_INTERVAL = 32


@dataclass(frozen=True)
class DecodePod:
    """One decode pod.

    Attributes:
        inject: False keeps the webhook away: a plain decode server, for comparisons.
        environment: for the decode container.
        arena_bytes: memory for KV and for what is lent; 0: the engine's default.
        sglang: the environment whose SGLang decodes; None: the built-in engine does.
        asks: to be prepared for a sidecar by its label, before a policy selects it.
        ranks: over which the built-in engine cuts the model.
        finetune: where the built-in engine runs jobs (`--finetune`).
        app: label by which policies select it.
    """

    name: str
    port: int
    device: Device
    model: Path
    inject: bool = True
    environment: tuple[tuple[str, str], ...] = ()
    arena_bytes: int = 0
    sglang: Path | None = None
    asks: bool = False
    ranks: int = 1
    finetune: str = "process"
    app: str = APP


def decode_pod(decode: DecodePod) -> Json:
    """Return a decode pod with the labels and arguments of a PD-disaggregated SGLang deployment."""
    annotations = {
        ANNOTATION_CPUSET: decode.device.cpuset,
        ANNOTATION_NICE + DECODE_CONTAINER: "0",
    }
    labels = {"app": decode.app, "rbg.workloads.x-k8s.io/role-name": "decode"}
    if not decode.inject:
        labels[LABEL_INJECT] = "disabled"
    elif decode.asks:
        labels[LABEL_INJECT] = "enabled"
    variables = [*decode.environment]
    if decode.sglang is not None:
        variables += sglang.variables(decode.sglang).items()
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": decode.name,
            "namespace": NAMESPACE,
            "labels": labels,
            "annotations": annotations,
        },
        "spec": {
            "terminationGracePeriodSeconds": 5,
            "containers": [
                {
                    "name": DECODE_CONTAINER,
                    "image": "windrow/builtin" if decode.sglang is None else "lmsysorg/sglang",
                    "command": ["python", "-m", "windrow_sidecar.engines.builtin"]
                    if decode.sglang is None
                    else sglang.COMMAND,
                    "args": [
                        f"--model-path={decode.model}",
                        "--disaggregation-mode=decode",
                        "--disaggregation-transfer-backend=fake",
                        "--host=127.0.0.1",
                        f"--port={decode.port}",
                        f"--stream-interval={STREAM_INTERVAL}",
                        *([f"--arena-bytes={decode.arena_bytes}"] if decode.arena_bytes else []),
                        *([f"--tp-size={decode.ranks}"] if decode.ranks > 1 else []),
                        *(
                            [f"--finetune={decode.finetune}"]
                            if decode.finetune != "process"
                            else []
                        ),
                        *([] if decode.sglang is None else sglang.ON_CORES),
                    ],
                    "env": [{"name": n, "value": v} for n, v in variables],
                    "ports": [{"containerPort": decode.port}],
                    "readinessProbe": {
                        "httpGet": {"path": "/health", "port": decode.port},
                        "periodSeconds": 1,
                        "timeoutSeconds": 2,
                    },
                }
            ],
        },
    }


def harvest_policy(
    name: str,
    objective_ms: float,
    policy: str,
    mode: str = "harvest",
    max_sm_percent: int = 100,
    app: str = APP,
) -> Json:
    """Return a policy over the decode pods of a label."""
    tpot = format_duration(timedelta(milliseconds=objective_ms))
    return {
        "apiVersion": API_VERSION,
        "kind": HARVEST_POLICY.kind,
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "selector": {"matchLabels": {"app": app}},
            "objective": {"tpot": tpot, "percentile": 99, "scope": "perStep"},
            "mode": mode,
            "policy": policy,
            "limits": {"maxSmPercent": max_sm_percent},
        },
    }


def finetune_job(
    example: Json, *, model: Path, rows: Path, destination: Path, steps: int, name: str = ""
) -> Json:
    """Return the example's job with this run's paths and length."""
    job = copy.deepcopy(example)
    job["metadata"] = {"name": name or job["metadata"]["name"], "namespace": NAMESPACE}
    spec = job["spec"]
    spec["model"]["name"] = str(model)
    spec["dataset"]["source"] = str(rows)
    spec["output"]["destination"] = str(destination)
    spec["training"].pop("epochs", None)
    spec["training"]["maxSteps"] = steps
    assert (job["apiVersion"], job["kind"]) == (API_VERSION, FINETUNE_JOB.kind)
    return job


def steps_through(
    *, seconds: float, dedicated_tokens_per_second: float, tokens_per_step: float
) -> int:
    """Return how many optimizer steps keep a worker busy through a load of `seconds`, not longer.

    Its figures shall hold for all of the load, bursts included, so it gets what only `BEST_SHARE`
    of its dedicated rate would end within the load. What is left is done on the idle device
    afterwards, in less than the time that the load took.
    """
    budget_s = max(5.0, seconds - START_S)
    steps = BEST_SHARE * dedicated_tokens_per_second * budget_s / tokens_per_step
    return max(FEWEST_STEPS, int(steps))


START_S = 5.0  # until a worker's first step: libraries, model, the base model's loss
BEST_SHARE = 0.9
FEWEST_STEPS = 4
