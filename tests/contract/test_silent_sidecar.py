"""A worker whose sidecar lives no more, or hangs, stops; one that is merely slow goes on."""

from __future__ import annotations

import threading
from concurrent import futures

import grpc
import pytest

from windrow.proto import agent_pb2, agent_pb2_grpc
from windrow.protocol import JobProgress
from windrow_sidecar.finetune.colocated import agent_link as agentlink
from windrow_sidecar.finetune.colocated.agent_link import JobAgentLink, worker_hello
from windrow_sidecar.finetune.colocated.standby import JobOrder

SILENT_S, LOOK_S = 2.0, 0.1


class Sidecar(agent_pb2_grpc.AgentServicer):
    """Takes what a worker says, and says that it is there for as long as the test wants it to."""

    def __init__(
        self, socket: str, command: agent_pb2.WorkerCommand | None = None, *, says: bool = True
    ) -> None:
        self.command = command
        self.says, self.falls_silent, self.ended = says, threading.Event(), threading.Event()
        self.heard = threading.Semaphore(0)
        self.server = grpc.server(futures.ThreadPoolExecutor(4))
        agent_pb2_grpc.add_AgentServicer_to_server(self, self.server)
        self.server.add_insecure_port(f"unix:{socket}")
        self.server.start()

    def Worker(self, request_iterator, context):
        next(request_iterator)
        self.heard.release()
        if self.command is not None:
            yield self.command
        while self.says and not self.falls_silent.wait(LOOK_S / 2):
            yield agent_pb2.WorkerCommand(action="ALIVE")
        self.ended.wait()  # hangs: the stream is open

    def close(self) -> None:
        self.ended.set()
        self.server.stop(0).wait()


@pytest.fixture
def orphaned(monkeypatch):
    """Return what the worker was told, as it comes."""
    monkeypatch.setattr(agentlink, "SILENT_AFTER_S", SILENT_S)
    monkeypatch.setattr(agentlink, "LOOK_EVERY_S", LOOK_S)
    return futures.Future()


def linked(socket, orphaned) -> JobAgentLink:
    hello = worker_hello(JobOrder("a-job", 1), 1)
    return JobAgentLink(socket, hello, JobProgress, orphaned=orphaned.set_result)


@pytest.mark.parametrize(
    ("action", "reason", "taken"),
    [
        ("STOP", "Deleted", "FORGET"),
        ("STOP", "Suspended", "STOP"),
        ("STOP", "", "STOP"),
        ("ABORT", "Deleted", "ABORT"),
    ],
)
def test_a_stop_for_a_deleted_job_asks_to_remove_its_checkpoints(tmp_path, action, reason, taken):
    socket = tmp_path / "agent.sock"
    sidecar = Sidecar(str(socket), agent_pb2.WorkerCommand(action=action, reason=reason))
    try:
        with linked(socket, futures.Future()) as link:
            while (command := link.take_command()) is None:
                assert link._thread.is_alive()
                threading.Event().wait(0.01)
            assert (command, link.end_asked) == (taken, taken)
            sidecar.ended.set()
    finally:
        sidecar.close()


@pytest.mark.parametrize("how", ["hangs", "is gone"])
def test_a_worker_hears_within_bounds_that_its_sidecar_is_silent(tmp_path, orphaned, how):
    socket = tmp_path / "agent.sock"
    sidecar = Sidecar(str(socket))
    try:
        with linked(socket, orphaned) as link:
            assert sidecar.heard.acquire(timeout=60)
            with pytest.raises(futures.TimeoutError):
                orphaned.result(timeout=1.5 * SILENT_S)
            if how == "hangs":
                sidecar.falls_silent.set()
            else:
                sidecar.close()
            assert orphaned.result(timeout=60) == "the sidecar has said nothing for 2 s"
            link.finish()
    finally:
        sidecar.close()


def test_a_sidecar_that_never_says_that_it_is_there_is_not_missed(tmp_path, orphaned):
    socket = tmp_path / "agent.sock"
    sidecar = Sidecar(str(socket), says=False)
    try:
        with linked(socket, orphaned):
            assert sidecar.heard.acquire(timeout=60)
            with pytest.raises(futures.TimeoutError):
                orphaned.result(timeout=1.5 * SILENT_S)
            sidecar.ended.set()
    finally:
        sidecar.close()
