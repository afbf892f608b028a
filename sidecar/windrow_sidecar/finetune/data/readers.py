"""Processes that read rows for a worker that trains meanwhile.

A thread of the worker could not be stopped while decode grants nothing, nor ended when its disk
hangs, and would hold the interpreter's lock against tasklets (docs/design/0006 has the figures). A
fresh process would import for 10 s and take 700 MB for it. So one process is forked while the
worker has a single thread and all libraries; it forks another one for each set of rows, which
shares their memory and begins at once.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import pickle
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Protocol

from windrow.crd import DatasetSpec
from windrow.errors import WindrowError
from windrow.served_chats import PLAIN
from windrow_sidecar.finetune.data import network_guard
from windrow_sidecar.finetune.data.held_models import HeldModel
from windrow_sidecar.finetune.data.reading import ModelLimits, read_dataset
from windrow_sidecar.finetune.data.remote import NO_CREDENTIALS, Credentials
from windrow_sidecar.finetune.data.row_limit import (
    ENDED_BY,
    end_process_at_limit,
    make_page,
    row_of_page,
)
from windrow_sidecar.finetune.data.source_access import UNCONFINED, SourceAccess
from windrow_sidecar.finetune.data.split import DataSplit
from windrow_sidecar.finetune.data.store import TokenFile
from windrow_sidecar.finetune.data.tokenizer_files import read_tokenizer
from windrow_sidecar.finetune.data.tokens import RowTokenizer

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_ORDER_BYTES = 1 << 16
_ALIVE_EVERY_S = 1.0
_KILLED_WITHIN_S = 1.0
_ALIVE, _DONE = b".", b"!"
_HOW = b"how"  # asks by which signal a process has ended
_SIGNALS = {b"end": signal.SIGKILL, b"hold": signal.SIGSTOP, b"go": signal.SIGCONT}
# A result may wait for so long; what is granted is looked at whenever it changes.
_LOOK_EVERY_S = 0.05


class ReadingPause(Protocol):
    """Pause for a reader that may not compute now."""

    def granted(self) -> bool:
        """Return whether it may compute now."""

    def wait(self, timeout_s: float) -> None:
        """Sleep until that may have changed, no longer than the timeout."""


class Unpaced:
    """No pause: of a reader that nothing but its priority keeps out of decode's way."""

    def granted(self) -> bool:
        """Yes."""
        return True

    def wait(self, timeout_s: float) -> None:
        """Sleep."""
        time.sleep(timeout_s)


@dataclass(frozen=True, slots=True)
class RowsWanted:
    """Facts that a process needs to read a job's rows.

    Attributes:
        dataset: where they are.
        tokenizer: the directory that it is read from.
        of_hub: whether that is of a model of the Hub (see `HeldModel`).
        limits: of the model.
        max_length: rows are cut to so many tokens.
        learn_all: prompts count as well.
        seed: draws the rows that are held out.
        credentials: for the place where the rows are.
        access: what may be read.
        begun: the time that chat templates read (None: that of the reading).
        served_by: the server whose requests chat rows are rendered as.
        engine: the one that serves now; "": it takes no chats, or is not known.
        log: where the process that reads writes what it has to say of the rows (None: where the
            worker wrote when it began).
    """

    dataset: DatasetSpec
    tokenizer: str
    limits: ModelLimits
    max_length: int
    learn_all: bool
    seed: int
    credentials: Credentials = NO_CREDENTIALS
    access: SourceAccess = UNCONFINED
    begun: datetime | None = None
    served_by: str = PLAIN
    engine: str = ""
    log: Path | None = None
    of_hub: bool = False


