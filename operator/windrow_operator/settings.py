"""Parse the operator's command line."""

from __future__ import annotations

import argparse
import shlex
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from windrow_operator.certificates import TRUST_SPREAD
from windrow_operator.injection import DECODE_IMAGE
from windrow_operator.reconcile import Timeouts


@dataclass(frozen=True, slots=True)
class Settings:
    """The command line, typed."""

    kubeconfig: str  # empty: the pod's service account, or kubectl's own file
    in_pod: bool
    namespace: str  # the operator's own: holds its Secret, is never injected
    host: str
    attach_port: int
    webhook_port: int
    metrics_port: int
    advertise_address: str
    replica_address: str  # empty: the same
    identity: str  # of this replica, in the Lease
    state_file: Path | None
    webhook_service: str  # empty: the webhook is registered by its URL
    webhook_client_ca: Path | None  # asks the API server for a certificate of these authorities
    webhook_client_names: tuple[str, ...]  # of that certificate; empty: any
    sidecar_image: str
    sidecar_command: tuple[str, ...]
    sidecar_metrics_port: int
    sidecar_cpu: str
    sidecar_memory: str
    prepulled: str
    namespaces: tuple[str, ...]  # empty: all
    offering: tuple[str, ...]  # namespaces whose policies are offered to every job
    timeouts: Timeouts
    trust_spread: timedelta  # until everyone trusts a new authority
    listed_every: timedelta  # what a watch has missed is found by then
    log_json: bool
    verbose: bool


