"""Write the pages that are made from the code: metrics, chart, resources, command line, Python.

docs/metrics.md and the chart's README.md are committed, and `--check` writes nothing and ends 1
when one is stale. Those below docs/reference/ are made for each build of the site (`make docs`).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
import yaml
from generated import ROOT, write_or_check

from windrow.client import WindrowClient
from windrow.metrics import (
    OPERATOR_METRICS,
    SIDECAR_METRICS,
    Metric,
    MetricType,
)
from windrow_cli import app

METRICS_HEAD = """# Metrics

Made from `api/windrow/metrics.py` by `tools/generate_docs.py`: change it there.

The operator serves its metrics on port 9464 (`/metrics`, `/healthz`, `/readyz`). A sidecar serves
the metrics of its pod's slots on the pod's address. The port is in the pod's annotation
`windrow.dev/metrics-port`: the policy's `spec.sidecar.metricsPort`, else the chart's
`sidecar.metricsPort`. Without either, the sidecar takes any free port of 127.0.0.1 and writes it to
`metrics.port` in the run directory. With `metrics.podMonitor` the chart creates PodMonitors for
operator and sidecars.

Conventions:

- `namespace` and `slot` name a HarvestSlot, `job_namespace` and `job_name` a FinetuneJob. Scrape
  with `honorLabels`, so that Prometheus leaves them as they are.
- The values of a label `part`, `state` or `move` add up: you can `sum` over them.
- Compute quantiles, shares and rates in Prometheus: latencies are histograms. Metrics that end in
  `_ratio` divide each step's latency by the objective or the prediction, so slots with different
  objectives can be summed: `histogram_quantile(0.99, sum by (le)
  (rate(windrow_decode_tpot_objective_ratio_bucket[5m])))` above 1 means that the fleet breaks its
  objective.
- Only `windrow_slot_info` has labels that describe a slot (model, policy, device); join them with
  `* on (namespace, slot) group_left (model, policy) windrow_slot_info`.
- Counters start at 0 with their process, as everywhere in Prometheus: use `rate` and `increase`.
- Buckets are classic ones: Python's client does not serve native histograms.
- `windrow_operator_api_requests_total` does not count the calls of the operator's watches (list and
  watch by kopf).
"""


def metrics_markdown() -> str:
    """Return docs/metrics.md."""
    return "\n".join(
        [
            METRICS_HEAD,
            *_table("Sidecar: a slot, its engine and its jobs", SIDECAR_METRICS),
            *_table("Operator", OPERATOR_METRICS),
        ]
    )


def _table(title: str, metrics: tuple[Metric, ...]) -> list[str]:
    rows = [
        f"| `{metric.name}` | {metric.type} | {metric.unit or '-'} "
        f"| {', '.join(metric.labels) or '-'} | {_meaning(metric)} |"
        for metric in metrics
    ]
    head = ["| name | type | unit | labels | meaning |", "|---|---|---|---|---|"]
    return [f"## {title}", "", *head, *rows, ""]


def _meaning(metric: Metric) -> str:
    if metric.type is not MetricType.HISTOGRAM:
        return metric.help
    return f"{metric.help} Buckets: {', '.join(f'{bound:g}' for bound in metric.buckets)}."


# --- resources ------------------------------------------------------------------------------------


def resources_markdown() -> str:
    """Return docs/reference/resources.md, from the definitions."""
    lines = ["# Resources", "", "Made from `crds/` by `tools/generate_docs.py`.", ""]
    for path in sorted((ROOT / "crds").glob("*.yaml")):
        spec = yaml.safe_load(path.read_text())["spec"]
        schema = spec["versions"][0]["schema"]["openAPIV3Schema"]
        names = spec["names"]
        lines += [f"## {names['kind']}", "", schema["description"], ""]
        lines += [f"`kubectl get {names['shortNames'][0]}`, group `{spec['group']}`.", ""]
        for part in ("spec", "status"):
            if (root := schema["properties"].get(part)) is None:
                continue
            lines += [
                f"### {names['kind']} {part}",
                "",
                "| field | type | meaning |",
                "|---|---|---|",
            ]
            lines += list(_fields(root, ""))
            lines.append("")
    return "\n".join(lines)


def _fields(schema: Mapping[str, Any], above: str) -> Iterator[str]:
    needed = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        path = f"{above}{name}"
        kind = field.get("type", "any")
        inner = field.get("items", {}) if kind == "array" else field
        if kind == "array":
            kind = f"list of {inner.get('type', 'any')}"
        if "enum" in field:
            kind = ", ".join(f"`{value}`" for value in field["enum"])
        said = field.get("description", "")
        if "default" in field and field["default"] not in ({}, []):
            said += f" Default: `{field['default']}`."
        if name in needed:
            said += " Required."
        yield f"| `{path}` | {kind} | {said.strip().replace('|', chr(92) + '|')} |"
        if inner.get("properties"):
            yield from _fields(inner, f"{path}{'[]' if inner is not field else ''}.")


# --- the chart ------------------------------------------------------------------------------------

CHART = ROOT / "deploy" / "helm" / "windrow"
CHART_HEAD = """# The chart

