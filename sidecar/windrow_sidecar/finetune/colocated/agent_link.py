"""The worker's side of a job's stream to the agent, over agent.sock.

Threads of their own carry both ways; the training thread only leaves words behind and picks
commands up between two tasklets.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol, cast

import grpc

from windrow.conditions import Reason
from windrow.errors import Transient
from windrow.eventlog import EventLog
from windrow.proto import agent_pb2, agent_pb2_grpc
from windrow.protocol import Action, JobProgress, WorkerEvent
from windrow.rundir import PROTOCOL_VERSION
from windrow_sidecar.finetune.colocated.standby import JobOrder
from windrow_sidecar.finetune.job.report import JobReporter

log = logging.getLogger(__name__)

PROGRESS_EVERY_S = 1.0
# The agent is our parent: it was there a moment ago, so a lost stream is tried again soon.
RECONNECT_S = 0.5
# The operator places a job again when it has heard nothing of its sidecar for 20 s; by then the
# worker is to have written its checkpoint. The agent says every two seconds that it is there, and
# silence is counted from the second look that misses it: the worker stops 14 s after its last word.
SILENT_AFTER_S = 8.0
LOOK_EVERY_S = 2.0
CREDENTIALS_WITHIN_S = 30.0
# While closing, to deliver last words over a stream that is lost.
LAST_ATTEMPTS = 4


class JobLink(JobReporter, Protocol):
    """A job's stream to what has placed it. A context manager that waits for its last words."""

    end_asked: Action | None

    def __enter__(self) -> JobLink:
        """Open it."""

    def __exit__(self, *_: object) -> None:
        """Close it, once all was taken."""

    def finish(self) -> None:
        """End it as soon as all was taken; returns at once."""

    def credentials(self) -> tuple[Mapping[str, str], ...]:
        """Return what the job's Secrets hold: of rows, destination, tracking and base model."""


