"""A real Kubernetes API server for one run: etcd, kube-apiserver and kube-controller-manager.

Each run has its own ports and directory. The three are children of a supervisor, so nothing is left
running however the run ends.
"""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import logging
import os
import secrets
import shutil
import signal
import ssl
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import yaml
from cryptography import x509

from windrow.errors import Transient, WindrowError
from windrow_lab.controlplane.certificates import (
    ServerFiles,
    make_server_files,
    make_signing_key,
    write_private,
)
from windrow_lab.machine.ports import LOOPBACK, ReservedPort
from windrow_lab.machine.processes import Child, Keeper, ProcessCommand
from windrow_lab.machine.tools import Tools

log = logging.getLogger(__name__)

# Garbage collection of owned objects, the end of namespaces, and what a pod needs to be admitted:
# its namespace's default service account and the authority that the pod trusts.
CONTROLLERS = (
    "garbage-collector-controller",
    "namespace-controller",
    "serviceaccount-controller",
    "root-ca-certificate-publisher-controller",
)
# Addresses of Services; the first one is the API server's own.
SERVICES, FIRST_SERVICE = "10.96.0.0/16", "10.96.0.1"
_TAIL_LINES = 20


class ControlPlaneError(WindrowError):
    """A component did not come up; the message ends with the tail of its log."""


@dataclass(frozen=True)
class ControlPlaneSettings:
    """Settings of a control plane.

    Attributes:
        tools: the executables.
        directory: where its files go; None: a new one under the temporary directory, removed at
            the end. Keep its path short.
        log_dir: where the logs go; None: below `directory`.
        port: of the API server; 0: any free one.
        nice: added to the niceness of all three, so that they yield to what is measured.
        cpus: CPUs that they may run on; empty: all.
        start_within: deadline for readiness.
        pods_reach: pods reach the API server, at this address and by its Service; every
            controller runs then. None: it is on the loopback interface, for processes of this
            machine.
    """

    tools: Tools
    directory: Path | None = None
    log_dir: Path | None = None
    port: int = 0
    nice: int = 5
    cpus: Sequence[int] = ()
    # Seconds on a machine that does nothing else; a minute was too short beside several tests.
    start_within: timedelta = timedelta(minutes=3)
    pods_reach: str | None = None


