"""A whole cluster on this machine: control plane, our resources, operator and process node."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import yaml
from rich.console import Console

from windrow.errors import WindrowError
from windrow.rundir import ENV_OUTPUT_TREES
from windrow_lab.controlplane.server import ControlPlane, ControlPlaneSettings
from windrow_lab.machine.build import ensure_tools
from windrow_lab.machine.child_processes import ENV_MARK
from windrow_lab.machine.ports import LOOPBACK
from windrow_lab.machine.processes import Keeper, ProcessCommand
from windrow_lab.machine.progress import progress_for
from windrow_lab.machine.resources import resource_directory
from windrow_lab.machine.service import ClusterError, Service, await_ready, leads

__all__ = ["ClusterError", "ClusterSettings", "LocalCluster", "apply_crds"]

log = logging.getLogger(__name__)

OPERATOR, NODE = "operator", "node"


@dataclass(frozen=True)
class ClusterSettings:
    """Settings of a local cluster.

    Attributes:
        tools: directory with the control plane's executables; None: found, or built once.
        log_dir: where all logs go, those of pods in `<namespace>_<pod>/<container>.log`; None:
            below the cluster's own directory, and removed with it.
        event_log_root: WINDROW_LOG_DIR of each container is the directory of its pod's name below
            it; None: not set.
        port: of the API server; 0: any free one.
        node_name: of the Node that runs the pods.
        node_environment: variables for each container.
        outputs: directories that jobs may write besides the working directory.
        operator_arguments: more of them.
        nice: added to the niceness of all but the pods.
        cpus: CPUs of control plane and operator; empty: all. Not decode's, where it is measured.
        start_within: deadline for operator and node to be ready.
    """

    tools: Path | None = None
    log_dir: Path | None = None
    event_log_root: Path | None = None
    port: int = 0
    node_name: str = "process-node"
    node_environment: Mapping[str, str] = field(default_factory=dict)
    outputs: tuple[Path, ...] = ()
    operator_arguments: tuple[str, ...] = ()
    nice: int = 5
    cpus: Sequence[int] = ()
    # Seconds on a machine that does nothing else; a minute was too short beside several tests.
    start_within: timedelta = timedelta(minutes=3)


class LocalCluster:
    """A running cluster; a context manager. However it ends, nothing of it stays.

    Attributes:
        kubeconfig: of a cluster administrator.
        server: URL of the API server.
        version: of Kubernetes, as the server says it.
        log_dir: logs of all its processes.
        directory: its own, with the sockets and files of its pods; gone when it has stopped.
        operator: the operator's process, started again when it ends.
        node: the process node, started again when it ends.
    """

    kubeconfig: Path
    server: str
    version: str
    log_dir: Path
    directory: Path
    operator: Service
    node: Service

    def __init__(self, settings: ClusterSettings, *, console: Console | None = None) -> None:
        """Prepare a cluster; a first build of the control plane is shown on `console`."""
        self._settings = settings
        self._console = console or Console(stderr=True)
        self._keeper: Keeper | None = None
        self._control_plane: ControlPlane | None = None
        self._services: list[Service] = []

    def start(self) -> None:
        """Start everything and wait until pods would be injected and run.

        Raises UserError when the control plane's executables are missing and cannot be built,
        ControlPlaneError or ClusterError when a part does not come up.
        """
        tools = ensure_tools(progress_for(self._console), self._settings.tools)
        self._keeper = Keeper()
        # A short path: the sockets of pods are below it.
        self.directory = Path(tempfile.mkdtemp(prefix="windrow-"))
        self._keeper.own(self.directory)
        self.log_dir = (self._settings.log_dir or self.directory / "logs").absolute()
        self.log_dir.mkdir(parents=True, exist_ok=True)
        plane = ControlPlaneSettings(
            tools,
            directory=self.directory / "c",
            log_dir=self.log_dir,
            port=self._settings.port,
            nice=self._settings.nice,
            cpus=self._settings.cpus,
        )
        try:
            self._control_plane = ControlPlane(plane, self._keeper)
            self._control_plane.start()
            self.kubeconfig, self.server = (
                self._control_plane.kubeconfig,
                self._control_plane.server,
            )
            self.version = self._control_plane.version
            with self._control_plane.client() as client:
                apply_crds(client)
            self._start_services()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End pods, operator and control plane, and remove the files; harmless when repeated."""
        if self._keeper is None:
            return
        # The node first: its pods may still want to tell the operator that they end.
        for service in reversed(self._services):
            service.stop(timedelta(seconds=15))
        self._services.clear()
        if self._control_plane is not None:
            self._control_plane.stop()
        self._keeper.close()
        self._keeper = None
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _start_services(self) -> None:
        deadline = time.monotonic() + self._settings.start_within.total_seconds()
        state = self.directory / "operator.json"
        self.operator = self._service(OPERATOR, self._operator_arguments(state))
        self.node = self._service(NODE, self._node_arguments(self.directory / "n"))
        await_ready(self.operator, lambda: leads(self.operator, state), deadline)
        await_ready(self.node, self._node_is_ready, deadline)

    def _service(self, name: str, arguments: list[str]) -> Service:
        assert self._keeper is not None
        environment = {
            key: value
            for key, value in os.environ.items()
            if key not in (ENV_MARK, "KUBECONFIG") and not key.startswith("WINDROW_")
        }
        command = ProcessCommand(
            [sys.executable, *arguments],
            log=self.log_dir / f"{name}.log",
            env=environment,
            nice=self._settings.nice if name == OPERATOR else 0,
            # The node's pods may be given any CPU, so it keeps all.
            cpus=self._settings.cpus if name == OPERATOR else (),
        )
        service = Service(name, command, self._keeper)
        service.start()
        self._services.append(service)
        return service

    def _operator_arguments(self, state: Path) -> list[str]:
        ports = [f"--{name}-port=0" for name in ("attach", "webhook", "metrics")]
        return [
            *("-m", "windrow_operator", f"--kubeconfig={self.kubeconfig}"),
            *(f"--attach-host={LOOPBACK}", f"--advertise-address={LOOPBACK}"),
            # Under a name that stays, a restart leads again at once.
            *("--identity=local", *ports, f"--state-file={state}"),
            *self._settings.operator_arguments,
        ]

    def _node_arguments(self, directory: Path) -> list[str]:
        root = self._settings.event_log_root
        return [
            *("-m", "windrow_lab.node", f"--kubeconfig={self.kubeconfig}"),
            *(f"--name={self._settings.node_name}", f"--dir={directory}"),
            f"--logs={self.log_dir}",
            *([f"--log-root={root.absolute()}"] if root else []),
            *(f"--env={name}={value}" for name, value in self._node_environment().items()),
        ]

    def _node_environment(self) -> dict[str, str]:
        # Its pods have this machine's files: jobs may write the working tree, and what was named.
        trees = (Path.cwd(), *(path.absolute() for path in self._settings.outputs))
        return {ENV_OUTPUT_TREES: ":".join(map(str, trees)), **self._settings.node_environment}

    def _node_is_ready(self) -> bool:
        assert self._control_plane is not None
        with self._control_plane.client() as client:
            answer = client.get(f"/api/v1/nodes/{self._settings.node_name}")
        conditions = answer.json().get("status", {}).get("conditions") or []
        return any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)


