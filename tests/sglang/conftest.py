"""SGLang runs in its own environment and processes: when a part of it fails, all of it dies."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
from support.sglang_programs import Programs
from support.sglang_servers import PYTHON


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.path.name != "test_chunk_holdings.py":
            item.add_marker(pytest.mark.sglang)
            item.add_marker(pytest.mark.timeout(600))
            if not PYTHON.exists():
                item.add_marker(pytest.mark.skip(reason="no SGLang here: make sglang"))


@pytest.fixture
def run_dir():
    with tempfile.TemporaryDirectory(prefix="wr-") as name:  # short: it holds sockets
        yield Path(name)


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """What runs a program in SGLang's environment; see support.sglang_programs."""
    running = Programs(PYTHON, tmp_path_factory.mktemp("programs") / "log")
    yield running
    running.close()


@pytest.fixture(scope="session")
def play(tmp_path_factory, programs):
    """Run a script on SGLang's scheduler; returns what came of it, with its log as `log`."""

    def run(script: dict, run_dir: Path | None = None, **environment: str) -> dict:
        folder = tmp_path_factory.mktemp("scheduler")
        (folder / "script.json").write_text(json.dumps(script))
        env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        env.pop("WINDROW_RUN_DIR", None)
        if run_dir is not None:
            env["WINDROW_RUN_DIR"] = str(run_dir)
        program = str(Path(__file__).parent / "scheduler_process.py")
        with (folder / "log").open("wb") as log:
            words = [program, str(folder / "script.json"), str(folder / "result.json")]
            programs.run(words, env, log, timeout_s=500)
        text = (folder / "log").read_text()
        if not (folder / "result.json").exists():
            pytest.fail(f"the scheduler died:\n{text[-4000:]}")
        return {**json.loads((folder / "result.json").read_text()), "log": text}

    return run
