"""Run a private MPS daemon for one GPU, so that two processes run on it at once.

Decode's start brings it up, in the foreground, so that its end is seen; the agent finds it by its
folder, asks it for its clients and outlives neither of them. Its pipe folder is its
address: only processes that are given `environment` are its clients, whatever other daemons the
machine has (container runtimes mount `/tmp/nvidia-mps`).
A fatal fault of one client reaches all of them, and what a client leaves running when it is killed
is not defined: one that must end is ended by `terminate_client` before its process is killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from windrow.errors import Transient, UserError
from windrow_sidecar.compute.mps_joining import pid_namespace

CONTROL = "nvidia-cuda-mps-control"
# Not for the daemon. It would renumber the devices that it leaves to its clients, who then look in
# vain for the numbers that their own variable names. And shares of SMs want the whole of them.
_CLIENTS_OWN = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_MPS_CLIENT_PRIORITY",
)
# The daemon answers from memory; so long only when the machine is at its limits.
ANSWERS_WITHIN = timedelta(seconds=10)
_ASK_AGAIN_S = 0.05
_REAPED_WITHIN_S = 0.2


@dataclass(frozen=True, slots=True)
class MpsClient:
    """A client as its server reports it.

    Attributes:
        server: number of the server.
        pid: of the client, as the daemon wants it in its commands.
    """

    server: int
    pid: int


class MpsDaemon:
    """One daemon in a folder of its own. One thread at a time.

    Args:
        folder: for its pipes and logs; made when it is not there, readable by this user only.
        control: the executable, by name or path.
        environ: what it runs with besides its folders, but for what chooses among devices and SMs:
            that is for each client.
        sleep: waits between two questions while it starts.
    """

    def __init__(
        self,
        folder: Path,
        *,
        control: str = CONTROL,
        environ: Mapping[str, str] = os.environ,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._folder, self._control, self._sleep = folder, control, sleep
        self._environ = {name: value for name, value in environ.items() if name not in _CLIENTS_OWN}
        self._process: subprocess.Popen[bytes] | None = None
        self._taken_over = False

    @property
    def environment(self) -> dict[str, str]:
        """Variables that make a process its client; set them before CUDA starts there."""
        return {
            "CUDA_MPS_PIPE_DIRECTORY": str(self._folder / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(self._folder / "log"),
        }

    @property
    def is_own(self) -> bool:
        """True where the daemon is a child of this process."""
        return self._process is not None

    @property
    def has_control(self) -> bool:
        """True where the program that starts and asks it exists."""
        return shutil.which(self._control, path=self._environ.get("PATH")) is not None

    def start(self, *, within: timedelta = ANSWERS_WITHIN) -> None:
        """Start it and wait until it answers. Where one answers already, it is ours from now on.

        Pipes that one has left behind which does not run any more are removed.

        Raises:
            UserError: there is no such executable.
            Transient: it ended, or did not answer in time; it is not running then.
        """
        deadline = time.monotonic() + within.total_seconds()
        if self.alive() or self.take_over(within=within):
            return
        program = shutil.which(self._control, path=self._environ.get("PATH"))
        if program is None:
            raise UserError(
                f"{self._control} is not on PATH",
                field="PATH",
                remedy="Use an image with NVIDIA's MPS tools; without them the GPU is shared in "
                "time (--sharing temporal says that this is meant).",
                reason="MpsMissing",
            )
        shutil.rmtree(self._folder / "pipe", ignore_errors=True)
        for folder in self.environment.values():
            Path(folder).mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self._folder / "log" / "daemon.out").open("wb") as output:
            self._process = subprocess.Popen(
                [program, "-f"],
                env=self._environ | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the agent
            )
        self._await_answer(deadline)

    def alive(self) -> bool:
        """Return whether the daemon runs: one system call, or a question if it was taken over."""
        if self._taken_over:
            self._taken_over = self._answers()
        return self._taken_over or (self._process is not None and self._process.poll() is None)

    def servers(self) -> list[int]:
        """Process ids of its servers: one for each user with clients."""
        return _numbers(self._ask("get_server_list"))

    def clients(self) -> dict[int, list[int]]:
        """Process ids of the clients of each server."""
        return {
            server: _numbers(self._ask(f"get_client_list {server}")) for server in self.servers()
        }

    def find_client(self, pid: int, *, shares_namespace: bool) -> MpsClient | None:
        """Return a process as its server reports it; None: not a client, or not known as one.

        Two PID namespaces may use one number for two processes, of which one may be decode's. So
        the number alone counts only where the daemon shares this process's namespace; else the
        namespace that the daemon's `ps` reports beside the number has to be the process's own.

        Args:
            pid: of the process, as this process sees it.
            shares_namespace: whether the daemon runs in this process's PID namespace.

        Raises:
            Transient: the daemon is gone or does not answer.
        """
        if shares_namespace:
            for server, clients in self.clients().items():
                if pid in clients:
                    return MpsClient(server, pid)
        own = _namespace_of(pid)
        if not own:
            return None
        for row in _table(self._ask("ps")):
            if row.get("NAMESPACE") == own[0] and row.get("PID") == own[1]:
                named = row.get("SERVER", "")
                return MpsClient(int(named), int(own[1])) if named.isdigit() else None
        return None

    def terminate_client(self, pid: int, *, shares_namespace: bool = True) -> bool:
        """End the GPU work of one client without harm to the others; False: it is none.

        The process itself goes on and finds its context gone; kill it afterwards. `pid` and
        `shares_namespace` are as in `find_client`.

        Raises:
            Transient: the daemon is gone or does not answer.
        """
        if not (self._folder / "pipe").is_dir():
            return False
        client = self.find_client(pid, shares_namespace=shares_namespace)
        if client is None:
            return False
        self._ask(f"terminate_client {client.server} {client.pid}")
        return True

    def abandon(self) -> None:
        """Kill it with its servers, where this process has started it. Waits for a moment only."""
        process, self._process = self._process, None
        self._taken_over = False
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_REAPED_WITHIN_S)

    def stop(self, *, within: timedelta = ANSWERS_WITHIN) -> None:
        """Ask it to quit, and end it when it does not. Its clients lose the GPU. Idempotent."""
        process, self._process = self._process, None
        if self._taken_over:
            self._taken_over = False
            with suppress(Transient):
                self._ask("quit -t 1")
        if process is None:
            return
        try:
            if process.poll() is None:
                self._ask("quit -t 1")
                process.wait(within.total_seconds())
        except (Transient, subprocess.TimeoutExpired):
            process.kill()
        process.wait()

    def take_over(self, *, within: timedelta = ANSWERS_WITHIN) -> bool:
        """Return whether a daemon of another process answers there; it is asked from now on."""
        self._taken_over = (self._folder / "pipe").is_dir() and self._answers(within)
        return self._taken_over

    def _answers(self, within: timedelta = ANSWERS_WITHIN) -> bool:
        try:
            self._ask("get_server_list", within)
        except Transient:
            return False
        return True

    def _await_answer(self, deadline: float) -> None:
        while True:
            left_s = max(_ASK_AGAIN_S, deadline - time.monotonic())
            try:
                self._ask("get_server_list", timedelta(seconds=left_s))
            except Transient as error:
                if not self.alive():
                    self._process = None
                    raise Transient(
                        f"the MPS daemon ended at once: {self._last_words()}"
                    ) from error
                if time.monotonic() > deadline:
                    self.abandon()
                    raise
                self._sleep(_ASK_AGAIN_S)
            else:
                return

    def _ask(self, command: str, within: timedelta = ANSWERS_WITHIN) -> str:
        """Send one command.

        Raises:
            Transient: the daemon is gone or does not answer.
        """
        try:
            done = subprocess.run(
                [self._control],
                input=command + "\n",
                env=self._environ | self.environment,
                capture_output=True,
                text=True,
                timeout=within.total_seconds(),
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Transient(f"the MPS daemon does not answer to {command!r}: {error}") from error
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip()
            raise Transient(f"the MPS daemon does not answer to {command!r}: {said}")
        return done.stdout

    def _last_words(self) -> str:
        text = (self._folder / "log" / "daemon.out").read_text(errors="replace").strip()
        return text.splitlines()[-1] if text else "it said nothing"


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split() if word.isdigit()]


def _table(text: str) -> list[dict[str, str]]:
    """Return the rows of the daemon's `ps` by the names of their columns."""
    lines = [line.split() for line in text.splitlines() if line.strip()]
    if not lines or "PID" not in lines[0]:
        return []
    # What a command line holds may have blanks; it and what follows it are not asked for.
    names = lines[0]
    return [dict(zip(names, words, strict=False)) for words in lines[1:]]


def _namespace_of(pid: int) -> tuple[str, str] | None:
    """Return the inode of a process's PID namespace and its number there; None: it is gone."""
    space = pid_namespace(pid)
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return None
    numbers = [line.split()[-1] for line in status.splitlines() if line.startswith("NSpid:")]
    inode = space.partition("[")[2].rstrip("]")
    return (inode, numbers[0]) if space and numbers else None
