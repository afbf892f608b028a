"""Hold every object of the chart against the schemas of three Kubernetes versions.

python tools/kubeconform/check_chart.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from windrow.errors import UserError
from windrow_lab.machine.build import build_tools
from windrow_lab.machine.progress import progress_for
from windrow_lab.machine.toolchain import Go, fetch_go, find_go
from windrow_lab.machine.tools import KUBERNETES_VERSION, NODE, cache_root

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
CHART = ROOT / "deploy" / "helm" / "windrow"
OUT = ROOT / "build" / "chart"
# The oldest that Chart.yaml allows, one between, and the one that everything else is tested on.
VERSIONS = ("v1.30.14", "v1.33.6", KUBERNETES_VERSION)
PROMETHEUS_OPERATOR = "github.com/prometheus-operator/prometheus-operator@v0.85.0"
MONITORING = ("podmonitors", "prometheusrules")
POLICY = {
    "name": "chat",
    "namespace": "serving",
    "spec": {"selector": {"matchLabels": {"app": "chat"}}, "objective": {"tpot": "40ms"}},
}
FEW: tuple[str, ...] = ()
ALL = (
    *("--set", "sidecar.native.enabled=true,sidecar.native.prePull=true"),
    *("--set", "sidecar.image=windrow/sidecar:1,networkPolicy.enabled=true"),
    *("--set", "metrics.podMonitor=true,metrics.rules=true,metrics.dashboards.enabled=true"),
    *("--set", "secrets.namespaces={team-a},operator.priorityClassName=system-cluster-critical"),
    *("--set", f"image.digest=sha256:{'0' * 64}"),
    *("--set-json", f"policies={json.dumps([POLICY])}"),
    *("--api-versions", "windrow.dev/v1alpha1/HarvestPolicy"),
)
# <folder>/apps/deployment_v1.json. kubeconform takes the core's version for its group:
# <folder>/v1/pod_v1.json.
LOCATION = "{{.Group}}/{{.ResourceKind}}_{{.ResourceAPIVersion}}.json"

Schema = dict[str, Any]


# --- schemas --------------------------------------------------------------------------------------


def schemas_of_kubernetes(openapi: Mapping[str, Any]) -> Iterator[tuple[str, Schema]]:
    """Yield path and schema of each kind of an OpenAPI v2 document of an API server."""
    definitions = {name: _strict(one) for name, one in openapi["definitions"].items()}
    for name, one in openapi["definitions"].items():
        for kind in one.get("x-kubernetes-group-version-kind", ()):
            yield (
                _path(kind["group"], kind["kind"], kind["version"]),
                {"$ref": f"#/definitions/{name}", "definitions": _needed_by(name, definitions)},
            )


def schemas_of_definition(crd: Mapping[str, Any]) -> Iterator[tuple[str, Schema]]:
    """Yield path and schema of each version of a CustomResourceDefinition."""
    spec = crd["spec"]
    for version in spec["versions"]:
        schema = _strict(version["schema"]["openAPIV3Schema"])
        schema["properties"] |= {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
        }
        yield _path(spec["group"], spec["names"]["kind"], version["name"]), schema


def _path(group: str, kind: str, version: str) -> str:
    return f"{group or version}/{kind.lower()}_{version}.json"


def _needed_by(name: str, definitions: Mapping[str, Schema]) -> dict[str, Schema]:
    found: dict[str, Schema] = {}
    todo = [name]
    while todo:
        one = todo.pop()
        if one not in found:
            found[one] = definitions[one]
            todo += _references(definitions[one])
    return found


def _references(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(reference := node.get("$ref"), str):
            yield reference.removeprefix("#/definitions/")
        for value in node.values():
            yield from _references(value)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value)


def _strict(schema: Mapping[str, Any]) -> Schema:
    """Return a schema that refuses fields that it does not name, in JSON Schema's own words."""
    said = dict(schema)
    if said.get("format") == "int-or-string" or said.get("x-kubernetes-int-or-string"):
        return {"type": ["string", "integer"]}
    if str(said.get("description", "")).startswith("Quantity is"):
        return {"type": ["string", "number"]}
    for name in ("properties", "patternProperties"):
        if name in said:
            said[name] = {key: _strict(value) for key, value in said[name].items()}
    for name in ("items", "additionalProperties"):
        if isinstance(said.get(name), dict):
            said[name] = _strict(said[name])
    if said.pop("nullable", False) and isinstance(said.get("type"), str):
        said["type"] = [said["type"], "null"]
    open_ended = said.get("x-kubernetes-preserve-unknown-fields")
    if said.get("properties") and not open_ended:
        said.setdefault("additionalProperties", False)
    return said


