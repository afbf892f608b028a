"""Dashboards and rules: what they name exists, units are those of the metrics, files are fresh."""

from __future__ import annotations

import builtins
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import types
import typing
from enum import Enum
from pathlib import Path

import pytest
import yaml
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from windrow.metrics import METRICS, MetricType

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "windrow"
RULES = CHART / "rules" / "windrow.rules.yaml"
BOARDS = sorted((CHART / "dashboards").glob("*.json"))
TABLE = {metric.name: metric for metric in METRICS}
DEVICE_SECONDS = {"device seconds"}
SECONDS = {"seconds", "Unix time", *DEVICE_SECONDS}
# What a panel's unit may be made of. Any other unit is refused.
UNITS = {
    "s": SECONDS,
    "bytes": {"bytes"},
    "suffix: tok/s": {"tokens", "tokens per second"},
    "suffix: tok": {"tokens"},
    "suffix: h": DEVICE_SECONDS,
    "currencyUSD": DEVICE_SECONDS,
    "reqps": {"requests"},
}
SAYS_ITS_UNIT = {*SECONDS, "bytes", "tokens", "tokens per second", "unit seconds"}

spec = importlib.util.spec_from_file_location("query", ROOT / "tools" / "dashboards" / "query.py")
query = importlib.util.module_from_spec(spec)
sys.modules["query"] = query
spec.loader.exec_module(query)

TARGETS = [
    pytest.param(target, id=f"{board.stem}-{target.title}-{target.legend}")
    for board in BOARDS
    for target in query.targets_of(board)
]


def groups():
    return yaml.safe_load(RULES.read_text())["groups"]


def recorded():
    return {
        rule["record"]: rule["expr"] for g in groups() for rule in g["rules"] if "record" in rule
    }


def metrics_in(expr):
    """Return the metrics of the table that an expression reads, through recorded series."""
    for name, of in recorded().items():
        expr = expr.replace(name, of)
    found = []
    for name in set(re.findall(r"\bwindrow[a-z_:]*[a-z0-9_]+", re.sub(r'"[^"]*"', "", expr))):
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        assert name in TABLE or base in TABLE, f"{name} is not a metric of the table"
        found.append(TABLE.get(name) or TABLE[base])
    return found


def test_the_dashboards_are_made_from_their_description():
    checked = [sys.executable, str(ROOT / "tools" / "generate_dashboards.py"), "--check"]
    assert subprocess.run(checked).returncode == 0, "run `python tools/generate_dashboards.py`"


def dropped(given, kept, path=""):
    """Return what of a JSON document was not taken over."""
    if isinstance(given, dict) and isinstance(kept, dict):
        unknown = [f"{path}.{name}" for name in given if name not in kept]
        both = (name for name in given if name in kept)
        return unknown + [x for n in both for x in dropped(given[n], kept[n], f"{path}.{n}")]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        pairs = enumerate(zip(given, kept, strict=True))
        return [x for n, (a, b) in pairs for x in dropped(a, b, f"{path}[{n}]")]
    return [] if given == kept else [f"{path}: {given!r} became {kept!r}"]


def mistyped(value, hint, path=""):
    """Return what of an object has another type than Grafana's schema says."""
    within = typing.get_args(hint)
    match typing.get_origin(hint):
        case typing.Union | types.UnionType:
            found = [mistyped(value, one, path) for one in within]
            return [] if [] in found else min(found, key=len)
        case builtins.list:
            if not isinstance(value, list):
                return [f"{path} is not a list: {value!r}"]
            return [
                x for n, one in enumerate(value) for x in mistyped(one, within[0], f"{path}[{n}]")
            ]
        case builtins.dict:
            if not isinstance(value, dict):
                return [f"{path} is not an object: {value!r}"]
            return [x for n, one in value.items() for x in mistyped(one, within[1], f"{path}.{n}")]
        case typing.Literal:
            return [] if value in within else [f"{path}: {value!r} is none of {within}"]
    if hint in (typing.Any, object):
        return []
    if issubclass(hint, Enum):
        values = [one.value for one in hint]
        return [] if value in values else [f"{path}: {value!r} is none of {values}"]
    wanted = (int, float) if hint is float else hint
    if not isinstance(value, wanted) or (isinstance(value, bool) and hint is not bool):
        return [f"{path}: {value!r} is no {hint.__name__}"]
    if not type(value).__module__.startswith("grafana_foundation_sdk"):
        return []
    hints = typing.get_type_hints(type(value))
    return [x for n, one in hints.items() for x in mistyped(getattr(value, n), one, f"{path}.{n}")]


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.stem)
def test_a_dashboard_fits_the_schema_that_grafana_publishes(board):
    # The types of Grafana's own SDK are made from that schema, panels and queries included.
    plugins.register_default_plugins()
    given = json.loads(board.read_text())
    read = Dashboard.from_json(given)
    kept = json.loads(JSONEncoder().encode(read))
    assert dropped(given, kept) == []
    assert mistyped(read, Dashboard) == []
    wrong = Dashboard.from_json({**given, "panels": [{"type": "stat", "gridPos": {"h": "8"}}]})
    assert mistyped(wrong, Dashboard)
    assert dropped({**given, "panelz": []}, kept) == [".panelz"]