class JobAgentLink:
    """A job's stream to the agent; leaving it as a context manager waits until all was taken.

    Args:
        socket: of the agent.
        hello: sent first, on every connection.
        progress: asked once a second.
        log_file: flushed once a second by the same thread.
        take: called with a further job that this worker shall run, on the stream's thread.
        orphaned: called once, on a thread of its own, when the agent has fallen silent.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        socket: Path,
        hello: agent_pb2.WorkerHello,
        progress: Callable[[], JobProgress],
        log_file: EventLog | None = None,
        take: Callable[[JobOrder], None] = lambda order: None,
        orphaned: Callable[[str], None] = lambda why: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._take, self._orphaned, self._clock = take, orphaned, clock
        self._heard_s: float | None = None  # when the agent last said that it is there
        self._target, self._hello, self._progress = f"unix:{socket}", hello, progress
        self._log_file = log_file
        self._unsent: deque[agent_pb2.WorkerReport] = deque()
        self._commands: queue.SimpleQueue[Action] = queue.SimpleQueue()
        self._credentials: tuple[Mapping[str, str], ...] = ({}, {}, {}, {})
        self._has_credentials = threading.Event()
        self.end_asked: Action | None = None  # STOP, FORGET or ABORT, also once it was picked up
        self._wake = threading.Event()
        self._closing = False
        self._closed = threading.Event()
        self._generation = 0
        self._thread = threading.Thread(target=self._run, name="agent-link", daemon=True)
        self._watch = threading.Thread(target=self._watch_agent, name="agent-watch", daemon=True)

    def __enter__(self) -> JobAgentLink:
        self._thread.start()
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()
        self._thread.join(timeout=5.0)

    def finish(self) -> None:
        """End the stream as soon as all was taken; returns at once."""
        self._closing = True
        self._closed.set()
        self._wake.set()

    def event(self, event: WorkerEvent) -> None:
        """Send an event as soon as there is a stream."""
        self._unsent.append(
            agent_pb2.WorkerReport(
                event=agent_pb2.WorkerEvent(
                    kind=event.kind,
                    reason=event.reason,
                    detail=event.detail,
                    user_error=event.user_error,
                    field=event.field,
                    remedy=event.remedy,
                    adapter_path=event.adapter_path,
                    adapter_digest=event.adapter_digest,
                    base_eval_loss=event.base_eval_loss,
                    tuned_eval_loss=event.tuned_eval_loss,
                )
            )
        )
        self._wake.set()

    def take_command(self) -> Action | None:
        """Return the oldest command that was not picked up yet."""
        try:
            return self._commands.get_nowait()
        except queue.Empty:
            return None

    def credentials(self) -> tuple[Mapping[str, str], ...]:
        """Return what the job's Secrets hold: of rows, destination, tracking and base model.

        Raises:
            Transient: the agent, which sends them first of all, has not answered.
        """
        if not self._has_credentials.wait(CREDENTIALS_WITHIN_S):
            raise Transient("the sidecar did not hand over the credentials of the job")
        return self._credentials

    def _run(self) -> None:
        last_attempts = LAST_ATTEMPTS
        with grpc.insecure_channel(self._target) as channel:
            stub = agent_pb2_grpc.AgentStub(channel)  # type: ignore[no-untyped-call]
            while last_attempts:
                self._generation += 1
                try:
                    for command in stub.Worker(self._reports(self._generation)):
                        self._hear(command)
                except grpc.RpcError as error:
                    log.warning("cannot reach the sidecar: %s", error)
                if self._closing:
                    last_attempts = last_attempts - 1 if self._unsent else 0
                if last_attempts:
                    time.sleep(RECONNECT_S)

    def _watch_agent(self) -> None:
        """Notice that the agent is gone or hangs; one that never said ALIVE is not waited for."""
        silent_s = 0.0
        while not self._closed.wait(LOOK_EVERY_S):
            heard_s, now_s = self._heard_s, self._clock()
            # Look by look: a worker that was stopped itself has missed what was said meanwhile.
            heard = heard_s is None or now_s - heard_s < 2 * LOOK_EVERY_S
            silent_s = 0.0 if heard else silent_s + LOOK_EVERY_S
            if silent_s >= SILENT_AFTER_S:
                self._orphaned(f"the sidecar has said nothing for {silent_s:.0f} s")
                return

    def _hear(self, command: agent_pb2.WorkerCommand) -> None:
        self._heard_s = self._clock() if command.action == "ALIVE" else self._heard_s
        if command.action == "ALIVE":
            return
        if command.action == "CREDENTIALS":
            # Never into a log or a file: they live and end with this process.
            of_job = (command.dataset_secret, command.output_secret)
            self._credentials = tuple(
                map(dict, (*of_job, command.tracking_secret, command.model_secret))
            )
            self._has_credentials.set()
            return
        if command.action == "ADD_JOB":
            self._take(JobOrder(command.job_uid, command.epoch))
            return
        action = cast(Action, command.action)
        if action == "STOP" and command.reason == Reason.DELETED:
            action = "FORGET"
        if action in ("STOP", "ABORT", "FORGET"):
            self.end_asked = action
        self._commands.put(action)

    def _reports(self, generation: int) -> Iterator[agent_pb2.WorkerReport]:
        """Hello, then events as they come and progress once a second, until closing."""
        yield agent_pb2.WorkerReport(hello=self._hello)
        due = 0.0
        # The library may ask a lost stream's iterator once more, while the next one is at work.
        while generation == self._generation:
            if self._unsent:
                # What the agent makes of an event, it says with the progress that it has.
                yield agent_pb2.WorkerReport(progress=_progress_message(self._progress()))
                yield self._unsent[0]
                # Only now has it gone out: a stream that is lost before repeats the event.
                if generation == self._generation:
                    self._unsent.popleft()
                continue
            if self._closing:
                yield agent_pb2.WorkerReport(progress=_progress_message(self._progress()))
                return
            now = time.monotonic()
            if now >= due:
                due = now + PROGRESS_EVERY_S
                yield agent_pb2.WorkerReport(progress=_progress_message(self._progress()))
                if self._log_file:
                    self._log_file.flush()
            self._wake.wait(timeout=due - now)
            self._wake.clear()


def worker_hello(order: JobOrder, pid: int) -> agent_pb2.WorkerHello:
    """Return the first message of a stream."""
    return agent_pb2.WorkerHello(
        protocol_version=PROTOCOL_VERSION, pid=pid, job_uid=order.job_uid, epoch=order.epoch
    )


def _progress_message(now: JobProgress) -> agent_pb2.WorkerProgress:
    return agent_pb2.WorkerProgress(
        step=now.step,
        total_steps=now.total_steps,
        loss=_told(now.loss),
        learning_rate=_told(now.learning_rate),
        grad_norm=_told(now.gradient_norm),
        tokens=now.tokens,
        checkpoint_step=now.checkpoint_step,
        checkpoint_path=now.checkpoint_path,
        held_chunks=now.held_chunks,
        busy_seconds=now.busy_seconds,
        skipped_rows=now.skipped_rows,
        cut_rows=now.cut_rows,
        memory_bytes=now.memory_bytes,
        allocator_held_bytes=now.allocator_held_bytes,
        allocator_requested_bytes=now.allocator_requested_bytes,
        graph_bytes=now.graph_bytes,
        sharing=now.sharing,
        sharing_reason=now.sharing_reason,
        sharing_code=now.sharing_code,
        joined_with=now.joined_with,
    )


def _told(figure: float | None) -> float:
    """Return what no step has reported yet as NaN: 0 would be a figure."""
    return math.nan if figure is None else figure
