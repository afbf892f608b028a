"""`windrow memory`: owners of the memory of a live decode pod."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from windrow.chunkmap import ChunkMap, draw
from windrow.errors import Transient, UserError, WindrowError
from windrow_cli.output import Json, print_json

app = typer.Typer(no_args_is_help=True, help="Look at the memory of a live decode pod.")

_TIMEOUT_S = 30
_EXIT_TRANSIENT = 3
# As /proc/net/unix writes them: listening, and of the arena's type (SOCK_SEQPACKET).
_LISTENING, _SEQPACKET = 0x10000, 5


@app.callback()
def memory() -> None:
    """Look at the memory of a live decode pod."""


@app.command("dump")
def dump(
    target: Annotated[
        str, typer.Argument(metavar="PID | SOCKET", help="The decode process, or its arena socket.")
    ],
    as_json: Json = False,
) -> None:
    """Show who owns which chunk: states, owners, epochs, ages. Changes nothing.

    Example: windrow memory dump /run/windrow/arena-0.sock
    """
    found = [_map_of(path) for path in sockets_of(target)]
    if as_json:
        print_json(found if len(found) > 1 else found[0])
        return
    console = Console(highlight=False)
    for arena in found:
        console.print(draw(ChunkMap.from_json(arena)))


def sockets_of(target: str) -> list[str]:
    """The arena sockets that are meant: the path itself, or what a process listens on.

    Raises:
        UserError: no such socket or process, or the process serves no arena.
    """
    if not target.isdigit():
        if not Path(target).is_socket():
            raise UserError(
                f"{target} is not a socket",
                field="PID | SOCKET",
                remedy="Give a decode process, or its socket (/run/windrow/arena-0.sock).",
            )
        return [target]
    process = Path("/proc", target)
    try:
        listening = _listening(process)
        mine = set(_descriptors(process))
    except FileNotFoundError:
        raise UserError(f"there is no process {target}", field="PID | SOCKET") from None
    except PermissionError:
        raise UserError(
            f"process {target} belongs to another user",
            field="PID | SOCKET",
            remedy="Run this as the user that decode runs as.",
        ) from None
    found = sorted(path for inode, path in listening.items() if f"socket:[{inode}]" in mine)
    if not found:
        raise UserError(
            f"process {target} serves no arena",
            field="PID | SOCKET",
            remedy="Give the decode process itself; is harvesting on?",
        )
    return [_seen_from_here(process, path) for path in found]


def _listening(process: Path) -> dict[str, str]:
    """Paths by inode: flags, type and inode are the 4th, 5th and 7th column, the path the 8th."""
    rows = (line.split() for line in (process / "net/unix").read_text().splitlines()[1:])
    return {
        row[6]: row[7]
        for row in rows
        if len(row) == 8
        and int(row[3], 16) & _LISTENING
        and int(row[4], 16) == _SEQPACKET
        and not row[7].startswith("@")  # without a file, as CUDA's own (@cuda-uvmfd-...)
    }


def _descriptors(process: Path) -> Iterator[str]:
    for fd in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            yield fd.readlink().name


def _seen_from_here(process: Path, path: str) -> str:
    """The process may have another root: that of its container."""
    root = process / "root"
    return path if root.samefile("/") else f"{root}{path}"


def _map_of(socket_path: str) -> Any:  # noqa: ANN401 - JSON is any
    # In a process of its own: the client knows the sidecar's package by name only.
    command = [sys.executable, "-m", "windrow_sidecar.memory.dump", socket_path]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    if run.returncode == _EXIT_TRANSIENT:
        raise Transient(run.stderr.strip())
    if run.returncode != 0:
        last = (run.stderr.strip().splitlines() or ["no answer"])[-1]
        raise WindrowError(f"the arena cannot be inspected: {last}")
    return json.loads(run.stdout)
