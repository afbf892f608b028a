"""Import what workers need once, then fork each worker: `fork_server MODULE --room=...`.

The agent starts it with a socket as standard input (`forking` is the agent's side). The module has
`load_ahead()`, which imports, and `main(argv)`, which is a worker. A worker's own imports take
seconds of CPU; a fork takes milliseconds, and shares the memory of what was imported.

A process can be forked safely only while it has one thread and has not touched CUDA. Both are
checked, and a server that cannot fork says why and ends: workers are started by exec then.

A worker is forked twice, so that it is a child of the agent (a subreaper), as one that was started
by exec: exit code, signals and the death with the agent are the same, and a server that ends takes
no worker along.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from windrow_sidecar.agent.spawn import die_with, narrow_to
from windrow_sidecar.process_exit import run_to_exit

# Of one message, either way: an environment can be long.
MESSAGE_BYTES = 1 << 17
# Of the command line of the server, so that a worker's own fits in its place (`ps`, `top`).
ROOM = "--room="
ROOM_BYTES = 1024
_ORPHANED_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True)
class ForkOrder:
    """One worker to fork; its standard input and its log come beside it as descriptors.

    Attributes:
        arguments: of the module.
        environment: all of it.
        cores: that it may run on; none: on all that the server has.
    """

    arguments: list[str]
    environment: dict[str, str]
    cores: list[int]

    def encode(self) -> bytes:
        """Return it as one message."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, message: bytes) -> ForkOrder:
        """Read it from a message."""
        return cls(**json.loads(message))


def main(argv: list[str]) -> int:
    """Serve until the agent hangs up. A worker that was forked does not return from here."""
    agent = os.getppid()
    channel = socket.socket(fileno=os.dup(0))
    _silence_input()
    module = importlib.import_module(argv[0])
    gc.disable()
    module.load_ahead()
    if why := why_not_to_fork():
        print(f"workers cannot be forked: {why}", file=sys.stderr)
        channel.send(_answer(refused=why))
        return 1
    # What was imported stays in memory that workers share.
    gc.collect()
    gc.freeze()
    gc.enable()
    channel.send(_answer(ready=True))
    order = _serve(channel, agent)
    channel.close()
    if order is not None:
        words = order.arguments
        sys.argv = [f"{module.__file__}", *words]
        _rename_process([sys.executable, "-m", argv[0], *words])
        run_to_exit(lambda: module.main(words))
    return 0


def why_not_to_fork() -> str:
    """Say what makes a fork of this process unsafe; "": nothing does."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"it has {threads} threads"
    if _cuda_is_spoilt():
        return "a library has initialised CUDA, which does not survive a fork"
    return ""


def _cuda_is_spoilt() -> bool:
    """Return whether a child could not use CUDA; torch knows this only in the child."""
    native = getattr(sys.modules.get("torch"), "_C", None)
    is_bad = getattr(native, "_cuda_isInBadFork", None)
    if is_bad is None:
        return False
    pid = os.fork()
    if pid == 0:
        os._exit(1 if is_bad() else 0)
    return os.waitpid(pid, 0)[1] != 0


def _serve(channel: socket.socket, agent: int) -> ForkOrder | None:
    """Fork a worker for each order. Returns an order in the worker, None when the agent is gone."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 2)
        if not message:
            return None
        if why := why_not_to_fork():
            channel.send(_answer(refused=why))
            _close(descriptors)
            continue
        order = ForkOrder.decode(message)
        pid = _fork_orphan()
        if pid == 0:
            _become_worker(order, descriptors, agent)
            return order
        _close(descriptors)
        channel.send(_answer(pid=pid))


def _fork_orphan() -> int:
    """Fork a process whose parent has ended by the time that this returns.

    Returns its id, and 0 in it.
    """
    told, tells = os.pipe()
    middle = os.fork()
    if middle == 0:
        os.close(told)
        worker = os.fork()
        if worker == 0:
            os.close(tells)
            return 0
        # By the parent too: the agent may signal the group as soon as it knows the number.
        os.setpgid(worker, worker)
        os.write(tells, b"%d" % worker)
        os._exit(0)
    os.close(tells)
    with open(told, "rb") as said:
        pid = int(said.read() or b"0")
    os.waitpid(middle, 0)
    if pid == 0:
        raise OSError("the process between server and worker ended early")
    return pid


def _become_worker(order: ForkOrder, descriptors: list[int], agent: int) -> None:
    """Set this process up as `spawn` does for one that is started by exec."""
    until_s = time.monotonic() + _ORPHANED_WITHIN_S
    while os.getppid() != agent and time.monotonic() < until_s:
        time.sleep(0.0005)
    die_with(agent)
    os.setpgid(0, 0)
    stdin, log = descriptors
    for theirs, ours in ((stdin, 0), (log, 1), (log, 2)):
        os.dup2(theirs, ours)
    _close(descriptors)
    os.environ.clear()
    os.environ.update(order.environment)
    narrow_to(order.cores)


def _silence_input() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _rename_process(command: list[str]) -> None:
    """Write a command line over the server's own, which has room for it."""
    stat = Path("/proc/self/stat").read_text(encoding="utf-8")
    fields = stat[stat.rindex(")") + 2 :].split()
    begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, the 48th and the 49th
    room = end - begin
    line = b"\0".join(os.fsencode(word) for word in command)[: room - 1]
    if begin and len(Path("/proc/self/cmdline").read_bytes()) == room:
        ctypes.memmove(begin, line.ljust(room, b"\0"), room)


def _answer(**said: object) -> bytes:
    return json.dumps(said).encode()


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _run() -> NoReturn:
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    _run()
