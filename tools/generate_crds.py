"""Write crds/*.yaml from the models of windrow.crd, and docs/conditions.md from windrow.conditions.

`--check` writes nothing and ends 1 when a file is stale.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from generated import ROOT, write_or_check
from pydantic import BaseModel

from windrow import crd
from windrow.conditions import conditions_markdown
from windrow.crd.finetunejob import ROOT_RULES

HEADER = "# Made from api/windrow/crd by tools/generate_crds.py: change it there.\n"

FOLDERS = (ROOT / "crds", ROOT / "deploy" / "helm" / "windrow" / "files" / "crds")
Schema = dict[str, Any]
AGE = ("Age", "date", ".metadata.creationTimestamp", "")

DESCRIPTIONS = {
    "FinetuneJob": "A finetuning run on compute that decode instances leave unused.",
    "HarvestPolicy": "Which decode pods are harvested, within which objective and limits.",
    "HarvestSlot": "One harvested device, as the operator sees it. Written by the operator.",
    "LatencyProfile": "How fast a kind of device decodes a model. Written by the operator.",
}
# Those of `kubectl get -o wide`.
WIDE = {("FinetuneJob", "Queue")}
COLUMNS: dict[str, list[tuple[str, str, str, str]]] = {
    "FinetuneJob": [
        ("Model", "string", ".spec.model.name", ""),
        ("State", "string", ".status.state", ""),
        ("Step", "string", ".status.step", "Finished steps of all."),
        ("Loss", "string", ".status.loss", "Training loss of the last step."),
        ("Tokens/s", "string", ".status.tokensPerSecond", "Real tokens, pauses included."),
        ("ETA", "string", ".status.eta", ""),
        ("Slot", "string", ".status.slot", ""),
        (
            "Queue",
            "string",
            r".metadata.labels.kueue\.x-k8s\.io/queue-name",
            "LocalQueue of Kueue.",
        ),
        AGE,
    ],
    "HarvestPolicy": [
        ("Mode", "string", ".spec.mode", ""),
        ("Policy", "string", ".spec.policy", ""),
        ("Objective", "string", ".spec.objective.tpot", "Time per output token."),
        ("Pods", "integer", ".status.pods", "Decode pods that are selected."),
        ("Slots", "integer", ".status.slots", "Slots that are attached."),
        ("Harvesting", "integer", ".status.harvesting", "Slots that run a job."),
        AGE,
    ],
    "HarvestSlot": [
        (
            "Ready",
            "string",
            '.status.conditions[?(@.type=="Ready")].status',
            "Whether it can take a job.",
        ),
        ("Node", "string", ".spec.nodeName", ""),
        ("Model", "string", ".spec.model", ""),
        ("Objective", "string", ".status.objective", "Time per output token to keep."),
        ("TPOT-P99", "string", ".status.tpotP99", "Over the last heartbeat."),
        ("Decode", "string", ".status.decode", "Compute units of decode."),
        ("Finetune", "string", ".status.finetune", "Compute units of the worker."),
        ("Lent", "string", ".status.lent", "Lent chunks of all."),
        ("Sharing", "string", ".status.sharing", "Of a GPU: spatial or temporal."),
        (
            "Harvestable",
            "number",
            ".status.predictedTokensPerSecond",
            "Tokens a second that a worker would get here, also in mode observe.",
        ),
        ("Job", "string", ".status.jobName", ""),
        AGE,
    ],
    "LatencyProfile": [
        ("Device", "string", ".spec.device", ""),
        ("Engine", "string", ".spec.engine", ""),
        ("Fingerprint", "string", ".spec.modelFingerprint", ""),
        ("TP", "integer", ".spec.tensorParallel", ""),
        AGE,
    ],
}
MODELS: dict[str, tuple[type[BaseModel], type[BaseModel] | None]] = {
    "FinetuneJob": (crd.FinetuneJobSpec, crd.FinetuneJobStatus),
    "HarvestPolicy": (crd.HarvestPolicySpec, crd.HarvestPolicyStatus),
    "HarvestSlot": (crd.HarvestSlotSpec, crd.HarvestSlotStatus),
    "LatencyProfile": (crd.LatencyProfileSpec, None),
}


def structural(node: Schema, definitions: dict[str, Schema]) -> Schema:
    """Return pydantic's JSON schema as a structural schema of Kubernetes.

    References are inlined, `null` alternatives dropped (absent says the same), and draft 2020's
    numeric `exclusiveMinimum` becomes OpenAPI 3.0's flag.
    """
    if "$ref" in node:
        target = definitions[node["$ref"].rsplit("/", 1)[1]]
        node = {**target, **{key: value for key, value in node.items() if key != "$ref"}}
    if "anyOf" in node:
        (chosen,) = [option for option in node["anyOf"] if option.get("type") != "null"]
        rest = {key: value for key, value in node.items() if key != "anyOf"}
        return structural({**chosen, **rest}, definitions)
    return _plain(node, definitions)


def _plain(node: Schema, definitions: dict[str, Schema]) -> Schema:
    result = {
        key: value for key, value in node.items() if key not in {"title", "additionalProperties"}
    }
    if result.get("default", ...) is None:
        del result["default"]
    for bound in ("Minimum", "Maximum"):
        if f"exclusive{bound}" in result:
            result[bound.lower()] = result.pop(f"exclusive{bound}")
            result[f"exclusive{bound}"] = True
    if "const" in result:
        result["enum"] = [result.pop("const")]
    match result.get("type"):
        case "string":
            if isinstance(result.get("default"), float):
                result["default"] = f"{result['default']:.12g}"
        case "object":
            _children(node, result, definitions)
        case "array":
            result["items"] = structural(result["items"], definitions)
        case "integer":
            result["format"] = "int64"
        case "number":
            result["format"] = "double"
    return result


def _children(node: Schema, result: Schema, definitions: dict[str, Schema]) -> None:
    if isinstance(node.get("additionalProperties"), dict):
        result["additionalProperties"] = structural(node["additionalProperties"], definitions)
    if "properties" not in node:
        return
    required = set(node.get("required", ()))
    result["properties"] = {
        name: structural(child, definitions) for name, child in node["properties"].items()
    }
    for name, child in result["properties"].items():
        # The server then fills in the defaults that stand inside.
        inner = child.get("properties", {})
        optional_of_none = "anyOf" in node["properties"][name]
        if inner and name not in required and not optional_of_none:
            child.setdefault("default", {})


def schema_of(model: type[BaseModel], description: str) -> Schema:
    """Return the structural schema of one model."""
    raw = model.model_json_schema(by_alias=True)
    schema = structural(raw, raw.get("$defs", {}))
    schema.pop("$defs", None)
    return {**schema, "description": description}


def definition(kind: crd.Kind) -> Schema:
    """Return the CustomResourceDefinition of one kind."""
    spec, status = MODELS[kind.kind]
    root: Schema = {
        "type": "object",
        "description": DESCRIPTIONS[kind.kind],
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": "windrow.dev/v1alpha1."},
            "kind": {"type": "string", "description": f"{kind.kind}."},
            "metadata": {"type": "object"},
            "spec": schema_of(spec, "What is wanted."),
        },
    }
    if status is not None:
        root["properties"]["status"] = schema_of(status, "What is. Written by the operator.")
    if kind.kind == "FinetuneJob":
        root["x-kubernetes-validations"] = ROOT_RULES
    version: Schema = {
        "name": crd.VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": root},
        "additionalPrinterColumns": [
            {"name": name, "type": type_, "jsonPath": path}
            | ({"description": description} if description else {})
            | ({"priority": 1} if (kind.kind, name) in WIDE else {})
            for name, type_, path, description in COLUMNS[kind.kind]
        ],
    }
    if status is not None:
        version["subresources"] = {"status": {}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{crd.GROUP}"},
        "spec": {
            "group": crd.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind.kind,
                "listKind": f"{kind.kind}List",
                "plural": kind.plural,
                "singular": kind.singular,
                "shortNames": [kind.short],
                "categories": [crd.CATEGORY],
            },
            "versions": [version],
        },
    }


def generated() -> dict[Path, str]:
    """Return the wanted content of every file that this tool writes."""
    texts = {
        f"{kind.plural}.yaml": HEADER + yaml.safe_dump(definition(kind), sort_keys=False, width=100)
        for kind in crd.KINDS
    }
    # The chart has copies, not a link: its folder alone is a whole chart.
    files = {folder / name: text for folder in FOLDERS for name, text in texts.items()}
    return {**files, ROOT / "docs" / "conditions.md": conditions_markdown()}


if __name__ == "__main__":
    write_or_check(__doc__, generated)
