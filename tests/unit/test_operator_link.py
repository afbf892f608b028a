"""The agent's stream to the operator ends when it is told to, whatever happens to it then."""

import asyncio
from types import SimpleNamespace

import grpc

from windrow.proto import attach_pb2
from windrow.rundir import PROTOCOL_VERSION
from windrow_sidecar.agent.operator_link import OperatorLink, end
from windrow_sidecar.agent.outbox import EventOutbox
from windrow_sidecar.agent.policy_lease import PolicyLease

HELLO = attach_pb2.OperatorHello(protocol_version=PROTOCOL_VERSION, heartbeat_seconds=1.0)


SETTINGS = SimpleNamespace(
    operator_address="operator:443",
    pod_namespace="serving",
    pod_name="decode-0",
    pod_uid="uid",
    node_name="node",
)


class FailingStream:
    """A stream that fails while a message is under way, which takes its time to be given up."""

    def __init__(self):
        self.answered = False
        self.listens, self.writes = asyncio.Event(), asyncio.Event()
        self.given_up, self.released = asyncio.Event(), asyncio.Event()

    async def read(self):
        if not self.answered:
            self.answered = True
            return attach_pb2.OperatorMessage(hello=HELLO)
        self.listens.set()
        await self.writes.wait()
        raise grpc.RpcError

    async def write(self, message):
        if not self.answered:
            return
        self.writes.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.given_up.set()
            await self.released.wait()
            raise


async def test_a_link_that_is_told_to_end_just_as_its_stream_fails_ends():
    link = OperatorLink(SETTINGS, EventOutbox(), list, obey=None, lease=PolicyLease())
    stream = FailingStream()

    async def attach(address):
        if not stream.answered:
            await link._talk(stream)
        await asyncio.Event().wait()

    link._attach = attach
    running = asyncio.create_task(link.run())
    async with asyncio.timeout(30):
        await stream.listens.wait()
        link.facts_changed()
        await stream.given_up.wait()
        ending = asyncio.create_task(end(running))
        await asyncio.sleep(0)
        stream.released.set()
        await ending
    assert running.cancelled()


async def test_a_link_whose_stream_has_failed_dials_again():
    link = OperatorLink(SETTINGS, EventOutbox(), list, obey=None, lease=PolicyLease())
    streams = [FailingStream() for _ in range(3)]

    async def attach(address):
        stream = next(stream for stream in streams if not stream.answered)
        stream.released.set()
        await link._talk(stream)

    link._attach = attach
    running = asyncio.create_task(link.run())
    async with asyncio.timeout(30):
        for stream in streams:
            await stream.listens.wait()
            link.facts_changed()
        await end(running)
    assert running.cancelled()
