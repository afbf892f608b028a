"""What the agent is told: environment of the pod, overridden by flags."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from windrow.crd.values import parse_quantity
from windrow.errors import UserError
from windrow.rundir import (
    DEFAULT_RUN_DIR,
    ENV_COPY_RATE,
    ENV_LOG_DIR,
    ENV_MAX_JOBS,
    ENV_METRICS_PORT,
    ENV_MPS,
    ENV_NODE_NAME,
    ENV_OPERATOR_ADDRESS,
    ENV_OPERATOR_CA,
    ENV_POD_NAME,
    ENV_POD_NAMESPACE,
    ENV_POD_UID,
    ENV_RUN_DIR,
    ENV_TOKEN_FILE,
    RunDir,
)

# Linux keeps a socket's path in 108 bytes, the last one a zero.
_SOCKET_PATH_MAX = 107

_EXAMPLE = """\
example:
  python -m windrow_sidecar.agent --run-dir /run/windrow \\
      --operator-address windrow-operator.windrow-system.svc:8443 \\
      --operator-ca /etc/windrow/ca.pem --token-file /var/run/secrets/windrow/token

Every flag has an environment variable of the pod behind it (named with each flag).
"""


@dataclass(frozen=True)
class AgentSettings:
    """One agent. Times in seconds."""

    run_dir: RunDir
    operator_address: str = ""  # empty: nobody to attach to; nothing is harvested
    operator_ca: str = ""  # PEM, or the path of a file that holds it
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
    mps: bool = True  # whether a private MPS daemon may be started for the GPU
    standby: bool = True  # have a worker wait ahead of its job, with everything loaded
    grace_s: float = 25.0  # for the worker's last checkpoint; pods have 30 s by default
    engine_absence_s: float = 5.0  # an engine that is away for longer is gone

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
                f"{self.metrics_port} is no port",
                field=ENV_METRICS_PORT,
                remedy="Give 0 (any free one) to 65535.",
            )
        if self.max_jobs < 1:
            raise UserError(
                f"{self.max_jobs} jobs are none",
                field=ENV_MAX_JOBS,
                remedy="Give 1 for one job at a time, or how many may take turns.",
            )
        if self.operator_address and not (self.operator_ca and self.token_file):
            missing = ENV_OPERATOR_CA if not self.operator_ca else ENV_TOKEN_FILE
            raise UserError(
                "an operator's address needs its authority and a token",
                field=missing,
                remedy=f"Set {missing} too, or leave {ENV_OPERATOR_ADDRESS} empty.",
            )

    @property
    def metrics_address(self) -> str:
        """Where the metrics are served: a port of one's own choice is for a scraper elsewhere."""
        return self.metrics_host or ("0.0.0.0" if self.metrics_port else "127.0.0.1")

    def operator_ca_pem(self) -> bytes:
        """The authority's certificate.

        Raises:
            UserError: it is neither PEM nor a readable file.
        """
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


