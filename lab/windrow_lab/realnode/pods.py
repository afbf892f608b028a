"""Pods on a real node of this machine, with its own programs, in an all but empty image.

An image with torch would be gigabytes to build and import for each run; these pods mount `/usr`,
the Python and the checkout of this process, as directories of the node.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from windrow.crd import API_VERSION, FINETUNE_JOB, HARVEST_POLICY
from windrow.errors import UserError
from windrow.rundir import ENV_LOG_DIR
from windrow_lab.machine.ports import LOOPBACK
from windrow_lab.node.launch import ANNOTATION_CPUSET
from windrow_lab.realnode.node import NodeInfo, write_image

Json = dict[str, Any]

IMAGE = "docker.io/windrow/decode:1"
PORT = 8001
APP = {"app": "chat"}
CHECKOUT = Path(__file__).resolve().parents[3]
MODEL = CHECKOUT / "models" / "windrow-tiny"
ROWS = CHECKOUT / "examples" / "support-tone" / "train.jsonl"
# What the chart runs as the sidecar: the same program by this machine's Python.
SIDECAR_COMMAND = f"{sys.executable} -m windrow_sidecar.agent"


def import_image(node: NodeInfo, archive: Path) -> str:
    """Give the node the image of an OCI archive; return its name.

    Raises:
        CalledProcessError: it was not taken.
    """
    ctr = [f"{node.bin}/ctr", "--address", node.containerd, "--namespace", "k8s.io"]
    run = [*ctr, "images", "import", str(archive)]
    done = subprocess.run(run, check=True, capture_output=True, text=True)
    return next(word for word in done.stdout.split() if word.startswith("docker.io/"))


def import_decode_image(node: NodeInfo, folder: Path) -> str:
    """Give the node an image that waits, and runs this machine's programs where it has them."""
    links = {
        name: Path("/", name) for name in ("lib", "lib64", "bin") if Path("/", name).is_symlink()
    }
    archive = folder / "decode-image.tar"
    write_image(archive, IMAGE, {"pause": Path(node.bin, "pause"), **links}, ["/pause"])
    return import_image(node, archive)


def programs() -> dict[str, str]:
    """Return the directories that this machine's Python and the checkout need, by volume."""
    python = Path(os.path.realpath(sys.executable)).parents[1]
    places = {"usr": "/usr", "etc": "/etc", "repo": str(CHECKOUT), "python": str(python)}
    return {name: path for name, path in places.items() if not path.startswith("/usr/")}


def require_mounted(path: Path, *, option: str) -> None:
    """Raise UserError, naming the option, where these pods do not have a file of this machine."""
    if not any(path.is_relative_to(place) for place in programs().values()):
        raise UserError(
            f"pods on a real node do not have {path}: they mount {CHECKOUT} and this machine's "
            "programs",
            field=option,
            remedy=f"Copy it below {CHECKOUT}.",
        )


def _mounts(places: Mapping[str, str]) -> list[Json]:
    return [{"name": f"of-{volume}", "mountPath": path} for volume, path in places.items()]


def _volumes(places: Mapping[str, str]) -> list[Json]:
    return [{"name": f"of-{name}", "hostPath": {"path": path}} for name, path in places.items()]


