"""Every form of a decode pod starts as before where NVIDIA's program for MPS is in its container.

A form gives decode's container an environment. Each environment starts a server by a real start
command, `windrow run`, without the program and with it, in all ways in which it may fail. On a real
node the forms start in `tests/node/test_pods_start.py`, whose containers have no such program.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.pod_forms import CASES, WITHOUT_IMAGE, Case, decode_pod

from windrow.conditions import Reason
from windrow.crd.harvestpolicy import SidecarSpec
from windrow.rundir import DEFAULT_RUN_DIR, ENV_MPS_WAIT, ENV_RUN_DIR, RunDir
from windrow_operator.injection import LABEL_POD_SECURITY, PodNamespace, SidecarTemplate, inject
from windrow_sidecar.compute.mps import CONTROL, MpsDaemon
from windrow_sidecar.compute.mps_joining import DaemonNote
from windrow_sidecar.compute.sharing import PIPE_DIRECTORY, WITHOUT_MPS

FAKE = Path(__file__).with_name("fake_mps_control.py")
FORMS = {**CASES, **WITHOUT_IMAGE}
TEMPLATE = SidecarTemplate("10.0.0.1:8443", "PEM", "sidecar:1")
# By name: what the program does before it acts as the stand-in, how many seconds decode may wait
# (many where the test is about something else), and the reasons that decode may report; an empty
# set means that decode becomes a client.
LONG, SHORT = "60", "0.2"
DAEMONS: dict[str, tuple[str, str, set[str]]] = {
    "works": ("", LONG, set()),
    "ends at once": ("exit 1\n", LONG, {Reason.MPS_NOT_STARTED}),
    "does not answer": ("exec sleep 600\n", SHORT, {Reason.MPS_NOT_STARTED}),
    "lets its clients wait": (
        'touch "$CUDA_MPS_PIPE_DIRECTORY/hang"\n',
        "1.5",
        {Reason.MPS_CLIENT_HANGS, Reason.MPS_NOT_STARTED},
    ),
    "ends after its first answer": (
        # The question is answered, then the daemon is asked to quit; the next one finds no pipe.
        f'[ "$1" = -f ] || {{ python3 -S {FAKE}; echo quit | python3 -S {FAKE}; exit 0; }}\n',
        LONG,
        # The second reason is given while the process of the daemon still ends.
        {Reason.MPS_NOT_STARTED, Reason.OTHER_PIPE_DIRECTORY},
    ),
}
# A server that prints what it was given, and ends with an exit code of its own.
SERVER = (
    "import json, os, sys; print(json.dumps([sys.argv[1:], os.getcwd(), os.getuid(), "
    "dict(os.environ)])); sys.exit(7)"
)
WORDS = ["--disaggregation-mode", "decode"]


@dataclass(frozen=True)
class Started:
    """Server that was started: what it was given, its exit code, and the pod's run directory."""

    words: list[str]
    folder: str
    user: int
    environment: dict[str, str]
    code: int
    note: DaemonNote | None
    lives: bool


def prepared(case: Case) -> dict[str, Any]:
    """Return the form's decode container as the webhook leaves it."""
    pod = decode_pod(case, "decode:1")
    found = None
    # Whatever answers instead of the webhook changes nothing; an exact quota refuses the sidecar.
    sidecar = (case.policy or {}).get("sidecar", {})
    asks = case.policy is not None or case.asks
    if asks and not case.webhook and not (case.quota and sidecar.get("form") == "sidecar"):
        asked = SidecarSpec.model_validate(sidecar) if case.policy is not None else None
        around = PodNamespace({LABEL_POD_SECURITY: case.level})
        found = inject(pod, TEMPLATE, asked, around)
        assert found is not None
    changed = {change["path"]: change["value"] for change in found.patch} if found else {}
    (container,) = changed.get("/spec/containers", pod["spec"]["containers"])
    return container