class Readers:
    """Has rows read by processes of their own; they end with the worker.

    Any thread may ask for rows. What it forks keeps the affinity mask of its maker.

    Raises:
        RuntimeError: this process has threads already, so it cannot be forked safely.
    """

    def __init__(self) -> None:
        # Those of numpy's library, which wait until they are asked to compute, do not count.
        threads = threading.active_count()
        if threads > 1:
            raise RuntimeError(f"readers must be made before other threads; there are {threads}")
        # What is imported now need not be by each process that reads.
        importlib.import_module("transformers.models.auto.tokenization_auto")
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self._socket.close()
            _run_apart(parent, lambda: _serve(theirs))
        theirs.close()

    def begin(self, wanted: RowsWanted) -> RowsBeingRead:
        """Have a process begin to read.

        Raises:
            RuntimeError: the process that makes them has ended.
        """
        rows = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the rows
        ours, theirs = os.pipe()
        try:
            page = make_page()
            descriptors = [rows.fileno(), theirs, page]
            pid = int(self._ask(b"read " + pickle.dumps(wanted), descriptors))
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        return RowsBeingRead(rows, ours, page, lambda word: self._ask(word + b" %d" % pid))

    def close(self) -> None:
        """End the process that makes them, and those that read."""
        self._socket.shutdown(socket.SHUT_RDWR)  # also wakes a thread that waits for an answer
        self._socket.close()
        os.waitpid(self.pid, 0)

    def _ask(self, order: bytes, descriptors: tuple[int, ...] | list[int] = ()) -> bytes:
        with self._lock:
            try:
                socket.send_fds(self._socket, [order], list(descriptors))
                answer = self._socket.recv(_ORDER_BYTES)
            except OSError as error:
                raise RuntimeError(f"rows cannot be read: {error}") from error
        if not answer:
            raise RuntimeError("rows cannot be read: the process that has them read is gone")
        return answer


class RowsBeingRead:
    """Rows that a process is reading.

    Args:
        rows: the file that they come into.
        said: descriptor of what the process says; closed here.
        page: descriptor of the page with the row that it is at (see `row_limit`); closed here.
        tell: sends the process a word of `_SIGNALS`, or asks how it has ended.
    """

    def __init__(
        self, rows: IO[bytes], said: int, page: int, tell: Callable[[bytes], bytes]
    ) -> None:
        self._rows, self._said, self._page, self._tell = rows, said, page, tell
        self._held = False

    def wait(self, alive: Callable[[], None], pace: ReadingPause) -> DataSplit:
        """Return the rows once all are there; `alive` is called each second while they come.

        Wait; the process stops while `pace` grants nothing, which is no reason to give it up.

        Raises:
            UserError, Transient: see `read_dataset`.
            RuntimeError: the process has ended without a word.
        """
        outcome = b""
        with open(self._said, "rb", buffering=0) as said, open(self._page, "rb") as page:
            while (word := self._heard(said, alive, pace)) == _ALIVE:
                alive()
            if word == _DONE:
                outcome = said.readall()
            try:
                found = pickle.loads(outcome)
            except (EOFError, pickle.UnpicklingError) as error:
                if self._tell(_HOW) == b"%d" % ENDED_BY and (row := row_of_page(page.fileno())):
                    raise row from None
                raise RuntimeError("the process that read the rows was killed") from error
        if isinstance(found, BaseException):
            raise found
        split, file = found
        file.lies_in(self._rows)
        return split  # type: ignore[no-any-return]

    def _heard(self, said: IO[bytes], alive: Callable[[], None], pace: ReadingPause) -> bytes:
        """Return the next byte that the process says; b"" once it has ended."""
        while not select.select([said], [], [], 0)[0]:
            if self._held is pace.granted():
                self._held = not self._held
                self._tell(b"hold" if self._held else b"go")
            if self._held:
                alive()
            pace.wait(_LOOK_EVERY_S)
        return said.read(1)

    def end(self) -> None:
        """End the process, whatever it does; `wait` raises then."""
        self._tell(b"end")


