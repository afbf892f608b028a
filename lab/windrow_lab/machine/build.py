"""Builds the executables of a control plane, a node and what tests need, once, into the cache."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from pathlib import Path

from windrow.errors import UserError
from windrow_lab.machine.processes import Child, Keeper, ProcessCommand
from windrow_lab.machine.progress import Progress, Task
from windrow_lab.machine.resources import resource_directory
from windrow_lab.machine.toolchain import BY_HAND, Go, fetch_go, find_go
from windrow_lab.machine.tools import (
    CONTROL_PLANE,
    KUBERNETES_VERSION,
    KUEUE,
    NODE,
    OBJECT_STORE,
    Tools,
    cache_directory,
    cache_root,
    find_tools,
    is_whole,
    write_manifest,
)

# Module sources (0.7 GB), build cache (1.5 GB), the programs twice, and some air.
_NEEDED_BYTES = 4 << 30
# A line of `go build -v` that names a package, not a download or an error.
_PACKAGE = re.compile(r"^[\w.-]+(/[\w.~+-]+)*$")
_DOWNLOADING = "go: downloading "
_SCRATCH = "build-"
_LOOK_EVERY_SECONDS = 0.2


@dataclass(frozen=True)
class Module:
    """One Go module of a kit's folder and what is built from it."""

    folder: str
    programs: tuple[str, ...]
    linker_flags: str = "-s -w"
    tags: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the executables."""
        return tuple(
            self.folder if program == "." else program.rpartition("/")[2]
            for program in self.programs
        )


def modules(kit: str = CONTROL_PLANE) -> tuple[Module, ...]:
    """Return the modules to build for a kit."""
    major, minor, _ = KUBERNETES_VERSION.removeprefix("v").split(".")
    # Both packages, since Helm and others read the second one's answer.
    stamps = [
        f"-X {package}/version.{name}={value}"
        for package in ("k8s.io/component-base", "k8s.io/client-go/pkg")
        for name, value in (
            ("gitVersion", KUBERNETES_VERSION),
            ("gitMajor", major),
            ("gitMinor", minor),
            ("gitTreeState", "clean"),
        )
    ]
    stamped = " ".join(["-s -w", *stamps])

    def kubernetes(*programs: str) -> Module:
        paths = tuple(f"k8s.io/kubernetes/cmd/{program}" for program in programs)
        return Module("kubernetes", paths, stamped)

    if kit == CONTROL_PLANE:
        return Module("etcd", (".",)), kubernetes("kube-apiserver", "kube-controller-manager")
    if kit == OBJECT_STORE:
        return (Module("versitygw", ("github.com/versity/versitygw/cmd/versitygw",)),)
    if kit == KUEUE:
        return (Module("kueue", ("sigs.k8s.io/kueue/cmd/kueue",)),)
    assert kit == NODE, kit
    containerd = tuple(
        f"github.com/containerd/containerd/v2/cmd/{program}"
        for program in ("containerd", "containerd-shim-runc-v2", "ctr")
    )
    return (
        Module("pause", (".",)),
        Module("containerd", containerd, tags="no_btrfs,no_devmapper,no_zfs"),
        Module("coredns", (".",)),
        Module("helm", ("helm.sh/helm/v4/cmd/helm",)),
        kubernetes("kubelet", "kube-scheduler", "kube-proxy", "kubectl"),
    )


def ensure_tools(
    progress: Progress,
    explicit: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Tools:
    """Return the executables of a control plane, building them when there are none.

    Raises UserError that says what is missing (network, disk, toolchain) and how to give the
    executables by hand.
    """
    environment = os.environ if environment is None else environment
    if found := find_tools(explicit, environment):
        return found
    build_tools(progress, environment)
    built = find_tools(None, environment)
    assert built is not None, "a finished build is found"
    return built


def build_tools(
    progress: Progress, environment: Mapping[str, str], kit: str = CONTROL_PLANE
) -> Path:
    """Build a kit into the cache, whole or not at all; returns the directory.

    Safe against a second process that builds at the same time (it waits) and against being killed
    (what is unfinished is not found, and the next call begins again with Go's own caches warm).
    """
    directory, root = cache_directory(environment, kit), cache_root(environment, kit)
    root.mkdir(parents=True, exist_ok=True)
    with _only_builder(root / "lock", progress):
        if is_whole(directory):
            return directory
        _require_space(root)
        go = find_go(environment) or fetch_go(root / "go", environment, progress.say)
        for left_over in root.glob(f"{_SCRATCH}*"):
            shutil.rmtree(left_over, ignore_errors=True)
        # A supervisor, so that a compiler does not outlive a build that was killed.
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=root) as scratch, Keeper() as keeper:
            finished = _Build(kit, go, Path(scratch), keeper, progress).run()
            shutil.rmtree(directory, ignore_errors=True)
            finished.rename(directory)
        if go.fetched:
            shutil.rmtree(root / "go", ignore_errors=True)
    return directory


@dataclass(frozen=True)
class _Build:
    """One run of the build: its toolchain, its scratch directory and its children."""

    kit: str
    go: Go
    scratch: Path
    keeper: Keeper
    progress: Progress

    def run(self) -> Path:
        """Build all programs and seal them with a manifest; returns their directory."""
        output = self.scratch / "bin"
        output.mkdir()
        # A copy, for the installed one may be read-only.
        shutil.copytree(resource_directory(self.kit), self.scratch / "src")
        names: list[str] = []
        for module in modules(self.kit):
            with self.progress.task(f"sources of {module.folder}") as task:
                n_packages = self._fetch_sources(module, task)
            with self.progress.task(f"build of {module.folder}", total=n_packages) as task:
                self._compile(module, output, task)
            names += module.names
        write_manifest(output, tuple(names), self.go.version, self.kit)
        return output

    def _fetch_sources(self, module: Module, task: Task) -> int:
        """Download what the programs consist of; returns the number of packages."""
        n_packages = 0
        for line in self._lines_of(module, ["list", "-deps", *_tags(module), *module.programs]):
            if line.startswith(_DOWNLOADING):
                task.note(line.removeprefix(_DOWNLOADING))
            n_packages += bool(_PACKAGE.match(line))
        return n_packages

    def _compile(self, module: Module, output: Path, task: Task) -> None:
        flags = [*_tags(module), "-v", "-trimpath", f"-ldflags={module.linker_flags}"]
        flags += ["-o", f"{output}/"]
        for line in self._lines_of(module, ["build", *flags, *module.programs]):
            if _PACKAGE.match(line):
                task.advance()

    def _lines_of(self, module: Module, arguments: Sequence[str]) -> Iterator[str]:
        """Run Go in a module's folder and yield its lines; raises UserError when it fails."""
        log = self.scratch / f"{module.folder}-{arguments[0]}.log"
        folder = self.scratch / "src" / module.folder
        argv = [str(self.go.program), *arguments]
        child = self.keeper.start(ProcessCommand(argv, log, env=self.go.environment, cwd=folder))
        tail: deque[str] = deque(maxlen=8)
        for line in _follow(log, child):
            if not (_PACKAGE.match(line) or line.startswith(_DOWNLOADING)):
                tail.append(line)
            yield line
        if child.exited.result() != 0:
            raise _explained("\n".join(tail))


def _tags(module: Module) -> list[str]:
    return [f"-tags={module.tags}"] if module.tags else []


def _follow(log: Path, child: Child) -> Iterator[str]:
    with log.open(encoding="utf-8", errors="replace") as lines:
        unfinished = ""
        while True:
            # Asked before reading: what is read after the end is all there is.
            ended = child.poll() is not None
            for text in lines:
                unfinished += text
                if unfinished.endswith("\n"):
                    yield unfinished.rstrip()
                    unfinished = ""
            if ended:
                return
            with contextlib.suppress(FutureTimeout):
                child.exited.result(timeout=_LOOK_EVERY_SECONDS)


def _explained(tail: str) -> UserError:
    if any(sign in tail for sign in ("dial tcp", "no such host", "i/o timeout", "proxyconnect")):
        return UserError(
            f"the sources of the control plane could not be downloaded:\n{tail}",
            remedy=f"The first build needs a network (GOPROXY names a mirror). {BY_HAND}",
            reason="NoNetwork",
        )
    return UserError(
        f"the control plane could not be built:\n{tail}", remedy=BY_HAND, reason="BuildFailed"
    )


def _require_space(root: Path) -> None:
    free = shutil.disk_usage(root).free
    if free < _NEEDED_BYTES:
        raise UserError(
            f"{root} has {free / 2**30:.1f} GiB free, and the build of the control plane needs "
            f"{_NEEDED_BYTES / 2**30:.0f}",
            remedy=f"Free some, or point XDG_CACHE_HOME elsewhere. {BY_HAND}",
            reason="NoSpace",
        )


@contextlib.contextmanager
def _only_builder(lock: Path, progress: Progress) -> Iterator[None]:
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.say("another process builds the control plane: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
