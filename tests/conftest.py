"""What tests of more than one folder share: a real API server, and a namespace of one's own."""

import os
import uuid

# Triton's kernels run on the host then; it reads this when it is first imported, and transformers
# may do so. tests/gpu takes it away again in processes of its own.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from kubernetes import client, config

from windrow.errors import UserError
from windrow.local.build import ensure_tools
from windrow.local.controlplane import ControlPlane, ControlPlaneSettings
from windrow.local.progress import LineProgress

TOOLS = pytest.StashKey()
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