_COLLECTION = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def apply_crds(client: httpx.Client, within: timedelta = timedelta(seconds=30)) -> list[str]:
    """Apply `crds/*.yaml` and wait until they are served; returns their names."""
    paths = sorted(resource_directory("crds").glob("*.yaml"))
    collections = {name: served_at for path in paths for name, served_at in [_apply(client, path)]}
    deadline = time.monotonic() + within.total_seconds()
    # Listed, not only Established: for a moment after that the server answers 429.
    while missing := [name for name, path in collections.items() if client.get(path).is_error]:
        if time.monotonic() > deadline:
            raise WindrowError(f"custom resources are not served yet: {', '.join(missing)}")
        time.sleep(0.05)
    return list(collections)


def _apply(client: httpx.Client, path: Path) -> tuple[str, str]:
    """Apply one definition; returns its name and the path of the collection that it defines."""
    text = path.read_text(encoding="utf-8")
    definition = yaml.safe_load(text)
    name, spec = definition["metadata"]["name"], definition["spec"]
    answer = client.patch(
        f"{_COLLECTION}/{name}",
        params={"fieldManager": "windrow", "force": "true"},
        content=text.encode(),
        headers={"Content-Type": "application/apply-patch+yaml"},
    )
    if answer.is_error:
        raise WindrowError(f"{path} was refused: {answer.json().get('message', answer.text)}")
    version = spec["versions"][0]["name"]
    return name, f"/apis/{spec['group']}/{version}/{spec['names']['plural']}"
