"""The settings of one agent, checked as a whole before anything runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from windrow.errors import UserError
from windrow.rundir import (
    ENV_MAX_JOBS,
    ENV_METRICS_PORT,
    ENV_OPERATOR_ADDRESS,
    ENV_OPERATOR_CA,
    ENV_RUN_DIR,
    ENV_TOKEN_FILE,
    RunDir,
)

# Linux keeps a socket's path in 108 bytes, the last one a zero.
_SOCKET_PATH_MAX = 107


@dataclass(frozen=True)
class AgentSettings:
    """Settings of one agent. Times in seconds."""

    run_dir: RunDir
    operator_address: str = ""  # empty: nobody to attach to; nothing is harvested
    operator_ca: str = ""  # PEM, or the path of a file that holds it
    operator_ca_file: Path | None = None  # more of them, kept up to date from outside
    operator_server_name: str = ""  # name in the operator's certificate, when not the address
    token_file: Path | None = None
    pod_namespace: str = ""
    pod_name: str = ""
    pod_uid: str = ""
    node_name: str = ""
    log_dir: Path | None = None
    metrics_port: int = 0
    metrics_host: str = ""
    worker_module: str = "windrow_sidecar.finetune.worker"
    max_jobs: int = 4  # that share a worker, where a slot can take more than one
    copy_rate: int | None = None  # bytes a second that frozen layers may move; None: no limit
    gpu_access: str = ""  # how its container sees GPUs, where they may be more than decode's
    sharing: str = "auto"  # of the GPU, as the policy says: auto, spatial or temporal
    mps_priority: str = "auto"  # of workers: auto, normal or below
    output_trees: tuple[str, ...] = ()  # that jobs may write besides the policy's volumes
    standby: bool = True  # have a worker wait ahead of its job, with everything loaded
    grace_s: float = 25.0  # for the worker's last checkpoint; pods have 30 s by default
    # A worker reports its progress once a second, from a thread that needs nothing but Python's
    # lock; libraries hold that for some seconds while they load.
    worker_silence_s: float = 120.0  # a worker that says nothing for longer is killed
    engine_absence_s: float = 5.0  # an engine that is away for longer is gone
    engine_calls_within_s: float = 20.0  # after the sidecar's start; then its silence is reported

    def __post_init__(self) -> None:
        """Refuse what could only fail later."""
        path = str(self.run_dir.agent_socket)
        if len(path.encode()) > _SOCKET_PATH_MAX:
            raise UserError(
                f"the socket's path {path} has more than {_SOCKET_PATH_MAX} bytes",
                field=ENV_RUN_DIR,
                remedy="Choose a shorter run directory.",
            )
        if not 0 <= self.metrics_port < 65536:
            raise UserError(
                f"{self.metrics_port} is not a port",
                field=ENV_METRICS_PORT,
                remedy="Give 0 (any free one) to 65535.",
            )
        if self.max_jobs < 1:
            raise UserError(
                f"{self.max_jobs} is not a number of jobs",
                field=ENV_MAX_JOBS,
                remedy="Give 1 for one job at a time, or how many may take turns.",
            )
        known = self.operator_ca or self.operator_ca_file
        if self.operator_address and not (known and self.token_file):
            missing = ENV_OPERATOR_CA if not known else ENV_TOKEN_FILE
            raise UserError(
                "an operator's address needs its authority and a token",
                field=missing,
                remedy=f"Set {missing} too, or leave {ENV_OPERATOR_ADDRESS} empty.",
            )

    @property
    def metrics_address(self) -> str:
        """Address where the metrics are served: a set port is open to scrapers outside the pod."""
        return self.metrics_host or ("0.0.0.0" if self.metrics_port else "127.0.0.1")

    def operator_ca_pem(self) -> bytes:
        """The certificates of the operator's authorities, as they are now.

        Raises:
            UserError: what was given is neither PEM nor a readable file.
        """
        return self._given_ca_pem() + self._kept_ca_pem()

    def _kept_ca_pem(self) -> bytes:
        # The pod may have started before its ConfigMap was written: then it is not there yet.
        if self.operator_ca_file is None or not self.operator_ca_file.is_file():
            return b""
        return b"\n" + self.operator_ca_file.read_bytes()

    def _given_ca_pem(self) -> bytes:
        if not self.operator_ca:
            return b""
        if self.operator_ca.lstrip().startswith("-----BEGIN"):
            return self.operator_ca.encode()
        try:
            return Path(self.operator_ca).read_bytes()
        except OSError as error:
            raise UserError(
                f"cannot read {self.operator_ca}: {error.strerror}",
                field=ENV_OPERATOR_CA,
                remedy="Give the operator's CA as PEM, or the path of a PEM file.",
            ) from error