class ControlPlane:
    """A running control plane; a context manager.

    Attributes:
        kubeconfig: file (mode 0600) with the credentials of a cluster administrator.
        server: URL of the API server.
        version: of Kubernetes, as the server says it (`v1.36.3`).
        log_dir: logs of the three components.
    """

    kubeconfig: Path
    server: str
    version: str
    log_dir: Path

    def __init__(self, settings: ControlPlaneSettings, keeper: Keeper | None = None) -> None:
        """Prepare a control plane; `keeper` supervises it, or one of its own."""
        self._settings = settings
        self._keeper, self._owns_keeper = keeper, keeper is None
        self._children: dict[str, Child] = {}
        self._directory: Path | None = None
        self._new_client: Callable[[], httpx.Client] | None = None

    def start(self) -> None:
        """Start all components and wait until pods can be created.

        Raises ControlPlaneError when one of them fails; nothing is left running then, and its log
        stays where the message says.
        """
        if self._keeper is None:
            self._keeper = Keeper()
        self._directory = self._make_directory()
        try:
            self._start_components()
        except BaseException as error:
            self._stop(keep_logs=isinstance(error, ControlPlaneError))
            raise
        log.info("kubernetes %s serves at %s", self.version, self.server)

    def client(self) -> httpx.Client:
        """Return a new HTTP client with the rights of a cluster administrator."""
        assert self._new_client is not None, "start() comes first"
        return self._new_client()

    def stop(self) -> None:
        """End all components and remove the files; harmless when repeated."""
        self._stop(keep_logs=False)

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

    def _make_directory(self) -> Path:
        if self._settings.directory is None:
            directory = Path(tempfile.mkdtemp(prefix="windrow-"))
        else:
            directory = self._settings.directory
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        assert self._keeper is not None
        self._keeper.own(directory)
        self.log_dir = self._settings.log_dir or directory / "logs"
        self.log_dir.mkdir(parents=True, exist_ok=True)
        return directory

    def _start_components(self) -> None:
        assert self._directory is not None
        deadline = time.monotonic() + self._settings.start_within.total_seconds()
        address = self._settings.pods_reach or LOOPBACK
        files = make_server_files(self._directory, name="kubernetes", also=_service_names(address))
        with (
            ReservedPort(self._settings.port) as server_port,
            ReservedPort() as etcd_port,
            ReservedPort() as peer_port,
        ):
            self._start("etcd", self._etcd_arguments(etcd_port.number, peer_port.number))
            token = secrets.token_urlsafe(32)
            self.server = f"https://{address}:{server_port.number}"
            self.kubeconfig = self._directory / "kubeconfig"
            write_kubeconfig(self.kubeconfig, self.server, token, files.authority.read_bytes())
            arguments = self._apiserver_arguments(
                files, etcd_port.number, server_port.number, token
            )
            self._start("kube-apiserver", arguments)
            self._new_client = lambda: _client(self.server, token, files.authority)
            with self.client() as client:
                self._await("kube-apiserver", deadline, lambda: _answers(client, "/readyz"))
                self.version = client.get("/version").json()["gitVersion"]
                self._start("kube-controller-manager", self._manager_arguments(files))
                account = "/api/v1/namespaces/default/serviceaccounts/default"
                self._await("kube-controller-manager", deadline, lambda: _answers(client, account))

    def _start(self, name: str, arguments: list[str]) -> None:
        tools = self._settings.tools
        program = {
            "etcd": tools.etcd,
            "kube-apiserver": tools.kube_apiserver,
            "kube-controller-manager": tools.kube_controller_manager,
        }[name]
        assert self._keeper is not None
        self._children[name] = self._keeper.start(
            ProcessCommand(
                [str(program), *arguments],
                log=self._log_of(name),
                # Their settings are the arguments alone; a proxy or ETCD_* of the user's shell
                # would reach them otherwise.
                env={"PATH": os.environ.get("PATH", ""), "HOME": str(self._directory)},
                cwd=self._directory,
                nice=self._settings.nice,
                cpus=self._settings.cpus,
            )
        )

    def _etcd_arguments(self, client_port: int, peer_port: int) -> list[str]:
        client, peer = f"http://{LOOPBACK}:{client_port}", f"http://{LOOPBACK}:{peer_port}"
        return [
            f"--data-dir={self._directory}/etcd",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--socket-reuse-port",
            # The data lives as long as the run: nothing to save from a power cut.
            "--unsafe-no-fsync",
            "--log-level=warn",
        ]

    def _apiserver_arguments(
        self, files: ServerFiles, etcd_port: int, port: int, token: str
    ) -> list[str]:
        assert self._directory is not None
        write_private(
            self._directory / "tokens.csv", f'{token},admin,admin,"system:masters"\n'.encode()
        )
        signing_key = self._directory / "service-accounts.key"
        make_signing_key(signing_key)
        address = self._settings.pods_reach or LOOPBACK
        return [
            f"--etcd-servers=http://{LOOPBACK}:{etcd_port}",
            f"--bind-address={address}",
            f"--advertise-address={address}",
            f"--secure-port={port}",
            "--permit-port-sharing",
            f"--cert-dir={self._directory}",
            f"--tls-cert-file={files.certificate}",
            f"--tls-private-key-file={files.key}",
            f"--token-auth-file={self._directory}/tokens.csv",
            "--authorization-mode=RBAC",
            # The audiences stay those of the issuer: with `windrow` among them the server would
            # take a sidecar's token for its own.
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={signing_key}",
            f"--service-account-signing-key-file={signing_key}",
            f"--service-cluster-ip-range={SERVICES}",
            *(
                ["--allow-privileged=true", "--kubelet-preferred-address-types=InternalIP"]
                if self._settings.pods_reach
                # A loopback address is not a valid endpoint of the `kubernetes` service.
                else ["--endpoint-reconciler-type=none"]
            ),
        ]

    def _manager_arguments(self, files: ServerFiles) -> list[str]:
        assert self._directory is not None
        return [
            f"--kubeconfig={self.kubeconfig}",
            f"--controllers={'*' if self._settings.pods_reach else ','.join(CONTROLLERS)}",
            f"--root-ca-file={files.authority}",
            "--leader-elect=false",
            "--secure-port=0",
        ]

    def _await(self, name: str, deadline: float, ready: Callable[[], bool]) -> None:
        while not ready():
            for component, child in self._children.items():
                if (status := child.poll()) is not None:
                    raise self._failure(component, f"ended with status {status}")
            if time.monotonic() > deadline:
                raise self._failure(
                    name, f"was not ready within {self._settings.start_within.total_seconds():g} s"
                )
            time.sleep(0.05)

    def _failure(self, name: str, what: str) -> ControlPlaneError:
        path = self._log_of(name)
        tail = path.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return ControlPlaneError("\n".join([f"{name} {what}; the end of {path}:", *tail]))

    def _log_of(self, name: str) -> Path:
        return self.log_dir / f"{name}.log"

    def _stop(self, *, keep_logs: bool) -> None:
        if self._keeper is None or self._directory is None:
            return
        # The API server takes tens of seconds to end on SIGTERM and holds nothing worth saving.
        # A supervisor that is gone has ended them, and removed the directory.
        with contextlib.suppress(Transient):
            for child in self._children.values():
                child.signal(signal.SIGKILL)
        for child in self._children.values():
            child.exited.result(timeout=30)
        self._children.clear()
        with contextlib.suppress(Transient):
            self._keeper.disown(self._directory)
        if self._owns_keeper:
            self._keeper.close()
            self._keeper = None
        _remove(self._directory, but=self.log_dir if keep_logs else None)
        self._directory = None


