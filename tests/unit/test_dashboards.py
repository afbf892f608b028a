"""Dashboards and rules: what they name exists, units are those of the metrics, files are fresh."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from windrow.metrics import METRICS

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "windrow"
RULES = CHART / "rules" / "windrow.rules.yaml"
BOARDS = sorted((CHART / "dashboards").glob("*.json"))
TABLE = {metric.name: metric for metric in METRICS}
SECONDS = {"seconds", "device seconds", "Unix time"}
TOKENS = {"tokens", "tokens per second"}
UNITS = {"s": SECONDS, "bytes": {"bytes"}, "suffix: tok/s": TOKENS, "suffix: tok": TOKENS}

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
        assert name in TABLE or base in TABLE, f"{name} is no metric of the table"
        found.append(TABLE.get(name) or TABLE[base])
    return found


def test_the_dashboards_are_made_from_their_description():
    checked = [sys.executable, str(ROOT / "tools" / "generate_dashboards.py"), "--check"]
    assert subprocess.run(checked).returncode == 0, "run `python tools/generate_dashboards.py`"


@pytest.mark.parametrize("target", TARGETS)
def test_a_query_reads_metrics_that_there_are_in_their_own_unit(target):
    metrics = [m for m in metrics_in(target.expr) if m.name != "windrow_slot_info"]
    assert metrics or "vector" in target.expr
    plain = " / " not in target.expr and "_count" not in target.expr
    if (wanted := UNITS.get(target.unit)) and plain:
        assert {metric.unit for metric in metrics} <= wanted
    for metric in metrics:
        if metric.unit == "bytes":
            assert target.unit == "bytes"


@pytest.mark.parametrize("rule", [rule for group in groups() for rule in group["rules"]])
def test_a_rule_reads_metrics_that_there_are(rule):
    assert metrics_in(rule["expr"])


ALERTS = [rule for group in groups() for rule in group["rules"] if "alert" in rule]


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_has_a_severity_a_runbook_and_is_seen_firing_and_clearing(alert):
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    page = ROOT / alert["annotations"]["runbook_url"]
    for heading in ("What it means", "What serving feels", "What to look at", "What to do"):
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
