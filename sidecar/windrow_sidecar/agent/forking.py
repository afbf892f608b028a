"""Have workers forked by the fork server: the agent's side (`fork_server` is the other)."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import NoReturn, Protocol

from windrow_sidecar.agent.fork_server import MESSAGE_BYTES, ForkOrder

_log = logging.getLogger(__name__)

_PR_SET_CHILD_SUBREAPER = 36
# At niceness 19 beside a busy decode, what takes 5 s alone takes a minute.
_LOADED_WITHIN_S = 300.0
_FORKED_WITHIN_S = 30.0
# After one that ended: the next one would end the same way.
_REST_S = 60.0
_REAP_EVERY_S = 0.05
_REAPED_WITHIN_S = 5.0


class CannotFork(Exception):
    """No worker can be forked now; one that is started by exec does as well."""


class WorkerChild(Protocol):
    """A worker's process, as asyncio has one that it started."""

    @property
    def pid(self) -> int:
        """Process id of the worker, which is also that of its group; 0: it has not started yet."""

    @property
    def returncode(self) -> int | None:
        """Exit status of the worker; below 0: the signal that ended it. None: it has not ended."""

    async def wait(self) -> int:
        """Reap it; returns its `returncode`."""


class ForkServer:
    """The agent's fork server: one process, started when the first worker is wanted.

    Used from the agent's event loop only.

    Args:
        start: starts the server's process with this standard input.
    """

    def __init__(self, start: Callable[[int], Awaitable[asyncio.subprocess.Process]]) -> None:
        self._start = start
        self._process: asyncio.subprocess.Process | None = None
        self._channel: socket.socket | None = None
        self._loading: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self._closed = False
        self._not_before_s = 0.0  # of the loop's clock

    @property
    def pid(self) -> int:
        """Process id of the server; 0: none runs."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else 0

    @property
    def rests(self) -> bool:
        """True while workers must be started by exec."""
        return self._closed or asyncio.get_running_loop().time() < self._not_before_s

    async def ready(self) -> None:
        """Have the server loaded. Harmless when it is; may be cancelled at any time.

        Raises:
            CannotFork: it has ended, or says that it cannot fork.
        """
        if self.rests:
            raise CannotFork("the fork server has ended, and rests")
        if self._loading is None or (self._loading.done() and not self.pid):
            self._loading = asyncio.create_task(self._load())
            self._loading.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            await asyncio.shield(self._loading)
        except asyncio.CancelledError:
            if self._loading.cancelled():
                raise CannotFork("the fork server was closed") from None
            raise

    async def fork(self, order: ForkOrder, stdin: int, log: int) -> int:
        """Return the number of a new worker, which is a child of this process.

        `stdin`, `log`: descriptors that become its standard input and its output; still the
        caller's.

        Raises:
            CannotFork: see `ready`.
        """
        await self.ready()
        async with self._turn:
            channel = self._channel
            if channel is None:
                raise CannotFork("the fork server has ended")
            try:
                socket.send_fds(channel, [order.encode()], [stdin, log])
                async with asyncio.timeout(_FORKED_WITHIN_S):
                    answer = await self._hear(channel)
            except (OSError, TimeoutError) as error:
                await self._give_up(f"it does not answer ({str(error) or type(error).__name__})")
                raise CannotFork(f"the fork server does not answer: {error}") from error
            if "pid" not in answer:
                await self._refused(answer)
            pid = int(str(answer["pid"]))
            if not is_child(pid):
                os.kill(pid, signal.SIGKILL)
                await self._give_up("its workers do not become children of the agent")
                raise CannotFork("orphans do not come to this process")
        return pid

    async def unload(self) -> None:
        """End the server until a worker is wanted again; its workers go on.

        A server that is being loaded goes on, since its caller waits for it.
        """
        if self._loading is not None and self._loading.done():
            async with self._turn:
                await self._end()

    async def close(self) -> None:
        """End the server; its workers go on."""
        self._closed = True
        if self._loading is not None and not self._loading.done():
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        await self._end()

    async def _load(self) -> None:
        await self._end()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._channel = ours
        try:
            become_subreaper()
            os.close(os.pidfd_open(os.getpid()))  # where that is forbidden, no worker is awaited
            self._process = await self._start(theirs.fileno())
            theirs.close()  # it hangs up as it ends
            async with asyncio.timeout(_LOADED_WITHIN_S):
                answer = await self._hear(ours)
        except (OSError, TimeoutError) as error:
            await self._give_up(f"it cannot be started ({str(error) or type(error).__name__})")
            raise CannotFork(f"the fork server cannot be started: {error}") from error
        finally:
            theirs.close()
        if "ready" not in answer:
            await self._refused(answer)
        _log.info("workers are forked from process %d", self.pid)

    @staticmethod
    async def _hear(channel: socket.socket) -> Mapping[str, object]:
        """Return an answer; an empty one: the server has ended."""
        message = await asyncio.get_running_loop().sock_recv(channel, MESSAGE_BYTES)
        return json.loads(message) if message else {}

    async def _refused(self, answer: Mapping[str, object]) -> NoReturn:
        why = str(answer.get("refused", "the fork server has ended"))
        await self._give_up(why)
        raise CannotFork(why)

    async def _give_up(self, why: str) -> None:
        _log.warning("the fork server ends, workers are started by exec for now: %s", why)
        self._not_before_s = asyncio.get_running_loop().time() + _REST_S
        await self._end()

    async def _end(self) -> None:
        channel, self._channel = self._channel, None
        process, self._process = self._process, None
        if channel is not None:
            channel.close()
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


class ForkedChild:
    """A worker that was forked: reaped by this process, as one that it started."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._descriptor = os.pidfd_open(pid)
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._descriptor, self._reap)

    async def wait(self) -> int:
        """Reap it; returns its `returncode`."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self.returncode = reap(self.pid)
        self._ended.set()
        self._reap_group(asyncio.get_running_loop().time() + _REAPED_WITHIN_S)

    def _reap_group(self, until_s: float) -> None:
        """Reap what the worker had started, which comes to this process when the worker ends."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-self.pid, os.WNOHANG)[0]:
                pass
            if loop.time() < until_s:
                loop.call_later(_REAP_EVERY_S, self._reap_group, until_s)


