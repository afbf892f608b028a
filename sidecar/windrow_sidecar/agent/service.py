"""Serve the Agent service, which engine and worker call on the pod's Unix socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import TypeVar

import grpc.aio

from windrow.proto import agent_pb2, agent_pb2_grpc
from windrow.rundir import PROTOCOL_VERSION
from windrow_sidecar.agent.channel import OutgoingQueue
from windrow_sidecar.agent.job_run import JobRun
from windrow_sidecar.agent.slot import AgentSlot

_log = logging.getLogger(__name__)
M = TypeVar("M")
# A worker that hears nothing for `agentlink.SILENT_AFTER_S` stops.
ALIVE_EVERY_S = 2
R = TypeVar("R", agent_pb2.EngineReport, agent_pb2.WorkerReport)


class AgentService(agent_pb2_grpc.AgentServicer):
    """Hands reports to slots and runs, and their commands back.

    Args:
        slot_at: the slot of that index; made when it is new.
        find_run: the run that a worker says it is; None when nobody started such a worker.
        on_profile: a latency profile has come.
        worker_silence_s: a worker that says nothing for longer hangs.
    """

    def __init__(
        self,
        slot_at: Callable[[int], AgentSlot],
        find_run: Callable[[str, int], JobRun | None],
        on_profile: Callable[[AgentSlot], None],
        worker_silence_s: float,
    ) -> None:
        self._slot_at, self._find_run, self._on_profile = slot_at, find_run, on_profile
        self._worker_silence_s = worker_silence_s

    async def Engine(
        self,
        requests: AsyncIterator[agent_pb2.EngineReport],
        context: grpc.aio.ServicerContext,
    ) -> None:
        """One decode engine, for as long as it lives."""
        hello = (await _first(requests, context)).hello
        channel: OutgoingQueue[agent_pb2.EngineCommand] = OutgoingQueue()
        slot = self._slot_at(hello.slot)
        _log.info("slot %d: %s serves %s", hello.slot, hello.engine, hello.model)
        async with _pumped(channel, context.write):
            try:
                await slot.engine_attached(hello, channel)
                async for report in requests:
                    self._take_report(slot, report)
            finally:
                slot.engine_hung_up(channel)

    def _take_report(self, slot: AgentSlot, report: agent_pb2.EngineReport) -> None:
        kind = report.WhichOneof("message")
        if kind == "stats":
            slot.engine_reported(report.stats)
        elif kind == "profile":
            slot.profile = report.profile
            self._on_profile(slot)

    async def Worker(
        self,
        requests: AsyncIterator[agent_pb2.WorkerReport],
        context: grpc.aio.ServicerContext,
    ) -> None:
        """One worker, from its hello to its last words."""
        hello = (await _first(requests, context)).hello
        run = self._find_run(hello.job_uid, hello.epoch)
        if run is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"job {hello.job_uid} epoch {hello.epoch} is not placed here",
            )
            return
        channel: OutgoingQueue[agent_pb2.WorkerCommand] = OutgoingQueue()
        silence = _Silence(self._worker_silence_s)
        async with _pumped(channel, context.write):
            run.attached(channel)
            watching = asyncio.create_task(silence.watch(run, channel))
            try:
                async for report in requests:
                    silence.broken()
                    await run.heard(report)
            finally:
                watching.cancel()
                run.hung_up()


class _Silence:
    """Tells a worker that the agent is there, and notices one that says nothing any more."""

    def __init__(self, too_long_s: float) -> None:
        self._too_long_s, self._seconds = too_long_s, 0

    def broken(self) -> None:
        """The worker has said something."""
        self._seconds = 0

    async def watch(self, run: JobRun, channel: OutgoingQueue[agent_pb2.WorkerCommand]) -> None:
        """Watch until the worker has been silent for too long, or this is cancelled."""
        for second in count():
            if second % ALIVE_EVERY_S == 0:
                channel.send(agent_pb2.WorkerCommand(action="ALIVE"))
            # Second by second: an agent that was stopped itself has slept for one of them only.
            await asyncio.sleep(1.0)
            self._seconds += 1
            if self._seconds >= self._too_long_s:
                break
        run.fell_silent(self._too_long_s)


@asynccontextmanager
async def _pumped(
    channel: OutgoingQueue[M], write: Callable[[M], Awaitable[object]]
) -> AsyncIterator[None]:
    """Write what is sent to the channel while the block runs."""
    pump = asyncio.create_task(channel.pump(write))
    try:
        yield
    finally:
        pump.cancel()
        await asyncio.gather(pump, return_exceptions=True)


async def _first(requests: AsyncIterator[R], context: grpc.aio.ServicerContext) -> R:
    """The hello; ends the stream when there is none or it speaks another protocol."""
    first = await anext(aiter(requests), None)
    if first is None or first.WhichOneof("message") != "hello":
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the first message is not a hello")
        raise ConnectionAbortedError
    spoken = first.hello.protocol_version
    if spoken != PROTOCOL_VERSION:
        await context.abort(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"protocol {spoken} is unknown: this agent speaks {PROTOCOL_VERSION}",
        )
    return first


async def serve(service: AgentService, socket: str) -> grpc.aio.Server:
    """Listen on the socket; one that a killed agent left behind is replaced."""
    server = grpc.aio.server()
    agent_pb2_grpc.add_AgentServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    return server
