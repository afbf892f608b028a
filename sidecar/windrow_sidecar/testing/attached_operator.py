"""An operator reduced to its side of the Attach stream, over TLS: it keeps what it hears."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, TypeVar

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from windrow.proto import attach_pb2, attach_pb2_grpc
from windrow.rundir import LEADER_METADATA

T = TypeVar("T")


async def until(condition: Callable[[], T], within_s: float = 60.0) -> T:
    """Wait for a condition to become true; returns its value. AssertionError after the deadline."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)
    return value


def certificate() -> tuple[bytes, bytes]:
    """Key and self-signed certificate for 127.0.0.1, as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "operator of a test")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(address, critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    return (
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        cert.public_bytes(pem),
    )


class AttachedOperator(attach_pb2_grpc.AttachServicer):
    """Keeps every message of every sidecar; sends what `say` is given.

    Attributes:
        cert: PEM of its self-signed certificate, for 127.0.0.1.
        heard: messages of all streams, oldest first.
        tokens: the `authorization` of each stream.
        term: of its leadership, as it reports it.
        renews: whether its hello announces renewals of policies.
        renew_every_s: seconds between two renewals; 0: it sends none unasked.
        leader: host:port of another replica that leads; this one then takes no stream.
    """

    def __init__(self, pair: tuple[bytes, bytes] | None = None) -> None:
        self.key, self.cert = pair or certificate()
        self.term = 0
        self.leader = ""
        self.renews = False
        self.renew_every_s = 0.0
        self.heard: list[attach_pb2.SidecarMessage] = []
        self.tokens: list[str] = []
        self.port = 0
        self._orders: asyncio.Queue[attach_pb2.OperatorMessage] = asyncio.Queue()
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Listen; on the same port as before when it was stopped."""
        server = grpc.aio.server()
        attach_pb2_grpc.add_AttachServicer_to_server(self, server)  # type: ignore[no-untyped-call]
        credentials = grpc.ssl_server_credentials([(self.key, self.cert)])
        self.port = server.add_secure_port(f"127.0.0.1:{self.port}", credentials)
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """Hang up on everyone."""
        if self._server is not None:
            await self._server.stop(grace=0)

    async def Attach(
        self,
        requests: AsyncIterator[attach_pb2.SidecarMessage],
        context: grpc.aio.ServicerContext,
    ) -> None:
        """One sidecar's stream."""
        self.tokens.append(dict(context.invocation_metadata())["authorization"])
        if self.leader:
            named = ((LEADER_METADATA, self.leader),)
            code = grpc.StatusCode.UNAVAILABLE
            await context.abort(code, "this replica does not lead", trailing_metadata=named)
        hello = attach_pb2.OperatorHello(
            protocol_version=1,
            heartbeat_seconds=0.1,
            leader_term=self.term,
            renews=self.renews,
        )
        await context.write(attach_pb2.OperatorMessage(hello=hello))
        talker = asyncio.create_task(self._talk(context))
        renewer = asyncio.create_task(self._renew_always())
        try:
            async for message in requests:
                self.heard.append(message)
        finally:
            talker.cancel()
            renewer.cancel()

    async def _talk(self, context: grpc.aio.ServicerContext) -> None:
        while True:
            await context.write(await self._orders.get())

    async def _renew_always(self) -> None:
        while True:
            await asyncio.sleep(self.renew_every_s or 0.1)
            if self.renew_every_s:
                self.renew()

    def renew(self) -> None:
        """Renew the policy once."""
        self.say(attach_pb2.OperatorMessage(renewal=attach_pb2.PolicyRenewal()))

    def say(self, message: attach_pb2.OperatorMessage) -> None:
        """Send a message to every attached peer."""
        self._orders.put_nowait(message)

    def set_policy(self, **fields: Any) -> None:  # noqa: ANN401 - of PolicyConfig
        """Send a PolicyConfig; its numbers are those of a HarvestPolicy that says nothing."""
        numbers = {"percentile": 99, "max_compute_percent": 100, "max_memory_percent": 50}
        policy = attach_pb2.PolicyConfig(**{**numbers, **fields})
        self.say(attach_pb2.OperatorMessage(policy=policy))

    def assign(
        self,
        spec: Mapping[str, Any],
        uid: str = "uid-1",
        epoch: int = 1,
        name: str = "support-tone",
    ) -> None:
        """Place a job of that spec on slot 0."""
        assign = attach_pb2.Assign(
            slot=0,
            job_namespace="team-a",
            job_name=name,
            job_uid=uid,
            epoch=epoch,
            spec_json=json.dumps(spec),
            leader_term=self.term,
        )
        self.say(attach_pb2.OperatorMessage(assign=assign))

    def command(
        self,
        action: attach_pb2.JobCommand.Action,
        uid: str = "uid-1",
        epoch: int = 1,
        reason: str = "test",
    ) -> None:
        """Send a command to a placement."""
        command = attach_pb2.JobCommand(
            job_uid=uid, epoch=epoch, action=action, reason=reason, leader_term=self.term
        )
        self.say(attach_pb2.OperatorMessage(command=command))

    @property
    def events(self) -> list[attach_pb2.JobEvent]:
        """All job events so far."""
        return [m.job_event for m in self.heard if m.WhichOneof("message") == "job_event"]

    @property
    def heartbeats(self) -> list[attach_pb2.SlotHeartbeat]:
        """All heartbeats so far."""
        return [m.heartbeat for m in self.heard if m.WhichOneof("message") == "heartbeat"]

    @property
    def has_engine(self) -> bool:
        """True where a slot's engine has called; one that starts for long is refused before."""
        return any(slot.engine and not slot.refused for h in self.hellos for slot in h.slots)

    @property
    def hellos(self) -> list[attach_pb2.SidecarHello]:
        """All hellos so far."""
        return [m.hello for m in self.heard if m.WhichOneof("message") == "hello"]

    def event(self, kind: int, epoch: int = 1) -> attach_pb2.JobEvent | None:
        """The first event of that kind and epoch."""
        return next((e for e in self.events if e.kind == kind and e.epoch == epoch), None)

    def of(self, uid: str) -> list[attach_pb2.JobEvent]:
        """All events of a job so far."""
        return [e for e in self.events if e.job_uid == uid]

    def kinds(self, uid: str | None = None) -> list[str]:
        """Names of all events so far, or of those of a job."""
        events = self.events if uid is None else self.of(uid)
        return [attach_pb2.JobEvent.Kind.Name(e.kind) for e in events]
