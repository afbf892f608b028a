#!/usr/bin/env -S python3 -S
"""Stands in for nvidia-cuda-mps-control in tests: the same options, commands and exit codes.

`-f` is the daemon, in the foreground, on a Unix socket in CUDA_MPS_PIPE_DIRECTORY; without an
option it sends the lines of its input there and prints the answers. The one server has the id 100;
its clients are the lines of the file `clients` in that folder. No GPU is touched.
"""

import os
import socket
import sys
from pathlib import Path

PIPE = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
SOCKET = str(PIPE / "control")
CLIENTS = PIPE / "clients"
SERVER = 100


def clients() -> list[str]:
    return CLIENTS.read_text().split() if CLIENTS.exists() else []


def answer(command: str, *arguments: str) -> str:
    match command, *arguments:
        case ("get_server_list",):
            return f"{SERVER}\n" if clients() else ""
        case "get_client_list", server if int(server) == SERVER:
            return "".join(f"{pid}\n" for pid in clients())
        case "terminate_client", server, pid if int(server) == SERVER and pid in clients():
            CLIENTS.write_text("\n".join(other for other in clients() if other != pid))
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