class ComingChild:
    """A worker that is forked as soon as the server can, or started by exec where it cannot.

    A signal that comes before the worker has started ends the wait: it never starts then.

    Args:
        ready: has the server loaded.
        fork: forks it.
        start: starts it by exec.
        done: called when it has started, or never will.
    """

    def __init__(
        self,
        ready: Callable[[], Awaitable[None]],
        fork: Callable[[], Awaitable[int]],
        start: Callable[[], Awaitable[WorkerChild]],
        done: Callable[[], None],
    ) -> None:
        self._fork, self._start, self._done = fork, start, done
        self._child: WorkerChild | None = None
        self._signal: signal.Signals | None = None
        self._returncode: int | None = None
        self._ready = asyncio.ensure_future(ready())
        self._started = asyncio.create_task(self._begin())

    @property
    def pid(self) -> int:
        """Process id of the worker; 0: it has not started."""
        return self._child.pid if self._child else 0

    @property
    def returncode(self) -> int | None:
        """Exit status of the worker; None: it has not ended."""
        return self._child.returncode if self._child else self._returncode

    async def started(self) -> None:
        """Wait until it has a process id, or never will."""
        await asyncio.shield(self._started)

    async def wait(self) -> int:
        """Reap it; returns its `returncode`."""
        await self.started()
        if self._child is not None:
            return await self._child.wait()
        assert self._returncode is not None
        return self._returncode

    def signal(self, number: signal.Signals) -> None:
        """Send its group a signal; one that has not started ends by it."""
        self._signal = number
        if self._child is None:
            self._ready.cancel()
        else:
            signal_group(self._child, number)

    async def _begin(self) -> None:
        try:
            await self._come()
        except (OSError, ValueError) as error:
            _log.error("a worker cannot be started: %s", error)
            self._returncode = 1
        finally:
            self._done()
        if self._child is not None and self._signal is not None:
            signal_group(self._child, self._signal)

    async def _come(self) -> None:
        try:
            await self._ready
            self._child = ForkedChild(await self._fork())
        except CannotFork as error:
            if self._signal is None:
                _log.info("a worker is started by exec: %s", error)
                self._child = await self._start()
        except asyncio.CancelledError:
            if self._signal is None:
                raise
        if self._child is None:
            self._returncode = -(self._signal or signal.SIGKILL)


def signal_group(child: WorkerChild, number: signal.Signals) -> None:
    """Send a worker and whatever it has started a signal, unless it has ended."""
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)


def become_subreaper() -> None:
    """Have orphans among this process's descendants come to it.

    Raises:
        OSError: this system cannot do that.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def is_child(pid: int) -> bool:
    """Return whether the pid is a child of this process; the child may have ended."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def reap(pid: int) -> int:
    """Wait for a child of this process; returns its exit code, below 0: by that signal."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED)
    assert ended is not None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
