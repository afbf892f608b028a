"""Start Python programs of this project by forking a process that has their imports.

`programs_are_forked()` replaces `subprocess.Popen` in this process. The second and each further
start of `python -m windrow...`, or of the command line, comes from the product's fork server
(`windrow_sidecar.agent.fork_server`) then: a worker's imports take seconds of CPU, a fork 30 ms.
What comes out is a child of this process with the command line, environment, folder, descriptors
and process group that it would have had, and runs the program from its first line (`runpy`); only
what it imports is there. `/proc/PID/environ` alone is that of the server.

A start that asks for more than that (a `preexec_fn`, further descriptors), on other cores than the
server has, or while an event loop runs and the server is loading, is an ordinary one. One that sets
variables which libraries read as they are loaded has a server of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import importlib.util
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from windrow_sidecar.agent import fork_server
from windrow_sidecar.agent.fork_server import MESSAGE_BYTES, ROOM, ROOM_BYTES, ForkOrder
from windrow_sidecar.process_exit import run_to_exit

# Of this module, to its server: what to import ahead, as JSON.
ENV_AHEAD = "WINDROW_TESTS_LOAD_AHEAD"
ENV_OFF = "WINDROW_TESTS_START_BY_EXEC"
COMMAND_LINE = "from windrow_cli import main; main()"
WORKER = "windrow_sidecar.finetune.worker"
# Libraries read these as they are loaded, or this project's modules do.
READ_AT_IMPORT = (
    *(
        "PYTHON",
        "OMP_",
        "GOMP_",
        "KMP_",
        "MKL_",
        "OPENBLAS_",
        "ATEN_",
        "TORCH",
        "PYTORCH",
        "TRITON",
    ),
    *("LD_", "CUDA", "NVIDIA", "HF_", "HUGGINGFACE", "TRANSFORMERS", "TOKENIZERS", "GRPC", "XDG_"),
    *("HOME", "LANG", "LC_", "TZ", "MALLOC"),
)
_PR_SET_CHILD_SUBREAPER = 36
_LOADED_WITHIN_S = 200.0


@dataclass(frozen=True)
class Program:
    """Program of a command, and what it is run with.

    Attributes:
        module: that `python -m` runs; "": the command line, by `python -c`.
        ahead: modules that are imported before it is forked.
        arguments: of it.
    """

    module: str
    ahead: tuple[str, ...]
    arguments: tuple[str, ...]


def program_of(command: object) -> Program | None:
    """Return the program of ours that a command starts; None: another one."""
    if isinstance(command, str | bytes | os.PathLike) or not isinstance(command, Sequence):
        return None
    words = [os.fsdecode(word) for word in command]
    if len(words) < 3 or words[0] != sys.executable:
        return None
    if words[1] == "-m" and words[2].startswith("windrow_"):
        main = words[2] if _is_plain(words[2]) else f"{words[2]}.__main__"
        return Program(words[2], (main,), tuple(words[3:]))
    if words[1:3] == ["-c", COMMAND_LINE]:
        return Program("", ("windrow_cli",), tuple(words[3:]))
    return None


def _is_plain(module: str) -> bool:
    found = importlib.util.find_spec(module)
    return found is None or found.submodule_search_locations is None


class _Server:
    """One fork server of programs with the same imports, environment for them and cores."""

    def __init__(self, ahead: Sequence[str], environment: Mapping[str, str]) -> None:
        self.cores = os.sched_getaffinity(0)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(_LOADED_WITHIN_S)
        self._channel, self._ready, self._turn = ours, False, threading.Lock()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, kept as long as the server
        own = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        self._process = _Plain(
            [
                *(sys.executable, "-m", "windrow_sidecar.agent.fork_server", __name__),
                ROOM.ljust(ROOM_BYTES, "-"),
            ],
            stdin=theirs,
            stdout=self._log,
            stderr=self._log,
            env={**environment, **own, ENV_AHEAD: json.dumps(list(ahead))},
            process_group=0,
        )
        theirs.close()

    def is_loaded(self) -> bool:
        """Return whether it can fork now; does not wait."""
        if not self._ready and self._turn.acquire(blocking=False):
            self._turn.release()
            self._channel.setblocking(False)
            try:
                self._hear_ready()
            except BlockingIOError:
                return False
            finally:
                self._channel.settimeout(_LOADED_WITHIN_S)
        return self._ready

    def fork(self, order: Mapping[str, object], descriptors: Sequence[int]) -> int:
        """Return the number of a new child of this process.

        Raises:
            OSError: nothing can be forked.
        """
        with self._turn:
            if not self._ready:
                self._hear_ready()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with ours, theirs, open(os.devnull, "wb") as nowhere, _adopting_orphans():
                environment = order["environment"]
                message = ForkOrder([], environment, []).encode()
                socket.send_fds(
                    ours, [json.dumps({**order, "environment": 0}).encode()], descriptors
                )
                socket.send_fds(self._channel, [message], [theirs.fileno(), nowhere.fileno()])
                answer = json.loads(self._channel.recv(MESSAGE_BYTES) or b"{}")
            if "pid" not in answer:
                raise OSError(f"nothing can be forked: {answer or self._said()}")
            return int(answer["pid"])

    def _hear_ready(self) -> None:
        answer = json.loads(self._channel.recv(MESSAGE_BYTES) or b"{}")
        if "ready" not in answer:
            raise OSError(f"the fork server does not serve: {answer or self._said()}")
        self._ready = True

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-2000:]


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Have orphans come to this process, for the moment of a fork: others are not ours."""
    _prctl(1)
    try:
        yield
    finally:
        _prctl(0)


