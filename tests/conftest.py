"""Fixtures of more than one folder: a real API server, a stand-in for libcuda."""

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from contextlib import nullcontext
from pathlib import Path

# Triton's kernels run on the host then; it reads this when it is first imported, and transformers
# may do so. tests/gpu takes it away again in processes of its own.
os.environ.setdefault("TRITON_INTERPRET", "1")

import hypothesis
import pytest
from kubernetes import client, config
from support.forked_start import programs_are_forked

from windrow.errors import UserError
from windrow_lab.controlplane.server import ControlPlane, ControlPlaneSettings
from windrow_lab.machine.build import build_tools, ensure_tools
from windrow_lab.machine.ports import free_port
from windrow_lab.machine.progress import LineProgress
from windrow_lab.machine.tools import OBJECT_STORE

ROOT = Path(__file__).parents[1]
# Processes that tests start import tests/support as well.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(ROOT / "tests"), os.environ.get("PYTHONPATH")))
)
TOOLS, STORE = pytest.StashKey(), pytest.StashKey()
# What the environment brings along, cmake and ninja among them.
PROGRAMS = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
# Minutes of compiling: begun last, it would leave the other processes without work at the end.
BEGUN_FIRST = "test_native_cpp.py"


# Folders whose tests start programs as they are; elsewhere other libraries are put before them.
FORKED = {"contract", "e2e", "integration"}

# A shell that starts tests in the background has them ignore Ctrl-C, and what they start as well:
# tests that interrupt a process would wait for it for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes is the machine's affair: 200 ms is Hypothesis' own limit for one.
hypothesis.settings.register_profile("windrow", deadline=None)
hypothesis.settings.load_profile("windrow")


@pytest.hookimpl(trylast=True)  # the reporter is there
def pytest_configure(config):
    """Give each process its share of the cores; build what they need before they start."""
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if processes > 1:
        import torch

        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // processes))
    elif config.getoption("numprocesses", None):
        find_tools(config)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    """Fork what tests start; see support.forked_start."""
    with programs_are_forked() if FORKED.intersection(item.path.parts) else nullcontext():
        yield


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name != BEGUN_FIRST)


def pytest_collection_finish(session):
    """Build what tests need before they begin, since it outlasts their time-outs."""
    if session.config.option.collectonly:
        return
    wanted = {name for item in session.items for name in item.fixturenames}
    if "tools" in wanted:
        find_tools(session.config)
    if "bucket" in wanted:
        build(session.config, STORE, lambda say: build_tools(say, os.environ, OBJECT_STORE))


def find_tools(config):
    build(config, TOOLS, ensure_tools)


def build(config, key, make):
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    write_line = reporter.write_line if reporter else lambda _: None
    try:
        config.stash[key] = make(LineProgress(write_line))
    except UserError as error:
        config.stash[key] = error


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
def store_address():
    """Return where the S3 server listens."""
    return "127.0.0.1"


@pytest.fixture(scope="session")
def object_store(request, tmp_path_factory, store_address):
    """A running S3 server with one bucket: what a Secret for it holds."""
    built = request.config.stash[STORE]
    if isinstance(built, UserError):
        pytest.skip(f"no object store: {built}")
    root = tmp_path_factory.mktemp("objects")
    (root / "team").mkdir()
    port = free_port()
    address = f"{store_address}:{port}"
    secret = {
        "AWS_ACCESS_KEY_ID": "team-key",
        "AWS_SECRET_ACCESS_KEY": "team-secret-a7f3",
        "AWS_ENDPOINT_URL": f"http://{address}",
        "AWS_REGION": "us-east-1",
    }
    command = [built / "versitygw", "--port", address, "--quiet"]
    command += ["posix", "--sidecar", tmp_path_factory.mktemp("metadata"), root]
    keys = {"ROOT_ACCESS_KEY": "team-key", "ROOT_SECRET_KEY": secret["AWS_SECRET_ACCESS_KEY"]}
    with (root.parent / "object-store.log").open("wb") as log:
        server = subprocess.Popen(command, env=os.environ | keys, stdout=log, stderr=log)
    try:
        while not answers(store_address, port):
            assert server.poll() is None, (root.parent / "object-store.log").read_text()
            time.sleep(0.05)
        yield secret
    finally:
        server.terminate()
        server.wait()


def answers(address, port):
    with socket.socket() as probe:
        return probe.connect_ex((address, port)) == 0


@pytest.fixture
def bucket(object_store, monkeypatch):
    """A folder of a bucket that is this test's own, and the Secret for it."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    return f"s3://team/{uuid.uuid4().hex[:8]}", object_store


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