def wrong_with(unit, expr, legend=""):
    """Return what is wrong with a query under a panel's unit; empty: nothing."""
    read = [m for m in metrics_in(expr) if m.name != "windrow_slot_info"]
    for name, of in recorded().items():
        expr = expr.replace(name, f"({of})")
    counts = all(f"{m.name}_count" in expr and f"{m.name}_sum" not in expr for m in read)
    units = {m.unit for m in read}
    changes = "rate(" in expr or "increase(" in expr
    as_it_stands = [m.name for m in read if m.type is MetricType.COUNTER]
    if as_it_stands and not (changes or " offset " in expr):
        return f"{as_it_stands} count since their process began: rate or increase"
    if any(m.type is MetricType.GAUGE and f"rate({m.name}" in expr for m in read):
        return "a gauge has no rate"
    match unit:
        case "percentunit":
            divided = " / " in expr and len(units) <= 2
            return "" if units <= {"ratio"} or divided else f"{units} is not a share"
        case "short":
            bare = units & SAYS_ITS_UNIT
            named = counts or legend.endswith(", s")
            return "" if not bare or named else f"{bare} without a unit"
        case "suffix: h" | "currencyUSD" if "/ 3600" not in expr:
            return "seconds are not hours"
        case "suffix: h" | "currencyUSD" if (unit == "currencyUSD") != ("$price" in expr):
            return "hours are money only times a price"
        case "suffix: tok/s" | "reqps" if units & {"tokens", "requests"} and not changes:
            return "a rate wants a rate"
        case "suffix: tok" if changes:
            return "a rate is not a number of tokens"
        case "s" if " / " in expr and not ("_sum" in expr and "_count" in expr):
            return "a share of seconds is no time"
        case _ if unit not in UNITS:
            return f"{unit!r} is not a unit that we use"
    return "" if units and units <= UNITS[unit] else f"{units} in {unit!r}"


@pytest.mark.parametrize("target", TARGETS)
def test_a_query_reads_metrics_that_there_are_in_their_own_unit(target):
    assert metrics_in(target.expr) or "vector" in target.expr
    assert wrong_with(target.unit, target.expr, target.legend) == ""


@pytest.mark.parametrize(
    ("unit", "expr"),
    [
        ("ms", "windrow_decode_objective_seconds"),
        ("percentunit", "windrow_decode_objective_seconds"),
        ("short", "windrow_decode_objective_seconds"),
        ("short", "windrow_arena_bytes"),
        ("s", "windrow_arena_bytes"),
        ("s", "windrow_chunk_bytes / windrow_decode_objective_seconds"),
        ("suffix: tok/s", "windrow_decode_context_tokens"),
        ("suffix: tok/s", "windrow_harvested_tokens_total"),
        ("suffix: tok/s", "rate(windrow_job_tokens_per_second[5m])"),
        ("suffix: tok", "rate(windrow_harvested_tokens_total[5m])"),
        ("suffix: h", "increase(windrow_harvested_device_seconds_total[5m])"),
        ("currencyUSD", "increase(windrow_harvested_device_seconds_total[5m]) / 3600"),
        ("reqps", "windrow_operator_api_requests_total"),
        ("short", "windrow_worker_exits_total"),
    ],
)
def test_a_wrong_unit_would_be_seen(unit, expr):
    assert wrong_with(unit, expr) != ""


def test_a_metric_that_there_is_none_of_would_be_seen():
    with pytest.raises(AssertionError, match="not a metric of the table"):
        metrics_in("sum(windrow_harvested_token_total)")


@pytest.mark.parametrize("rule", [rule for group in groups() for rule in group["rules"]])
def test_a_rule_reads_metrics_that_there_are(rule):
    assert metrics_in(rule["expr"])


ALERTS = [rule for group in groups() for rule in group["rules"] if "alert" in rule]


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_has_a_severity_a_runbook_and_is_seen_firing_and_clearing(alert):
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    page = ROOT / alert["annotations"]["runbook"]
    for heading in ("What it means", "Effect on serving", "What to look at", "What to do"):
        assert f"## {heading}\n" in page.read_text()
    assert alert["alert"] in page.read_text()
    tests = yaml.safe_load((ROOT / "tests" / "rules" / "alerts.test.yaml").read_text())["tests"]
    about = [
        case
        for test in tests
        for case in test["alert_rule_test"]
        if case["alertname"] == alert["alert"]
    ]
    assert any(case.get("exp_alerts") for case in about)
    assert any(not case.get("exp_alerts") for case in about)


def test_promtool_sees_every_alert_fire_and_clear():
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool (Debian: apt-get install prometheus)")
    checked = subprocess.run([promtool, "check", "rules", RULES], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    done = subprocess.run(
        [promtool, "test", "rules", "alerts.test.yaml"],
        cwd=ROOT / "tests" / "rules",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
