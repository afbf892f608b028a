"""Our resources and operator on the real node that this process runs on, as a demo needs them."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

from windrow_lab.machine.processes import Keeper, ProcessCommand
from windrow_lab.machine.resources import resource_directory
from windrow_lab.machine.service import Service, await_ready, leads
from windrow_lab.realnode import pods as realpods
from windrow_lab.realnode.node import NODE_ADDRESS, NodeInfo

_START_WITHIN_S = 60.0


class RealCluster:
    """A context manager; the node itself stays for as long as its command runs.

    Attributes:
        kubeconfig: of a cluster administrator.
        version: of Kubernetes.
        directory: the run's own folder.
        log_dir: of the operator's log.

    Args:
        node: that this process runs on.
        keeper: ends the operator, however this process ends.
        folder: of the run, below which logs lie and jobs may write.
    """

    def __init__(self, node: NodeInfo, keeper: Keeper, folder: Path) -> None:
        self._node, self._keeper, self._folder = node, keeper, folder
        self.directory = folder
        self.log_dir = folder / "logs"
        self.kubeconfig = Path(node.kubeconfig)
        self.version = ""
        self._operator: Service | None = None

    def __enter__(self) -> Self:
        with tempfile.TemporaryDirectory() as archive:
            realpods.import_decode_image(self._node, Path(archive))
        versions = json.loads(self._node.kubectl("version", "-o", "json"))
        self.version = versions["serverVersion"]["gitVersion"]
        crds = str(resource_directory("crds"))
        self._node.kubectl("apply", "--server-side", "--force-conflicts", "-f", crds)
        self._node.kubectl("wait", "--for=condition=Established", "crd", "--all")
        # What says that policies may give directories of the node there.
        enforce = "pod-security.kubernetes.io/enforce=privileged"
        self._node.kubectl("label", "--overwrite", "namespace", "default", enforce)
        self._start_operator()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the operator, and have the API server ask nobody about pods any more."""
        if self._operator is not None:
            self._operator.stop(timedelta(seconds=15))
        hook = ("mutatingwebhookconfiguration", "windrow-operator")
        self._node.kubectl("delete", *hook, "--ignore-not-found")

    def _start_operator(self) -> None:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        log, state = self.log_dir / "operator.log", self.log_dir / "operator.json"
        command = ProcessCommand(
            [
                *(sys.executable, "-m", "windrow_operator", f"--kubeconfig={self.kubeconfig}"),
                *("--attach-host=0.0.0.0", f"--advertise-address={NODE_ADDRESS}"),
                *(f"--{name}-port=0" for name in ("attach", "webhook", "metrics")),
                *("--identity=local", f"--state-file={state}"),
                f"--sidecar-command={realpods.SIDECAR_COMMAND}",
            ],
            log=log,
        )
        self._operator = operator = Service("operator", command, self._keeper)
        operator.start()
        deadline = time.monotonic() + _START_WITHIN_S
        await_ready(operator, lambda: leads(operator, state), deadline)
