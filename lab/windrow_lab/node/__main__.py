"""`python -m windrow_lab.node`: run the process node until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from datetime import timedelta
from pathlib import Path

from windrow.errors import UserError
from windrow_lab.machine.processes import Keeper
from windrow_lab.node.agent import NodeAgent
from windrow_lab.node.api import Api
from windrow_lab.node.backoff import BackoffRule
from windrow_lab.node.events import NodeEventRecorder
from windrow_lab.node.launch import LaunchSettings, inherited_environment
from windrow_lab.node.pod import NodeServices
from windrow_lab.node.probes import Prober

# A volume's directory adds up to 45 bytes, and a Unix socket's path may have 107.
_LONGEST_DIRECTORY = 60


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m windrow_lab.node",
        description="Run the containers of pods as local processes.",
    )
    parser.add_argument("--kubeconfig", type=Path, required=True, help="of the API server")
    parser.add_argument("--name", default=socket.gethostname().lower(), help="of the Node object")
    parser.add_argument("--dir", type=Path, required=True, help="volumes; a short path")
    parser.add_argument(
        "--logs", type=Path, help="<namespace>_<pod>/<container>.log below it; default: <dir>/logs"
    )
    parser.add_argument(
        "--log-root", type=Path, help="set WINDROW_LOG_DIR=<log-root>/<pod> in each container"
    )
    parser.add_argument(
        "--env", action="append", default=[], metavar="K=V", help="for each container; repeatable"
    )
    parser.add_argument("--backoff-seconds", type=float, default=1.0, help="second restart waits")
    parser.add_argument("--backoff-cap-seconds", type=float, default=300.0, help="longest wait")
    return parser.parse_args(arguments)


async def run(options: argparse.Namespace) -> None:
    """Run the node until the process is asked to end."""
    directory: Path = options.dir.absolute()
    if len(str(directory)) > _LONGEST_DIRECTORY:
        raise UserError(
            f"{directory} is longer than {_LONGEST_DIRECTORY} characters, and the sockets below it "
            "would not fit into a socket address",
            field="--dir",
            remedy="Choose a shorter path.",
        )
    own = asyncio.current_task()
    assert own is not None
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, own.cancel)
    with Keeper() as keeper:
        async with Api.from_kubeconfig(options.kubeconfig) as api:
            prober = Prober()
            services = NodeServices(
                api=api,
                keeper=keeper,
                recorder=NodeEventRecorder(api, options.name),
                prober=prober,
                pods_dir=directory / "p",
                logs_dir=options.logs.absolute() if options.logs else directory / "logs",
                launch=LaunchSettings(
                    inherited_environment(os.environ) | _variables(options.env), options.log_root
                ),
                backoff=BackoffRule(
                    timedelta(seconds=options.backoff_seconds),
                    timedelta(seconds=options.backoff_cap_seconds),
                ),
            )
            try:
                await NodeAgent(options.name, api, services).run()
            finally:
                await prober.close()


def _variables(pairs: list[str]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise UserError(f"{pair!r} is not of the form NAME=VALUE", field="--env")
    return dict(pair.split("=", 1) for pair in pairs)


def main() -> None:
    """Entry point of the process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # One line for each request would bury everything else.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        asyncio.run(run(parse(sys.argv[1:])))
    except asyncio.CancelledError:
        pass
    except UserError as error:
        sys.exit(f"windrow node: {error}")


if __name__ == "__main__":
    main()
