"""The C++ tests pass under the sanitizers, and the core compiles without a warning."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
BUILD_TIMEOUT_S = 600
# What is built and run under each. One thread alone sweeps through the failures of making an arena:
# ThreadSanitizer can find nothing there, and takes 6 s to say so.
SANITIZERS = {
    "address,undefined": ("all", "*"),
    "thread": ("windrow_tests", "-*.CreatingSurvivesTheFailureOfAnyCall/*"),
}


def require_tools() -> None:
    if shutil.which("cmake", path=TOOLS) is None:
        pytest.skip("no cmake: make setup brings it")
    if not any(shutil.which(name, path=TOOLS) for name in ("c++", "g++", "clang++")):
        pytest.skip("no C++ compiler")


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | {"PATH": TOOLS, "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"},
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        check=False,
    )


def configure(build: Path, sanitizer: str) -> None:
    generator = ["-G", "Ninja"] if shutil.which("ninja", path=TOOLS) else []
    done = run(
        "cmake",
        *generator,
        "-DWINDROW_PYTHON=OFF",
        "-DWINDROW_CPP_TESTS=ON",
        "-DWINDROW_WERROR=ON",
        f"-DWINDROW_SANITIZE={sanitizer}",
        ROOT,
        cwd=build,
    )
    if "need GoogleTest" in done.stderr:
        pytest.skip("no GoogleTest: install it (Debian: apt-get install libgtest-dev)")
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(2 * BUILD_TIMEOUT_S)
@pytest.mark.parametrize(
    "sanitizer", ["address,undefined", pytest.param("thread", marks=pytest.mark.extended)]
)
def test_the_cpp_tests_pass_under(sanitizer: str):
    require_tools()
    # Kept between runs, so that only what changed is compiled again.
    build = ROOT / "build" / f"cpp-{sanitizer.partition(',')[0]}"
    build.mkdir(parents=True, exist_ok=True)
    configure(build, sanitizer)
    target, tests = SANITIZERS[sanitizer]
    processes = str(os.cpu_count())
    built = run("cmake", "--build", ".", "--parallel", processes, "--target", target, cwd=build)
    assert built.returncode == 0, built.stdout[-8000:] + built.stderr
    tested = run(build / "tests" / "cpp" / "windrow_tests", f"--gtest_filter={tests}", cwd=build)
    assert tested.returncode == 0, tested.stdout[-8000:] + tested.stderr[-8000:]
