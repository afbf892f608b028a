"""The commands of the laptop's quick start run as they stand on the page."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.paired, pytest.mark.extended]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "quickstart" / "laptop.md"
BIN = Path(sys.executable).parent

spec = importlib.util.spec_from_file_location("query", ROOT / "tools" / "dashboards" / "query.py")
query = importlib.util.module_from_spec(spec)
sys.modules["query"] = query
spec.loader.exec_module(query)


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def run(block, environment):
    """Return what the lines of a block print, by one bash, as a person pastes them."""
    done = subprocess.run(
        ["bash", "-euc", block.replace(".venv/bin/", f"{BIN}/")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}"
    return done.stdout


def until(what, found):
    deadline = time.monotonic() + 240
    while not (value := found()):
        assert time.monotonic() < deadline, what
        time.sleep(0.5)
    return value


def test_the_page_starts_with_the_demo_that_other_tests_run():
    assert blocks("bash")[0] == "make demo\n"
    assert re.search(r"^demo: ", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The cluster that stays: what its commands said, and the environment that they ran in."""
    # Its state beside that of a cluster that a person may have left running.
    hidden = ("KUBECONFIG", "PROMETHEUS_URL")
    environment = {k: v for k, v in os.environ.items() if k not in hidden}
    environment["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    shutil.rmtree(ROOT / "out" / "mine", ignore_errors=True)
    stays, down = blocks("bash")[2], blocks("bash")[-2]
    assert stays.split()[1] == "up"
    assert down.split()[1] == "down"
    said = {}
    try:
        for line in stays.splitlines():
            said[line.split(maxsplit=1)[1]] = run(line, environment)
        yield said, environment
    finally:
        run(down, environment)
        shutil.rmtree(ROOT / "out" / "mine", ignore_errors=True)


def test_the_cluster_that_stays_does_what_the_page_says(page):
    said, environment = page
    (python,) = blocks("python")
    subprocess.run([sys.executable, "-c", python], cwd=ROOT, env=environment, check=True)
    # What decode serves is called what the job calls it.
    until(
        "the job is placed",
        lambda: (
            "shares the served model's weights"
            in run(".venv/bin/windrow explain support-tone", environment)
        ),
    )
    # What `up` proposes is on the page, and asks for no program that a laptop lacks.
    for proposed in ("submit examples/harvestpolicy.yaml", "submit examples/finetunejob.yaml"):
        assert f"windrow {proposed}\n" in said["up"]
        assert proposed in said
    assert "support-tone" in said["get"]
    # Nothing harvests yet: the page says that the job waits, and that `explain` says why.
    assert "is Pending" in said["explain support-tone"]
    assert "a policy has to select a decode pod" in said["explain support-tone"]
    assert "TENANT" in said["report --since 1h"]
    assert "HARVESTABLE" in said["top --plain"]
    until(
        "the slot is listed",
        lambda: "decode-0" in run(".venv/bin/windrow top --plain", environment),
    )


@pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no prometheus (Debian: apt-get install prometheus)"
)
def test_a_newcomer_gets_from_their_own_rows_to_a_dashboard_with_their_jobs_curve(page, tmp_path):
    _, environment = page
    rows, own = blocks("bash")[3:5]
    monitor = subprocess.Popen(
        [BIN / "windrow", "monitor", "--port", "0", "--json", "--data", tmp_path],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        said = ""
        while not said.endswith("}\n"):
            line = monitor.stdout.readline()
            assert line, "monitor ended"
            said += line
        url = json.loads(said)["url"]
        begin = time.time()
        run(rows, environment)
        assert "next-number" in run(own, environment)
        until(
            "the adapter is there",
            lambda: '"Succeeded"' in run(".venv/bin/windrow get next-number --json", environment),
        )
        assert (ROOT / "out" / "mine" / "adapter" / "adapter_model.safetensors").stat().st_size
        jobs = ROOT / "deploy" / "helm" / "windrow" / "dashboards" / "jobs.json"
        everything = {"cluster": ".*", "job_namespace": ".*", "job": "next-number"}
        asking = query.Asking(url, begin, time.time(), everything, step_s=1)
        (loss,) = (target for target in query.targets_of(jobs) if target.title == "Loss")
        (curve,) = asking.series(loss)
        assert curve.name == "default/next-number"
        values = [value for _, value in curve.points]
        assert len(set(values)) > 3
        assert values[-1] < values[0]
        spent = run(f".venv/bin/windrow report --since 1h --prometheus {url}", environment)
        assert re.search(r"^default +[1-9][\d,]* +\d", spent, re.MULTILINE)
    finally:
        monitor.send_signal(signal.SIGINT)
        monitor.wait(60)
        monitor.stdout.close()


def test_a_step_is_planned_without_a_cluster():
    assert "backward" in run(blocks("bash")[-1], dict(os.environ))
