#!/usr/bin/env -S python3 -S
"""Stands in for nvidia-cuda-mps-control in tests: the same options, commands and exit codes.

`-f` is the daemon, in the foreground, on a Unix socket in CUDA_MPS_PIPE_DIRECTORY; without an
option it sends the lines of its input there and prints the answers. The one server has the id 100;
its clients are the lines of the file `clients` in that folder, and those of `joined`, where the
stand-in of libcuda writes a line for each process that becomes one. A line is the number of a
client and the inode of its PID namespace; without that it is the daemon's own. No GPU is touched.
"""

import os
import socket
import sys
from pathlib import Path

PIPE = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
SOCKET = str(PIPE / "control")
CLIENTS, JOINED = PIPE / "clients", PIPE / "joined"
SERVER = 100
OWN = os.readlink("/proc/self/ns/pid").strip("pid:[]")


def lines(path: Path) -> list[list[str]]:
    return [line.split() for line in path.read_text().splitlines()] if path.is_file() else []


def lives(pid: str, namespace: str) -> bool:
    return namespace != OWN or os.path.exists(f"/proc/{pid}")


def clients() -> list[tuple[str, str]]:
    known = [(one[0], one[1] if len(one) > 1 else OWN) for one in lines(CLIENTS)]
    return known + [(pid, space) for pid, space in lines(JOINED) if lives(pid, space)]


def end(pid: str) -> None:
    for path in (CLIENTS, JOINED):
        if path.is_file():
            path.write_text("".join(f"{' '.join(one)}\n" for one in lines(path) if one[0] != pid))


def answer(command: str, *arguments: str) -> str:
    pids = [pid for pid, _ in clients()]
    match command, *arguments:
        case ("get_server_list",):
            return f"{SERVER}\n" if pids else ""
        case "get_client_list", server if int(server) == SERVER:
            return "".join(f"{pid}\n" for pid in pids)
        case ("ps",):
            rows = [f"{pid} 0 {SERVER} GPU-0 {space} python3 1\n" for pid, space in clients()]
            return "PID ID SERVER DEVICE NAMESPACE COMMAND ATTACHED_CONTEXTS\n" + "".join(rows)
        case "terminate_client", server, pid if int(server) == SERVER and pid in pids:
            end(pid)
            return ""
    return f"Invalid command: {command}\n"


def serve() -> None:
    if "WINDROW_FAKE_MPS_BROKEN" in os.environ:
        sys.exit("An instance of this daemon is already running")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(SOCKET)
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection:
                words = connection.recv(4096).decode().split()
                if words[0] == "quit":
                    os.unlink(SOCKET)
                    return
                connection.sendall(answer(*words).encode())


def ask() -> None:
    for line in sys.stdin:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(SOCKET)
            except OSError:
                sys.exit("Cannot find MPS control daemon process")
            connection.sendall(line.encode())
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(4096):
                sys.stdout.write(part.decode())


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["-f"] else ask()