def _service_names(address: str) -> list[x509.GeneralName]:
    """Return the names by which pods know the API server."""
    names = ("kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local")
    addresses = (address, FIRST_SERVICE)
    return [
        *(x509.DNSName(name) for name in names),
        *(x509.IPAddress(ipaddress.ip_address(each)) for each in addresses),
    ]


def write_kubeconfig(path: Path, server: str, token: str, authority_pem: bytes) -> None:
    """Write a kubeconfig for one user of one cluster, both named windrow."""
    authority = base64.b64encode(authority_pem).decode()
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {
                "name": "windrow",
                "cluster": {"server": server, "certificate-authority-data": authority},
            }
        ],
        "users": [{"name": "windrow", "user": {"token": token}}],
        "contexts": [{"name": "windrow", "context": {"cluster": "windrow", "user": "windrow"}}],
        "current-context": "windrow",
    }
    write_private(path, yaml.safe_dump(content, sort_keys=False).encode())


def _client(server: str, token: str, authority: Path) -> httpx.Client:
    return httpx.Client(
        base_url=server,
        headers={"Authorization": f"Bearer {token}"},
        verify=ssl.create_default_context(cafile=str(authority)),
        timeout=5,
        trust_env=False,
    )


def _answers(client: httpx.Client, path: str) -> bool:
    try:
        return client.get(path).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _remove(directory: Path, *, but: Path | None) -> None:
    if but is None or not but.is_relative_to(directory):
        shutil.rmtree(directory, ignore_errors=True)
        return
    for entry in directory.iterdir():
        if entry == but:
            continue
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def version_of(tools: Tools) -> str:
    """Return the version that an API server's executable claims (`v1.36.3`)."""
    run = subprocess.run(
        [tools.kube_apiserver, "--version"], capture_output=True, text=True, check=True, timeout=30
    )
    return run.stdout.split()[-1]
