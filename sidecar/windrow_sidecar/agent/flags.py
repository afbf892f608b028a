"""Parse the agent's settings from the pod's environment and from flags, which win."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from windrow.crd.values import parse_quantity
from windrow.errors import UserError
from windrow.rundir import (
    DEFAULT_RUN_DIR,
    ENV_COPY_RATE,
    ENV_GPU_ACCESS,
    ENV_LOG_DIR,
    ENV_MAX_JOBS,
    ENV_METRICS_PORT,
    ENV_MPS,
    ENV_MPS_PRIORITY,
    ENV_NODE_NAME,
    ENV_OPERATOR_ADDRESS,
    ENV_OPERATOR_CA,
    ENV_OPERATOR_CA_FILE,
    ENV_OUTPUT_TREES,
    ENV_POD_NAME,
    ENV_POD_NAMESPACE,
    ENV_POD_UID,
    ENV_RUN_DIR,
    ENV_SHARING,
    ENV_TOKEN_FILE,
    RunDir,
)
from windrow_sidecar.agent.settings import AgentSettings
from windrow_sidecar.compute.mps_priority import checked

_EXAMPLE = """\
example:
  python -m windrow_sidecar.agent --run-dir /run/windrow \\
      --operator-address windrow-operator.windrow-system.svc:8443 \\
      --operator-ca /etc/windrow/ca.pem --token-file /var/run/secrets/windrow/token

