"""What tests of more than one folder share: a real API server, a stand-in for libcuda."""

import fcntl
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

# Triton's kernels run on the host then; it reads this when it is first imported, and transformers
# may do so. tests/gpu takes it away again in processes of its own.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from kubernetes import client, config

from windrow.errors import UserError
from windrow.local.build import ensure_tools
from windrow.local.controlplane import ControlPlane, ControlPlaneSettings
from windrow.local.progress import LineProgress

ROOT = Path(__file__).parents[1]
TOOLS = pytest.StashKey()
# What the environment brings along, cmake and ninja among them.
PROGRAMS = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
# Minutes of compiling: begun last, it would leave the other processes without work at the end.
BEGUN_FIRST = "test_native_cpp.py"


@pytest.hookimpl(trylast=True)  # the reporter is there
def pytest_configure(config):
    """Give each process its share of the cores; build what they need before they start."""
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if processes > 1:
        import torch

        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // processes))
    elif config.getoption("numprocesses", None):
        find_tools(config)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name != BEGUN_FIRST)


def pytest_collection_finish(session):
    """Build the control plane before the tests that need it, since it outlasts their time-outs."""
    if session.config.option.collectonly:
        return
    if any("tools" in item.fixturenames for item in session.items):
        find_tools(session.config)


def find_tools(config):
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    write_line = reporter.write_line if reporter else lambda _: None
    try:
        config.stash[TOOLS] = ensure_tools(LineProgress(write_line))
    except UserError as error:
        config.stash[TOOLS] = error


@pytest.fixture(scope="module")
def one_thread():
    """Small operations on a busy machine: a team of threads would wait for its slowest."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def standin() -> Path:
    """The library that stands in for libcuda, built from tests/libcuda_standin."""
    if shutil.which("cmake", path=PROGRAMS) is None:
        pytest.skip("no cmake: make setup brings it")
    # Kept between runs, so that only what changed is compiled again.
    build = ROOT / "build" / "libcuda_standin"
    build.mkdir(parents=True, exist_ok=True)
    with (build / "lock").open("w") as lock:  # tests run in several processes
        fcntl.flock(lock, fcntl.LOCK_EX)
        build_standin(build)
    return build / "tests" / "libcuda_standin" / "libcuda.so.1"


def build_standin(build: Path) -> None:
    options = ["-DWINDROW_PYTHON=OFF", "-DWINDROW_CUDA_STANDIN=ON", "-DCMAKE_BUILD_TYPE=Debug"]
    generator = ["-G", "Ninja"] if shutil.which("ninja", path=PROGRAMS) else []
    for command in (
        ["cmake", *generator, *options, "-S", str(ROOT), "-B", str(build)],
        ["cmake", "--build", str(build), "--target", "cuda_standin", "--parallel", "2"],
    ):
        done = subprocess.run(
            command,
            env=os.environ | {"PATH": PROGRAMS},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.fixture(scope="session")
def tools(request):
    """The executables of a control plane."""
    found = request.config.stash[TOOLS]
    if isinstance(found, UserError):
        pytest.skip(f"no control plane: {found}")
    return found


@pytest.fixture(scope="session")
def control_plane(tools):
    """A running ControlPlane: `.kubeconfig`, `.server`, `.version`; one for the whole session."""
    with ControlPlane(ControlPlaneSettings(tools)) as running:
        yield running


@pytest.fixture(scope="session")
def kube(control_plane):
    """A kubernetes.client.ApiClient with the rights of a cluster administrator."""
    with config.new_client_from_config(str(control_plane.kubeconfig)) as api:
        yield api


@pytest.fixture
def namespace(kube):
    """The name of a namespace that is this test's own, deleted (not awaited) after it."""
    core = client.CoreV1Api(kube)
    name = f"test-{uuid.uuid4().hex[:8]}"
    core.create_namespace({"metadata": {"name": name}})
    yield name
    core.delete_namespace(name)