Made from `values.yaml` by `tools/generate_docs.py`: change the comments there.

    helm upgrade --install windrow deploy/helm/windrow -n windrow-system --create-namespace \\
        --set image.repository=REGISTRY/windrow/operator

The chart installs the operator (a Deployment, its Service, its rights, and a disruption budget if
there are several replicas), the webhook's registration, and the definitions of the resources. The
definitions stay on uninstall. `helm test` checks that the operator serves. A value that is not in
this table, or out of its range, is refused. [What a reviewer looks
for](../../../docs/operations/chart-review.md) answers the usual questions and names the tests.

| value | default | meaning |
|---|---|---|
"""


def chart_markdown() -> str:
    """Return the chart's README: each value with its default and the comment above it."""
    text = (CHART / "values.yaml").read_text()
    root = yaml.compose(text)
    rows = [
        f"| `{path}` | `{default}` | {said.replace('|', chr(92) + '|')} |"
        for path, default, said in _values(root, text.splitlines(), "")
    ]
    return CHART_HEAD + "\n".join(rows) + "\n"


def _values(node: yaml.MappingNode, lines: list[str], above: str) -> Iterator[tuple[str, str, str]]:
    for key, value in node.value:
        path = f"{above}{key.value}"
        if isinstance(value, yaml.MappingNode) and value.value and not value.flow_style:
            yield from _values(value, lines, f"{path}.")
            continue
        default = json.dumps(yaml.safe_load(yaml.serialize(value)))
        yield path, default, _comment_above(lines, key.start_mark.line)


def _comment_above(lines: list[str], line: int) -> str:
    said: list[str] = []
    while line and lines[line - 1].lstrip().startswith("#"):
        line -= 1
        said.insert(0, lines[line].lstrip().removeprefix("#").strip())
    return " ".join(said)


# --- command line ---------------------------------------------------------------------------------


def cli_markdown() -> str:
    """Return docs/reference/cli.md, from the commands themselves."""
    lines = [
        "# Command line",
        "",
        "Made from the commands by `tools/generate_docs.py`.",
        "",
        "`kubectl windrow ...` is the same program. Exit codes: 0 done, 1 failed, 2 fix the",
        "input, 3 not reachable now, 130 interrupted.",
        "",
    ]
    for name, command in _commands(typer.main.get_command(app), "windrow"):
        text = inspect.cleandoc(command.help or "").replace("\b", "")
        body, *examples = text.split("Example: ")
        lines += [f"## {name}", "", body.strip(), ""]
        lines += [f"    {' '.join(example.split())}" for example in examples]
        lines += [""]
        rows = [row for one in command.params if (row := _parameter(one))]
        if rows:
            lines += ["| | meaning | default |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _commands(group: Any, name: str) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
    if not hasattr(group, "commands"):
        yield name, group
        return
    for word, command in group.commands.items():
        yield from _commands(command, f"{name} {word}")


def _parameter(one: Any) -> str:  # noqa: ANN401
    said = str(getattr(one, "help", "") or "").replace("|", "\\|").replace("\n", " ")
    if one.param_type_name == "argument":
        return f"| `{(one.name or '').upper()}` | {said} | |"
    if getattr(one, "hidden", False):
        return ""
    default = one.default if one.default not in (None, False, "") else ""
    shown = f"`{default}`" if default != "" and not callable(default) else ""
    return f"| {', '.join(f'`{opt}`' for opt in one.opts)} | {said} | {shown} |"


# --- Python ---------------------------------------------------------------------------------------


def python_markdown() -> str:
    """Return docs/reference/python.md, from the client's docstrings."""
    lines = [
        "# Python",
        "",
        "Made from `windrow.client` by `tools/generate_docs.py`.",
        "",
        "## WindrowClient",
        "",
        *_doc(WindrowClient),
    ]
    for name, member in vars(WindrowClient).items():
        if name.startswith("_") or not (callable(member) or isinstance(member, property)):
            continue
        if isinstance(member, property):
            lines += [f"### {name}", "", *_doc(member)]
            continue
        signature = str(inspect.signature(member)).replace("self, ", "").replace("(self)", "()")
        lines += [f"### {name}", "", "```python", f"{name}{signature}", "```", "", *_doc(member)]
    return "\n".join(lines)


def _doc(thing: object) -> list[str]:
    text = inspect.getdoc(thing) or ""
    head, *rest = text.split("\n\n")
    lines = [head, ""]
    for part in rest:
        # Google's sections keep their form.
        lines += ["```text", part, "```", ""] if part.split("\n")[0].endswith(":") else [part, ""]
    return lines


def committed() -> dict[Path, str]:
    """Return the wanted content of the pages that are committed."""
    return {
        ROOT / "docs" / "metrics.md": metrics_markdown(),
        CHART / "README.md": chart_markdown(),
    }


def generated() -> dict[Path, str]:
    """Return the wanted content of every page that this tool writes."""
    docs = ROOT / "docs"
    return committed() | {
        docs / "reference" / "resources.md": resources_markdown(),
        docs / "reference" / "cli.md": cli_markdown(),
        docs / "reference" / "python.md": python_markdown(),
    }


if __name__ == "__main__":
    write_or_check(__doc__, generated, checked=committed)