def given(container: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the variables that the form adds, with their values."""
    return tuple(sorted((v["name"], v.get("value", "decode-0")) for v in container.get("env", ())))


@pytest.fixture(scope="module")
def start(standin: Path) -> Iterator[Callable[[tuple[tuple[str, str], ...], str], Started]]:
    """Return a function that starts a server with variables; each pair of arguments once."""
    done: dict[tuple[tuple[tuple[str, str], ...], str], Started] = {}
    with tempfile.TemporaryDirectory(prefix="wr-") as name:

        def run(variables: tuple[tuple[str, str], ...], daemon: str) -> Started:
            if (variables, daemon) not in done:
                folder = Path(name, str(len(done)))
                done[variables, daemon] = _start(folder, dict(variables), daemon, standin)
            return done[variables, daemon]

        yield run


def _start(folder: Path, variables: dict[str, str], daemon: str, standin: Path) -> Started:
    programs, run_dir = folder / "bin", folder / "run"
    programs.mkdir(parents=True)
    run_dir.mkdir()
    wait = LONG
    if daemon:
        before, wait, _ = DAEMONS[daemon]
        (programs / CONTROL).write_text(f'#!/bin/sh\n{before}exec python3 -S {FAKE} "$@"\n')
        (programs / CONTROL).chmod(0o755)
    ours = (PIPE_DIRECTORY, WITHOUT_MPS, ENV_RUN_DIR, "PYTEST_CURRENT_TEST")
    environment = {n: v for n, v in os.environ.items() if n not in ours} | variables
    if ENV_RUN_DIR in variables:  # where the form mounts its volume
        environment[ENV_RUN_DIR] = str(run_dir)
    environment |= {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": str(standin.parent),
        "WINDROW_STANDIN_GRANULARITY": "4096",
        ENV_MPS_WAIT: wait,
    }
    windrow = Path(sys.executable).with_name("windrow")
    server = [sys.executable, "-S", "-c", SERVER, *WORDS]
    done = subprocess.run(
        [windrow, "run", "--", *server],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    words, where, user, seen = json.loads(done.stdout)
    left = MpsDaemon(RunDir(run_dir).mps_folder, control=str(FAKE))
    lives = left.take_over()
    same = {n: v.replace(str(folder), "") for n, v in seen.items()}
    return Started(
        words,
        where.replace(str(folder), ""),
        user,
        same,
        done.returncode,
        DaemonNote.read(RunDir(run_dir)),
        lives,
    )


@pytest.mark.parametrize("form", FORMS)
def test_a_form_changes_nothing_of_decodes_container_but_variables_and_mounts(form):
    before = decode_pod(FORMS[form], "decode:1")["spec"]["containers"][0]
    after = prepared(FORMS[form])
    added = {name for name in after if after[name] != before.get(name)}
    assert added <= {"env", "volumeMounts"}
    assert not {name for name in before if name not in after}
    run_dirs = [value for name, value in given(after) if name == ENV_RUN_DIR]
    assert run_dirs in ([], [str(DEFAULT_RUN_DIR)])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("daemon", DAEMONS)
def test_a_form_starts_its_server_as_before_whatever_the_daemon_does(form, daemon, start):
    variables = given(prepared(FORMS[form]))
    plain, beside = start(variables, ""), start(variables, daemon)
    assert (beside.words, beside.code) == (plain.words, plain.code) == (WORDS, 7)
    assert (beside.folder, beside.user) == (plain.folder, plain.user)
    told = {PIPE_DIRECTORY, "CUDA_MPS_LOG_DIRECTORY", WITHOUT_MPS}
    more = beside.environment.keys() - plain.environment.keys()
    wait = {ENV_MPS_WAIT}
    assert {n for n, v in plain.environment.items() if beside.environment.get(n) != v} <= wait
    why = DAEMONS[daemon][2]
    assert not beside.lives, "it ends with the server"
    if ENV_RUN_DIR not in dict(variables):
        assert (more, beside.note) == (set(), None), "a pod that is left alone gets no daemon"
    elif why:
        assert more == {WITHOUT_MPS}
        assert beside.environment[WITHOUT_MPS].partition(":")[0] in why
        assert beside.note is None, "nobody is to become its client later"
    else:
        assert more == told - {WITHOUT_MPS}
        assert beside.note is not None


def test_the_forms_are_thirty_and_give_decode_few_environments():
    assert len(FORMS) == 30
    assert len({given(prepared(case)) for case in FORMS.values()}) == 2