def parse_settings(argv: Sequence[str], environ: Mapping[str, str]) -> AgentSettings:
    """Settings from flags and environment; flags win.

    Raises:
        UserError: a value that cannot be used.
    """
    parser = argparse.ArgumentParser(
        prog="python -m windrow_sidecar.agent",
        description="The windrow sidecar: runs finetune workers beside a decode engine.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def flag(name: str, variable: str, text: str, default: str = "") -> None:
        parser.add_argument(
            name,
            default=environ.get(variable) or default,
            metavar="X",
            help=f"{text} [{variable}; now: %(default)s]",
        )

    flag("--run-dir", ENV_RUN_DIR, "where engine and sidecar meet", str(DEFAULT_RUN_DIR))
    flag("--operator-address", ENV_OPERATOR_ADDRESS, "host:port of the operator")
    parser.add_argument(
        "--operator-ca",
        default=environ.get(ENV_OPERATOR_CA, ""),
        metavar="X",
        help=f"certificate of the operator's authority: PEM or a file [{ENV_OPERATOR_CA}]",
    )
    parser.add_argument(
        "--operator-server-name",
        default="",
        metavar="X",
        help="name that the operator's certificate carries, when it is not the address",
    )
    flag("--token-file", ENV_TOKEN_FILE, "projected service-account token")
    flag("--pod-namespace", ENV_POD_NAMESPACE, "of this pod")
    flag("--pod-name", ENV_POD_NAME, "of this pod")
    flag("--pod-uid", ENV_POD_UID, "of this pod")
    flag("--node-name", ENV_NODE_NAME, "where this pod runs")
    flag("--log-dir", ENV_LOG_DIR, "event logs of workers go here as well")
    flag("--metrics-port", ENV_METRICS_PORT, "of the Prometheus endpoint; 0: any free one", "0")
    parser.add_argument(
        "--metrics-host",
        default="",
        metavar="X",
        help="address of the Prometheus endpoint (default: every one, but loopback for port 0)",
    )
    parser.add_argument(
        "--worker-module",
        default=AgentSettings.worker_module,
        metavar="X",
        help="what is run as the finetune worker [%(default)s]",
    )
    flag(
        "--max-jobs",
        ENV_MAX_JOBS,
        "how many jobs over one base may take turns in a slot; on a GPU it is one",
        str(AgentSettings.max_jobs),
    )
    flag(
        "--copy-rate",
        ENV_COPY_RATE,
        "bytes a second that layers which take turns may move, like 2Gi; none: no limit",
    )
    flag(
        "--mps",
        ENV_MPS,
        "auto: start a private MPS daemon where the GPU can be shared; off",
        "auto",
    )
    parser.add_argument(
        "--standby",
        action=argparse.BooleanOptionalAction,
        default=AgentSettings.standby,
        help="keep a worker ready that has loaded its libraries: about 0.6 GB for a start at once",
    )
    parser.add_argument(
        "--grace-seconds",
        type=float,
        default=AgentSettings.grace_s,
        metavar="S",
        help="for a worker's last checkpoint when the agent is asked to end [%(default)s]",
    )
    args = parser.parse_args(argv)
    if not args.metrics_port.isdigit():
        raise UserError(
            f"{args.metrics_port!r} is no port",
            field=ENV_METRICS_PORT,
            remedy="Give 0 (any free one) to 65535.",
        )
    if not args.max_jobs.isdigit():
        raise UserError(
            f"{args.max_jobs!r} is no number of jobs",
            field=ENV_MAX_JOBS,
            remedy="Give 1 for one job at a time, or how many may take turns.",
        )
    if args.mps not in ("auto", "off"):
        raise UserError(
            f"{args.mps!r} says nothing of MPS", field=ENV_MPS, remedy="Write auto or off."
        )
    return AgentSettings(
        copy_rate=_copy_rate(args.copy_rate),
        run_dir=RunDir(Path(args.run_dir)),
        operator_address=args.operator_address,
        operator_ca=args.operator_ca,
        operator_server_name=args.operator_server_name,
        token_file=Path(args.token_file) if args.token_file else None,
        pod_namespace=args.pod_namespace,
        pod_name=args.pod_name,
        pod_uid=args.pod_uid,
        node_name=args.node_name,
        log_dir=Path(args.log_dir) if args.log_dir else None,
        metrics_port=int(args.metrics_port),
        metrics_host=args.metrics_host,
        worker_module=args.worker_module,
        max_jobs=int(args.max_jobs),
        mps=args.mps == "auto",
        standby=args.standby,
        grace_s=args.grace_seconds,
    )


def _copy_rate(text: str) -> int | None:
    """Return bytes a second; None where nothing is said."""
    if not text:
        return None
    try:
        rate = parse_quantity(text)
    except ValueError:
        rate = 0
    if rate < 1:
        raise UserError(
            f"{text!r} is no rate in bytes a second",
            field=ENV_COPY_RATE,
            remedy="Write it like 512Mi or 2Gi, or leave it out for no limit.",
        )
    return rate