def parse(arguments: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Return the settings of a command line in an environment."""
    parser = argparse.ArgumentParser(
        prog="python -m windrow_operator",
        description="Places FinetuneJobs on decode pods and keeps their state.",
    )
    parser.add_argument(
        "--kubeconfig",
        default=environ.get("KUBECONFIG", ""),
        help="default: KUBECONFIG, else the pod's service account, else kubectl's own",
    )
    parser.add_argument("--namespace", default="windrow-system", help="the operator's own")
    parser.add_argument("--attach-host", default="0.0.0.0", help="address to listen on")
    parser.add_argument(
        "--attach-port",
        type=int,
        default=8443,
        help="port of the Attach service; 0: the one of the state file, else any free one",
    )
    parser.add_argument("--webhook-port", type=int, default=9443, help="0: as above")
    parser.add_argument("--metrics-port", type=int, default=9464, help="0: as above")
    parser.add_argument(
        "--advertise-address",
        default="",
        help="host by which sidecars and API server reach the operator; default: its Service",
    )
    parser.add_argument(
        "--replica-address",
        default=environ.get("POD_IP", ""),
        help="host by which sidecars reach this replica when it leads; default: POD_IP, else the "
        "advertised address",
    )
    parser.add_argument(
        "--identity",
        default="",
        help="name of this replica in the Lease; a restart under the same one leads again at once, "
        "and no two may run under it; default: the pod's name, else one of this process alone",
    )
    parser.add_argument("--state-file", type=Path, help="JSON with pid, ports and `ready`")
    parser.add_argument(
        "--namespace-scope", default="all", help="namespaces to serve, by commas; all: every one"
    )
    parser.add_argument(
        "--offering-namespaces",
        default="",
        help="namespaces, by commas, whose HarvestPolicies are offered to every job that they "
        "admit; default: none, and a job runs under policies of another namespace only if it "
        "names them in spec.policies",
    )
    parser.add_argument(
        "--webhook-service",
        default="",
        help="Service of the operator's namespace by which the API server reaches the webhook, on "
        "port 443; default: by the advertised address",
    )
    parser.add_argument(
        "--webhook-client-ca",
        type=Path,
        help="PEM file of the authority that signs the client certificate which the API server "
        "shows to webhooks, where it is configured to show one; default: it is not asked for one",
    )
    parser.add_argument(
        "--webhook-client-names",
        default="",
        help="common names of that certificate, by commas; default: any",
    )
    parser.add_argument(
        "--sidecar-image",
        default=DECODE_IMAGE,
        help=f"`{DECODE_IMAGE}` (default): each pod's decode image, which then holds windrow",
    )
    parser.add_argument("--sidecar-cpu", default="1", help="of a native sidecar, request and limit")
    parser.add_argument("--sidecar-memory", default="4Gi", help="likewise")
    parser.add_argument(
        "--prepulled",
        default="",
        metavar="NAMESPACE/NAME",
        help="DaemonSet that has pulled the sidecar's image; native sidecars wait for it",
    )
    parser.add_argument(
        "--sidecar-command",
        default="python -m windrow_sidecar.agent",
        help="what the sidecar runs, where its image has Python elsewhere",
    )
    parser.add_argument("--sidecar-metrics-port", type=int, default=0, help="0: any free one")
    default = Timeouts()
    for name, value, text in (
        ("gone-grace", default.gone_grace, "wait for a sidecar whose pod is gone"),
        ("lost-grace", default.lost_grace, "wait for a sidecar whose pod is there"),
        (
            "return-grace",
            default.return_grace,
            "wait for sidecars to come back to a replica that has just come to lead",
        ),
        ("start-timeout", default.start_timeout, "wait for a worker's first sign"),
        ("stop-timeout", default.stop_timeout, "wait for a worker to stop"),
        ("backoff-base", default.backoff_base, "pause after the first failure, doubled each time"),
    ):
        parser.add_argument(
            f"--{name}-seconds", type=float, default=value.total_seconds(), help=text
        )
    parser.add_argument(
        "--trust-spread-seconds",
        type=float,
        default=TRUST_SPREAD.total_seconds(),
        help="how long it may take until API server and sidecars trust a new authority; only then "
        "does it sign",
    )
    parser.add_argument(
        "--list-every-seconds",
        type=_seconds,
        default=60.0,
        help="pause between two listings of all watched objects, which find what a watch has "
        "missed (%(default)g)",
    )
    parser.add_argument("--log-json", action="store_true", help="one JSON object per log line")
    parser.add_argument("--verbose", action="store_true", help="log debug messages")
    in_pod = "KUBERNETES_SERVICE_HOST" in environ
    options = parser.parse_args(arguments)
    host = socket.gethostname()  # in a pod its name
    options.identity = options.identity or (host if in_pod else f"{host}_{uuid.uuid4().hex[:8]}")
    return _settings(options, in_pod=in_pod)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from error
    if not 1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and 3600 seconds")
    return seconds


def _settings(options: argparse.Namespace, *, in_pod: bool) -> Settings:
    scope = () if options.namespace_scope == "all" else tuple(options.namespace_scope.split(","))
    return Settings(
        kubeconfig=options.kubeconfig,
        in_pod=in_pod,
        namespace=options.namespace,
        host=options.attach_host,
        attach_port=options.attach_port,
        webhook_port=options.webhook_port,
        metrics_port=options.metrics_port,
        advertise_address=options.advertise_address or f"windrow-operator.{options.namespace}.svc",
        replica_address=options.replica_address,
        identity=options.identity,
        state_file=options.state_file,
        webhook_service=options.webhook_service,
        webhook_client_ca=options.webhook_client_ca,
        webhook_client_names=tuple(n for n in options.webhook_client_names.split(",") if n),
        sidecar_image=options.sidecar_image,
        sidecar_command=tuple(shlex.split(options.sidecar_command)),
        sidecar_metrics_port=options.sidecar_metrics_port,
        sidecar_cpu=options.sidecar_cpu,
        sidecar_memory=options.sidecar_memory,
        prepulled=options.prepulled,
        namespaces=scope,
        offering=tuple(name for name in options.offering_namespaces.split(",") if name),
        timeouts=Timeouts(
            gone_grace=timedelta(seconds=options.gone_grace_seconds),
            lost_grace=timedelta(seconds=options.lost_grace_seconds),
            return_grace=timedelta(seconds=options.return_grace_seconds),
            start_timeout=timedelta(seconds=options.start_timeout_seconds),
            stop_timeout=timedelta(seconds=options.stop_timeout_seconds),
            backoff_base=timedelta(seconds=options.backoff_base_seconds),
        ),
        trust_spread=timedelta(seconds=options.trust_spread_seconds),
        listed_every=timedelta(seconds=options.list_every_seconds),
        log_json=options.log_json,
        verbose=options.verbose,
    )