def _serve(orders: socket.socket) -> None:
    """Fork a process for each order, until there is nobody to give any."""
    children: set[int] = set()
    ended: dict[int, int] = {}  # signals
    while True:
        # Those that have ended unasked: nobody else reaps them, so no number is used again
        # before it has left the set.
        _reap(children, ended)
        if not select.select([orders], [], [], _ALIVE_EVERY_S if children else None)[0]:
            continue
        order, descriptors, _, _ = socket.recv_fds(orders, _ORDER_BYTES, 3)
        if not order:
            break
        word, _, about = order.partition(b" ")
        if word == b"read":
            children.add(pid := _fork_reader(orders, about, *descriptors))
            ended.pop(pid, None)
            orders.send(b"%d" % pid)
        elif word == _HOW:
            if (pid := int(about)) in children:  # it has closed what it spoke by, so it ends
                _note(pid, os.waitpid(pid, 0)[1], ended)
                children.remove(pid)
            orders.send(b"%d" % ended.pop(pid, 0))
        else:
            if (pid := int(about)) in children:
                os.kill(pid, _SIGNALS[word])
            orders.send(b"told")
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    # Reaped here: whose they are then may reap nobody. One that a file system holds ends later.
    until_s = time.monotonic() + _KILLED_WITHIN_S
    while children and time.monotonic() < until_s:
        _reap(children, ended)
        time.sleep(0.005)


def _reap(children: set[int], ended: dict[int, int]) -> None:
    """Forget those that have ended; note those that a signal has."""
    for pid in [*children]:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            _note(pid, status, ended)
            children.remove(pid)


def _note(pid: int, status: int, ended: dict[int, int]) -> None:
    if os.WIFSIGNALED(status):
        ended[pid] = os.WTERMSIG(status)


def _fork_reader(orders: socket.socket, order: bytes, rows: int, said: int, page: int) -> int:
    parent = os.getpid()
    if (pid := os.fork()) == 0:
        orders.close()
        end_process_at_limit(page)
        _run_apart(parent, lambda: _read(pickle.loads(order), rows, said))
    for descriptor in (rows, said, page):
        os.close(descriptor)
    return pid


def _run_apart(parent: int, run: Callable[[], None]) -> None:
    """Be a process that ends with its parent, not with the signals that ask the worker to stop."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    status = 1
    try:
        for asks in (signal.SIGTERM, signal.SIGINT):
            signal.signal(asks, signal.SIG_IGN)
        if os.getppid() == parent:  # else it died before the signal was set
            run()
            status = 0
    except BaseException:
        log.exception("a process that reads rows failed")
    finally:
        os._exit(status)


def _read(wanted: RowsWanted, rows: int, said: int) -> None:
    """Read into `rows`; tell over `said` of life, and at last of the outcome."""
    if wanted.log is not None:
        with wanted.log.open("ab") as out:
            os.dup2(out.fileno(), sys.stdout.fileno())
            os.dup2(out.fileno(), sys.stderr.fileno())
    told_s = time.monotonic()

    def alive() -> None:
        nonlocal told_s
        if (now_s := time.monotonic()) - told_s >= _ALIVE_EVERY_S:
            told_s = now_s
            os.write(said, _ALIVE)

    with open(said, "wb", closefd=False) as out:
        outcome = pickle.dumps(_outcome(wanted, rows, alive))
        out.write(_DONE + outcome)


def _outcome(wanted: RowsWanted, rows: int, alive: Callable[[], None]) -> Any:  # noqa: ANN401
    """Return (split, its file), or what went wrong in a form that another process can raise."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core is all that decode can spare
    stored = TokenFile(os.fdopen(rows, "r+b"))
    held: HeldModel | None = None
    try:
        # Those who can write to the volume may have changed it since the model was loaded.
        held = HeldModel(Path(wanted.tokenizer), wanted.access, of_hub=wanted.of_hub)
        tokenizer = RowTokenizer(
            read_tokenizer(held.path),
            max_length=wanted.max_length,
            learn_all=wanted.learn_all,
            now=wanted.begun,
            served_by=wanted.served_by,
            engine=wanted.engine,
        )
        if wanted.access.network is not None:
            network_guard.install().admit("rows", wanted.access.network)
        split = read_dataset(
            wanted.dataset,
            tokenizer,
            wanted.limits,
            seed=wanted.seed,
            alive=alive,
            into=stored,
            credentials=wanted.credentials,
            access=wanted.access,
        )
    except (WindrowError, MemoryError) as error:
        return error.with_traceback(None)
    except Exception as error:
        # The edge of a process: whatever went wrong, the worker hears of it.
        log.exception("rows cannot be read")
        return RuntimeError(f"{type(error).__name__}: {error}")
    finally:
        if held is not None:
            held.close()
    stored.flush()
    return split, stored