def _prctl(on: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, on, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


class _Servers:
    def __init__(self) -> None:
        self._asked: Counter[object] = Counter()
        self._servers: dict[object, _Server | None] = {}
        self._lock = threading.Lock()

    def of(self, program: Program, environment: Mapping[str, str]) -> _Server | None:
        """Return a server that can fork it; None: this one is to be started by exec."""
        at_import = {k: v for k, v in environment.items() if k.startswith(READ_AT_IMPORT)}
        ahead = _ahead(program)
        key = (ahead, tuple(sorted(at_import.items())))
        with self._lock:
            self._asked[key] += 1
            if self._asked[key] < 2:
                return None
            if key not in self._servers:
                self._servers[key] = _Server(ahead, environment)
            server = self._servers[key]
        if server is None or server.cores != os.sched_getaffinity(0):
            return None
        if asyncio._get_running_loop() is not None and not server.is_loaded():
            return None
        return server

    def give_up(self, server: _Server) -> None:
        with self._lock:
            for key, one in self._servers.items():
                if one is server:
                    self._servers[key] = None


def _ahead(program: Program) -> tuple[str, ...]:
    """A run of `windrow finetune` starts a worker."""
    finetunes = not program.module and program.arguments[:1] == ("finetune",)
    return (*program.ahead, WORKER) if finetunes else program.ahead


_Plain = subprocess.Popen
_SERVERS = _Servers()


class ForkedPopen(subprocess.Popen):
    """`Popen` whose child is forked by a server, where that can be."""

    def _execute_child(self, *given):
        start = _Start(*given)
        forks = start.is_plain() and not os.environ.get(ENV_OFF)
        program = program_of(start.args) if forks else None
        server = _SERVERS.of(program, start.environment()) if program else None
        if program is None or server is None:
            super()._execute_child(*given)
            return
        order = start.order() | {
            "module": program.module,
            "folder": os.fsdecode(start.cwd or os.getcwd()),
            "finetunes": not program.module and WORKER in _ahead(program),
        }
        try:
            pid = server.fork(order, start.streams())
        except OSError as error:
            print(f"started by exec: {error}", file=sys.stderr)
            _SERVERS.give_up(server)
            super()._execute_child(*given)
            return
        self.pid, self._child_created = pid, True
        self._close_pipe_fds(*start.handles)


class _Start:
    """Arguments of `_execute_child`, by name."""

    def __init__(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        self.args, self.cwd, self._env = args, cwd, env
        _, _, shell, *self.handles = rest[:9]
        _, gid, gids, uid, umask, self._session, self._group = rest[9:]
        extra = executable or preexec_fn or pass_fds or shell or not close_fds
        self._extra = extra or (gid, gids, uid) != (None, None, None) or umask >= 0

    def is_plain(self) -> bool:
        """Return whether a fork can be all that is asked for."""
        return not self._extra

    def environment(self) -> dict[str, str]:
        """Return what the program starts with."""
        given = os.environ if self._env is None else self._env
        return {os.fsdecode(name): os.fsdecode(value) for name, value in given.items()}

    def streams(self) -> list[int]:
        """Return the descriptors that become the program's first three."""
        given = (self.handles[0], self.handles[3], self.handles[5])
        return [own if fd < 0 else fd for own, fd in enumerate(given)]

    def order(self) -> dict[str, object]:
        """Return what the forked process is to become."""
        return {
            "command": [os.fsdecode(word) for word in self.args],
            "environment": self.environment(),
            "session": bool(self._session),
            "group": os.getpgid(0) if self._group == -1 else self._group,
        }


@contextlib.contextmanager
def programs_are_forked() -> Iterator[None]:
    """Have the starts of this process forked meanwhile, but while the variable ENV_OFF is set."""
    subprocess.Popen = ForkedPopen
    try:
        yield
    finally:
        subprocess.Popen = _Plain


# What follows runs in the server and in what it forks.


def load_ahead() -> None:
    """Import what the programs do; see `fork_server`."""
    for module in json.loads(os.environ[ENV_AHEAD]):
        loaded = importlib.import_module(module)
        if module == WORKER:
            loaded.load_ahead()


def main(_: list[str]) -> NoReturn:
    """Become the program that the test asks for."""
    with socket.socket(fileno=os.dup(0)) as control:
        order, streams = _read_order(control)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for stream in streams:
        os.close(stream)
    if order["session"]:
        os.setpgid(0, os.getpgid(os.getppid()))
        os.setsid()
    elif order["group"]:
        os.setpgid(0, order["group"])
    _outlive_the_parent()
    os.chdir(order["folder"])
    command = order["command"]
    fork_server._rename_process(command)
    if order["finetunes"]:
        _SpareWorker.keep_one()
    sys.argv = [command[1], *command[3:]]
    sys.path[0] = order["folder"] if order["module"] else ""
    _run_to_its_end(order["module"])


def _run_to_its_end(module: str) -> NoReturn:
    """Run a program, or what `-c` was given; exit as a forked worker does."""
    if module:
        run_to_exit(lambda: _run(module))
    run_to_exit(lambda: exec(compile(COMMAND_LINE, "<string>", "exec"), {"__name__": "__main__"}))


def _run(module: str) -> None:
    """Run a module as `python -m` does, but without its warning of one that is imported already."""
    for name in (module, f"{module}.__main__"):
        if not hasattr(sys.modules.get(name), "__path__"):
            sys.modules.pop(name, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _read_order(control: socket.socket) -> tuple[dict, list[int]]:
    message, streams, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 3)
    return json.loads(message), list(streams)


def _outlive_the_parent() -> None:
    """A worker that the agent forks ends with it; what a test starts need not end with the test."""
    ctypes.CDLL(None).prctl(1, 0)  # PR_SET_PDEATHSIG


class _SpareWorker(subprocess.Popen):
    """In a run of `windrow finetune`: its worker, which waits as a process of its own.

    It is forked before the run has a second thread.
    """

    _pid = 0
    _channel: socket.socket

    @classmethod
    def keep_one(cls) -> None:
        """Fork it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            ours.close()
            cls._become_worker(theirs)
        theirs.close()
        cls._pid, cls._channel = pid, ours
        subprocess.Popen = cls

    @staticmethod
    def _become_worker(control: socket.socket) -> None:
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        message, streams, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 3)
        if not message:
            os._exit(0)
        order = json.loads(message)
        control.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.environ.clear()
        os.environ.update(order["environment"])
        if order["session"]:
            os.setsid()
        fork_server._rename_process(order["command"])
        sys.argv = ["-m", *order["command"][3:]]
        _run_to_its_end(WORKER)

    def _execute_child(self, *given):
        start, pid = _Start(*given), _SpareWorker._pid
        if not pid or start.args[1:3] != ["-m", WORKER] or not start.is_plain() or start.cwd:
            super()._execute_child(*given)
            return
        message = json.dumps(start.order()).encode()
        socket.send_fds(self._channel, [message], start.streams())
        _SpareWorker._pid = 0
        self.pid, self._child_created = pid, True
        self._close_pipe_fds(*start.handles)
