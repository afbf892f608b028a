"""The cluster on a real node that stays: `windrow up --node real`; `windrow down` ends it.

The process that holds it stays in the machine's own network and listens on loopback for the API
server and each decode pod. A process on the node takes those connections, whose sockets it was
handed, and passes them on to where the node's network has API server and pods.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import yaml
from rich.console import Console

from windrow.errors import WindrowError
from windrow_lab.cluster.up import (
    ClusterInfo,
    fresh_logs,
    leave_running,
    note,
    only_cluster,
    refuse_second,
    state_directory,
)
from windrow_lab.controlplane.certificates import write_private
from windrow_lab.machine.build import build_tools, ensure_tools
from windrow_lab.machine.ports import LOOPBACK
from windrow_lab.machine.processes import Keeper
from windrow_lab.machine.progress import progress_for
from windrow_lab.machine.tools import NODE
from windrow_lab.realnode import node as realnode
from windrow_lab.realnode.cluster import RealCluster
from windrow_lab.realnode.machine import check

_PIECE = 1 << 16  # bytes


@dataclass(frozen=True)
class OnNode:
    """Settings of the process on the node.

    Attributes:
        folder: of the operator's logs.
        ready: open file to which it writes what it has brought up, a line of JSON.
        api: socket that listens for who wants the API server.
        pods: port of a decode pod, on the node -> socket that listens for who wants it.
    """

    folder: str
    ready: int
    api: int
    pods: dict[int, int]


def up(ports: Sequence[int], *, console: Console) -> ClusterInfo:
    """Start a node with our operator that stays, and return once pods can be created.

    `ports`: of the decode pods to come, on the node's loopback; they answer at the same ports of
    this machine's. Raises UserError when a cluster is up already or the machine can run no node,
    ClusterError with the tail of the log when it does not come up; nothing stays then.
    """
    refuse_second()
    check()
    progress = progress_for(console)
    ensure_tools(progress)
    build_tools(progress, os.environ, NODE)
    log_dir = fresh_logs()
    words = [str(log_dir.parent), *map(str, ports)]
    return leave_running([sys.executable, "-m", "windrow_lab.realnode.up", "hold", *words], log_dir)


# --- the process that holds it ----------------------------------------------------------------


def hold(folder: Path, ports: Sequence[int]) -> int:
    """Hold a node until SIGTERM, or until it ends; return its status then."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with only_cluster(os.environ), contextlib.ExitStack() as open_files:
        api, *pods = (
            open_files.enter_context(socket.create_server((LOOPBACK, port))) for port in (0, *ports)
        )
        read, write = os.pipe()
        server = f"https://{LOOPBACK}:{api.getsockname()[1]}"
        awaited = threading.Thread(target=_note_ready, args=(read, server), daemon=True)
        awaited.start()
        on_node = OnNode(
            str(folder),
            write,
            api.fileno(),
            dict(zip(ports, (pod.fileno() for pod in pods), strict=True)),
        )
        command = [
            sys.executable,
            "-m",
            "windrow_lab.realnode.up",
            "inside",
            json.dumps(asdict(on_node)),
        ]
        files = (write, api.fileno(), *on_node.pods.values())
        return realnode.run(command, Console(stderr=True), pass_fds=files)


def _note_ready(read: int, server: str) -> None:
    """Note the cluster once its node says that it is ready."""
    with open(read, encoding="utf-8") as answer:
        found = json.loads(answer.readline())
    kubeconfig = yaml.safe_load(Path(found["kubeconfig"]).read_text(encoding="utf-8"))
    kubeconfig["clusters"][0]["cluster"]["server"] = server
    path = state_directory(os.environ) / "kubeconfig"
    path.unlink(missing_ok=True)
    write_private(path, yaml.safe_dump(kubeconfig, sort_keys=False).encode())
    note(str(path), server, found["version"], found["log_dir"], found["directory"])


# --- the process on the node ------------------------------------------------------------------


def stay(on_node: OnNode) -> None:
    """Run operator and CRDs on this node, and pass connections on, until this process is ended."""
    node = realnode.NodeInfo.of_environment()
    assert node is not None, "`hold` runs this on one"
    with Keeper() as keeper, RealCluster(node, keeper, Path(on_node.folder)) as cluster:
        kubeconfig = yaml.safe_load(cluster.kubeconfig.read_text(encoding="utf-8"))
        server = urlsplit(kubeconfig["clusters"][0]["cluster"]["server"])
        assert server.hostname, "our own kubeconfig has a URL"
        assert server.port, "our own kubeconfig has a URL with a port"
        ready = {
            "kubeconfig": str(cluster.kubeconfig),
            "version": cluster.version,
            "log_dir": str(cluster.log_dir),
            "directory": str(cluster.kubeconfig.parent),
        }
        with open(on_node.ready, "w", encoding="utf-8") as answer:
            answer.write(json.dumps(ready) + "\n")
        routes = [(on_node.api, server.hostname, server.port)]
        routes += [(listener, LOOPBACK, port) for port, listener in on_node.pods.items()]
        asyncio.run(_pass_on(routes))


async def _pass_on(routes: Sequence[tuple[int, str, int]]) -> None:
    """Connect the clients of a socket (its file, the host and port behind it) with what is there.

    Somebody who comes while nothing listens there is hung up on, as by a server that is not up.
    """
    async with contextlib.AsyncExitStack() as servers:
        for listener, host, port in routes:
            taken = socket.socket(fileno=listener)
            taken.setblocking(False)

            async def connect(
                reader: asyncio.StreamReader,
                writer: asyncio.StreamWriter,
                host: str = host,
                port: int = port,
            ) -> None:
                try:
                    answers, asks = await asyncio.open_connection(host, port)
                except OSError:
                    writer.transport.abort()
                    return
                await asyncio.gather(_copy(reader, asks), _copy(answers, writer))
                asks.close()
                writer.close()

            await servers.enter_async_context(await asyncio.start_server(connect, sock=taken))
        await asyncio.Event().wait()


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Copy bytes until the source ends; the sink's input then ends, and it may still answer."""
    try:
        while piece := await source.read(_PIECE):
            sink.write(piece)
            await sink.drain()
        if sink.can_write_eof():
            sink.write_eof()
    except OSError:
        sink.transport.abort()


def main() -> None:
    """Entry point of both processes."""
    part, first, *rest = sys.argv[1:]
    try:
        if part == "hold":
            sys.exit(hold(Path(first), [int(port) for port in rest]))
        fields = json.loads(first)
        pods = {int(port): file for port, file in fields.pop("pods").items()}
        stay(OnNode(**fields, pods=pods))
    except WindrowError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