def namespace(name: str) -> Json:
    """Return a namespace whose pods may mount directories of the node, and whose policies too."""
    labels = {"pod-security.kubernetes.io/enforce": "privileged"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def decode_pod(
    where: str,
    *,
    name: str = "decode",
    model: Path = MODEL,
    arguments: tuple[str, ...] = (),
    requests: Mapping[str, str] | None = None,
    **of_spec: object,
) -> Json:
    """Return a pod of the built-in engine.

    Args:
        where: its namespace.
        name: of the pod.
        model: that it serves.
        arguments: more of them for the engine.
        requests: by default so little that two of them, and the operators, fit on two cores.
        of_spec: fields of the pod's spec.
    """
    mounted = programs()
    container = {
        "name": "decode",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": [sys.executable, "-m", "windrow_sidecar.engines.builtin"],
        "args": [
            f"--model-path={model}",
            "--disaggregation-mode=decode",
            "--disaggregation-transfer-backend=fake",
            "--host=0.0.0.0",
            f"--port={PORT}",
            *arguments,
        ],
        "resources": {
            "requests": dict(requests or {"cpu": "500m", "memory": "2Gi"}),
            "limits": {"cpu": "2", "memory": "4Gi"},
        },
        "readinessProbe": {"httpGet": {"path": "/health", "port": PORT}, "periodSeconds": 1},
        "volumeMounts": _mounts(mounted),
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": where, "labels": dict(APP)},
        "spec": {
            "terminationGracePeriodSeconds": 3,
            "containers": [container],
            "volumes": _volumes(mounted),
            **of_spec,
        },
    }


def policy(
    where: str, out: Path | None, tpot: str = "2s", *, rows: Path = ROWS, **of_spec: object
) -> Json:
    """Return a policy over those pods.

    Args:
        where: its namespace.
        out: directory that jobs may write below; None: nowhere.
        tpot: its objective.
        rows: file of rows that jobs may read.
        of_spec: fields of the policy's spec.
    """
    mounted = programs() | ({"out": str(out)} if out else {})
    volumes: list[Json] = [
        {"name": volume, "mountPath": path, "hostPath": {"path": path}}
        for volume, path in mounted.items()
        if path != str(CHECKOUT)  # of decode's model, so the sidecar has it already
    ]
    # Of the checkout a job may read the served model only: its rows need a volume of the policy.
    folder = str(rows.parent)
    volumes.append(
        {"name": "rows", "mountPath": folder, "readOnly": True, "hostPath": {"path": folder}}
    )
    return {
        "apiVersion": API_VERSION,
        "kind": HARVEST_POLICY.kind,
        "metadata": {"name": "chat", "namespace": where},
        "spec": {
            "selector": {"matchLabels": dict(APP)},
            "objective": {"tpot": tpot},
            "mode": "harvest",
            "sidecar": {"volumes": volumes},
            **of_spec,
        },
    }


def finetune_job(where: str, name: str, destination: str, steps: int, **of_output: object) -> Json:
    """Return a small job on the pods' own model, with a checkpoint every four steps."""
    return {
        "apiVersion": API_VERSION,
        "kind": FINETUNE_JOB.kind,
        "metadata": {"name": name, "namespace": where},
        "spec": {
            "model": {"name": str(MODEL)},
            "dataset": {"source": str(ROWS), "format": "chat"},
            "adapter": {"type": "lora", "lora": {"rank": 4, "targetModules": "all-linear"}},
            "training": {"maxSteps": steps, "batchSize": 4, "learningRate": "2e-4"},
            "checkpoint": {"everySteps": 4, "keep": 2},
            "output": {"destination": destination, **of_output},
        },
    }


# --- the demo's own pods and policy, as this node runs them ---------------------------------------


def on_the_node(body: Json, folder: Path, log_root: Path | None, rows: Path = ROWS) -> Json:
    """Return a pod or policy of `cluster.manifests` as a real node of this machine runs it.

    Pods use the node's network, so that they answer at the same address as on a process node, and
    run on the CPUs that their annotation names. Other objects are returned as they are.

    Args:
        body: of any kind.
        folder: of the run: pods and sidecars may write below it.
        log_root: below it is the folder for each pod's event log; None: no event logs.
        rows: file of rows that jobs may read.
    """
    made = copy.deepcopy(body)
    if made["kind"] == HARVEST_POLICY.kind:
        where = made["metadata"]["namespace"]
        made["spec"]["sidecar"] = policy(where, folder, rows=rows)["spec"]["sidecar"]
    if made["kind"] != "Pod":
        return made
    metadata, spec = made["metadata"], made["spec"]
    mounted = programs() | {"out": str(folder)}
    (container,) = spec["containers"]
    program, *words = container["command"]
    pinned = ["taskset", "--cpu-list", metadata.pop("annotations")[ANNOTATION_CPUSET]]
    container |= {
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": [*pinned, sys.executable if program == "python" else program, *words],
        "volumeMounts": _mounts(mounted),
    }
    if log_root is not None:
        events = {"name": ENV_LOG_DIR, "value": str(log_root / metadata["name"])}
        container["env"] = [*container.get("env", ()), events]
    container["readinessProbe"]["httpGet"]["host"] = LOOPBACK
    spec["hostNetwork"] = True
    spec["volumes"] = _volumes(mounted)
    return made
