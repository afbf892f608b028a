"""Slots that engines claim in a pod: engines as processes that know nothing of each other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from windrow.errors import UserError
from windrow.rundir import ENV_SLOT, MOST_SLOTS, RunDir
from windrow_sidecar.engines.claim import claim_slot

ENGINE = """
import os, sys
from pathlib import Path
from windrow.errors import UserError
from windrow.rundir import RunDir
from windrow_sidecar.engines.claim import claim_slot
try:
    claim = claim_slot(RunDir(Path(sys.argv[1])), {"WINDROW_SLOT": sys.argv[2]})
    child = os.fork()
    if child == 0:
        sys.stdin.read()  # what an engine has started may outlive it
        os._exit(0)
    print(claim.run_dir.slot, child, flush=True)
except UserError as error:
    print(error, flush=True)
sys.stdin.read()
"""


class Engines:
    """Processes that claim a slot and live on."""

    def __init__(self, run_dir) -> None:
        self.run_dir = run_dir
        self.running: list[subprocess.Popen[str]] = []

    def start(self, slot: str = "") -> str:
        """Start one more; return what it says: its slot, or why it has none."""
        engine = subprocess.Popen(
            [sys.executable, "-c", ENGINE, str(self.run_dir), slot],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.running.append(engine)
        said = engine.stdout.readline().strip()
        return said.split()[0] if said[:1].isdigit() else said

    def kill(self, number: int) -> None:
        self.running[number].kill()
        self.running[number].wait()


@pytest.fixture
def engines(run_dir) -> Iterator[Engines]:
    made = Engines(run_dir)
    yield made
    for engine in made.running:
        engine.kill()
        engine.communicate()


def test_each_engine_is_another_slot_and_one_that_starts_again_is_the_same(engines):
    assert [engines.start(), engines.start()] == ["0", "1"]
    engines.kill(0)
    assert engines.start() == "0", "whatever the one before it has left behind"
    assert engines.start() == "2"


def test_an_engine_may_be_told_which_slot_it_is(engines):
    assert [engines.start("3"), engines.start()] == ["3", "0"]
    assert "another engine of this pod is slot 3" in engines.start("3")


@pytest.mark.parametrize("said", ["-1", "one", str(MOST_SLOTS)])
def test_what_is_no_slot_is_refused_by_the_variables_name(run_dir, said):
    with pytest.raises(UserError, match="is not a slot of a pod") as error:
        claim_slot(RunDir(run_dir), {ENV_SLOT: said})
    assert error.value.field == ENV_SLOT