def write_schemas(folder: Path, schemas: Iterator[tuple[str, Schema]]) -> None:
    """Write each schema where `LOCATION` finds it."""
    for path, schema in schemas:
        to = folder / path
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(json.dumps(schema))


# --- programs -------------------------------------------------------------------------------------


def module_directory(go: Go, module: str) -> Path:
    """Return the directory of a Go module, downloaded if need be.

    Raises:
        UserError: it cannot be had.
    """
    command = [str(go.program), "mod", "download", "-json", module]
    with tempfile.TemporaryDirectory() as nowhere:  # outside of every module
        done = subprocess.run(
            command, cwd=nowhere, env=dict(go.environment), capture_output=True, check=False
        )
    if done.returncode != 0:
        said = json.loads(done.stdout or "{}").get("Error") or done.stderr.decode()
        raise UserError(
            f"{module} cannot be downloaded: {said}",
            remedy="Connect to a Go module proxy (GOPROXY).",
        )
    return Path(json.loads(done.stdout)["Dir"])


def build_kubeconform(go: Go) -> Path:
    """Build kubeconform of the version in go.mod; return the program."""
    program = OUT / "kubeconform"
    command = [str(go.program), "build", "-trimpath", "-o", str(program)]
    command.append("github.com/yannh/kubeconform/cmd/kubeconform")
    subprocess.run(command, cwd=HERE, env=dict(go.environment), check=True)
    return program


def render(helm: Path, version: str, values: tuple[str, ...]) -> str:
    """Return the chart's objects as a cluster of that version would get them."""
    command = [str(helm), "template", "windrow", str(CHART), "--namespace", "windrow-system"]
    command += ["--set", "image.repository=registry.example/windrow/operator"]
    command += ["--kube-version", version, *values]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> int:
    """Check all; return 1 when something does not fit."""
    OUT.mkdir(parents=True, exist_ok=True)
    progress = progress_for(Console(stderr=True))
    helm = build_tools(progress, os.environ, NODE) / "helm"
    cache = cache_root(os.environ, "go")
    go = find_go(os.environ) or fetch_go(cache, os.environ, progress.say)
    kubeconform = build_kubeconform(go)
    theirs = module_directory(go, PROMETHEUS_OPERATOR) / "example" / "prometheus-operator-crd"
    used = [theirs / f"monitoring.coreos.com_{name}.yaml" for name in MONITORING]
    others = [*(ROOT / "crds").glob("*.yaml"), *used]
    wrong = 0
    for version in VERSIONS:
        folder = OUT / "schemas" / version
        spec = module_directory(go, f"k8s.io/kubernetes@{version}") / "api" / "openapi-spec"
        write_schemas(
            folder, schemas_of_kubernetes(json.loads((spec / "swagger.json").read_text()))
        )
        for path in others:
            write_schemas(folder, schemas_of_definition(yaml.safe_load(path.read_text())))
        for name, values in (("few values", FEW), ("all values", ALL)):
            command = [str(kubeconform), "-strict", "-summary", "-schema-location"]
            text = render(helm, version, values)
            done = subprocess.run(
                [*command, f"{folder}/{LOCATION}", "-"],
                input=text,
                capture_output=True,
                text=True,
                check=False,
            )
            print(f"Kubernetes {version}, {name}: {done.stdout.strip()}{done.stderr.strip()}")
            wrong += done.returncode != 0
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