Every flag has an environment variable of the pod behind it (named with each flag).
"""


def parse_settings(argv: Sequence[str], environ: Mapping[str, str]) -> AgentSettings:
    """Settings from flags and environment; flags win.

    Raises:
        UserError: a value that cannot be used.
    """
    flags = _Flags(environ)
    flags.of_the_operator()
    flags.of_the_pod()
    flags.of_what_is_watched()
    flags.of_workers()
    args = flags.parser.parse_args(argv)
    return AgentSettings(
        run_dir=RunDir(Path(args.run_dir)),
        operator_address=args.operator_address,
        operator_ca=args.operator_ca,
        operator_ca_file=Path(args.operator_ca_file) if args.operator_ca_file else None,
        operator_server_name=args.operator_server_name,
        token_file=Path(args.token_file) if args.token_file else None,
        pod_namespace=args.pod_namespace,
        pod_name=args.pod_name,
        pod_uid=args.pod_uid,
        node_name=args.node_name,
        log_dir=Path(args.log_dir) if args.log_dir else None,
        metrics_port=_port(args.metrics_port),
        metrics_host=args.metrics_host,
        worker_module=args.worker_module,
        max_jobs=_jobs(args.max_jobs),
        copy_rate=_copy_rate(args.copy_rate),
        gpu_access=args.gpu_access,
        sharing=_sharing(args.sharing),
        mps_priority=checked(args.mps_priority),
        output_trees=tuple(tree for tree in args.output_trees.split(":") if tree),
        standby=args.standby,
        grace_s=args.grace_seconds,
        worker_silence_s=args.worker_silence_seconds,
        engine_calls_within_s=args.engine_calls_within_seconds,
    )


class _Flags:
    """Every flag, its variable and its words, in the order in which `--help` shows them."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.parser = argparse.ArgumentParser(
            prog="python -m windrow_sidecar.agent",
            description="The windrow sidecar: runs finetune workers beside a decode engine.",
            epilog=_EXAMPLE,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        where = "where engine and sidecar meet"
        self._add("--run-dir", ENV_RUN_DIR, where, str(DEFAULT_RUN_DIR))

    def of_the_operator(self) -> None:
        """Add the flags for the operator to attach to."""
        self._add("--operator-address", ENV_OPERATOR_ADDRESS, "host:port of the operator")
        self.parser.add_argument(
            "--operator-ca",
            default=self._environ.get(ENV_OPERATOR_CA, ""),
            metavar="X",
            help=f"certificate of the operator's authority: PEM or a file [{ENV_OPERATOR_CA}]",
        )
        where = "more of them, read at each dialling"
        self._add("--operator-ca-file", ENV_OPERATOR_CA_FILE, where)
        self.parser.add_argument(
            "--operator-server-name",
            default="",
            metavar="X",
            help="name that the operator's certificate carries, when it is not the address",
        )
        self._add("--token-file", ENV_TOKEN_FILE, "projected service-account token")

    def of_the_pod(self) -> None:
        """Add the flags that identify the pod."""
        self._add("--pod-namespace", ENV_POD_NAMESPACE, "of this pod")
        self._add("--pod-name", ENV_POD_NAME, "of this pod")
        self._add("--pod-uid", ENV_POD_UID, "of this pod")
        self._add("--node-name", ENV_NODE_NAME, "where this pod runs")

    def of_what_is_watched(self) -> None:
        """Event logs and metrics."""
        self._add("--log-dir", ENV_LOG_DIR, "event logs of workers go here as well")
        self._add(
            "--metrics-port", ENV_METRICS_PORT, "of the Prometheus endpoint; 0: any free one", "0"
        )
        self.parser.add_argument(
            "--metrics-host",
            default="",
            metavar="X",
            help="address of the Prometheus endpoint (default: every one, but loopback for port 0)",
        )

    def of_workers(self) -> None:
        """Add the flags for the worker's program and its limits."""
        self.parser.add_argument(
            "--worker-module",
            default=AgentSettings.worker_module,
            metavar="X",
            help="what is run as the finetune worker [%(default)s]",
        )
        self._add(
            "--max-jobs",
            ENV_MAX_JOBS,
            "how many jobs over one base may take turns in a slot; on a GPU it is one",
            str(AgentSettings.max_jobs),
        )
        self._add(
            "--copy-rate",
            ENV_COPY_RATE,
            "bytes a second that layers which take turns may move, like 2Gi; none: no limit",
        )
        self._add(
            "--output-trees",
            ENV_OUTPUT_TREES,
            "directories that jobs may write besides the policy's volumes, with colons between",
        )
        self._add(
            "--gpu-access",
            ENV_GPU_ACCESS,
            "env: the container may see more GPUs than decode's, which workers are then shown "
            "alone; mps: so, and an MPS daemon of the node's is used",
            "",
        )
        older = "temporal" if self._environ.get(ENV_MPS) == "off" else "auto"
        self._add(
            "--sharing",
            ENV_SHARING,
            "of the GPU; auto, spatial: in space, under the MPS daemon that decode's start has "
            "brought up; temporal: in turn",
            older,
        )
        self._add(
            "--mps-priority",
            ENV_MPS_PRIORITY,
            "of workers as clients of MPS; normal; below: below decode's; auto: below where the "
            "policy lets them run on every SM",
            AgentSettings.mps_priority,
        )
        self.parser.add_argument(
            "--standby",
            action=argparse.BooleanOptionalAction,
            default=AgentSettings.standby,
            help="keep a worker ready, and a process that forks workers: about 0.6 GB for a start "
            "at once",
        )
        self.parser.add_argument(
            "--grace-seconds",
            type=float,
            default=AgentSettings.grace_s,
            metavar="S",
            help="for a worker's last checkpoint when the agent is asked to end [%(default)s]",
        )
        self.parser.add_argument(
            "--worker-silence-seconds",
            type=float,
            default=AgentSettings.worker_silence_s,
            metavar="S",
            help="a worker that lives and says nothing for longer is killed [%(default)s]",
        )
        self.parser.add_argument(
            "--engine-calls-within-seconds",
            type=float,
            default=AgentSettings.engine_calls_within_s,
            metavar="S",
            help="where no engine has called by then, the slot's status says so [%(default)s]",
        )

    def _add(self, name: str, variable: str, text: str, default: str = "") -> None:
        self.parser.add_argument(
            name,
            default=self._environ.get(variable) or default,
            metavar="X",
            help=f"{text} [{variable}; now: %(default)s]",
        )


def _port(text: str) -> int:
    if not text.isdigit():
        raise UserError(
            f"{text!r} is not a port",
            field=ENV_METRICS_PORT,
            remedy="Give 0 (any free one) to 65535.",
        )
    return int(text)


def _jobs(text: str) -> int:
    if not text.isdigit():
        raise UserError(
            f"{text!r} is not a number of jobs",
            field=ENV_MAX_JOBS,
            remedy="Give 1 for one job at a time, or how many may take turns.",
        )
    return int(text)


def _sharing(text: str) -> str:
    if text not in ("auto", "spatial", "temporal"):
        raise UserError(
            f"{text!r} is not a valid way to share a GPU",
            field=ENV_SHARING,
            remedy="Write auto, spatial or temporal.",
        )
    return text


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
            f"{text!r} is not a rate in bytes a second",
            field=ENV_COPY_RATE,
            remedy="Write it like 512Mi or 2Gi, or leave it out for no limit.",
        )
    return rate
