"""Run a private MPS daemon for one GPU, so that two processes run on it at once.

It is started in the foreground, as a child of the agent, so that its end is seen. While decode is
its client it outlives an agent that ends, and the next one takes it over. Its pipe folder is its
address: only processes that are given `environment` are its clients, whatever other daemons the
machine has (container runtimes mount `/tmp/nvidia-mps`).
A fatal fault of one client reaches all of them, and what a client leaves running when it is killed
is not defined: one that must end is ended by `terminate_client` before its process is killed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from windrow.errors import Transient, UserError

CONTROL = "nvidia-cuda-mps-control"
# Not for the daemon. It would renumber the devices that it leaves to its clients, who then look in
# vain for the numbers that their own variable names. And shares of SMs want the whole of them.
_CLIENTS_OWN = ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
# The daemon answers from memory; so long only when the machine is at its limits.
ANSWERS_WITHIN = timedelta(seconds=10)
_ASK_AGAIN_S = 0.05


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
        """What makes a process its client: to be set before CUDA starts there."""
        return {
            "CUDA_MPS_PIPE_DIRECTORY": str(self._folder / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(self._folder / "log"),
        }

    def start(self, *, within: timedelta = ANSWERS_WITHIN) -> None:
        """Start it and wait until it answers. Where one answers already, it is ours from now on.

        Raises:
            UserError: there is no such executable.
            Transient: it ended, or did not answer in time; it is not running then.
        """
        if self.alive() or self._take_over():
            return
        program = shutil.which(self._control, path=self._environ.get("PATH"))
        if program is None:
            raise UserError(
                f"{self._control} is not on PATH",
                field="PATH",
                remedy="Use an image with NVIDIA's MPS tools; without them the GPU is shared in "
                "time (--mps off says that this is meant).",
                reason="MpsMissing",
            )
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
        self._await_answer(time.monotonic() + within.total_seconds())

    def alive(self) -> bool:
        """Whether the daemon still runs: one system call, or a question where it was taken over."""
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

    def terminate_client(self, pid: int) -> bool:
        """End the GPU work of one client without harm to the others; False: it is none.

        The process itself goes on and finds its context gone; kill it afterwards.

        Raises:
            Transient: the daemon is gone or does not answer.
        """
        if not (self._folder / "pipe").is_dir():
            return False
        for server, clients in self.clients().items():
            if pid in clients:
                self._ask(f"terminate_client {server} {pid}")
                return True
        return False

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

    def _take_over(self) -> bool:
        self._taken_over = (self._folder / "pipe").is_dir() and self._answers()
        return self._taken_over

    def _answers(self) -> bool:
        try:
            self._ask("get_server_list")
        except Transient:
            return False
        return True

    def _await_answer(self, deadline: float) -> None:
        while True:
            try:
                self._ask("get_server_list")
            except Transient as error:
                if not self.alive():
                    self._process = None
                    raise Transient(
                        f"the MPS daemon ended at once: {self._last_words()}"
                    ) from error
                if time.monotonic() > deadline:
                    self.stop(within=timedelta(seconds=1))
                    raise
                self._sleep(_ASK_AGAIN_S)
            else:
                return

    def _ask(self, command: str) -> str:
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
                timeout=ANSWERS_WITHIN.total_seconds(),
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
