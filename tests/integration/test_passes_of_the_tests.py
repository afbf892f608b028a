"""Each command of the tests runs all of its passes, also after a red one, and says what was red."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "run_tests.py"
# As `tools/run_tests.py` calls itself, with other passes.
CALL = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("run_tests", {tool!r})
tool = sys.modules["run_tests"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)
plain = ("-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", ".")
names = sys.argv[1:]
sys.exit(tool.run([tool.Pass(n, (f"test_{{n}}.py", *plain), {{"OF_PASS": n}}) for n in names]))
"""
FILES = {
    "green": "def test_one(): pass\ndef test_two(): pass\n",
    "red": "def test_bad(): assert False\ndef test_good(): pass\n",
    "without": "import pytest\n@pytest.mark.skip\ndef test_not_here(): pass\n",
    "killed": "import os\ndef test_it(): os.kill(os.getpid(), 9)\n",
    "told": "import os\ndef test_environment(): assert os.environ['OF_PASS'] == 'told'\n",
    "slow": "import time\ndef test_it():\n    open('begun', 'w').close()\n    time.sleep(60)\n",
}


@pytest.fixture
def command(tmp_path):
    for name, text in FILES.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    return [sys.executable, "-c", CALL.format(tool=str(TOOL))]


def run(command, folder, *passes):
    done = subprocess.run(
        [*command, *passes], cwd=folder, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout.splitlines()


def test_passes_after_a_red_one_run_and_the_summary_has_counts_names_and_seconds(command, tmp_path):
    code, lines = run(command, tmp_path, "red", "green", "without", "told")
    assert code == 1
    closing = lines[next(i for i, line in enumerate(lines) if "summary of all passes" in line) :]
    assert closing[1] == "FAILED test_red.py::test_bad (red)"
    counts = [
        re.sub(r" in [0-9.]+s, [0-9]+s of CPU$", "", line).split(maxsplit=1)
        for line in closing[2:-1]
    ]
    assert counts == [
        ["red", "1 failed, 1 passed"],
        ["green", "2 passed"],
        ["without", "1 skipped"],
        ["told", "1 passed"],
    ]
    assert re.fullmatch(r"=+ 1 failed, 4 passed, 1 skipped in [0-9.]+s =+", closing[-1])


def test_green_passes_end_with_success(command, tmp_path):
    code, lines = run(command, tmp_path, "green", "told")
    assert code == 0
    assert re.fullmatch(r"=+ 3 passed in [0-9.]+s =+", lines[-1])


def test_a_pass_that_dies_is_red_and_its_signal_is_the_exit_code(command, tmp_path):
    code, lines = run(command, tmp_path, "red", "killed", "green")
    assert code == 128 + signal.SIGKILL
    assert "FAILED pytest itself ended with exit code 137 (killed)" in lines
    assert "1 failed, 3 passed, 1 error" in lines[-1]


def test_an_interrupt_ends_the_run_with_what_there_is_to_say(command, tmp_path):
    process = subprocess.Popen(
        [*command, "green", "slow", "told"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "2 passed" in said.splitlines()[-1]
    assert "test_told.py" not in said


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location("run_tests", TOOL)
    made = sys.modules["run_tests"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_a_command_line_chooses_passes_by_name(tool, capsys):
    names = [this.name for this in tool.PASSES["test"]]
    assert [this.name for this in tool.chosen(["test"])] == names
    first = tool.chosen(["test", "--only", names[0]])
    others = tool.chosen(["test", "--but", names[0]])
    assert [this.name for this in (*first, *others)] == names
    with pytest.raises(SystemExit):
        tool.chosen(["test", "--only", "nowhere"])
    assert "'nowhere' is not a pass of test" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("marks", "passes"),
    [
        *((marks, 1) for marks in (set(), {"alone"}, {"paired"}, {"quantized"})),
        *(({"extended", *marks}, 1) for marks in ((), ("alone",), ("paired",))),
        *(({mark}, 0) for mark in ("sglang", "long")),
    ],
)
def test_each_test_belongs_to_one_pass_but_for_those_with_a_command_of_their_own(
    tool, marks, passes
):
    """Both suites together, which is what `.ci/run` plays; equality alone comes again."""
    both = [this.arguments[1] for suite in ("test", "extended") for this in tool.PASSES[suite]]
    known = ("alone", "paired", "quantized", "sglang", "long", "extended")
    has = {mark: mark in marks for mark in known}
    found = [eval(expression, {}, has) for expression in both if expression != "equality"]
    assert found.count(True) == passes


def test_what_is_extended_is_in_no_pass_of_make_test(tool):
    for marks in (set(), {"alone"}, {"paired"}):
        has = {mark: mark in marks for mark in ("alone", "paired", "quantized", "sglang", "long")}
        for this in tool.PASSES["test"]:
            assert not eval(this.arguments[1], {}, has | {"extended": True})


@pytest.mark.parametrize("mark", ["alone", "paired", "quantized", "equality", "extended"])
def test_what_has_a_mark_lies_where_its_passes_look(tool, mark):
    looked = [ROOT / place for place in getattr(tool, f"{mark.upper()}_LIES")]
    marked = [
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if f"pytest.mark.{mark}" in path.read_text()
        and path != Path(__file__).resolve()
        and ROOT / "tests" / "sglang" not in path.parents  # in an environment of its own
    ]
    assert marked
    lost = [path for path in marked if not any(path.is_relative_to(place) for place in looked)]
    assert lost == []
    assert all(path.exists() for path in looked)


@pytest.mark.parametrize(
    ("flags", "left_out"),
    [("sse4_2 avx2 fma", True), ("avx2 avx512f avx512_bf16", False), ("sse4_2", False)],
)
def test_equality_on_avx2_kernels_is_tried_where_torch_has_better_ones(
    tool, monkeypatch, flags, left_out
):
    monkeypatch.setattr(Path, "read_text", lambda _: f"flags : fpu {flags}\n")
    left = {this.name for this in tool.PASSES["extended"] if this.repeats()}
    assert left == ({"equality, AVX2 kernels"} if left_out else set())


def test_the_core_contracts_are_there(tool):
    assert all(map(Path.exists, map(ROOT.joinpath, tool.CORE)))
